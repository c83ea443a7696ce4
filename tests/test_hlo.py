"""HLO and StableHLO text as inputs: what is read from a step of JAX, and what it is planned as."""

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from simcore import cli as command_line
from simcore.errors import GraphError, JobError
from simcore.frontends.hlo import decode_step, is_hlo
from simcore.frontends.hlo_fold import folded
from simcore.frontends.hlo_nest import parts_of, reshaped
from simcore.frontends.torch_capture import capture
from simcore.graph import OpClass, OpGraph, Phase
from simcore.job import Job
from simcore.sharding.groups import find_linkage
from simcore.sharding.named import find_roles
from simcore.shards import one_device, sharded_plan
from simcore.sources import load_graph
from tests.networks import star

DATA = Path(__file__).parent / "data"
TEXTS = (DATA / "mlp_step.mlir", DATA / "mlp_step.hlo")
MLP_ELEMENTS = 16 * 64 + 64 + 64 * 48 + 48 + 48 * 10 + 10


@pytest.fixture(scope="module")
def models() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of packages that jax imports
        pytest.importorskip("jax", reason="jax makes these files: pip install 'placewright[jax]'")
        from tests import jax_models

        return jax_models


def read(text: str) -> tuple[OpGraph, Job]:
    return decode_step(text, "step")


def flops(graph: OpGraph, batch: int | None = None) -> float:
    return float(graph.at_batch(batch).flops.sum())


def products(graph: OpGraph) -> float:
    is_product = np.isin(graph.op_class, (OpClass.MATMUL, OpClass.BATCHED_MATMUL))
    return float(graph.at_batch(None).flops[is_product].sum())


def group_sizes(graph: OpGraph) -> Counter[tuple[int, int]]:
    return Counter(group.size for group in find_linkage(graph).groups)


# files that are kept: they are read without jax


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.suffix)
def test_a_step_is_read_without_jax(path: Path) -> None:
    graph, job = read(path.read_text())
    assert job == Job(batch=8, optimizer="sgd", precision="fp32")
    assert int(graph.elements.sum()) == MLP_ELEMENTS
    layers = 16 * 64 + 64 * 48 + 48 * 10
    assert products(graph) == 2 * 8 * (3 * layers - 16 * 64)  # no gradient of the input
    assert group_sizes(graph) == {(0, 1): 1, (16, 0): 1, (64, 0): 1, (48, 0): 1, (10, 0): 1}


def test_both_texts_of_one_step_are_one_graph() -> None:
    first, second = (read(path.read_text())[0] for path in TEXTS)
    assert flops(first) == flops(second)
    assert first.at_batch(None).traffic.sum() == second.at_batch(None).traffic.sum()
    assert Counter(first.op_class.tolist()) == Counter(second.op_class.tolist())


def test_every_phase_has_its_ops_in_order() -> None:
    graph, _ = read(TEXTS[0].read_text())
    done = graph.at_batch(None).flops
    is_product = graph.op_class == OpClass.MATMUL
    forward = done[is_product & (graph.phase == Phase.F)].sum()
    assert forward == 2 * 8 * (16 * 64 + 64 * 48 + 48 * 10)
    assert set(graph.phase[-6:].tolist()) == {Phase.U}
    updated = {name for name in graph.op_names if name.endswith(".update")}
    assert len(updated) == 6


def test_backward_ops_are_placed_with_what_they_belong_to() -> None:
    graph, _ = read(TEXTS[0].read_text())
    weights = [name.removesuffix(".update") for name in graph.op_names if ".update" in name]
    for name in weights[::2]:
        reader = next(
            op
            for op in range(graph.num_ops)
            if name
            in {
                graph.tensor_names[t]
                for t in graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]
            }
        )
        assert graph.unit[reader] == graph.unit[graph.op_names.index(f"{name}.update")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stablehlo.add %0, %2", "stablehlo.add %0, %99", r"line \d+: add: reads '99'"),
        ("-> tensor<8x64xf32>", "-> tensor<?x64xf32>", "is not fixed"),
        ("-> tensor<8x64xf32>", "-> tensor<8x64xq7>", "dtype 'q7'"),
        ("@relu(%3)", "@rely(%3)", "no function 'rely'"),
        ("contracting_dims = [1] x [0], precision", "contracting_dims = [1] x [0, 1], p", "op"),
    ],
)
def test_bad_stablehlo_is_named_with_file_and_line(old: str, new: str, message: str) -> None:
    text = TEXTS[0].read_text()
    assert old in text
    if message == "op":  # a rule that does not fit leaves an op that is not split
        graph, _ = read(text.replace(old, new, 1))
        assert graph.loops is not None
        assert None in graph.loops
        return
    with pytest.raises(GraphError, match=message) as caught:
        read(text.replace(old, new, 1))
    assert str(caught.value).startswith("step: line ")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.suffix)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.97])
def test_a_file_cut_short_is_refused(path: Path, share: float) -> None:
    text = path.read_text()
    with pytest.raises(GraphError, match=r"^step: "):
        read(text[: int(len(text) * share)])


def test_bad_hlo_is_named_with_file_and_line() -> None:
    text = TEXTS[1].read_text()
    with pytest.raises(GraphError, match=r"step: line \d+: .*is no type"):
        read(text.replace("f32[8,64]{1,0} dot(", "f32 8,64 dot(", 1))
    with pytest.raises(GraphError, match="no ENTRY"):
        read(text.replace("ENTRY ", ""))
    with pytest.raises(GraphError, match="for several devices"):
        read(text.replace(" dot(", " all-reduce(", 1))


def test_a_step_that_returns_no_parameters_is_refused() -> None:
    text = TEXTS[1].read_text()
    with pytest.raises(GraphError, match="must return the updated parameters"):
        read(text.replace(" subtract(", " power(", 1).replace("subtract(p", "dot(p"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.suffix)
def test_line_ends_of_windows_and_sizes_that_are_huge_or_zero_are_read(path: Path) -> None:
    text = path.read_text()
    assert read(text.replace("\n", "\r\n"))[0].content_hash() == read(text)[0].content_hash()
    assert read(text.replace("64", "1000000007"))[0].num_ops == read(text)[0].num_ops
    assert read(text.replace("[8,", "[0,"))[0].num_ops


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    for head in ("HloModule m\n", "module @m {\n func.func public @main() {\n stablehlo."):
        assert is_hlo(head + "func.func")
        with pytest.raises(GraphError):
            read(head + text)


# what jax makes


def test_flops_are_those_of_xla_and_parameters_exact(models: Any) -> None:
    for lowered, elements in (
        (models.mlp(64, (64, 256, 256, 10)), 64 * 256 + 256 + 256 * 257 + 2570),
        (models.cnn(), 3 * 3 * 3 * 16 + 9 * 16 * 32 + 2048 * 10),
    ):
        graph, _ = read(lowered.as_text())
        compiled = lowered.compile()
        counted = compiled.cost_analysis()["flops"]
        assert flops(graph) == pytest.approx(counted, rel=0.02)
        optimised, _ = read(compiled.as_text())
        assert flops(optimised) == pytest.approx(counted, rel=0.02)
        assert int(graph.elements.sum()) == int(optimised.elements.sum()) == elements


@pytest.mark.slow
def test_flops_of_a_transformer_are_those_of_xla(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("WIDTH", 256), ("FEED", 1024)):
        monkeypatch.setattr(models, name, size)
    lowered = models.gpt.__wrapped__(16)
    counted = lowered.compile().cost_analysis()["flops"]
    assert flops(read(lowered.as_text())[0]) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_sizes_grow_with_the_batch_as_a_step_lowered_for_it(models: Any, name: str) -> None:
    make = getattr(models, name)
    (small, job), (large, other) = (read(make(batch).as_text()) for batch in (6, 12))
    assert (job.batch, other.batch) == (6, 12)
    grown, made = small.at_batch(12), large.at_batch(12)
    assert grown.tensor_bytes.tolist() == made.tensor_bytes.tolist()
    assert grown.flops.tolist() == made.flops.tolist()
    assert grown.traffic.tolist() == made.traffic.tolist()
    assert small.loops == large.loops or name == "cnn"  # padded pairs are counted, not loops


def test_optimizers_are_known_by_their_states(models: Any) -> None:
    import jax

    params, data = models.mlp_params(), (models.array(8, 16), models.array(8, dtype="int32"))
    momentum = jax.jit(models.clipped_momentum(models.mlp_loss)).lower(params, params, *data)
    graph, job = read(momentum.as_text())
    assert job.optimizer == "momentum"
    assert int(graph.elements.sum()) == MLP_ELEMENTS
    adam = jax.jit(models.adam_step(models.mlp_loss))
    text = adam.lower(params, params, params, models.array(), *data).as_text()
    graph, job = read(text)
    assert job.optimizer == "adam"
    assert int(graph.elements.sum()) == MLP_ELEMENTS
    assert products(graph) == products(read(TEXTS[0].read_text())[0])


def test_without_a_loss_the_forward_is_what_all_gradients_need(models: Any) -> None:
    import jax

    step = models.sgd_step(models.mlp_loss, shows_loss=False)
    data = models.array(8, 16), models.array(8, dtype="int32")
    graph, _ = read(jax.jit(step).lower(models.mlp_params(), *data).as_text())
    is_product = graph.op_class == OpClass.MATMUL
    assert (is_product & (graph.phase == Phase.F)).sum() == 3
    assert (is_product & (graph.phase == Phase.B)).sum() == 5


def test_names_of_the_program_are_kept(models: Any) -> None:
    graph, _ = read(models.gpt(adam=True).as_text(debug_info=True))
    assert "params.blocks.1.w1" in graph.tensor_names
    assert "params.blocks.1" in graph.op_modules


def test_a_scan_is_the_layers_one_by_one(models: Any) -> None:
    plain, _ = read(models.gpt().as_text())
    scanned, _ = read(models.gpt(scan=True).as_text())
    assert products(plain) == products(scanned)
    assert plain.elements.sum() == scanned.elements.sum()
    assert sorted(plain.elements[plain.elements > 0]) == sorted(
        scanned.elements[scanned.elements > 0]
    )
    assert group_sizes(plain) == group_sizes(scanned)


def test_a_step_that_compares_its_samples_keeps_its_batch(models: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.mlir"
    path.write_text(models.contrastive().as_text())
    graph, job, _ = load_graph(str(path))
    assert job.batch == 8
    assert not graph.tensor_bytes[:, 1].any()
    with pytest.raises(JobError, match="the batch of 8 is fixed"):
        load_graph(str(path), {"batch": 16})
    with pytest.raises(JobError, match="dtypes"):
        load_graph(str(path), {"precision": "bf16"})
    with pytest.raises(JobError, match="sequence length"):
        load_graph(str(path), {"sequence_length": 16})


# the same as in torch


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(16, 64), nn.Linear(64, 48), nn.Linear(48, 10),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states = torch.relu(self.second(torch.relu(self.first(x))))
        return nn.functional.cross_entropy(self.third(states), y)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, feed: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, feed), nn.Linear(feed, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        h = self.norms[0](x)
        parts = (part(h).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, models: Any) -> None:
        super().__init__()
        width = models.WIDTH
        self.table = nn.Embedding(models.VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(models.LENGTH, width))
        blocks = (Block(width, models.HEADS, models.FEED) for _ in range(models.LAYERS))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, models.VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.table(ids) + self.positions))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.roll(-1, 1).flatten())


def test_an_mlp_has_the_linkage_groups_that_it_has_in_torch() -> None:
    inputs = torch.zeros(8, 16), torch.zeros(8, dtype=torch.long)
    captured = capture(Mlp(), inputs, Job(batch=8), name="mlp")
    assert group_sizes(read(TEXTS[0].read_text())[0]) == group_sizes(captured)


def communicated(graph: OpGraph, job: Job, style: str) -> Counter[tuple[Phase, str, int]]:
    """Returns the collectives of one of two devices on tensors that grow with the batch."""
    cluster = star(2)
    plan = sharded_plan(graph, cluster, job, cluster.device_names, {"tp": (style, 2)})
    device = one_device(graph, plan, np.zeros(graph.num_units, np.int32))
    return Counter(
        (Phase(device.graph.phase[op]), what.kind, what.num_bytes[1])
        for op, what in device.communication.items()
    )


@pytest.mark.parametrize("scan", [False, True])
def test_a_transformer_has_megatrons_plan_as_in_torch(models: Any, scan: bool) -> None:
    graph, job = read(models.gpt(scan=scan).as_text())
    ids = torch.zeros(6, models.LENGTH, dtype=torch.long)
    captured = capture(Gpt(models), (ids,), Job(batch=6), name="gpt")
    roles, wanted = (find_roles(each, find_linkage(each)) for each in (graph, captured))
    assert [len(found) for found in roles] == [len(found) for found in wanted]
    states = models.LENGTH * models.WIDTH * 4
    for style in ("tensor", "sequence"):
        found, expected = (
            {key: n for key, n in communicated(*each, style).items() if key[2] == states}
            for each in ((graph, job), (captured, Job(batch=6)))
        )
        assert found == expected


# reshapes and numbers


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_labels_of_a_reshape_are_common_factors(before: list[int], after: list[int]) -> None:
    after = [*after, int(np.prod(before))]
    before = [*before, int(np.prod(after[:-1]))]
    left, right = reshaped(before, after)
    sizes: dict[str, int] = {}
    for labels, shape in ((left, before), (right, after)):
        for label, size in zip(labels, shape, strict=True):
            parts = parts_of(label, size)
            assert np.prod([part for _, part in parts], dtype=int) == size
            for name, part in parts:
                assert not name or sizes.setdefault(name, part) == part


def test_whole_numbers_are_followed() -> None:
    assert folded("constant", {"value": "12"}, []) == 12
    assert folded("constant", {"value": "1.5"}, []) is None
    assert folded("compare", {"direction": "LT"}, [3, 4]) == 1
    assert folded("select", {}, [1, 7, None]) == 7
    assert folded("add", {}, [1, None]) is None
    assert folded("clamp", {}, [0, 9, 4]) == 4


# commands


def test_a_step_is_planned_from_its_text(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    given_ = ["plan", str(TEXTS[0]), "--cluster", "1xV100", "--evaluations", "20", "--json"]
    assert command_line.main([*given_, "--out", str(out), "--batch", "16"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["throughput_samples_per_s"] == pytest.approx(16 / printed["step_time_s"])
    assert command_line.main(["simulate", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == pytest.approx(printed["step_time_s"])


def test_the_graph_command_shows_a_step(capsys: Any) -> None:
    assert command_line.main(["graph", str(TEXTS[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["batch"] == 8


def test_a_missing_file_is_no_unknown_model(capsys: Any) -> None:
    assert command_line.main(["graph", "nowhere.mlir"]) == 1
    assert "nowhere.mlir: No such file" in capsys.readouterr().err
