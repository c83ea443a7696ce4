"""ONNX files as inputs: a forward that is read, and the training step that is derived from it."""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from simcore import cli as command_line
from simcore.errors import CaptureError, GraphError, JobError
from simcore.frontends.torch_capture import capture
from simcore.frontends.torch_onnx_nodes import FUNCTIONS
from simcore.graph import OpClass, OpGraph, Phase
from simcore.job import Job
from simcore.sharding.groups import find_linkage
from simcore.sharding.named import find_roles
from simcore.sources import load_graph

onnx_models = pytest.importorskip(
    "tests.onnx_models", reason="onnx makes these files: pip install 'placewright[onnx]'"
)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def run(model: Any, **changes: Any) -> tuple[OpGraph, Job]:
        graph, job, _ = load_graph(str(onnx_models.save(model, tmp_path / "m.onnx")), changes)
        return graph, job

    return run


def flops(graph: OpGraph, batch: int | None = None) -> float:
    return float(graph.at_batch(batch).flops.sum())


def group_sizes(graph: OpGraph) -> Counter[tuple[int, int]]:
    return Counter(group.size for group in find_linkage(graph).groups)


def test_vgg_is_what_it_is_in_torch(load: Any) -> None:
    graph, job = load(onnx_models.vgg())
    known, _, _ = load_graph("vgg-19", {"batch": 32})
    assert job == Job(batch=32)
    assert int(graph.elements.sum()) == int(known.elements.sum()) == 143_667_240
    convolutions = {"aten.convolution", "aten.convolution_backward", "aten.addmm", "aten.mm"}
    for kind in convolutions:
        ours, theirs = (
            each.at_batch(None).flops[[target == kind for target in each.op_targets]].sum()
            for each in (graph, known)
        )
        assert ours == theirs > 0
    inside = (Phase.F, Phase.B, Phase.U)
    assert all((graph.phase == phase).any() for phase in inside)
    assert group_sizes(graph) == group_sizes(known)


@pytest.mark.slow
def test_vgg_shows_the_known_answer(tmp_path: Path, capsys: Any) -> None:
    path = onnx_models.save(onnx_models.vgg(), tmp_path / "vgg.onnx")
    steps = []
    for source in (str(path), "vgg-19"):
        arguments = ["plan", source, "--cluster", "2x8xV100", "--strategy", "sharding"]
        arguments += ["--evaluations", "600", "--batch", "256", "--json"]
        assert command_line.main([*arguments, "--out", str(tmp_path / "plan.json")]) == 0
        steps.append(json.loads(capsys.readouterr().out)["step_time_s"])
    assert steps[0] == pytest.approx(steps[1], rel=0.05)  # no dropout in the file
    assert steps[0] < 0.15


@pytest.mark.parametrize("batch", [4, "batch"])
def test_a_fixed_batch_and_an_open_one_are_one_graph(load: Any, batch: int | str) -> None:
    graph, job = load(onnx_models.attention(batch), batch=8)
    torch_graph = capture(Attention(), (torch.zeros(8, 16, 32),), Job(batch=8), name="torch")
    assert job.batch == 8
    assert int(graph.elements.sum()) == int(torch_graph.elements.sum())
    for batch_size in (8, 24):
        assert flops(graph, batch_size) == flops(torch_graph, batch_size)
    assert group_sizes(graph) == group_sizes(torch_graph)
    roles = find_roles(graph, find_linkage(graph))
    assert len(roles.heads) == 1


class Attention(nn.Module):
    """What `onnx_models.attention` writes out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.zeros(32, 32)) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], 16, 4, 8)
        q = (x @ self.q).reshape(shape).permute(0, 2, 1, 3)
        k = (x @ self.k).reshape(shape).permute(0, 2, 3, 1)
        v = (x @ self.v).reshape(shape).permute(0, 2, 1, 3)
        seen = ((q @ k).softmax(-1) @ v).permute(0, 2, 1, 3)
        return self.norm(seen.reshape(x.shape) @ self.o).mean()


CASES: list[tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...], dict[str, Any]]] = [
    ("Add", (4, 8), ((8,),), {}),
    ("Gelu", (4, 8), (), {}),
    ("Erf", (4, 8), (), {}),
    ("Softmax", (4, 8), (), {"axis": -1}),
    ("ReduceMean", (4, 8), (), {}),
    ("Conv", (4, 3, 8, 8), ((6, 3, 3, 3),), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", (4, 3, 8, 8), ((6, 3, 3, 3),), {"pads": [0, 0, 1, 1]}),
    ("ConvTranspose", (4, 3, 8, 8), ((3, 6, 3, 3),), {"strides": [2, 2]}),
    ("MaxPool", (4, 3, 8, 8), (), {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1]}),
    ("AveragePool", (4, 3, 8, 8), (), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("GlobalAveragePool", (4, 3, 8, 8), (), {}),
    ("BatchNormalization", (4, 3, 8, 8), ((3,), (3,), (3,), (3,)), {}),
    ("LayerNormalization", (4, 8), ((8,), (8,)), {}),
    ("Gemm", (4, 8), ((8, 5), (5,)), {"alpha": 0.5}),
    ("Transpose", (4, 8, 3), (), {"perm": [0, 2, 1]}),
    ("Concat", (4, 8), ((4, 8),), {"axis": 1}),
    ("Flatten", (4, 8, 3), (), {}),
    ("Einsum", (4, 8), ((8, 5),), {"equation": "bi,ij->bj"}),
]


@pytest.mark.parametrize(("op", "shape", "weights", "attributes"), CASES)
def test_a_node_gives_the_shape_that_onnx_infers(
    op: str, shape: tuple[int, ...], weights: Any, attributes: dict[str, Any]
) -> None:
    from simcore.frontends.torch_onnx import module_of

    model = onnx_models.one_node(op, shape, *weights, **attributes)
    shown = onnx_models.onnx.shape_inference.infer_shapes(model).graph.output[0]
    wanted = [dim.dim_value for dim in shown.type.tensor_type.shape.dim]
    module = module_of(model, "m.onnx").to_empty(device="cpu")
    found = module(torch.zeros(shape))
    assert list(found.shape) == wanted


def test_batch_norm_keeps_statistics_and_trains_the_rest(load: Any) -> None:
    model = onnx_models.one_node("BatchNormalization", (4, 3, 8, 8), *[(3,)] * 4)
    graph, _ = load(model)
    updated = {name for name in graph.op_names if name.endswith(".update")}
    assert updated == {"scale.update", "w0.update", "w1.update"}


def test_an_op_that_is_not_known_is_named_with_its_node(load: Any) -> None:
    assert "Det" not in FUNCTIONS
    with pytest.raises(CaptureError, match=r"m\.onnx: node \S+ \(Det\): this op is not supported"):
        load(onnx_models.one_node("Det", (4, 8, 8)))
    with pytest.raises(CaptureError, match=r"node gemm_1 \(Gemm\)"):
        load(onnx_models.one_node("Gemm", (4, 8), (9, 5)))


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(
    ("op", "gates", "directions"), [("LSTM", 4, 1), ("LSTM", 4, 2), ("GRU", 3, 1), ("RNN", 1, 1)]
)
def test_a_recurrent_layer_is_that_of_torch(
    load: Any, op: str, gates: int, directions: int, layout: int
) -> None:
    graph, job = load(onnx_models.recurrent(op, gates, directions=directions, layout=layout))
    made = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[op]
    layer = made(32, 64, bidirectional=directions == 2, batch_first=True)
    known = capture(_Layer(layer, directions * 64), torch.zeros(32, 10, 32), name="known")
    assert job.batch == 32
    assert int(graph.elements.sum()) == int(known.elements.sum())
    ours, theirs = (
        each.at_batch(32).flops[each.op_class == OpClass.RNN] for each in (graph, known)
    )
    assert len(ours) == len(theirs) == 2  # forward and backward
    assert ours.tolist() == theirs.tolist()
    assert flops(graph, 32) == pytest.approx(flops(known, 32), rel=0.01)


class _Layer(nn.Module):
    """A recurrent layer and a product behind it."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layer(x)[0])
        return scores.mean()


def test_what_torch_has_no_recurrent_layer_for_is_refused(load: Any) -> None:
    model = onnx_models.recurrent("GRU", 3)
    names = [node.op_type for node in model.graph.node]
    layer = model.graph.node[names.index("GRU")]
    layer.attribute.append(onnx_models.helper.make_attribute("activations", ["Affine", "Tanh"]))
    with pytest.raises(CaptureError, match=r"node \S+ \(GRU\): activations Affine, Tanh are not"):
        load(model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs": ["rnn.w"]}, "its input 2 is missing"),
        ({"inputs": []}, "its input 1 is missing"),
        ({"gates": 3}, r"weights of shape \(1, 192, 32\).* 4 gates need \(1, 256, 32\)"),
        (
            {"directions": 2, "way": "forward"},
            r"shape \(2, 256, 32\), where forward.* \(1, 256, 32\)",
        ),
        ({"way": "bidirectional"}, r"shape \(1, 256, 32\), where bidirectional"),
        ({"way": "sideways"}, "direction 'sideways' is not known"),
        ({"hidden": 32}, r"weights of shape .* 32 hidden features and 4 gates need \(1, 128, 32\)"),
        ({"biases": [1, 4 * 64]}, r"biases of shape \(1, 256\).* need \(1, 512\)"),
    ],
)
def test_a_recurrent_layer_with_weights_of_another_one_is_refused(
    load: Any, given: dict[str, Any], said: str
) -> None:
    gates, directions = given.get("gates", 4), given.get("directions", 1)
    model = onnx_models.recurrent("LSTM", gates, directions=directions)
    layer = next(node for node in model.graph.node if node.op_type == "LSTM")
    if "inputs" in given:
        layer.input[1:] = given["inputs"]
    for attribute in layer.attribute:
        if attribute.name == "direction" and "way" in given:
            attribute.s = given["way"].encode()
        if attribute.name == "hidden_size" and "hidden" in given:
            attribute.i = given["hidden"]
    for held in model.graph.initializer:
        if held.name == layer.input[-1] and "biases" in given:
            held.CopyFrom(onnx_models.tensor(held.name, given["biases"]))
    with pytest.raises(CaptureError, match=rf"node \S+ \(LSTM\): .*{said}"):
        load(model)


def test_a_first_state_of_another_shape_is_refused(load: Any) -> None:
    model = onnx_models.recurrent("GRU", 3)
    layer = next(node for node in model.graph.node if node.op_type == "GRU")
    model.graph.initializer.append(onnx_models.tensor("first", [1, 4, 63]))
    layer.input.extend(["", "first"])
    with pytest.raises(CaptureError, match=r"first state of shape \(1, 4, 63\)"):
        load(model)


def test_control_flow_is_refused_by_the_name_of_its_node(load: Any) -> None:
    helper, kind = onnx_models.helper, onnx_models.TensorProto.FLOAT
    out = helper.make_tensor_value_info("inner", kind, None)
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["inner"])], "branch", [], [out])
    model = onnx_models.one_node("Relu", (4, 8))
    node = helper.make_node("If", ["c"], ["y"], "gate", then_branch=branch, else_branch=branch)
    model.graph.node.append(node)
    with pytest.raises(GraphError, match=r"node gate \(If\): control flow is not supported"):
        load(model)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("inputs", [{}, {"sizes": [1, 4, 32, 32]}])
def test_a_resize_doubles_pictures_and_its_factors_are_no_parameters(
    load: Any, mode: str, inputs: dict[str, list[int]]
) -> None:
    graph, _ = load(onnx_models.resized(mode, **inputs), batch=8)
    assert int(graph.elements.sum()) == 4 * 3 * 3 * 3
    name = {"nearest": "aten.upsample_nearest2d", "linear": "aten.upsample_bilinear2d"}[mode]
    op = next(k for k, target in enumerate(graph.op_targets) if target == name)
    written = graph.tensor_bytes[int(graph.first_output[op])]
    assert written.tolist() == [0, 4 * 32 * 32 * 4]


@pytest.mark.parametrize(("op", "opset"), [("Resize", 10), ("Upsample", 9), ("Upsample", 7)])
def test_older_files_say_the_factors_elsewhere(load: Any, op: str, opset: int) -> None:
    model = onnx_models.resized("nearest")
    node = model.graph.node[1]
    node.op_type, model.opset_import[0].version = op, opset
    del node.input[1:]
    if opset == 7:
        factors = onnx_models.helper.make_attribute("scales", [1.0, 1.0, 2.0, 2.0])
        node.attribute.append(factors)
        del model.graph.initializer[1]
    else:
        node.input.append("scales")
    graph, _ = load(model, batch=8)
    assert graph.op_targets.count("aten.upsample_nearest2d") == 1


@pytest.mark.parametrize(
    ("axes", "sizes", "reason"),
    [
        ([-2, -1], [32, 32], ""),
        (None, [1, 12, 32, 32], "channels change too"),
        (None, [32, 32], "2 sizes or factors of 4 axes"),
        ([1, 2], [32, 32], r"axes \[1, 2\] of 4 are not those behind the channels"),
    ],
)
def test_a_resize_of_other_axes_than_those_behind_the_channels_is_refused(
    load: Any, axes: list[int] | None, sizes: list[int], reason: str
) -> None:
    model = onnx_models.resized("nearest", sizes=sizes)
    if axes:
        model.graph.node[1].attribute.append(onnx_models.helper.make_attribute("axes", axes))
    if not reason:
        assert "aten.upsample_nearest2d" in load(model)[0].op_targets
        return
    with pytest.raises(CaptureError, match=rf"node \S+ \(Resize\): {reason}"):
        load(model)


def test_a_sequence_length_that_no_input_has_is_refused(load: Any) -> None:
    model = onnx_models.one_node("Gemm", (4, 8), (8, 5))
    with pytest.raises(JobError, match=r"m\.onnx: no input has a sequence length that is open"):
        load(model, sequence_length=3)


def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path) -> None:
    path = onnx_models.save(onnx_models.attention(4), tmp_path / "m.onnx")
    content = path.read_bytes()
    for share in (0.1, 0.5, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises((GraphError, CaptureError), match=r"m\.onnx: "):
            load_graph(str(path))
    path.write_bytes(b"\x08\x07")
    with pytest.raises(GraphError, match=r"m\.onnx: not ONNX"):
        load_graph(str(path))


def test_a_batch_that_is_written_into_constants_is_refused(load: Any) -> None:
    maker = onnx_models.Maker()
    done = maker.node("Mul", "x", maker.weight("scale", 8))
    done = maker.node("Add", done, maker.weight("rows", 4, 8))
    model = maker.model((("x", 1, [4, 8]),), done)
    with pytest.raises(JobError, match="the batch of 4 is part of the file"):
        load(model)


def test_the_package_is_asked_for_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = onnx_models.save(onnx_models.attention(4), tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(GraphError, match=r"pip install 'placewright\[onnx\]'"):
        load_graph(str(path))


def test_a_model_is_planned_from_its_file(tmp_path: Path, capsys: Any) -> None:
    path = onnx_models.save(onnx_models.attention("batch"), tmp_path / "m.onnx")
    out = str(tmp_path / "plan.json")
    arguments = ["plan", str(path), "--cluster", "1xV100", "--evaluations", "20", "--json"]
    assert command_line.main([*arguments, "--out", out, "--batch", "4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert command_line.main(["simulate", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == printed["step_time_s"]


@pytest.mark.slow
def test_a_model_that_torch_exports_is_what_torch_records(load: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch exports with it")

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.table = nn.Embedding(100, 32)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 100)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(self.table(ids)))

    model, ids = Encoder(), torch.zeros(4, 16, dtype=torch.long)
    captured = capture(model, (ids,), Job(batch=4), name="torch")
    path = str(tmp_path / "exported.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(model, (ids,), path, verbose=False)
    graph, _, _ = load_graph(path)
    missing = {name for name in captured.tensor_names if name.endswith("weight")}
    assert missing
    products = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
    done = [
        sum(
            value
            for value, target in zip(each.at_batch(None).flops, each.op_targets, strict=True)
            if target in products or "attention" in target
        )
        for each in (graph, captured)
    ]
    assert done[0] == pytest.approx(done[1], rel=0.1)
