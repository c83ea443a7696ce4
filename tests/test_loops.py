"""Loops in graphs: builder, file, hash, and what capture records of whole models."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from simcore.errors import GraphError
from simcore.frontends.torch_capture import capture
from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.graph_file import decode_graph, encode_graph
from simcore.job import Job
from simcore.loops import NO_LOOP, Access, Dim, Loop, LoopKind, OpLoops
from simcore.signature import Affine, OpClass
from simcore.sources import load_graph

BATCH = 6


def at(size: Affine, batch: int = BATCH) -> int:
    return size[0] + size[1] * batch


def loops_of(graph: OpGraph, name: str) -> OpLoops:
    assert graph.loops is not None
    loops = graph.loops[graph.op_names.index(name)]
    assert loops is not None
    return loops


def labels(loops: OpLoops) -> list[str]:
    """Each access as the names of its loops, "." where there is none, ">" before outputs."""
    names = [loop.name for loop in loops.loops]
    return [
        (">" if access.is_output else "")
        + " ".join("." if dim.loop == NO_LOOP else names[dim.loop] for dim in access.dims)
        for access in loops.accesses
    ]


# the builder


ROWS = Loop("m", (0, 8), LoopKind.MAP, "m")
UNITS = Loop("n", (4, 0), LoopKind.INNER, "n", (16, 2))


def access(tensor: int, *, is_output: bool = False, whole: bool = False) -> Access:
    dims = (Dim(0, (0, 8), (4, 0)), Dim(1, (4, 0), (1, 0)), Dim(NO_LOOP, (2, 0), (0, 3)))
    return Access(tensor, 4, dims, is_output, whole)


def two_ops() -> GraphBuilder:
    builder = GraphBuilder("g", batch=2)
    first = builder.op("a", outputs=[Out(8)])
    weight = builder.parameter("w", 16)  # after a tensor that an op makes
    (x,) = builder.outputs(first)
    loops = OpLoops(
        (ROWS, UNITS),
        (access(weight), access(x), access(1, is_output=True, whole=True)),
        is_linear=True,
    )
    builder.op("b", inputs=[x, weight], outputs=[Out(8), Out(8)], loops=loops)
    return builder


def test_the_graph_calls_tensors_by_their_id() -> None:
    graph = two_ops().build()
    assert graph.loops is not None
    assert graph.loops[0] is None
    accesses = loops_of(graph, "b").accesses
    assert [graph.tensor_names[a.tensor] for a in accesses] == ["w", "a:0", "b:1"]
    assert [a.is_output for a in accesses] == [False, False, True]


def test_a_graph_without_any_loops_does_not_know_them() -> None:
    assert OpGraph.from_edges({"a": 1, "b": 1}, [("a", "b", 4)]).loops is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (access(5), "the op has no input 5"),
        (access(1), "the op has no input 1"),  # another op's
        (access(1, is_output=True), "the op has no output 1"),
        (access(0)._replace(dims=(Dim(2, (1, 0), (1, 0)),)), "there is no loop 2"),
        (access(0)._replace(dims=(Dim(-2, (1, 0), (1, 0)),)), "there is no loop -2"),
    ],
)
def test_loops_of_tensors_that_the_op_has_not_are_refused(bad: Access, reason: str) -> None:
    builder = GraphBuilder("g")
    tensors = [builder.parameter("w", 8), builder.parameter("v", 8)]
    loops = OpLoops((ROWS, UNITS), (bad,))
    with pytest.raises(GraphError, match=f"^g: op 'a': loops: {reason}"):
        builder.op("a", inputs=tensors[:1], outputs=[Out(8)], loops=loops)


# the file


def test_loops_survive_the_file() -> None:
    graph = two_ops().build()
    again = decode_graph(encode_graph(graph), "file")
    assert again.loops == graph.loops
    assert again.content_hash() == graph.content_hash()


def test_equal_loops_are_written_once() -> None:
    builder = GraphBuilder("g")
    for name in ("a", "b", "c"):
        weight = builder.parameter(f"{name}.w", 8)
        loops = OpLoops((ROWS, UNITS), (access(weight), access(0, is_output=True)))
        builder.op(name, inputs=[weight], outputs=[Out(8)], loops=loops)
    graph = builder.build()
    file = json.loads(encode_graph(graph))
    assert len(file["loops"]) == 1
    assert [op["loops"] for op in file["ops"]] == [0, 0, 0]
    assert decode_graph(encode_graph(graph), "file").loops == graph.loops


def test_a_file_from_before_has_no_loops() -> None:
    file = json.loads(encode_graph(two_ops().build()))
    del file["loops"]
    for op in file["ops"]:
        op.pop("loops", None)
    assert decode_graph(json.dumps(file).encode(), "file").loops is None


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("op", 7, "op 'b': loops 7 is not a position in loops"),
        ("tensor", 9, "op 'b': loops: the op has no input 9"),
        ("kind", 4, r"loops\[0\]: Invalid enum value 4"),
        ("loops", "x", r"loops\[0\]: Expected `array`"),
    ],
)
def test_wrong_loops_in_a_file_are_refused_by_name(key: str, value: Any, reason: str) -> None:
    file = json.loads(encode_graph(two_ops().build()))
    if key == "op":
        file["ops"][1]["loops"] = value
    elif key == "tensor":
        file["loops"][0][1][0][0] = value
    elif key == "kind":
        file["loops"][0][0][0][2] = value
    else:
        file["loops"][0] = value
    with pytest.raises(GraphError, match=f"^file: {reason}"):
        decode_graph(json.dumps(file).encode(), "file")


SIZES = st.tuples(st.integers(-9, 2**40), st.integers(0, 2**40))
NESTS = st.builds(
    OpLoops,
    st.tuples(
        st.builds(
            Loop, st.sampled_from("mnk"), SIZES, st.sampled_from(LoopKind), st.just("m"), SIZES
        )
    ),
    st.lists(
        st.builds(
            Access,
            st.just(0),
            st.integers(1, 16),
            st.lists(st.builds(Dim, st.integers(-1, 0), SIZES, SIZES), max_size=3).map(tuple),
            st.booleans(),
            st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    st.booleans(),
)


@given(st.lists(st.none() | NESTS, min_size=1, max_size=4))
def test_any_loops_survive_the_file(nests: list[OpLoops | None]) -> None:
    builder = GraphBuilder("g")
    weight = builder.parameter("w", 8)
    for index, nest in enumerate(nests):
        builder.op(f"op{index}", inputs=[weight], outputs=[Out(8)], loops=nest)
    graph = builder.build()
    again = decode_graph(encode_graph(graph), "file")
    assert again.loops == graph.loops
    assert (graph.loops is None) == all(nest is None for nest in nests)


# capture


class Net(nn.Module):
    """Two layers with an activation in place between them, over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu_()).pow(2).mean()


def captured(module: nn.Module, *shape: int) -> OpGraph:
    return capture(module, torch.zeros(4, *shape), name="net")


def test_a_matrix_product_sees_samples_and_positions_as_rows() -> None:
    graph = captured(Net(), 5, 8)
    loops = loops_of(graph, "first.addmm")
    assert labels(loops) == ["n", "m k", "k n", ">m n"]
    assert [(loop.name, loop.size, loop.dim) for loop in loops.loops] == [
        ("n", (12, 0), "n"), ("m", (0, 5), "m"), ("k", (8, 0), "k"),
    ]  # fmt: skip
    weight = loops.accesses[2]
    assert graph.tensor_names[weight.tensor] == "first.weight"
    assert [dim.stride for dim in weight.dims] == [(1, 0), (8, 0)]  # it is transposed


def test_an_op_in_place_reads_one_version_and_writes_the_next() -> None:
    graph = captured(Net(), 5, 8)
    before, after = loops_of(graph, "relu_").accesses
    assert before.tensor != after.tensor
    assert graph.tensor_storage[before.tensor] == graph.tensor_storage[after.tensor]
    assert [dim.size for dim in after.dims] == [(0, 1), (5, 0), (12, 0)]
    assert before.dims == after.dims


def test_inputs_and_updates_have_the_loops_of_their_tensors() -> None:
    graph = captured(Net(), 5, 8)
    assert labels(loops_of(graph, "input.0")) == [">e0 e1 e2"]
    assert labels(loops_of(graph, "first.weight.update")) == ["e0 e1", "e0 e1", ">e0 e1"]


def test_a_tied_weight_is_refreshed_along_the_loops_of_its_update() -> None:
    class Tied(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.nn.functional.linear(x, self.first.weight)
            return (hidden @ self.first.weight).mean() + self.second(hidden).mean()

    graph = captured(Tied(), 8)
    loops = loops_of(graph, "first.weight.refresh.0")
    assert labels(loops) == ["e0 e1"]
    assert graph.tensor_names[loops.accesses[0].tensor] == "first.weight.update:0"


class Odd(nn.Module):
    """One op of choice between a layer and the loss."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.layer, self.op = nn.Linear(8, 8), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.layer(x)).mean()


def half_zeroed(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :4].fill_(0)
    return y


@pytest.mark.parametrize(
    ("op", "target"),
    [
        (half_zeroed, "aten.fill_"),  # a write to a part of a storage
        (lambda x: torch.cdist(x, x[:2]), "aten._cdist_forward"),  # no rule
    ],
)
def test_what_no_rule_fits_has_no_loops(op: Any, target: str) -> None:
    graph = captured(Odd(op), 8)
    assert graph.loops is not None
    assert graph.loops[graph.op_targets.index(target)] is None


def test_views_have_no_loops_and_their_readers_have_the_strides_of_the_base() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.layer(x).chunk(3, -1)
            return (a * b * c).mean()

    graph = captured(Split(), 5, 8)
    assert graph.loops is not None
    views = [op for op, kind in enumerate(graph.op_class) if kind == OpClass.VIEW]
    assert views
    assert all(graph.loops[op] is None for op in views)
    first = loops_of(graph, "mul").accesses[0]
    assert [dim.stride for dim in first.dims] == [(120, 0), (24, 0), (1, 0)]
    assert [dim.size for dim in first.dims] == [(0, 1), (5, 0), (8, 0)]


def test_a_batch_of_one_is_a_loop_and_a_broadcast_is_none() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * torch.ones(1, 1, 8)

    graph = capture(Odd(scaled), torch.zeros(1, 5, 8), Job(batch=1), name="net")
    assert labels(loops_of(graph, "mul")) == ["e0 e1 e2", "e2", ">e0 e1 e2"]


def check_graph(graph: OpGraph) -> None:
    """Every op but views has loops, which lie within its tensors and fill what it writes."""
    assert graph.loops is not None
    sized = graph.at_batch(BATCH)
    for op, loops in enumerate(graph.loops):
        if graph.op_class[op] == OpClass.VIEW:
            assert loops is None
            continue
        assert loops is not None, graph.op_names[op]
        reads = set(graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist())
        reads = {t for t in reads if sized.tensor_bytes[t]}  # without those that only order
        seen = {a.tensor for a in loops.accesses if not a.is_output}
        assert seen - {t for t in seen if not sized.tensor_bytes[t]} == reads, graph.op_names[op]
        for access in loops.accesses:
            count = math.prod(at(dim.size) for dim in access.dims if dim.stride != (0, 0))
            reach = sum((at(dim.size) - 1) * at(dim.stride) for dim in access.dims) + 1
            storage = graph.tensor_storage[access.tensor]
            assert reach * access.itemsize <= sized.storage_bytes[storage], graph.op_names[op]
            if access.is_output:
                assert count * access.itemsize == sized.tensor_bytes[access.tensor]
            else:
                assert count * access.itemsize <= sized.tensor_bytes[access.tensor]
        check_dims(graph, op, loops)


def check_dims(graph: OpGraph, op: int, loops: OpLoops) -> None:
    """The loops of a product's or attention's dimension multiply up to it."""
    if graph.op_class[op] not in (OpClass.MATMUL, OpClass.BATCHED_MATMUL, OpClass.ATTENTION):
        return
    signature = graph.signatures[graph.signature[op]]
    for name, _, _ in signature.dims:
        if name != "d":
            found = math.prod(at(loop.size) for loop in loops.loops if loop.dim == name)
            assert found == signature.dim(name, BATCH), (graph.op_names[op], name)


@pytest.mark.parametrize("name", ["gnmt-4", "gpt2", "resnet-50", "vgg-16"])
def test_the_loops_of_a_model_fit_its_tensors(name: str) -> None:
    check_graph(model_graph(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bert-base",
        "inception-v3",
        "moe",
        "multi-modal",
        "nasnet-mobile",
        "t5-base",
        "transformer-base",
        "two-tower",
    ],
)
def test_the_loops_of_a_large_model_fit_its_tensors(name: str) -> None:
    check_graph(model_graph(name))


def model_graph(name: str) -> OpGraph:
    return load_graph(name, {"batch": 4})[0]
