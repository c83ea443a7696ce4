"""Repeated layers, folded: a plan decides for one of them, and two or three are simulated.

Layers are found by the number in their modules' names (``h.0``, ``h.1``, …). Those whose ops,
sizes and connections are the same stand for each other: all but a few are taken out, and what
read from them reads from the layer that takes their place. A plan treats all layers of a stack
alike. Its step time and peak memory grow by the same amount with every further layer once there are
a few, so those of all layers follow from a graph with few and one with one more.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from networkx.utils import UnionFind
from numpy.typing import NDArray

from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.loops import OpLoops
from simcore.sharding.groups import Linkage

KEPT = 2  # layers of a run that stay
_LAYER = re.compile(r"^(?P<stack>[^.]*?(?:\.[^.\d][^.]*)*?)\.?(?P<number>\d+)(?=\.|$)")
_Key = tuple[object, ...]
_Number = TypeVar("_Number", np.int64, np.float64)


class Repeat(NamedTuple):
    """Layers that stand for each other.

    Attributes:
        stack: the module that they are in.
        ops: of each layer, in program order, [layer][op]; layers follow one another.
    """

    stack: str
    ops: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fold:
    """A graph with few of its repeated layers.

    Attributes:
        graph: what is left.
        dropped: layers that were taken out of each stack, by its name.
    """

    graph: OpGraph
    dropped: Mapping[str, int]


def layer_of(name: str) -> tuple[str, int, str] | None:
    """Returns (stack, number, rest) of the name of something in a layer, None = it is in none."""
    if (found := _LAYER.match(name)) is None:
        return None
    return found["stack"], int(found["number"]), name[found.end() :]


def find_repeats(graph: OpGraph) -> list[Repeat]:
    """Returns the longest run of equal layers of every stack, if there are more than are kept.

    Stacks of as many layers that take turns (dense and sparse ones) are one stack.
    """
    found = []
    for stack, layers in _stacks(graph).items():
        run = _longest_run(_layer_keys(graph, layers))
        if len(run) > KEPT + 1 and not _read_outside(graph, layers, run):
            found.append(Repeat(stack, tuple(tuple(layers[number]) for number in run)))
    return found


def _stacks(graph: OpGraph) -> dict[str, dict[int, list[int]]]:
    """Returns the ops of each layer in program order, by stack and number."""
    place = {
        op: found[:2]
        for op, module in enumerate(graph.op_modules)
        if (found := layer_of(module)) is not None
    }
    numbers: dict[str, set[int]] = {}
    for stack, number in place.values():
        numbers.setdefault(stack, set()).add(number)
    feeds: set[tuple[str, str]] = set()
    for source, reader, _ in zip(*graph.edges(), strict=True):
        if graph.phase[reader] == Phase.F and int(source) in place and int(reader) in place:
            feeds.add((place[int(source)][0], place[int(reader)][0]))
    one = UnionFind(numbers)
    for a, b in feeds:
        if (b, a) in feeds and numbers[a] == numbers[b]:
            one.union(a, b)
    stacks: dict[str, dict[int, list[int]]] = {}
    for op, (stack, number) in place.items():
        stacks.setdefault(one[stack], {}).setdefault(number, []).append(op)
    return stacks


def _layer_keys(graph: OpGraph, layers: Mapping[int, Sequence[int]]) -> dict[int, _Key]:
    """Returns what equal layers have in common, by number."""
    place = {op: (number, k) for number, ops in layers.items() for k, op in enumerate(ops)}
    return {
        number: tuple(_op_key(graph, op, number, place) for op in ops)
        for number, ops in layers.items()
    }


def _op_key(graph: OpGraph, op: int, number: int, place: Mapping[int, tuple[int, int]]) -> _Key:
    """Returns what equal ops of equal layers have in common."""
    inputs: list[_Key] = []
    for tensor in graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist():
        maker = int(graph.tensor_producer[tensor])
        size = tuple(graph.tensor_bytes[tensor].tolist())
        if maker < 0:  # each layer has its own parameters, or they share one
            readers = graph.consumers[
                graph.first_consumer[tensor] : graph.first_consumer[tensor + 1]
            ]
            own = all(place.get(int(reader), (-1, 0))[0] == number for reader in readers)
            inputs.append((own, -1 if own else tensor, size))
        elif maker in place:
            layer, k = place[maker]
            inputs.append((layer - number, k, tensor - int(graph.first_output[maker]), size))
        else:
            inputs.append((tensor,))
    known = graph.loops_of(op)
    accesses = known.accesses if known is not None else ()
    shape = tuple((a.itemsize, a.dims, a.is_output, a.whole) for a in accesses)
    module = layer_of(graph.op_modules[op])
    return (
        "" if module is None else module[2],
        graph.op_targets[op],
        int(graph.phase[op]),
        int(graph.op_class[op]),
        int(graph.signature[op]),
        int(graph.kernels[op]),
        int(graph.elements[op]),
        tuple(graph.workspace[op].tolist()),
        tuple(sorted(map(repr, inputs))),
        shape,
    )


def _longest_run(keys: Mapping[int, _Key]) -> list[int]:
    """Returns the numbers of the longest run of equal layers."""
    best: list[int] = []
    run: list[int] = []
    for number in sorted(keys):
        follows = run and number == run[-1] + 1 and keys[number] == keys[run[0]]
        run = [*run, number] if follows else [number]
        best = run if len(run) > len(best) else best
    return best


def _read_outside(graph: OpGraph, layers: Mapping[int, Sequence[int]], run: Sequence[int]) -> bool:
    """Whether anything outside a stack reads what a layer of a run makes, the last one aside."""
    inside = {op for ops in layers.values() for op in ops}
    for number in run[1:-1]:
        for op in layers[number]:
            for tensor in range(int(graph.first_output[op]), int(graph.first_output[op + 1])):
                first, end = graph.first_consumer[tensor : tensor + 2]
                if not inside.issuperset(graph.consumers[first:end].tolist()):
                    return True
    return False


def fold(graph: OpGraph, repeats: Sequence[Repeat], kept: Mapping[str, int]) -> Fold:
    """Takes repeated layers out of a graph.

    Args:
        graph: a captured graph.
        repeats: its runs of equal layers.
        kept: layers of each run that stay, by stack; at least two.
    """
    writer = _Writer(graph)
    for repeat in repeats:
        writer.drop(repeat, kept[repeat.stack])
    dropped = {repeat.stack: len(repeat.ops) - kept[repeat.stack] for repeat in repeats}
    return Fold(graph=writer.write(), dropped=dropped)


class _Writer:
    """Writes a graph again without some layers."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.place: dict[int, tuple[int, int, int]] = {}  # op -> run, layer, place in it
        self.runs: list[tuple[tuple[int, ...], ...]] = []
        self.gap: list[tuple[int, int]] = []  # of each run: layers begin to end are out
        self.builder = GraphBuilder(graph.name, batch=graph.batch)
        self.handle: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        self.unit_op: dict[int, int] = {}
        self.storage = graph.tensor_storage.tolist()

    def drop(self, repeat: Repeat, kept: int) -> None:
        """Takes the layers of a run out that stand before its last."""
        self.gap.append((kept - 1, len(repeat.ops) - 1))
        self.runs.append(repeat.ops)
        for layer, ops in enumerate(repeat.ops):
            self.place |= {op: (len(self.runs) - 1, layer, k) for k, op in enumerate(ops)}

    def write(self) -> OpGraph:
        """Returns the graph."""
        graph = self.graph
        for tensor in range(int(graph.first_output[0])):
            first, end = graph.first_consumer[tensor : tensor + 2]
            readers = graph.consumers[first:end].tolist()
            if readers and all(map(self._is_out, readers)):
                continue
            is_parameter = graph.tensor_role[tensor] == Role.PARAMETER
            add = self.builder.parameter if is_parameter else self.builder.buffer
            constant, slope = graph.tensor_bytes[tensor].tolist()
            self._note(tensor, add(graph.tensor_names[tensor], (constant, slope)))
        for op in range(graph.num_ops):
            if not self._is_out(op):
                self._op(op)
        return self.builder.build()

    def _is_out(self, op: int) -> bool:
        if op not in self.place:
            return False
        run, layer, _ = self.place[op]
        return self.gap[run][0] <= layer < self.gap[run][1]

    def _stand_in(self, tensor: int, reader: int) -> int:
        """Returns the tensor that takes the place of one that is out."""
        maker = int(self.graph.tensor_producer[tensor])
        if maker < 0 or not self._is_out(maker):
            return tensor
        run, layer, k = self.place[maker]
        begin, end = self.gap[run]
        number = self.place[reader][1] if reader in self.place else end
        other = layer - (end - begin) if number >= end else layer + (end - begin)
        offset = tensor - int(self.graph.first_output[maker])
        return int(self.graph.first_output[self.runs[run][other][k]]) + offset

    def _note(self, tensor: int, handle: int) -> None:
        self.handle[tensor] = handle
        self.newest[self.storage[tensor]] = handle

    def _op(self, op: int) -> None:
        graph = self.graph
        read = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist()
        new = {tensor: self.handle[self._stand_in(tensor, op)] for tensor in read}
        reads = {self.storage[tensor]: handle for tensor, handle in new.items()}
        tensors = range(int(graph.first_output[op]), int(graph.first_output[op + 1]))
        number, unit = int(graph.signature[op]), int(graph.unit[op])
        handle = self.builder.op(
            graph.op_names[op],
            module=graph.op_modules[op],
            target=graph.op_targets[op],
            phase=Phase(int(graph.phase[op])),
            op_class=OpClass(int(graph.op_class[op])),
            signature=graph.signatures[number] if number >= 0 else None,
            inputs=list(new.values()),
            outputs=[self._out(tensor, reads) for tensor in tensors],
            unit_of=self.unit_op.get(unit),
            kernels=int(graph.kernels[op]),
            sync=bool(graph.sync[op]),
            workspace=_pair(graph.workspace[op].tolist()),
            resident=_pair(graph.resident[op].tolist()),
            elements=int(graph.elements[op]),
            loops=self._loops(op, new),
        )
        self.unit_op[unit] = handle
        for tensor, made in zip(tensors, self.builder.outputs(handle), strict=True):
            self._note(tensor, made)

    def _out(self, tensor: int, reads: Mapping[int, int]) -> Out:
        storage = self.storage[tensor]
        return Out(
            _pair(self.graph.tensor_bytes[tensor].tolist()),
            storage_of=reads.get(storage, self.newest.get(storage)),
            role=Role(int(self.graph.tensor_role[tensor])),
            name=self.graph.tensor_names[tensor],
        )

    def _loops(self, op: int, new: Mapping[int, int]) -> OpLoops | None:
        known = self.graph.loops_of(op)
        if known is None:
            return None
        first = int(self.graph.first_output[op])
        accesses = tuple(
            a._replace(tensor=a.tensor - first if a.is_output else new[a.tensor])
            for a in known.accesses
        )
        return known._replace(accesses=accesses)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def merged_groups(graph: OpGraph, linkage: Linkage) -> dict[tuple[str, int], tuple[int, ...]]:
    """Returns the groups that are the same but for the number of the layer.

    Args:
        graph: a captured graph, folded or not.
        linkage: its groups.

    Returns:
        Groups by (name of a tensor with ``*`` for the layer, factor): the same keys for a graph and
        for its folds.
    """
    names: dict[int, str] = {}
    for tensor, storage in enumerate(graph.tensor_storage.tolist()):
        names.setdefault(storage, _starred(graph.tensor_names[tensor]))
    found: dict[tuple[str, int], list[int]] = {}
    for number, group in enumerate(linkage.groups):
        key = min(_keys(group.places, names))
        found.setdefault(key, []).append(number)
    return {key: tuple(groups) for key, groups in sorted(found.items())}


def _keys(places: Sequence[tuple[int, int]], names: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    return ((names[storage], factor) for storage, factor in places)


def _starred(name: str) -> str:
    """Returns a name with ``*`` for the number of its layer."""
    place = layer_of(name)
    return name if place is None else f"{place[0]}.*{place[2]}"


def extended(
    few: NDArray[_Number], more: Sequence[NDArray[_Number]], layers: Sequence[int]
) -> NDArray[_Number]:
    """Returns what grows by as much with each layer, at all layers.

    Args:
        few: at the layers that are kept.
        more: with one more of each stack, [stack].
        layers: that were taken out of each stack, [stack].
    """
    total = few
    for values, count in zip(more, layers, strict=True):
        total = total + count * (values - few)
    return total
