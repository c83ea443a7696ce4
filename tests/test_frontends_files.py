"""Graph files: what is read from them, and how bad ones are refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simcore.errors import GraphError
from simcore.frontends.dnn_partitioning import (
    BYTES_PER_COST,
    read_device_limits,
    read_dnn_partitioning,
)
from simcore.frontends.pipedream import read_pipedream
from simcore.graph import OpGraph
from simcore.signature import OpClass, Phase, Role


def layer(name: str, text: str, **fields: object) -> str:
    values = {
        "forward_compute_time": 1.0,
        "backward_compute_time": 2.0,
        "activation_size": 8.0,
        "parameter_size": 0.0,
    } | fields
    return f"{name} -- {text} -- " + ", ".join(f"{key}={value}" for key, value in values.items())


FREE = {"forward_compute_time": 0.0, "backward_compute_time": 0.0}
EDGES = ((1, 2), (2, 3), (3, 4))
INPUT = layer("node1", "Input", forward_compute_time=500.0, backward_compute_time=0.0)
CONVOLUTION = layer("node2", "Conv2d(3, 64)", activation_size=400.0, parameter_size=40.0)
RELU = layer("node3", "ReLU(inplace)", activation_size=400.0)
LINEAR = layer("node4", "Linear(in=100)", activation_size=80.0, parameter_size=10.0)
CHAIN = "\n".join(
    [LINEAR, INPUT, CONVOLUTION, RELU, "\tnode3 -- node4", "\tnode1 -- node2", "\tnode2 -- node3"]
)


def profile(folder: Path, text: str) -> OpGraph:
    path = folder / "graph.txt"
    path.write_text(text)
    return read_pipedream(path)


def reads(graph: OpGraph, op: str) -> list[str]:
    index = graph.op_names.index(op)
    tensors = graph.inputs[graph.first_input[index] : graph.first_input[index + 1]]
    return [graph.tensor_names[tensor] for tensor in tensors]


def storage(graph: OpGraph, tensor: str) -> int:
    return int(graph.tensor_storage[graph.tensor_names.index(tensor)])


def unit(graph: OpGraph, op: str) -> int:
    return int(graph.unit[graph.op_names.index(op)])


# PipeDream


def test_layers_run_forward_in_number_order_then_backward_reversed_then_update(
    tmp_path: Path,
) -> None:
    graph = profile(tmp_path, CHAIN)
    assert graph.op_names == (
        "node1", "node2", "node3", "node4",
        "node4.backward", "node3.backward", "node2.backward",
        "node2.update", "node4.update",
    )  # fmt: skip
    assert [Phase(phase).name for phase in graph.phase] == list("FFFFBBBUU")


def test_milliseconds_become_seconds_and_data_loading_is_dropped(tmp_path: Path) -> None:
    graph = profile(tmp_path, CHAIN)
    assert graph.fixed is not None
    assert graph.fixed.seconds[:7].tolist() == [0.0, 1e-3, 1e-3, 1e-3, 2e-3, 2e-3, 2e-3]
    assert np.isnan(graph.fixed.seconds[7:]).all()  # updates are costed from their elements
    assert graph.elements.tolist() == [0] * 7 + [10, 3]
    assert graph.batch is graph.fixed.batch is graph.fixed.measured_on is None


def test_a_backward_op_reads_gradients_saved_tensors_and_parameters(tmp_path: Path) -> None:
    graph = profile(tmp_path, CHAIN)
    assert sorted(reads(graph, "node2.backward")) == [
        "node1:0", "node2.parameters", "node2:0", "node3.gradient.0"
    ]  # fmt: skip
    assert reads(graph, "node4.update") == ["node4.parameters", "node4.parameters.gradient"]
    gradient = graph.tensor_names.index("node4.gradient.0")
    assert graph.tensor_bytes[gradient].tolist() == [400, 0]
    assert "node2.gradient.0" not in graph.tensor_names  # nobody wants the input's gradient


def test_a_layer_its_backward_and_its_update_are_one_unit(tmp_path: Path) -> None:
    graph = profile(tmp_path, CHAIN)
    assert graph.num_units == 4
    assert unit(graph, "node2") == unit(graph, "node2.backward") == unit(graph, "node2.update")


def test_an_inplace_layer_shares_storage_but_not_placement(tmp_path: Path) -> None:
    graph = profile(tmp_path, CHAIN)
    assert storage(graph, "node3:0") == storage(graph, "node2:0")
    assert unit(graph, "node3") != unit(graph, "node2")


def test_a_getitem_layer_is_a_view_of_one_element(tmp_path: Path) -> None:
    lstm = layer("node2", "LSTM(4, 4)", activation_size="[64.0; 16.0]", parameter_size=4.0)
    item = layer("node3", "__getitem__(1)", activation_size=16.0, **FREE)
    last = layer("node4", "Linear(in=4)")
    graph = profile(
        tmp_path,
        "\n".join([INPUT, lstm, item, last, *(f"\tnode{a} -- node{b}" for a, b in EDGES)]),
    )
    assert reads(graph, "node3") == ["node2:1"]
    assert storage(graph, "node3:0") == storage(graph, "node2:1")
    assert unit(graph, "node3") == unit(graph, "node2")
    assert graph.op_class[graph.op_names.index("node3")] == OpClass.VIEW
    assert storage(graph, "node3.gradient.0") == storage(graph, "node4.gradient.0")


def test_a_gradient_arrives_from_every_reader(tmp_path: Path) -> None:
    branch = layer("node5", "Linear(in=100)")
    join = layer("node6", "Add")
    text = "\n".join(
        [CHAIN, branch, join, "\tnode3 -- node5", "\tnode4 -- node6", "\tnode5 -- node6"]
    )
    graph = profile(tmp_path, text)
    arriving = {name for name in reads(graph, "node3.backward") if "gradient" in name}
    assert arriving == {"node4.gradient.0", "node5.gradient.0"}


def test_a_profile_without_backward_times_is_inference(tmp_path: Path) -> None:
    graph = profile(tmp_path, CHAIN.replace("backward_compute_time=2.0", "backward_compute_time=0"))
    assert graph.num_ops == 4
    assert set(graph.phase) == {Phase.F}


def test_stages_and_carriage_returns_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    plain = profile(tmp_path, CHAIN)
    staged = CHAIN.replace("parameter_size=0.0", "parameter_size=0.0 -- stage_id=3")
    odd = profile(tmp_path, "\n" + staged.replace("\n", "\r\n\r\n") + "\n")
    assert odd.content_hash() == plain.content_hash()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("\tnode1 -- node2", "no layers; is this a PipeDream profile"),
        (INPUT + "\nnode2 Conv", "line 2: a layer is 'nodeN"),
        (INPUT + "\n" + INPUT, "line 2: node1 is listed twice"),
        (INPUT + "\n\tnode1 -- node9", "line 2: there is no layer 'node9'"),
        (INPUT + "\n\tnode1 - node9", "line 2: an edge is 'nodeA -- nodeB'"),
        (
            layer("node1", "Add", activation_size="NaN"),
            "line 1: node1: activation_size: nan is not",
        ),
        (layer("node1", "Add", parameter_size=-4), "parameter_size: -4.0 is negative"),
        (layer("node1", "Add", forward_compute_time="inf"), "forward_compute_time: inf is not"),
        (layer("node1", "Add", forward_compute_time="fast"), "'fast' is not a number"),
        (layer("node1", "Add", activation_size="[4; ]"), "activation_size: '' is not a number"),
        (layer("node1", "Add", activation_size="1e30"), "activation_size: 1e+30 is too large"),
        (layer("node1", "Add", speed=1), "node1: unknown field 'speed=1'"),
        ("node1 -- Add -- forward_compute_time=1", "node1: backward_compute_time is missing"),
        (CHAIN + "\n\tnode4 -- node2", "cycle"),
        (CHAIN + "\n\tnode4 -- node4", "cycle"),
    ],
)
def test_a_bad_profile_is_refused_with_file_line_and_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(GraphError) as caught:
        profile(tmp_path, text)
    assert "graph.txt" in str(caught.value)
    assert reason in str(caught.value)


def test_a_file_that_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.bin").write_bytes(b"node1 \xff")
    with pytest.raises(GraphError, match="not text"):
        read_pipedream(tmp_path / "graph.bin")
    with pytest.raises(GraphError, match="No such file"):
        read_pipedream(tmp_path / "absent.txt")
    with pytest.raises(GraphError, match="directory"):
        read_pipedream(tmp_path)


@pytest.mark.parametrize(
    ("name", "layers", "total"),
    [("alexnet", 23, 0.085321), ("gnmt", 48, 0.089416), ("nasnetalarge", 1251, 0.658297)],
)
def test_public_profiles_are_read_whole(data: Path, name: str, layers: int, total: float) -> None:
    graph = read_pipedream(data / "pipedream" / f"{name}.graph.txt")
    assert graph.fixed is not None
    assert int((graph.phase == Phase.F).sum()) == layers
    assert np.nansum(graph.fixed.seconds) == pytest.approx(total, abs=1e-6)


# dnn-partitioning

NODE = {
    "name": "a",
    "id": 7,
    "supportedOnFpga": 1,
    "cpuLatency": 10.0,
    "fpgaLatency": 1.0,
    "size": 9,
}
THREE: dict[str, Any] = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        NODE | {"name": "c", "id": 3, "isBackwardNode": True, "colorClass": 5},
        NODE,
        NODE | {"name": "b", "id": 1, "colorClass": 5, "supportedOnFpga": False},
    ],
    "edges": [
        {"sourceId": 7, "destId": 1, "cost": 2.0},
        {"sourceId": 7, "destId": 3, "cost": 2.0},
        {"sourceId": 1, "destId": 3, "cost": 2.0, "size": 12.0},
    ],
}


def partitioning(folder: Path, content: dict[str, Any] | str) -> OpGraph:
    path = folder / "graph.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_dnn_partitioning(path)


def test_nodes_are_sorted_topologically_whatever_the_file_does(tmp_path: Path) -> None:
    graph = partitioning(tmp_path, THREE)
    assert graph.op_names == ("a", "b", "c")
    assert [Phase(phase).name for phase in graph.phase] == ["F", "F", "B"]


def test_latencies_become_seconds_and_unsupported_nodes_run_on_cpus_only(tmp_path: Path) -> None:
    graph = partitioning(tmp_path, THREE)
    assert graph.fixed is not None
    assert graph.fixed.cpu_seconds is not None
    assert graph.fixed.seconds.tolist() == [1e-3, math.inf, 1e-3]
    assert graph.fixed.cpu_seconds.tolist() == [1e-2, 1e-2, 1e-2]
    assert graph.resident.tolist() == [[9, 0]] * 3


def test_nodes_of_one_color_are_one_unit(tmp_path: Path) -> None:
    graph = partitioning(tmp_path, THREE)
    assert graph.unit.tolist() == [0, 1, 1]


def test_edges_of_equal_bytes_carry_one_tensor(tmp_path: Path) -> None:
    graph = partitioning(tmp_path, THREE)
    assert graph.tensor_bytes[:, 0].tolist() == [round(2 * BYTES_PER_COST), 12]
    assert graph.tensor_role.tolist() == [Role.ACTIVATION] * 2
    assert [edge.tolist() for edge in graph.edges()] == [[0, 0, 1], [1, 2, 2], [0, 0, 1]]


def test_names_that_come_twice_or_not_at_all_get_their_id(tmp_path: Path) -> None:
    nodes = [NODE | {"id": 1}, NODE | {"id": 2}, NODE | {"id": 3, "name": None}]
    assert partitioning(tmp_path, {"nodes": nodes, "edges": []}).op_names == ("a#1", "a#2", "#3")


def test_device_limits_are_read_apart(tmp_path: Path) -> None:
    partitioning(tmp_path, THREE)
    limits = read_device_limits(tmp_path / "graph.json")
    assert (limits.accelerators, limits.cpus, limits.accelerator_memory) == (2, 1, 100.0)


def edge(source: int, target: int, **fields: object) -> dict[str, Any]:
    return {"nodes": [NODE], "edges": [{"sourceId": source, "destId": target} | fields]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "the file is empty"),
        ('{"nodes": [{"id": 1', "truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ('{"nodes": []}', "missing required field `edges`"),
        ({"nodes": [], "edges": []}, "no nodes"),
        ({"nodes": [NODE | {"fpgaLatency": "1"}], "edges": []}, "Expected `float`, got `str`"),
        ({"nodes": [NODE | {"fpgaLatency": -1}], "edges": []}, "node 7: fpgaLatency: -1.0 is neg"),
        ({"nodes": [NODE | {"size": 1e300}], "edges": []}, "node 7: size: 1e+300 is too large"),
        ({"nodes": [NODE, NODE], "edges": []}, "node 7 is listed twice"),
        (edge(7, 8), "edge 7 -> 8: there is no node 8"),
        (edge(7, 7), "cycle"),
        (edge(7, 7, cost=-1.0), "edge 7 -> 7: cost: -1.0 is negative"),
        ('{"nodes": ' + "[" * 100_000, "graph.json"),
        ('{"nodes": [], "edges": [], "x": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": NaN}', "graph.json"),
    ],
)
def test_a_bad_partitioning_file_is_refused_with_file_and_reason(
    tmp_path: Path, content: dict[str, Any] | str, reason: str
) -> None:
    with pytest.raises(GraphError) as caught:
        partitioning(tmp_path, content)
    assert "graph.json" in str(caught.value)
    assert reason in str(caught.value)


def test_public_partitioning_files_are_read_whole(data: Path) -> None:
    folder = data / "dnn_partitioning" / "estimated_costs_operator_graphs"
    graph = read_dnn_partitioning(folder / "bert_l-3_training.json")
    assert (graph.num_ops, len(graph.edges()[0])) == (600, 817)
    assert graph.fixed is not None
    assert graph.fixed.seconds.sum() == pytest.approx(0.122987, abs=1e-6)
    assert read_device_limits(folder / "bert_l-3_training.json").accelerators == 3
