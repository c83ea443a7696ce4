"""Linkage groups: what deciding by groups loses against deciding op by op.

On small random graphs every way to let each op split one of its loops, or none, is simulated, by
giving each loop a group of its own; so is every ordered list of the real groups. Where every tensor
is in one state all along, groups lose nothing. Where some readers take a slice of what others take
whole, or where communication pays, they can: of 408 random graphs like these, 8 % have a better
plan without communication op by op (2.6 % less work on average), and 4 % have one with
communication (0.2 % less cost on average, 22 % at most, where a byte counts as a quarter of a
multiply-add).
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.loops import Access, Dim, Loop, OpLoops
from simcore.sharding.groups import Linkage, find_linkage
from simcore.sharding.local import local_graph
from simcore.sharding.states import Axis
from simcore.signature import OpClass

DEVICES = 2
SIZES = (3, 4, 8, 16)  # 3 cannot be split
PRICES = (1 / 4, 1 / 64)  # how much work a byte of communication counts as, where it counts


def dims(shape: tuple[int, ...], loops: tuple[int, ...]) -> tuple[Dim, ...]:
    """Returns the dimensions of a contiguous tensor."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    pairs = zip(loops, shape, strides, strict=True)
    return tuple(Dim(loop, (size, 0), (stride, 0)) for loop, size, stride in pairs)


def access(tensor: int, shape: tuple[int, ...], loops: tuple[int, ...], *, out: bool) -> Access:
    return Access(tensor, 4, dims(shape, loops), out)


def nest(names: str, sizes: tuple[int, ...], *accesses: Access, linear: bool = False) -> OpLoops:
    loops = tuple(Loop(name, (size, 0)) for name, size in zip(names, sizes, strict=True))
    return OpLoops(loops, accesses, linear)


class Maker:
    """Adds ops to matrices that are there."""

    def __init__(self) -> None:
        self.builder = GraphBuilder("random")
        self.shape: dict[int, tuple[int, int]] = {}

    def parameter(self, shape: tuple[int, int]) -> int:
        tensor = self.builder.parameter(f"w{len(self.shape)}", 4 * math.prod(shape))
        self.shape[tensor] = shape
        return tensor

    def op(self, inputs: list[int], shape: tuple[int, int], loops: OpLoops) -> int:
        op = self.builder.op(
            f"op{self.builder.num_ops}", op_class=OpClass.OTHER, inputs=inputs,
            outputs=[Out(4 * math.prod(shape))], loops=loops,
        )  # fmt: skip
        made = self.builder.outputs(op)[0]
        self.shape[made] = shape
        return made

    def product(self, left: int, right: int) -> int:
        (m, k), (_, n) = self.shape[left], self.shape[right]
        loops = nest(
            "mnk", (m, n, k),
            access(left, (m, k), (0, 2), out=False), access(right, (k, n), (2, 1), out=False),
            access(0, (m, n), (0, 1), out=True),
        )  # fmt: skip
        return self.op([left, right], (m, n), loops)

    def pointwise(self, *inputs: int, linear: bool) -> int:
        shape = self.shape[inputs[0]]
        reads = [access(tensor, shape, (0, 1), out=False) for tensor in inputs]
        loops = nest("ab", shape, *reads, access(0, shape, (0, 1), out=True), linear=linear)
        return self.op(list(inputs), shape, loops)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """Products from both sides, pointwise ops and sums of earlier results; the last is read."""
    maker = Maker()
    size = st.sampled_from(SIZES)
    made = [maker.parameter((draw(size), draw(size)))]
    for _ in range(draw(st.integers(1, 3))):
        last, other = draw(st.sampled_from(made[-2:])), draw(st.sampled_from(made))
        rows, columns = maker.shape[last]
        kind = draw(st.sampled_from("rlrlxss"))
        if kind == "r":
            made.append(maker.product(last, maker.parameter((columns, draw(size)))))
        elif kind == "l":
            made.append(maker.product(maker.parameter((draw(size), rows)), last))
        elif kind == "s" and maker.shape[other] == (rows, columns) and other != last:
            made.append(maker.pointwise(last, other, linear=True))
        elif kind == "s" and maker.shape[other][0] == columns:
            made.append(maker.product(last, other))
        else:
            made.append(maker.pointwise(last, linear=False))
    maker.pointwise(made[-1], linear=False)
    return maker.builder.build()


class Cost(NamedTuple):
    """What a plan takes on one device."""

    work: float
    moved: int  # bytes
    slices: int


def alone(linkage: Linkage) -> tuple[Linkage, list[list[int]]]:
    """Returns a linkage in which each loop of each op is decided by itself, and their numbers."""
    counter = itertools.count()
    numbers = [[next(counter) for _ in loops] for loops in linkage.factors.loops]
    return linkage._replace(loop_group=tuple(map(tuple, numbers))), numbers


def cost(graph: OpGraph, linkage: Linkage, groups: tuple[int, ...]) -> Cost:
    axes = [[Axis("tp", DEVICES, groups)]]
    local = local_graph(graph, linkage, axes, np.zeros(graph.num_units, np.int64))
    work = 0.0
    for op, (choice,) in enumerate(local.states.choice):
        assert graph.loops is not None
        known = graph.loops[op]
        assert known is not None
        whole = math.prod(loop.size[0] for loop in known.loops)
        work += whole / (DEVICES if choice >= 0 else 1)
    moved = sum(what.num_bytes[0] for what in local.communication.values())
    return Cost(work, moved, local.graph.op_targets.count("slice"))


def by_group(graph: OpGraph, linkage: Linkage) -> Iterator[Cost]:
    numbers = range(len(linkage.groups))
    for count in range(len(numbers) + 1):
        for groups in itertools.permutations(numbers, count):
            yield cost(graph, linkage, groups)


def by_op(graph: OpGraph, linkage: Linkage) -> Iterator[Cost]:
    free, numbers = alone(linkage)
    for choice in itertools.product(*([None, *each] for each in numbers)):
        yield cost(graph, free, tuple(each for each in choice if each is not None))


def least_free(found: Iterable[Cost]) -> float:
    return min(each.work for each in found if each.moved == 0)


def least(found: Iterable[Cost], price: float) -> float:
    return min(each.work + price * each.moved for each in found)


@settings(max_examples=25)
@given(graphs())
def test_groups_lose_nothing_where_every_tensor_stays_in_one_state(graph: OpGraph) -> None:
    linkage = find_linkage(graph)
    assume(len(linkage.groups) <= 5)
    groups, ops = list(by_group(graph, linkage)), list(by_op(graph, linkage))
    assert least_free(groups) <= least_free(each for each in ops if each.slices == 0)
    for price in PRICES:  # every plan by groups is one op by op
        assert least(ops, price) <= least(groups, price) <= 1.5 * least(ops, price)


def square() -> OpGraph:
    """A matrix that is read by rows and by columns: its rows and its columns are one group."""
    maker = Maker()
    matrix = maker.parameter((8, 8))
    made = maker.product(matrix, maker.parameter((8, 3)))
    maker.pointwise(maker.product(matrix, made), linear=False)
    return maker.builder.build()


def test_a_slice_of_what_others_read_whole_is_lost() -> None:
    graph = square()
    linkage = find_linkage(graph)
    assert least_free(by_op(graph, linkage)) < least_free(by_group(graph, linkage))


def test_where_communication_pays_op_by_op_can_be_better() -> None:
    maker = Maker()
    first = maker.pointwise(maker.parameter((4, 8)), linear=False)
    second = maker.product(first, maker.parameter((8, 8)))
    maker.pointwise(maker.product(maker.parameter((16, 4)), second), linear=False)
    graph = maker.builder.build()
    linkage = find_linkage(graph)
    ops, groups = least(by_op(graph, linkage), 1 / 16), least(by_group(graph, linkage), 1 / 16)
    assert ops < groups < 1.01 * ops


def test_groups_are_fewer_decisions_than_loops() -> None:
    maker = Maker()
    states = maker.parameter((8, 8))
    for _ in range(3):
        states = maker.pointwise(maker.product(states, maker.parameter((8, 8))), linear=False)
    linkage = find_linkage(maker.builder.build())
    # the rows, the columns of the first matrix, and those of each product
    assert len(linkage.groups) == 5
    assert sum(len(loops) for loops in linkage.factors.loops) == 3 * 3 + 3 * 2
