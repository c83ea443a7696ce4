import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simcore.errors import GraphError
from simcore.graph import FixedCosts, GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.loops import OpLoops
from simcore.signature import Signature


def two_layers() -> OpGraph:
    """One layer with a parameter, its backward and its update; then a loss."""
    builder = GraphBuilder("two layers", batch=4)
    weight = builder.parameter("w", 400)
    source = builder.op("x", op_class=OpClass.INPUT, outputs=[Out((0, 8), role=Role.INPUT)])
    (x,) = builder.outputs(source)
    matmul = Signature("matmul", "fp32", (("m", 0, 1), ("n", 10, 0), ("k", 10, 0)))
    layer = builder.op(
        "layer", module="net.layer", inputs=[x, weight], outputs=[Out((16, 40))], unit_of=source,
        signature=matmul, op_class=OpClass.MATMUL, workspace=(1, 2), resident=3,
    )  # fmt: skip
    (y,) = builder.outputs(layer)
    loss = builder.op("loss", inputs=[y], outputs=[Out(4)], sync=True)
    back = builder.op(
        "layer.back", phase=Phase.B, inputs=[x, *builder.outputs(loss)],
        outputs=[Out(400, role=Role.GRADIENT)], unit_of=layer,
    )  # fmt: skip
    builder.op(
        "layer.update", phase=Phase.U, op_class=OpClass.UPDATE, unit_of=layer, elements=100,
        inputs=[weight, *builder.outputs(back)], outputs=[Out(400, storage_of=weight)],
    )  # fmt: skip
    return builder.build()


# from_edges: a graph of one's own


def test_ops_are_put_into_topological_order_with_ties_as_given() -> None:
    graph = OpGraph.from_edges({"c": 3, "b": 2, "a": 1}, [("a", "c", 8)])
    assert graph.op_names == ("b", "a", "c")
    assert graph.fixed is not None
    assert graph.fixed.seconds.tolist() == [2, 1, 3]


def test_edges_with_equal_bytes_share_a_tensor() -> None:
    graph = OpGraph.from_edges(
        {"a": 1, "b": 1, "c": 1, "d": 1}, [("a", "b", 8), ("a", "c", 8), ("a", "d", 9)]
    )
    assert graph.tensor_bytes.tolist() == [[8, 0], [9, 0]]
    producer, consumer, tensor = graph.edges()
    assert producer.tolist() == [0, 0, 0]
    assert consumer.tolist() == [1, 2, 3]
    assert tensor.tolist() == [0, 0, 1]


def test_an_edge_given_twice_is_one_use() -> None:
    graph = OpGraph.from_edges({"a": 1, "b": 1}, [("a", "b", 8), ("a", "b", 8)])
    assert graph.inputs.tolist() == [0]


def test_colocated_ops_are_one_unit() -> None:
    graph = OpGraph.from_edges(
        {"a": 1, "b": 1, "c": 1}, [("a", "b", 1), ("b", "c", 1)], colocate={"a": "x", "c": "x"}
    )
    assert graph.unit.tolist() == [0, 1, 0]
    assert graph.unit_names == ("a", "b")


def test_a_cycle_is_named() -> None:
    edges = [("a", "b", 1), ("b", "c", 1), ("c", "b", 1), ("c", "d", 1)]
    with pytest.raises(GraphError, match=r"^mine: cycle: (b -> c -> b|c -> b -> c)$"):
        OpGraph.from_edges(dict.fromkeys("abcd", 1.0), edges, name="mine")


def test_a_long_cycle_is_shortened() -> None:
    ops = [f"o{op}" for op in range(100)]
    edges = [(op, ops[(index + 1) % 100], 1) for index, op in enumerate(ops)]
    with pytest.raises(GraphError, match=r"o\d+ -> .* -> \.\.\.$"):
        OpGraph.from_edges(dict.fromkeys(ops, 1.0), edges)


@pytest.mark.parametrize(
    ("ops", "edges", "reason"),
    [
        ({"a": 1}, [("a", "a", 1)], "cycle: a -> a"),
        ({"a": 1}, [("a", "z", 1)], "edge a -> z: no op named 'z'"),
        ({"a": 1}, [("z", "a", 1)], "edge z -> a: no op named 'z'"),
        ({"a": -1}, [], "op 'a': seconds is -1"),
        ({"a": math.nan}, [], "op 'a': seconds is nan"),
        ({"a": 1, "b": 1}, [("a", "b", -1)], "'a:0': .*negative"),
        ({"a": 1, "b": 1}, [("a", "b", math.nan)], "'a:0': nan is not a whole number"),
        ({"a": 1, "b": 1}, [("a", "b", math.inf)], "'a:0': inf is not a whole number"),
        ({"a": 1, "b": 1}, [("a", "b", 0.5)], "'a:0': 0.5 is not a whole number"),
        ({"a": 1, "b": 1}, [("a", "b", 10**400)], "'a:0': 1000.* is not a whole number"),
        ([("a", 1), ("a", 1)], [], "two ops are named 'a'"),
        ({}, [], "at least one op"),
    ],
)
def test_a_bad_graph_is_refused_with_its_name_and_the_reason(
    ops: Any, edges: Any, reason: str
) -> None:
    with pytest.raises(GraphError, match=f"mine: .*{reason}"):
        OpGraph.from_edges(ops, edges, name="mine")


# GraphBuilder


def test_tensors_are_numbered_by_producer_after_those_without() -> None:
    builder = GraphBuilder("g")
    first = builder.op("a", outputs=[Out(1), Out(2)])
    late = builder.parameter("late", 9)
    builder.op("b", inputs=[*builder.outputs(first), late], outputs=[Out(3)])
    graph = builder.build()
    assert graph.tensor_names == ("late", "a:0", "a:1", "b:0")
    assert graph.tensor_producer.tolist() == [-1, 0, 0, 1]
    assert graph.first_output.tolist() == [1, 3, 4]
    assert graph.inputs.tolist() == [0, 1, 2]
    assert graph.first_consumer.tolist() == [0, 1, 2, 3, 3]
    assert graph.consumers.tolist() == [1, 1, 1]


def test_units_are_numbered_by_their_first_op() -> None:
    builder = GraphBuilder("g")
    ops = [builder.op(name) for name in "abcde"]
    builder.merge_units(ops[4], ops[1])
    builder.merge_units(ops[2], ops[3])
    builder.op("f", unit_of=ops[4])
    assert builder.build().unit.tolist() == [0, 1, 2, 2, 1, 1]


def test_views_and_in_place_versions_share_a_storage() -> None:
    builder = GraphBuilder("g")
    weight = builder.parameter("w", 4)
    (base,) = builder.outputs(builder.op("a", outputs=[Out(100)]))
    view = builder.op("slice", op_class=OpClass.VIEW, inputs=[base], kernels=0,
                      outputs=[Out(50, storage_of=base), Out(50, storage_of=base)])  # fmt: skip
    builder.op("add_", inputs=[builder.outputs(view)[1]],
               outputs=[Out(60, storage_of=builder.outputs(view)[1])])  # fmt: skip
    builder.op("update", inputs=[weight], outputs=[Out(4, storage_of=weight)])
    graph = builder.build()
    assert graph.tensor_storage.tolist() == [0, 1, 1, 1, 1, 0]
    assert graph.num_storages == 2
    assert graph.persistent_storage.tolist() == [True, False]
    assert graph.at_batch(1).storage_bytes.tolist() == [4, 100]


def test_a_tensor_read_twice_is_one_input() -> None:
    builder = GraphBuilder("g")
    (x,) = builder.outputs(builder.op("a", outputs=[Out(1)]))
    builder.op("square", inputs=[x, x])
    assert builder.build().inputs.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seconds": -1.0}, "seconds is negative"),
        ({"cpu_seconds": -1.0}, "cpu_seconds is negative"),
        ({"workspace": -1}, "workspace.*negative"),
        ({"resident": (5, -1)}, "resident.*negative"),
        ({"workspace": math.nan}, "workspace: nan is not"),
        ({"kernels": -1}, "kernels -1"),
        ({"kernels": 2**31}, "kernels 2147483648"),
        ({"elements": -1}, "elements -1"),
        ({"inputs": [7]}, "input tensor 7 does not exist"),
        ({"outputs": [Out(1, storage_of=7)]}, "shares a storage that does not exist"),
        ({"outputs": [Out((1, 2**61))]}, "not a whole number of bytes below"),
    ],
)
def test_a_bad_op_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(GraphError, match=f"g: .*'bad.*{reason}"):
        GraphBuilder("g").op("bad", **change)


def test_two_ops_of_one_name_are_refused() -> None:
    builder = GraphBuilder("g")
    builder.op("same")
    builder.op("same")
    with pytest.raises(GraphError, match="two ops are named 'same'"):
        builder.build()


def test_a_graph_without_measured_seconds_is_not_fixed() -> None:
    assert two_layers().fixed is None


# OpGraph


def test_every_array_is_read_only() -> None:
    graph = two_layers()
    arrays = [getattr(graph, name) for name in graph.__slots__]
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    assert len(arrays) == 18
    for array in arrays:
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_bytes_and_flops_follow_the_batch() -> None:
    sized = two_layers().at_batch(10)
    assert sized.tensor_bytes.tolist() == [400, 80, 416, 4, 400, 400]
    assert sized.workspace.tolist() == [0, 21, 0, 0, 0]
    assert sized.resident.tolist() == [0, 3, 0, 0, 0]
    assert sized.flops.tolist() == [0, 2 * 10 * 10 * 10, 0, 0, 0]


def test_without_a_batch_the_graph_has_its_own() -> None:
    assert two_layers().at_batch(None).tensor_bytes[1] == 8 * 4


def test_a_size_that_is_negative_at_a_batch_is_refused_by_name() -> None:
    builder = GraphBuilder("g")
    builder.op("a", outputs=[Out((-100, 10))])
    graph = builder.build()
    assert graph.at_batch(10).tensor_bytes.tolist() == [0]
    with pytest.raises(GraphError, match="g: 'a:0' has -50 bytes at batch 5"):
        graph.at_batch(5)


def test_sizes_that_leave_int64_are_refused() -> None:
    builder = GraphBuilder("g")
    builder.op("a", outputs=[Out((0, 2**40))])
    with pytest.raises(GraphError, match="over 2\\*\\*62 bytes at batch 1099511627776"):
        builder.build().at_batch(2**40)


def changed(graph: OpGraph, key: str) -> Any:
    """Another value for a field, of the same type."""
    value = getattr(graph, key)
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flat[-1] = not value.flat[-1] if value.dtype == bool else value.flat[-1] ^ 1
        return value
    if key == "signatures":
        return (replace_signature(value[0]),)
    if key == "batch":
        return 5
    if key == "loops":
        return (OpLoops((), ()),) * graph.num_ops
    if key == "fixed":
        return FixedCosts(
            seconds=np.ones(graph.num_ops), cpu_seconds=None, measured_on=None, batch=None
        )
    return (*value[:-1], "other")


def replace_signature(signature: Signature) -> Signature:
    return Signature(signature.op_class, "bf16", signature.dims)


@pytest.mark.parametrize(
    "key",
    [
        name
        for name in OpGraph.__slots__
        # offsets cannot change alone, and consumers are derived
        if name not in ("name", "first_input", "first_output", "first_consumer", "consumers")
    ],
)
def test_the_hash_changes_with_every_field(key: str) -> None:
    graph = two_layers()
    fields = {name: getattr(graph, name) for name in graph.__slots__}
    for derived in ("first_consumer", "consumers"):
        del fields[derived]
    assert OpGraph(**fields).content_hash() == graph.content_hash()
    fields[key] = changed(graph, key)
    assert OpGraph(**fields).content_hash() != graph.content_hash()


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": np.array([1.0, 3.0])},
        {"seconds": np.array([1.0, np.nan])},
        {"cpu_seconds": None},
        {"cpu_seconds": np.array([5.0, np.inf])},
        {"measured_on": "b"},
        {"measured_on": None},
        {"batch": 2},
        {"measured_on": "a1", "batch": None},
    ],
)
def test_the_hash_changes_with_measured_costs(change: dict[str, Any]) -> None:
    fixed = FixedCosts(
        seconds=np.array([1.0, 2.0]),
        cpu_seconds=np.array([5.0, 6.0]),
        measured_on="a",
        batch=1,
    )
    graph = replace_fixed(OpGraph.from_edges({"a": 1, "b": 2}, []), fixed)
    other = replace_fixed(graph, replace(fixed, **change))
    assert graph.content_hash() != other.content_hash()


def replace_fixed(graph: OpGraph, fixed: FixedCosts) -> OpGraph:
    return replace(graph, fixed=fixed)


def test_the_hash_does_not_change_with_the_name() -> None:
    graph = two_layers()
    assert replace(graph, name="other").content_hash() == graph.content_hash()
    assert len(graph.content_hash()) == 16
    assert int(graph.content_hash(), 16) >= 0


def test_the_hash_does_not_see_which_nan_was_given() -> None:
    def graph(nan: float) -> OpGraph:
        builder = GraphBuilder("g")
        builder.op("a", seconds=1.0)
        builder.op("b", seconds=nan)
        return builder.build()

    assert graph(math.nan).content_hash() == graph(-math.nan).content_hash()


# Signature


@pytest.mark.parametrize(
    ("op_class", "dims", "factor", "flops"),
    [
        ("matmul", {"m": 2, "n": 3, "k": 5}, 1, 2 * 2 * 3 * 5),
        ("batched_matmul", {"b": 7, "m": 2, "n": 3, "k": 5}, 1, 2 * 7 * 2 * 3 * 5),
        # 2 images, 8 filters of 3 x 3 over 4 channels, 10 x 10 positions
        ("convolution", {"n": 2, "k": 8, "out": 100, "c": 4, "filter": 9}, 1, 2 * 2 * 8 * 100 * 36),
        ("convolution", {"n": 2, "k": 8, "out": 100, "c": 4, "filter": 9}, 2, 4 * 2 * 8 * 100 * 36),
        # 2 x 3 heads, 10 queries by 20 keys of 4: scores and weighted values
        ("attention", {"b": 2, "h": 3, "q": 10, "kv": 20, "d": 4}, 1, 2 * 2 * (6 * 10 * 20 * 4)),
        ("attention", {"b": 2, "h": 3, "q": 10, "kv": 20, "d": 4}, 2.5, 10 * (6 * 10 * 20 * 4)),
        # 5 steps of 2 samples, both directions of an LSTM of 8 on 3 inputs
        ("rnn", {"t": 5, "b": 2, "dirs": 2, "gates": 4, "h": 8, "i": 3}, 1, 5 * 2 * 2 * 64 * 11),
        ("pointwise", {"elements": 11}, 3, 33),
        ("embedding", {}, 1, 0),
    ],
)
def test_flops_are_those_worked_by_hand(
    op_class: str, dims: dict[str, int], factor: float, flops: float
) -> None:
    constant = tuple((name, size, 0) for name, size in dims.items())
    assert Signature(op_class, "fp32", constant, factor).flops(32) == flops


def test_dimensions_and_traffic_are_affine_in_the_batch() -> None:
    signature = Signature(
        "matmul", "fp32", (("m", 1, 4), ("n", 3, 0), ("k", 5, 0)), traffic=(60, 8)
    )
    assert signature.dim("m", 10) == 41
    assert signature.dim("absent", 10) == 0
    assert signature.flops(10) == 2 * 41 * 3 * 5
    assert signature.traffic_bytes(10) == 140


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Signature("matmull", "fp32"), "unknown op class 'matmull'"),
        (lambda: Signature("matmul", "fp32", (("m", 1, 0),)), r"missing dims \['k', 'n'\]"),
        (lambda: Signature("other", "fp32", factor=-1.0), "factor -1.0"),
        (lambda: Signature("other", "fp32", factor=math.nan), "factor nan"),
        (lambda: Signature("other", "fp32", (("elements", -1, 0),)), "elements -1"),
        (lambda: Signature("other", "fp32", (("elements", 0, -1),)), "elements 0 \\+ -1"),
        (lambda: Signature("other", "fp32", traffic=(2**70, 0)), "traffic 118"),
    ],
)
def test_a_bad_signature_is_refused(make: Callable[[], Signature], reason: str) -> None:
    with pytest.raises(GraphError, match=f"signature.*{reason}"):
        make()
