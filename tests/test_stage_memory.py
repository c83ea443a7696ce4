"""Memory of stages: by hand, against a slow walk, the simulator, torch's tracker and papers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.cluster import Cluster
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.job import Job
from simcore.lower import Problem
from simcore.simulation import run_placement
from simcore.stage_cut import cut_graph
from simcore.stages import StageTables, stage_tables
from tests.reference_stages import SlowWalk, draw_step
from tests.strategies import seeded

KIND = "V100-SXM2-16GB"
JOB = Job(batch=3)
NUM_STEPS = 250  # random training steps
GiB = 2**30

seeds = st.integers(0, 2**32 - 1)


def tables(graph: OpGraph, stage, **rest) -> StageTables:
    return stage_tables(graph, JOB, (KIND,), np.array(stage, np.int32), JOB.batch, **rest)


# --- by hand --------------------------------------------------------------------------------------


def two_layers(workspace: int = 0, *, blocks: bool = False) -> OpGraph:
    """x -> a -> b -> loss, each layer's input kept for its weight gradient; sizes tell them."""
    builder = GraphBuilder("layers")
    weights = [builder.parameter(name, size) for name, size in (("wa", 1000), ("wb", 2000))]
    x = builder.outputs(builder.op("x", op_class=OpClass.INPUT, outputs=[Out(1)]))
    module = ("h.0", "h.1") if blocks else ("", "")
    a = builder.op(
        "a", module=module[0], inputs=[weights[0], *x], outputs=[Out(10), Out(30)], unit_of=0
    )
    out_a, inner = builder.outputs(a)
    b = builder.op(
        "b", module=module[1], inputs=[weights[1], out_a], outputs=[Out(100)], workspace=workspace
    )
    loss = builder.op("loss", inputs=builder.outputs(b), outputs=[Out(4)], module="loss")
    dy = builder.op(
        "loss.dx", phase=Phase.B, inputs=builder.outputs(b), outputs=[Out(100)], unit_of=loss
    )
    dy_b = builder.outputs(dy)
    db = builder.op("b.dx", phase=Phase.B, inputs=[weights[1], *dy_b], outputs=[Out(10)], unit_of=b)
    dwb = builder.op(
        "b.dw", phase=Phase.B, inputs=[out_a, *dy_b], outputs=[Out(2000, role=Role.GRADIENT)],
        unit_of=b,
    )  # fmt: skip
    dwa = builder.op(
        "a.dw", phase=Phase.B, inputs=[*x, inner, *builder.outputs(db)],
        outputs=[Out(1000, role=Role.GRADIENT)], unit_of=a,
    )  # fmt: skip
    for name, weight, op in (("a", weights[0], dwa), ("b", weights[1], dwb)):
        builder.op(
            f"{name}.update", phase=Phase.U, op_class=OpClass.UPDATE,
            inputs=[weight, *builder.outputs(op)], unit_of=op, elements=250,
        )  # fmt: skip
    return builder.build()


def test_a_stage_holds_from_forward_to_backward_what_the_backward_reads():
    found = tables(two_layers(), [0, 0, 0])
    assert found.saved.tolist() == [1 + 10 + 30 + 100]
    assert found.extra[0, Phase.F] == 1 + 10 + 30 + 100 + 4
    # x, a's two, b's output; its gradient on top, then a's gradient where b's output is gone
    assert found.extra[0, Phase.B] == 100
    assert found.gradient.tolist() == [3000]
    assert found.first_extra[0, Phase.B] == 3000 - 100  # dw of a on top; b's output is gone
    assert found.parameters.tolist() == [3000]
    assert found.state_bytes.tolist() == [500 * 8]
    assert found.resident.tolist() == [0]


def test_from_input_gradients_to_weight_gradients_their_inputs_are_kept():
    found = tables(two_layers(), [0, 0, 0])
    assert found.kept.tolist() == [1 + 10 + 30 + 100 + 10]  # the two output gradients too
    assert found.extra[0, Phase.I] == 100  # when loss.dx has run, b's output goes
    assert found.extra[0, Phase.W] == 0
    assert found.new_gradient[0].tolist() == [0, 3000, 0, 3000, 0]


def test_a_stage_holds_what_it_receives_from_its_first_use_on():
    found = tables(two_layers(), [0, 1, 1])
    assert found.saved.tolist() == [1 + 30, 10 + 100]
    assert found.extra[:, Phase.F].tolist() == [41, 114]
    assert found.extra[:, Phase.B].tolist() == [10, 100]
    assert found.forward_bytes.sum(axis=1).tolist() == [10]
    assert found.backward_bytes.sum(axis=1).tolist() == [10]
    assert found.parameters.tolist() == [1000, 2000]


def test_what_only_the_backward_reads_of_another_stage_is_held_from_the_forward_on():
    builder = GraphBuilder("late")
    a = builder.op("a", outputs=[Out(8), Out(50)])
    first, second = builder.outputs(a)
    b = builder.op("b", inputs=[first], outputs=[Out(2)])
    builder.op("b.back", phase=Phase.B, inputs=[second], outputs=[Out(3)], unit_of=b)
    found = tables(builder.build(), [0, 1])
    assert found.saved.tolist() == [0, 50]
    assert found.extra[1, Phase.F] == 60
    assert found.extra[1, Phase.B] == 3
    assert found.forward_bytes.sum() == 58


def test_workspace_counts_while_its_op_runs():
    found = tables(two_layers(workspace=10_000), [0, 1, 1])
    assert found.extra[:, Phase.F].tolist() == [41, 10 + 100 + 10_000]


def test_views_live_in_what_they_are_of():
    builder = GraphBuilder("views")
    base = builder.outputs(builder.op("a", outputs=[Out(100)]))
    view = builder.op("v", op_class=OpClass.VIEW, inputs=base, outputs=[Out(40, base[0])])
    c = builder.op("c", inputs=builder.outputs(view), outputs=[Out(1)])
    builder.op("c.back", phase=Phase.B, inputs=builder.outputs(view), outputs=[], unit_of=c)
    graph = builder.build()
    assert tables(graph, [0, 0, 0]).saved.tolist() == [100]
    assert tables(graph, [0, 0, 1]).saved.tolist() == [0, 40]  # only the part is sent


def test_full_recompute_keeps_what_crosses_the_borders_of_blocks():
    found = tables(two_layers(blocks=True), [0, 0, 0], recompute=("full",))
    # b's output crosses into the loss, a's into b; a's inner result is made again
    assert found.saved.tolist() == [1 + 10 + 100]
    assert found.extra[0, Phase.F] == 1 + 10 + 30 + 100 - 30 + 4


def test_a_tied_parameter_is_held_by_each_stage_that_reads_it():
    builder = GraphBuilder("tied")
    weight, buffer = builder.parameter("w", 100), builder.buffer("b", 7)
    a = builder.op("a", inputs=[weight], outputs=[Out(8)], resident=5)
    builder.op("b", inputs=[weight, buffer, *builder.outputs(a)])
    found = tables(builder.build(), [0, 1])
    assert found.parameter_bytes.tolist() == [100, 100]
    assert found.buffer_bytes.tolist() == [0, 7]
    assert found.resident.tolist() == [5, 0]


# --- against a slow walk --------------------------------------------------------------------------

WAYS = ((Phase.F, 0, 0), (Phase.B, 0, 1), (Phase.I, 1, 1), (Phase.W, 1, 2), (Phase.U, 0, 3))


def assert_as_walked_slowly(seed: int) -> None:
    draws = seeded(np.random.default_rng(seed))
    graph, stage = draw_step(draws)
    cut = cut_graph(graph, stage)
    recompute = tuple(draws.pick(("none", "full", "selective")) for _ in range(cut.num_stages))
    found = tables(graph, stage, recompute=recompute)
    sized = graph.at_batch(JOB.batch)
    for number in range(cut.num_stages):
        walks = [
            SlowWalk(graph, cut, number, recompute, split).walk(sized.tensor_bytes, sized.workspace)
            for split in (False, True)
        ]
        assert found.saved[number] == walks[0].alive[1] == walks[1].alive[1]
        assert found.kept[number] == walks[1].alive[2]
        assert found.gradient[number] == sum(walks[0].gradient) == sum(walks[1].gradient)
        for phase, split, part in WAYS:
            assert found.extra[number, phase] == walks[split].extra[part]
            assert found.first_extra[number, phase] == walks[split].first_extra[part]
            assert found.new_gradient[number, phase] == walks[split].gradient[part]


@pytest.mark.parametrize("seed", range(NUM_STEPS))
def test_random_steps_hold_what_a_slow_walk_finds(seed):
    assert_as_walked_slowly(seed)


@given(seeds)
@settings(max_examples=50)
def test_other_random_steps_hold_what_a_slow_walk_finds(seed):
    assert_as_walked_slowly(seed)


# --- laws -----------------------------------------------------------------------------------------


@given(seeds)
@settings(max_examples=100)
def test_peaks_bound_what_they_lead_to(seed):
    graph, stage = draw_step(seeded(np.random.default_rng(seed)))
    num_stages = int(stage.max()) + 1
    plain = tables(graph, stage)
    for kind in ("selective", "full"):
        again = tables(graph, stage, recompute=(kind,) * num_stages)
        assert (again.seconds >= plain.seconds).all()
        for held in (plain, again):
            assert (held.extra[:, Phase.F] >= held.saved).all()
            assert (held.extra[:, Phase.I] >= held.kept - held.saved).all()
            assert (held.first_extra <= held.extra + held.new_gradient).all()
            made = held.new_gradient[:, [Phase.F, Phase.B]].sum(axis=1)
            assert np.array_equal(made, held.gradient)


@given(seeds)
@settings(max_examples=100)
def test_what_stages_hold_is_held_once_by_one_stage(seed):
    """Without a cut nothing is sent, and parameters and elements are those of the graph."""
    graph, stage = draw_step(seeded(np.random.default_rng(seed)))
    whole, cut = tables(graph, np.zeros_like(stage)), tables(graph, stage)
    assert whole.edges == whole.update_edges == ()
    assert cut.elements.sum() == whole.elements.sum()
    assert cut.resident.sum() == whole.resident.sum()
    assert (cut.parameters <= whole.parameters).all()
    assert cut.parameters.sum() >= whole.parameters.sum()


# --- against the simulator ------------------------------------------------------------------------


def held(found: StageTables, stage: int) -> int:
    """Bytes that a stage holds all the time."""
    fields = (found.parameters, found.resident, found.state_bytes)
    return int(sum(field[stage] for field in fields))


def peak_of_first_microbatch(found: StageTables, stage: int) -> int:
    """Bytes at the peak of a step of one microbatch: gradients come with the backward."""
    extra = found.first_extra[stage]
    inside = max(
        extra[Phase.F],
        found.new_gradient[stage, Phase.F] + found.saved[stage] + extra[Phase.B],
        found.gradient[stage] + extra[Phase.U],
    )
    return held(found, stage) + int(inside)


def peak_of_later_microbatches(found: StageTables, stage: int) -> int:
    """Bytes at the peak of any later microbatch: all gradients are there from the start."""
    extra = found.extra[stage]
    inside = max(extra[Phase.F], found.saved[stage] + extra[Phase.B], extra[Phase.U])
    return held(found, stage) + int(found.gradient[stage] + inside)


def simulated_peak(graph: OpGraph, job: Job) -> int:
    problem = Problem.build(graph, Cluster.preset("4xV100-NVLink"), job)
    return int(run_placement(problem, np.zeros(graph.num_ops, np.int32)).allocated[0])


def assert_peak_is_simulated(graph: OpGraph, job: Job) -> None:
    stage = np.zeros(graph.num_units, np.int32)
    found = stage_tables(graph, job, (KIND,), stage, job.batch)
    assert peak_of_first_microbatch(found, 0) == simulated_peak(graph, job)
    assert peak_of_later_microbatches(found, 0) >= peak_of_first_microbatch(found, 0)


def captured(name: str, **changes) -> tuple[OpGraph, Job]:
    from simcore.sources import load_graph

    return load_graph(name, changes)[:2]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "bert-base", "gnmt-4", "inception-v3", "moe", "multi-modal", "nasnet-mobile",
                "resnet-50", "t5-base", "transformer-base", "two-tower", "vgg-16",
            )
        ),
    ],
)  # fmt: skip
def test_the_peak_of_a_whole_model_on_one_stage_is_the_simulators(name):
    assert_peak_is_simulated(*captured(name))


def test_the_peak_of_a_toy_on_one_stage_is_the_simulators():
    assert_peak_is_simulated(two_layers(), JOB)
    assert_peak_is_simulated(two_layers(workspace=20_000), JOB)


@given(seeds)
@settings(max_examples=100)
def test_the_peak_of_a_random_step_on_one_stage_bounds_the_simulators(seed):
    """It is the same but where the update frees gradients before it is at its own peak."""
    graph, stage = draw_step(seeded(np.random.default_rng(seed)))
    found = tables(graph, np.zeros_like(stage))
    simulated = simulated_peak(graph, JOB)
    first = peak_of_first_microbatch(found, 0)
    assert simulated <= first
    if found.first_extra[0, Phase.U] == 0:
        assert simulated == first


# --- against torch's tracker ----------------------------------------------------------------------


def torch_block(width: int, heads: int, dropout: float):
    """A GPT block whose attention is not fused, as Megatron-LM's of 2022."""
    import torch
    from torch import nn

    from simcore.models.attention import merge_heads, split_heads

    def drop():
        return nn.Dropout(dropout) if dropout else nn.Identity()

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.weight_dropout, self.dropout = drop(), drop()

        def forward(self, x, mask):
            query, key, value = (split_heads(part, heads) for part in self.qkv(x).chunk(3, dim=2))
            scores = query @ key.transpose(-1, -2) / math.sqrt(width // heads)
            weights = scores.masked_fill(mask, -math.inf).softmax(-1)
            return self.dropout(self.out(merge_heads(self.weight_dropout(weights) @ value)))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention, self.dropout = Attention(), drop()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x, mask):
            x = x + self.attention(self.norm1(x), mask)
            hidden = torch.nn.functional.gelu(self.up(self.norm2(x)))
            return x + self.dropout(self.down(hidden))

    return Block()


def eager_gpt(*, width, heads, layers, length, vocabulary, dropout=0.0):
    """A language model of such blocks, and its inputs."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.h = nn.ModuleList(torch_block(width, heads, dropout) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            self.register_buffer("mask", mask)

        def forward(self, ids, labels):
            x = self.embedding(ids)
            for block in self.h:
                x = block(x, self.mask)
            logits = self.head(self.norm(x))
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def inputs(batch):
        ids = torch.zeros(batch, length, dtype=torch.long)
        return {"ids": ids, "labels": ids.clone()}

    return Model, inputs


def convolutional():
    """Residual blocks with batch norm and activations in place, and its inputs."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)

        def forward(self, x):
            return nn.functional.relu(self.norm(self.conv(x)) + x, inplace=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 32, 3, padding=1)
            self.blocks = nn.Sequential(*(Block() for _ in range(6)))
            self.head = nn.Linear(32, 10)

        def forward(self, images, labels):
            features = self.blocks(self.stem(images)).mean((2, 3))
            return nn.functional.cross_entropy(self.head(features), labels)

    def inputs(batch):
        labels = torch.zeros(batch, dtype=torch.long)
        return {"images": torch.zeros(batch, 3, 32, 32), "labels": labels}

    return Model, inputs


def fused_gpt():
    """The zoo's GPT, whose attention is one op, and its inputs."""
    from simcore.models.gpt import GPT, Shape
    from simcore.models.inputs import next_tokens

    shape = Shape(layers=3, width=64, heads=4, dropout=0.0)
    return lambda: GPT(shape), next_tokens(32)


TRACKED = {
    "eager attention": lambda: eager_gpt(width=64, heads=4, layers=3, length=32, vocabulary=500),
    "convolutional": convolutional,
    "fused attention": fused_gpt,
}


def track(build, inputs, batch: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes by class after the forward, after the backward and at the peak of a second step."""
    torch = pytest.importorskip("torch")
    mem_tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    from torch._subclasses.fake_tensor import FakeTensorMode

    def classes(kind: str) -> dict[str, int]:
        (snapshot,) = tracker.get_tracker_snapshot(kind).values()
        return {str(key).rpartition(".")[2]: value for key, value in snapshot.items()}

    with FakeTensorMode():
        model, data = build(), inputs(batch)
        optimizer = torch.optim.Adam(model.parameters())
        tracker = mem_tracker.MemTracker()
        tracker.track_external(model, optimizer, *data.values())
        with tracker:
            for _ in range(2):  # the first makes the optimizer's state
                tracker.reset_mod_stats()
                loss = model(**data)
                forward = classes("current")
                loss.backward()
                backward = classes("current")
                optimizer.step()
                optimizer.zero_grad()
        return forward, backward, classes("peak")


@pytest.mark.parametrize("name", TRACKED)
def test_memory_by_class_is_what_torchs_tracker_sees(name):
    pytest.importorskip("torch")
    from simcore.frontends.torch_capture import capture

    build, inputs = TRACKED[name]()
    job = Job(batch=16)
    graph = capture(build(), inputs, job, name="tracked")
    stage = np.zeros(graph.num_units, np.int32)
    found = stage_tables(graph, job, (KIND,), stage, job.batch)
    forward, backward, peak = track(build, inputs, job.batch)
    assert found.parameter_bytes[0] == forward["PARAM"]
    assert found.buffer_bytes[0] == forward["BUFFER"]
    assert found.gradient[0] == backward["GRAD"]
    assert found.state_bytes[0] == pytest.approx(forward["OPT"], rel=0.01)  # and step counters
    # torch's inputs are no activations, but they are held as well
    assert found.saved[0] == pytest.approx(forward["ACT"] + forward["OTH"], rel=0.01)
    assert peak_of_first_microbatch(found, 0) == pytest.approx(peak["Total"], rel=0.005)


# --- against papers -------------------------------------------------------------------------------


class Layers:
    """Transformer layers on a stage of their own, between embedding and head; bf16, one sample."""

    def __init__(self, *, width: int, heads: int, layers: int, length: int) -> None:
        from simcore.frontends.torch_capture import capture

        sizes = {"width": width, "heads": heads, "layers": layers, "length": length}
        self.layers, self.unit = layers, length * width  # s b h
        job = Job(batch=2, precision="bf16")
        graph = capture(
            lambda: _built(eager_gpt(**sizes, vocabulary=51_200, dropout=0.1)), job=job, name="gpt"
        )
        stage = by_module(graph, lambda module: module.startswith("h."))
        self.found = {
            kind: stage_tables(
                graph, job, ("A100-SXM4-80GB",), stage, 1, recompute=("none", kind, "none")
            )
            for kind in ("none", "selective", "full")
        }

    def saved(self, kind: str) -> float:
        """Bytes kept of a layer / (s b h)."""
        return float(self.found[kind].saved[1]) / self.layers / self.unit


def _built(model_and_inputs):
    build, inputs = model_and_inputs
    return build(), inputs


def by_module(graph: OpGraph, inside) -> np.ndarray:
    """Stage 1 for what lies inside, 0 for what comes before it, 2 for what comes after."""
    stage = np.zeros(graph.num_units, np.int32)
    seen = False
    for op in np.flatnonzero((graph.phase == Phase.F) & (graph.op_class > OpClass.VIEW)):
        here = inside(graph.op_modules[op])
        seen |= here
        stage[graph.unit[op]] = 1 if here else 2 if seen else 0
    return stage


@pytest.mark.parametrize(
    ("width", "heads", "length"), [(256, 4, 128), (1024, 16, 512), (768, 12, 1024)]
)
def test_a_layer_keeps_what_korthikanti_et_al_count(width, heads, length):
    """Reducing Activation Recomputation in Large Transformer Models, 2022, equation 2."""
    pytest.importorskip("torch")
    layers = Layers(width=width, heads=heads, layers=3, length=length)
    assert layers.saved("none") == pytest.approx(34 + 5 * heads * length / width, rel=0.01)
    assert layers.saved("selective") == pytest.approx(34, rel=0.01)
    assert layers.saved("full") == pytest.approx(2, rel=0.01)
    # what runs again is there once more, of one layer
    plain, full = layers.found["none"].extra[1], layers.found["full"].extra[1]
    one_layer = (34 + 5 * heads * length / width) * layers.unit
    assert full[Phase.B] >= one_layer - 2 * layers.unit
    assert full[Phase.B] <= one_layer + plain[Phase.B]


@pytest.mark.parametrize(
    ("sizes", "parallel", "published"),
    [
        # GiB per GPU without recompute; with sequence parallelism, and two kinds of recompute,
        # as parts of it
        ((12_288, 96, 96), (8, 8, 3), (66.84, 0.6204, 0.1849, 0.0871)),
        ((20_480, 128, 105), (8, 35, 3), (114.02, 0.5831, 0.2027, 0.0942)),
    ],
    ids=["175B", "530B"],
)
def test_activations_of_large_models_are_those_published(sizes, parallel, published):
    """The same paper's measured figures, of the first stage of an interleaved pipeline.

    With sequence parallelism all that a layer keeps is divided by the size of the tensor-parallel
    group; without it not all is, which is not checked here. Full recompute keeps whole inputs.
    """
    pytest.importorskip("torch")
    width, heads, layers = sizes
    tensor, pipeline, chunks = parallel
    none, sequence, both, full = published
    found = Layers(width=width, heads=heads, layers=1, length=2048)
    in_flight = layers * (1 + (pipeline - 1) / (pipeline * chunks))  # layers

    def gibibytes(kind: str, parts: int) -> float:
        return found.saved(kind) * found.unit * in_flight / parts / GiB

    assert gibibytes("none", tensor) == pytest.approx(none * sequence, rel=0.01)
    assert gibibytes("selective", tensor) == pytest.approx(none * both, rel=0.01)
    assert gibibytes("full", 1) == pytest.approx(none * full, rel=0.02)


def test_mixed_precision_adam_takes_16_bytes_a_parameter():
    """Rajbhandari et al., ZeRO, 2020; 18 where gradients are summed in fp32, 20 with copies."""
    pytest.importorskip("torch")
    found = Layers(width=256, heads=4, layers=2, length=64).found["none"]
    total = found.parameter_bytes + found.gradient + found.state_bytes
    assert (total == 16 * found.elements).all()


@pytest.mark.parametrize("layout", [(1, 2, 2, 3), (2, 2, 2, 2), (5, 1, 1, 1)])
def test_an_uneven_pipeline_holds_what_is_really_on_each_stage(layout):
    """Case of Megatron-Bridge issue 5077: the mean over stages is not the heaviest stage."""
    pytest.importorskip("torch")
    from simcore.frontends.torch_capture import capture

    sizes = {"width": 16, "heads": 2, "layers": 8, "length": 8, "vocabulary": 100}
    build, inputs = eager_gpt(**sizes)
    model = build()
    graph = capture(model, inputs, JOB, name="uneven")
    ends = np.cumsum(layout)
    of_layer = [int(np.searchsorted(ends, layer, side="right")) for layer in range(8)]

    def place(module: str) -> int:
        if module.startswith("h."):
            return of_layer[int(module.split(".")[1])]
        return 0 if module.startswith("embedding") else 3

    stage = np.zeros(graph.num_units, np.int32)
    for op in np.flatnonzero((graph.phase == Phase.F) & (graph.op_class > OpClass.VIEW)):
        stage[graph.unit[op]] = place(graph.op_modules[op])
    found = tables(graph, stage)
    expected = [0] * 4
    for name, parameter in model.named_parameters():
        expected[place(name)] += parameter.numel()
    assert found.elements.tolist() == expected
    assert (found.parameter_bytes == 4 * np.array(expected)).all()
    assert (found.gradient == 4 * np.array(expected)).all()
