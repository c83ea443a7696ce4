"""Pipelines op by op: against placements, copies, closed forms, stage tasks and the reference."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.cost import CostSource, CostTable
from simcore.errors import PlanError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.job import Job
from simcore.lower import Problem
from simcore.pipeline_build import build_pipeline
from simcore.pipeline_ops import op_program
from simcore.pipeline_tasks import pipeline_program
from simcore.plan import Buckets, Plan, Ref, Settings, Stage
from simcore.profile_store import load_profile
from simcore.program import Program, copy_program
from simcore.result import RawRun
from simcore.run import run_placement
from tests import networks
from tests.reference import ReferenceProblem, simulate_reference

SEED = 20260
KIND = networks.KIND
QUIET = Settings(host="per_rank", launch="graph", contention="none")
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
ASYNC = ("asynchronous updates",)
MIB = 2**20


class Toy(NamedTuple):
    """A training step, what its ops cost, and a layer for every unit."""

    graph: OpGraph
    seconds: NDArray[np.float64]  # [op] s
    launch: NDArray[np.float64]  # [op] s
    layer: NDArray[np.int64]  # [unit]


class Layer(NamedTuple):
    """A layer that reads activations and a parameter."""

    reads: tuple[int, ...]  # layers
    forward: float = 1.0  # s
    to_inputs: float = 1.0  # s, of its input gradients
    to_weights: float = 1.0  # s, of its weight gradient
    update: float = 0.0  # s
    activation: int = 0  # bytes per sample
    weights: int = 0  # bytes
    in_place: bool = False  # a buffer is written


class Writer:
    """Writes the forward, backward and update of layers as a captured graph has them."""

    def __init__(self, layers: Sequence[Layer], tied: tuple[int, int] | None = None) -> None:
        self.layers, self.tied = layers, tied
        self.builder = GraphBuilder("toy")
        self.seconds: list[float] = []
        self.unit: list[int] = []
        self.parts: list[int] = []  # partial gradients of the tied parameter
        weights = {
            number: self.builder.parameter(f"w{number}", layer.weights)
            for number, layer in enumerate(layers)
            if layer.weights or layer.to_weights
        }
        if tied:
            weights[tied[1]] = weights[tied[0]]
        self.weights = weights
        self.counters = {
            number: self.builder.buffer(f"count{number}", 8)
            for number, layer in enumerate(layers)
            if layer.in_place
        }

    def op(self, name: str, layer: int, seconds: float, **fields: Any) -> tuple[int, ...]:
        known = layer < len(self.unit)
        handle = self.builder.op(name, unit_of=self.unit[layer] if known else None, **fields)
        if not known:
            self.unit.append(handle)
        self.seconds.append(seconds)
        return self.builder.outputs(handle)

    def build(self) -> Toy:
        made: list[int] = []
        for number, layer in enumerate(self.layers):
            made.append(self.forward(number, layer, made))
        wanted: dict[int, list[int]] = {len(self.layers) - 1: []}  # gradients of activations
        gradients: dict[int, int] = {}
        for number in reversed(range(len(self.layers))):
            self.backward(number, made, wanted, gradients)
        self.update(gradients)
        graph = self.builder.build()
        layer_of = {int(graph.unit[op]): layer for layer, op in enumerate(self.unit)}
        return Toy(
            graph,
            np.array(self.seconds),
            np.zeros(graph.num_ops),
            np.array([layer_of[unit] for unit in range(graph.num_units)]),
        )

    def forward(self, number: int, layer: Layer, made: list[int]) -> int:
        inputs = [made[read] for read in layer.reads]
        inputs += [self.weights[number]] if number in self.weights else []
        out, *_ = self.op(
            f"f{number}", number, layer.forward, module=f"layer.{number}", inputs=inputs,
            outputs=[Out((0, layer.activation), name=f"a{number}")], workspace=(0, 3),
        )  # fmt: skip
        if layer.in_place:
            counter = self.counters[number]
            self.op(f"count{number}.add", number, 0.0, inputs=[counter],
                    outputs=[Out(8, storage_of=counter)])  # fmt: skip
        return out

    def backward(
        self, number: int, made: list[int], wanted: dict[int, list[int]], gradients: dict[int, int]
    ) -> None:
        layer = self.layers[number]
        parts = wanted.get(number, [])
        if len(parts) > 1:
            parts = list(self.op(
                f"b{number}.sum", number, 0.25, phase=Phase.B, inputs=parts,
                outputs=[Out((0, layer.activation), storage_of=parts[0])],
            ))  # fmt: skip
        saved = [made[number], *(made[read] for read in layer.reads)]
        if number in self.weights:
            out = Out(layer.weights, role=Role.GRADIENT, name=f"g{number}")
            is_tied = self.tied is not None and number in self.tied
            made_by, *_ = self.op(
                f"b{number}.weights", number, layer.to_weights, phase=Phase.B,
                module=f"layer.{number}", inputs=[*parts, *saved],
                outputs=[out._replace(role=Role.ACTIVATION) if is_tied else out],
            )  # fmt: skip
            if is_tied:
                self.parts.append(made_by)
            else:
                gradients[number] = made_by
        if layer.reads:
            found = self.op(
                f"b{number}.inputs", number, layer.to_inputs, phase=Phase.B,
                module=f"layer.{number}", inputs=[*parts, *saved],
                outputs=[Out((0, self.layers[read].activation)) for read in layer.reads],
            )  # fmt: skip
            for read, tensor in zip(layer.reads, found, strict=True):
                wanted.setdefault(read, []).append(tensor)

    def update(self, gradients: dict[int, int]) -> None:
        if self.tied:
            owner, other = self.tied
            size = self.layers[owner].weights
            gradients[owner], *_ = self.op(
                f"tie{owner}", owner, 0.5, phase=Phase.B, inputs=self.parts,
                outputs=[Out(size, role=Role.GRADIENT, storage_of=self.parts[-1])],
            )  # fmt: skip
        for number, gradient in sorted(gradients.items()):
            layer, weights = self.layers[number], self.weights[number]
            updated, *_ = self.op(
                f"u{number}", number, layer.update, phase=Phase.U, op_class=OpClass.UPDATE,
                inputs=[weights, gradient], outputs=[Out(layer.weights, storage_of=weights)],
                elements=layer.weights // 4,
            )  # fmt: skip
            if self.tied and number == self.tied[0]:
                self.op(f"refresh{other}", other, 0.0, phase=Phase.U, inputs=[updated], kernels=0)


def chain(count: int, **fields: Any) -> list[Layer]:
    """Layers one after the other."""
    return [Layer(reads=(number - 1,) if number else (), **fields) for number in range(count)]


def uniform(count: int, **fields: Any) -> Toy:
    """A chain whose first layer has input gradients too: of data, which nobody reads."""
    data = Layer(reads=(), forward=0.0, to_weights=0.0)
    layers = [
        layer._replace(reads=(number,)) for number, layer in enumerate(chain(count, **fields))
    ]
    toy = Writer([data, *layers]).build()
    return toy._replace(layer=np.maximum(toy.layer - 1, 0))


def random_layers(rng: np.random.Generator, count: int) -> list[Layer]:
    """Layers that also read some before the one before them; the first only hands on data."""
    layers = []
    for number in range(count):
        reads = {number - 1} if number else set()
        if number > 2 and rng.random() < 0.4:
            reads.add(int(rng.integers(1, number - 1)))
        has_weights = number > 0 and rng.random() < 0.8
        layers.append(
            Layer(
                reads=tuple(sorted(reads)),
                forward=float(rng.random()),
                to_inputs=float(rng.random()),
                to_weights=float(rng.random()) if has_weights else 0.0,
                update=float(rng.random()) / 4,
                activation=int(rng.integers(1, 100)) * 10**6,
                weights=int(rng.integers(1, 10)) * 10**7 if has_weights else 0,
                in_place=bool(rng.random() < 0.3),
            )
        )
    return layers


def random_toy(rng: np.random.Generator, count: int, tied: bool = False) -> Toy:
    layers = random_layers(rng, count)
    if tied:
        for number in (1, -1):
            layers[number] = layers[number]._replace(weights=3 * 10**7, to_weights=0.5)
    toy = Writer(layers, (1, count - 1) if tied else None).build()
    return toy._replace(launch=rng.random(len(toy.seconds)) / 50)


class Run(NamedTuple):
    """A pipeline that was played op by op, and what it is made of."""

    toy: Toy
    plan: Plan
    cluster: Cluster
    job: Job
    cost: CostTable
    program: Program
    raw: RawRun

    def time(self, name: str) -> tuple[float, float]:
        """When an op ran, s."""
        op = self.program.graph.op_names.index(name)
        return float(self.raw.start[op]), float(self.raw.end[op])

    def names(self, device: int) -> list[str]:
        """What a device runs, in order."""
        ops = np.flatnonzero(self.program.placement == device)
        return [self.program.graph.op_names[op] for op in ops]


def plan_of(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    stage: NDArray[np.int64],
    devices: Sequence[Sequence[int]],
    **fields: Any,
) -> Plan:
    names, recompute = cluster.device_names, fields.pop("recompute", "none")
    stages = tuple(
        Stage(
            name=f"stage{number}",
            devices=tuple(names[device] for device in mine),
            ops=tuple(graph.unit_names[unit] for unit in np.flatnonzero(stage == number)),
            mesh={"dp": len(mine)},
            recompute=recompute,
        )
        for number, mine in enumerate(devices)
    )
    return Plan(
        graph=Ref(name=graph.name, hash=graph.content_hash()),
        cluster=Ref(name=cluster.name, hash=cluster.content_hash()),
        job=job,
        stages=stages,
        **fields,
    )


def cost_of(toy: Toy, batches: Sequence[int]) -> CostTable:
    """What the ops cost on the one kind of device, the same at all batches."""
    shape = (len(toy.seconds), 1)
    return CostTable(
        seconds=np.repeat(toy.seconds[:, None, None], len(batches), axis=2),
        launch=toy.launch.reshape(shape),
        source=np.full(shape, CostSource.FIXED, np.uint8),
        relative_error=np.zeros(shape),
        kinds=(KIND,),
        batches=tuple(batches),
    )


def run(
    toy: Toy,
    devices: Sequence[Sequence[int]] = ((0,),),
    microbatches: int = 1,
    schedule: str = "gpipe",
    *,
    batch: int = 24,
    cluster: Cluster | None = None,
    settings: Settings = QUIET,
    **fields: Any,
) -> Run:
    """Cuts layers into as many equal parts as there are device lists, and plays them."""
    used = max(max(mine) for mine in devices) + 1
    cluster = cluster or networks.mesh(used)
    job = Job(batch=batch)
    stage = toy.layer * len(devices) // (int(toy.layer.max()) + 1)
    fields |= {"microbatches": microbatches, "schedule": schedule}
    plan = plan_of(toy.graph, cluster, job, stage, devices, **fields)
    whole = batch if schedule == "pipedream" else batch // microbatches
    cost = cost_of(toy, list(dict.fromkeys(whole // len(mine) for mine in devices)))
    pipeline = build_pipeline(toy.graph, cluster, job, plan, cost=cost)
    program = op_program(toy.graph, cluster, job, pipeline, cost=cost)
    raw = play(program, cluster, job, settings)
    return Run(toy, plan, cluster, job, cost, program, raw)


def play(program: Program, cluster: Cluster, job: Job, settings: Settings) -> RawRun:
    problem = Problem.build(
        program.graph, cluster, job, settings, cost=program.cost, collectives=program.collectives
    )
    return run_placement(problem, program.placement)


def by_tasks(found: Run, settings: Settings) -> RawRun:
    """Plays the same plan with a task for each phase of a stage."""
    pipeline = build_pipeline(
        found.toy.graph, found.cluster, found.job, found.plan, cost=found.cost
    )
    program = pipeline_program("toy", found.cluster, pipeline, found.job.batch)
    return play(program, found.cluster, found.job, settings)


# one stage


@pytest.mark.parametrize("contention", ["none", "port", "ordered", "fifo", "fair"])
def test_one_stage_and_one_microbatch_on_one_device_is_the_placement_bit_for_bit(
    contention: str,
) -> None:
    rng = np.random.default_rng(SEED)
    settings = Settings(contention=contention)
    for count in (1, 3, 8):
        found = run(toy := random_toy(rng, count), settings=settings)
        problem = Problem.build(
            toy.graph, found.cluster, found.job, settings, cost=cost_of(toy, [24])
        )
        expected = run_placement(problem, np.zeros(toy.graph.num_ops, np.int32))
        assert np.array_equal(found.program.base, np.arange(toy.graph.num_ops))
        assert np.array_equal(found.raw.start, expected.start)
        assert np.array_equal(found.raw.end, expected.end)
        assert found.raw.step_time == expected.step_time
        assert np.array_equal(found.raw.allocated, expected.allocated)


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 60 * 10**6, 25 * MIB])
@pytest.mark.parametrize("host", ["one", "per_rank"])
def test_one_stage_and_one_microbatch_with_copies_are_the_copies_bit_for_bit(
    host: str, num_bytes: int, as_views: bool
) -> None:
    rng = np.random.default_rng(SEED)
    settings = Settings(host=host)
    buckets = Buckets(num_bytes=num_bytes, as_views=as_views)
    for copies in (2, 3, 4):
        toy = random_toy(rng, 6)
        found = run(toy, [range(copies)], settings=settings, buckets=buckets)
        program = copy_program(
            toy.graph, found.cluster, range(copies), cost_of(toy, [24 // copies]), buckets
        )
        problem = Problem.build(
            program.graph, found.cluster, found.job, settings,
            cost=program.cost, copies=copies, collectives=program.collectives,
        )  # fmt: skip
        expected = run_placement(problem, program.placement)
        assert np.array_equal(found.raw.start, expected.start)
        assert np.array_equal(found.raw.end, expected.end)
        assert found.raw.step_time == expected.step_time
        assert np.array_equal(found.raw.allocated, expected.allocated)


# times worked out by hand


def test_two_stages_and_two_microbatches_take_the_time_worked_out_by_hand() -> None:
    toy = Writer(chain(2, activation=10**9 // 12, update=0.5)).build()  # 12 samples take 1 s
    found = run(toy, [[0], [1]], 2, "gpipe", batch=24)
    # gpu 0: F0 0-1, F1 1-2; gpu 1: F0 2-3, F1 3-4
    # gpu 1: B0 weights 4-5, inputs 5-6, B1 weights 6-7, inputs 7-8, update 8-8.5
    # gpu 0: B0 weights 7-8, B1 weights 9-10, update 10-10.5
    assert found.time("f1 (microbatch 0)") == pytest.approx((2, 3))
    assert found.time("f1 (microbatch 1)") == pytest.approx((3, 4))
    assert found.time("b1.inputs (microbatch 0)") == pytest.approx((5, 6))
    assert found.time("u1") == pytest.approx((8, 8.5))
    assert found.time("b0.weights (microbatch 0)") == pytest.approx((7, 8))
    assert found.time("b0.weights (microbatch 1)") == pytest.approx((9, 10))
    assert found.time("u0") == pytest.approx((10, 10.5))
    assert found.raw.step_time == pytest.approx(10.5)


def test_a_tensor_is_sent_when_its_op_ends_and_not_when_its_stage_does() -> None:
    layers = [
        Layer(reads=(), activation=10**9 // 24),
        Layer(reads=(0,), forward=3.0),
        Layer(reads=(0,)),
        Layer(reads=(1, 2)),
    ]
    found = run(Writer(layers).build(), [[0], [1]])
    assert found.time("f1") == pytest.approx((1, 4))
    assert found.time("f2") == pytest.approx((2, 3))
    assert found.time("f3") == pytest.approx((4, 5))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_uniform_chains_have_the_bubble_of_the_closed_form(schedule: str, ranks: int) -> None:
    microbatches, layers = 2 * ranks, 2  # layers of a stage
    stages = ranks * (2 if schedule == "interleaved" else 1)
    devices = [[stage % ranks] for stage in range(stages)]
    found = run(uniform(stages * layers), devices, microbatches, schedule, batch=24)
    phase = float(layers * stages // ranks)  # s of F, of I and of W of a microbatch on a rank
    bubble = (ranks - 1) * {"zb-h1": phase, "interleaved": 1.5 * phase}.get(schedule, 3 * phase)
    assert found.raw.step_time == pytest.approx(3 * phase * microbatches + bubble)


# against stage tasks


@pytest.mark.parametrize("schedule", [*SCHEDULES, "pipedream"])
@pytest.mark.parametrize("launch", ["eager", "graph"])
def test_with_one_op_to_a_phase_both_levels_agree(schedule: str, launch: str) -> None:
    rng = np.random.default_rng(SEED)
    for stages in (1, 2, 4):
        fields = {"to_weights": 0.0, "activation": 10**7}
        layers = [
            layer._replace(forward=float(rng.random()), to_inputs=float(rng.random()))
            for layer in chain(stages, **fields)
        ]
        toy = Writer(layers).build()
        toy = toy._replace(launch=rng.random(toy.graph.num_ops) / 10)
        if schedule != "zb-h1":
            settings = msgspec.structs.replace(QUIET, launch=launch)
            semantics = ASYNC if schedule == "pipedream" else ()
            devices = [[stage] for stage in range(stages)]
            found = run(toy, devices, 6, schedule, settings=settings, semantics=semantics)
            assert by_tasks(found, settings).step_time == pytest.approx(
                found.raw.step_time, rel=1e-12
            )


def random_chain(rng: np.random.Generator, count: int) -> Toy:
    """A chain of unequal layers."""
    layers = [
        layer._replace(
            forward=float(rng.uniform(0.5, 1.5)),
            to_inputs=float(rng.uniform(0.5, 1.5)),
            to_weights=float(rng.uniform(0.5, 1.5)),
            activation=int(rng.integers(1, 10)) * 10**5,
            weights=int(rng.integers(1, 10)) * 10**7,
        )
        for layer in chain(count)
    ]
    toy = Writer(layers).build()
    return toy._replace(launch=rng.random(toy.graph.num_ops) / 20)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("launch", ["eager", "graph"])
def test_both_levels_agree_on_chains_where_what_leaves_a_stage_is_made_last(
    schedule: str, launch: str
) -> None:
    rng = np.random.default_rng(SEED)
    settings = Settings(host="per_rank", launch=launch)
    for _ in range(5):
        found = run(random_chain(rng, 12), [[0], [1], [2], [3]], 6, schedule, settings=settings)
        tasks = by_tasks(found, settings)
        assert tasks.step_time == pytest.approx(found.raw.step_time, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_levels_agree_within_one_percent_on_random_stages(schedule: str) -> None:
    rng = np.random.default_rng(SEED)
    settings = Settings(host="per_rank")
    for _ in range(5):
        layers = [
            layer._replace(activation=layer.activation // 100, update=0.0)
            for layer in random_layers(rng, 16)
        ]
        found = run(Writer(layers).build(), [[0], [1]], 12, schedule, settings=settings)
        tasks = by_tasks(found, settings)
        assert tasks.step_time == pytest.approx(found.raw.step_time, rel=0.01)
        assert tasks.step_time >= found.raw.step_time * (1 - 1e-9)  # tensors leave earlier op by op


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_levels_have_the_same_peak_within_five_percent(schedule: str) -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(5):
        layers = [
            layer._replace(activation=int(rng.integers(1, 10)) * 10**6)
            for layer in chain(96, weights=10**6)
        ]
        found = run(Writer(layers).build(), [[0], [1], [2], [3]], 6, schedule)
        assert by_tasks(found, QUIET).allocated == pytest.approx(found.raw.allocated, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize("model", ["bert-base", "gpt2", "vgg-16"])
def test_both_levels_agree_within_one_percent_on_models(
    model: str, launch: str, schedule: str
) -> None:
    graph, job = captured(model)
    cluster = Cluster.preset("8xV100-NVLink")
    stage = block_stages(graph, 4)
    devices = [[0], [1], [2], [3]]
    plan = plan_of(graph, cluster, job, stage, devices, microbatches=8, schedule=schedule)
    pipeline = build_pipeline(graph, cluster, job, plan)
    settings = Settings(host="per_rank", launch=launch)
    programs = [
        op_program(graph, cluster, job, pipeline),
        pipeline_program(model, cluster, pipeline, job.batch),
    ]
    one, two = (play(program, cluster, job, settings) for program in programs)
    assert two.step_time == pytest.approx(one.step_time, rel=0.01)


@lru_cache
def captured(model: str) -> tuple[OpGraph, Job]:
    from simcore.sources import load_graph

    graph, job = load_graph(model)[:2]
    return graph, job.replace(batch=64)


def block_stages(graph: OpGraph, count: int) -> NDArray[np.int64]:
    """As many blocks for each stage, [unit]; as many units where there are no blocks."""
    index = {name: op for op, name in enumerate(graph.op_names)}
    modules = [graph.op_modules[index[name]] for name in graph.unit_names]
    found = [re.search(r"(?:encoder|^h)\.(\d+)", module) for module in modules]
    numbers = [int(match.group(1)) for match in found if match]
    if not numbers:
        return np.arange(graph.num_units) * count // graph.num_units
    blocks, latest = np.zeros(graph.num_units, np.int64), 0
    for unit, match in enumerate(found):
        latest = int(match.group(1)) if match else latest
        blocks[unit] = latest  # what has no number goes with the block before it
    return blocks * count // (max(numbers) + 1)


# what runs, and what it reads


def test_each_op_reads_what_its_copy_of_its_microbatch_made() -> None:
    rng = np.random.default_rng(SEED)
    for schedule in SCHEDULES:
        check_program(run(random_toy(rng, 9), [[0, 1], [2, 3]], 4, schedule))
    check_program(run(Writer(chain(8)).build(), [[0, 1], [2, 3]] * 2, 4, "interleaved"))


def check_program(found: Run) -> None:
    toy, graph, base = found.toy, found.program.graph, found.program.base
    cut = build_pipeline(
        toy.graph, found.cluster, found.job, found.plan, cost=found.cost
    ).tables[0].cut  # fmt: skip
    copies = [len(stage.devices) for stage in found.plan.stages]
    for op, phase in enumerate(cut.phase):
        times = 1 if phase == Phase.U else found.plan.microbatches
        assert (base == op).sum() == copies[cut.stage[op]] * times
    of = re.compile(r"\(copy (\d+)(?:, microbatch (\d+))?")
    for op in np.flatnonzero((base >= 0) & (graph.phase != Phase.U)):
        mine = of.search(graph.op_names[op])
        read = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]
        assert (graph.tensor_producer[read] < op).all()
        names = [graph.tensor_names[tensor] for tensor in read]
        old = toy.graph.inputs[slice(*toy.graph.first_input[base[op] : base[op] + 2])]
        assert mine is not None
        for name, made in zip(names, graph.tensor_producer[read], strict=True):
            theirs = of.search(name)
            assert (theirs is None) == (made < 0)
            assert theirs is None or theirs.groups() == mine.groups()
        assert sorted(name.split(" (")[0] for name in names) == sorted(
            toy.graph.tensor_names[tensor] for tensor in old
        )


def test_ops_of_a_device_stand_in_the_order_of_its_actions() -> None:
    found = run(Writer(chain(4)).build(), [[0], [1]], 3, "1f1b", batch=24)
    names = [name for name in found.names(0) if "add" not in name and not name.startswith("u")]
    numbers = [int(name[-2]) for name in names]  # of the microbatch
    actions = [(number, "f" in names[at]) for at, number in enumerate(numbers)]
    assert [action for action, _ in itertools.groupby(actions)] == [
        (0, True), (1, True), (0, False), (2, True), (1, False), (2, False),
    ]  # fmt: skip
    assert found.names(0)[-2:] == ["u0", "u1"]


def test_a_gradient_is_added_in_place_to_the_sum_of_earlier_microbatches() -> None:
    weights = 10**8
    toy = Writer(chain(1, weights=weights)).build()
    found = run(toy, [[0]], 3, "gpipe")
    graph, names = found.program.graph, found.program.graph.op_names
    adds = [op for op, name in enumerate(names) if name.startswith("add g0")]
    assert [names[op] for op in adds] == ["add g0 (microbatch 1)", "add g0 (microbatch 2)"]
    rate = load_profile(KIND).byte_rate("pointwise")
    assert found.program.cost.seconds[adds, 0, 0] == pytest.approx(3 * weights / rate)
    assert found.program.cost.launch[adds, 0].tolist() == [load_profile(KIND).launch_overhead] * 2
    assert (graph.op_class[adds] == OpClass.POINTWISE).all()
    assert (graph.kernels[adds] == 1).all()
    reads = [
        [graph.tensor_names[t] for t in graph.inputs[slice(*graph.first_input[op : op + 2])]]
        for op in [*adds, names.index("u0")]
    ]
    assert reads == [
        ["g0 (microbatch 0)", "g0 (microbatch 1)"],
        ["g0 (microbatch 1)", "g0 (microbatch 2)"],
        ["w0", "g0 (microbatch 2)"],
    ]
    first = graph.first_output[[names.index("b0.weights (microbatch 0)"), *adds]]
    assert len(set(graph.tensor_storage[first])) == 1
    # parameter and Adam's state, the sum, and one new gradient beside it
    assert found.raw.allocated[0] == weights + 2 * weights + 2 * weights + 0


def test_no_gradient_is_added_where_each_microbatch_has_its_update() -> None:
    toy = random_toy(np.random.default_rng(SEED), 6)
    found = run(toy, [[0], [1]], 4, "pipedream", batch=8, semantics=ASYNC)
    names = found.program.graph.op_names
    assert not [name for name in names if name.startswith("add ")]
    order = found.names(0)
    updates = [name for name in order if name.startswith("u1")]
    assert updates == [f"u1 (microbatch {number})" for number in range(len(updates))]
    assert len(updates) >= 4
    for update in updates:
        mine = update.removeprefix("u1")
        last = max(at for at, name in enumerate(order) if name.startswith("b") and mine in name)
        assert order.index(update) > last
    state = toy.graph.elements.sum() * found.job.state_bytes_per_element()
    assert found.program.graph.elements.sum() * found.job.state_bytes_per_element() == state


# copies


@pytest.mark.parametrize(
    ("mine", "theirs", "shares"),
    [
        (2, 4, {(0, 0): 6, (0, 1): 6, (1, 2): 6, (1, 3): 6}),
        (4, 2, {(0, 0): 6, (1, 0): 6, (2, 1): 6, (3, 1): 6}),
        (2, 3, {(0, 0): 8, (0, 1): 4, (1, 1): 4, (1, 2): 8}),
        (1, 3, {(0, 0): 8, (0, 1): 8, (0, 2): 8}),
    ],
)
def test_copies_fetch_the_samples_that_they_lack_once(
    mine: int, theirs: int, shares: dict[tuple[int, int], int]
) -> None:
    toy = Writer(chain(2, activation=1000)).build()
    devices = [range(mine), range(mine, mine + theirs)]
    found = run(toy, devices, 2, "1f1b", batch=48)
    names = found.program.graph.tensor_names
    forward, backward = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    raw = found.raw
    for tensor, source, target in zip(
        raw.transfer_tensor, raw.transfer_source, raw.transfer_target, strict=True
    ):
        size = int(raw.transfer_bytes[raw.transfer_tensor == tensor][0])
        if names[tensor].startswith("a0"):
            forward[int(source), int(target) - mine, size] += 1
        else:
            backward[int(target), int(source) - mine, size] += 1
    expected = {(a, b, 1000 * samples): 2 for (a, b), samples in shares.items()}
    assert forward == expected
    assert backward == expected


def test_what_copies_put_together_is_as_large_as_what_they_work_on() -> None:
    toy = Writer(chain(2, activation=1000)).build()
    found = run(toy, [[0, 1, 2], [3, 4]], 1, batch=24)
    graph = found.program.graph
    received = [op for op, name in enumerate(graph.op_names) if name.startswith("receive a0")]
    assert [graph.tensor_bytes[graph.first_output[op], 0] for op in received] == [12000, 12000]
    assert found.program.placement[received].tolist() == [3, 4]
    assert (found.program.cost.seconds[received] == 0).all()


def test_buckets_are_summed_in_order_while_the_last_backward_goes_on() -> None:
    toy = Writer(chain(4, weights=30 * 10**6, update=1.0)).build()
    buckets = Buckets(num_bytes=60 * 10**6)
    found = run(toy, [[0, 1]], 3, "1f1b", buckets=buckets)
    graph, raw = found.program.graph, found.raw
    sums = sorted(found.program.collectives)
    assert [found.program.collectives[op].num_bytes for op in sums] == [60 * 10**6] * 2
    assert {c.kind for c in found.program.collectives.values()} == {"all_reduce"}
    ready = [found.time(f"add g{n} (copy 1, microbatch 2)")[1] for n in (2, 0)]
    assert [raw.request[op] for op in sums] == pytest.approx(ready)
    assert raw.end[sums[0]] <= raw.start[sums[1]]
    assert raw.end[sums[0]] < found.time("b0.weights (copy 0, microbatch 2)")[1]
    assert found.time("u0 (copy 0)")[0] >= raw.end[sums[1]]
    assert [graph.op_names[op + 1] for op in sums] == [
        "b2.inputs (copy 0, microbatch 2)", "u0 (copy 0)",
    ]  # fmt: skip


@pytest.mark.parametrize("sharding", [1, 2])
def test_a_sharded_optimizer_sums_parts_updates_parts_and_gathers_parameters(
    sharding: int,
) -> None:
    toy = Writer(chain(2, weights=40 * 10**6, update=1.0)).build()
    whole = run(toy, [[0, 1, 2, 3]], 2)
    found = run(toy, [[0, 1, 2, 3]], 2, optimizer_sharding=sharding)
    kinds = [(c.kind, c.num_bytes) for _, c in sorted(found.program.collectives.items())]
    assert kinds == [("reduce_scatter", 40 * 10**6)] * 2 + [("all_gather", 80 * 10**6)]
    start, end = found.time("u1 (copy 0)")
    assert end - start == 0.25
    gather = max(found.program.collectives)
    assert found.raw.request[gather] == end
    assert found.raw.step_time == found.raw.end[gather]
    state = 2 * 80 * 10**6
    saved = whole.raw.allocated[0] - found.raw.allocated[0]
    if sharding == 1:
        assert saved == state * 3 // 4
    else:  # buckets and what is kept are parts; whole gradients go once they are summed
        assert saved == state * 3 // 4 + 80 * 10**6 * 3 // 4 - 20 * 10**6


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(PlanError, match="optimizer_sharding 3"):
        run(Writer(chain(2, weights=400)).build(), [[0, 1]], 2, optimizer_sharding=3)


def test_copies_that_train_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="the graph updates none"):
        run(Writer(chain(2, to_weights=0.0)).build(), [[0, 1], [2]], 2)


# tied parameters


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tied_parameter_is_exchanged_once_a_step_after_the_backward(schedule: str) -> None:
    layers = chain(4, weights=4 * 10**6, activation=1)
    toy = Writer(layers, (0, 3)).build()
    found = run(toy, [[0], [1]], 4, schedule)
    graph, raw = found.program.graph, found.raw
    big = [
        (graph.tensor_names[tensor].split(" ")[0], int(source), int(target))
        for tensor, source, target, size in zip(
            raw.transfer_tensor, raw.transfer_source, raw.transfer_target, raw.transfer_bytes,
            strict=True,
        )
        if size == 4 * 10**6
    ]  # fmt: skip
    assert big == [("g3", 1, 0), ("u0:0", 0, 1)]
    names = found.program.graph.op_names
    assert sum(name.startswith("tie0") for name in names) == 1
    assert sum(name.startswith("add g3") for name in names) == 3
    last = max(end for name, end in zip(names, raw.end, strict=True) if name.startswith("b3"))
    assert raw.transfer_request[raw.transfer_bytes == 4 * 10**6][0] >= last
    assert found.time("u0")[0] >= found.time("tie0")[1] >= found.time("u1")[1]
    assert found.time("refresh3")[0] >= found.time("u0")[1]


@pytest.mark.parametrize("sharding", [0, 1, 2])
def test_copies_sum_a_tied_gradient_before_stages_exchange_it(sharding: int) -> None:
    toy = Writer(chain(4, weights=4 * 10**6, activation=24), (0, 3)).build()
    found = run(toy, [[0, 1], [2, 3]], 2, "1f1b", optimizer_sharding=sharding)
    size = 2 * 10**6 if sharding else 4 * 10**6
    raw, names = found.raw, found.program.graph.tensor_names
    sent = [
        (names[tensor].split(" ")[0], int(source), int(target), int(num_bytes))
        for tensor, source, target, num_bytes in zip(
            raw.transfer_tensor, raw.transfer_source, raw.transfer_target, raw.transfer_bytes,
            strict=True,
        )
        if num_bytes > 10**6
    ]  # fmt: skip
    assert sent == [
        ("g3", 2, 0, size), ("g3", 3, 1, size),
        ("u0:0", 0, 2, 4 * 10**6), ("u0:0", 1, 3, 4 * 10**6),
    ]  # fmt: skip
    sums = [c for c in found.program.collectives.values() if c.kind != "all_gather"]
    assert Counter(c.members for c in sums) == {(0, 1): 2, (2, 3): 2}


def test_stages_that_exchange_a_gradient_cannot_be_asynchronous() -> None:
    toy = Writer(chain(4, weights=400), (0, 3)).build()
    with pytest.raises(PlanError, match="exchange 'g3', so they cannot update"):
        run(toy, [[0], [1]], 4, "pipedream", semantics=ASYNC)
    with pytest.raises(PlanError, match="among 1 and 2 copies"):
        run(toy, [[0, 1], [2]], 4, optimizer_sharding=1)


# recompute


def test_a_block_that_is_not_kept_runs_again_once_its_gradient_has_come() -> None:
    toy = Writer(chain(6, activation=10**7)).build()
    blocks = [f"layer.{int(name[-1]) // 3}" if name else "" for name in toy.graph.op_modules]
    toy = toy._replace(graph=replace(toy.graph, op_modules=tuple(blocks)))
    kept = run(toy, [[0], [1]], 2, batch=24)
    found = run(toy, [[0], [1]], 2, batch=24, recompute="full")
    again = [name for name in found.names(0) if "again" in name]
    assert again == [f"f{n} (microbatch {m}, again)" for m in range(2) for n in range(2)]
    came = found.time("b3.inputs (microbatch 0)")[1] + 12 * 10**7 / 1e9
    assert found.time("f0 (microbatch 0, again)")[0] == pytest.approx(came)
    assert found.time("b2.weights (microbatch 0)")[0] == pytest.approx(came + 2)
    for device in (0, 1):
        assert found.raw.allocated[device] < kept.raw.allocated[device]


# against the reference


@pytest.mark.parametrize("contention", ["none", "port", "ordered", "fifo", "fair"])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved", "pipedream"])
def test_the_reference_plays_it_alike(schedule: str, contention: str) -> None:
    rng = np.random.default_rng(SEED)
    for round_ in range(1 if schedule == "pipedream" else 3):
        tied = schedule != "pipedream" and bool(round_ % 2)
        toy = random_toy(rng, int(rng.integers(4, 7)), tied)
        devices = [[0, 1], [2]] if round_ == 0 else [[0, 1], [2, 3]]
        if schedule == "interleaved":
            toy, devices = random_chain(rng, 4), [*devices, *devices]
        settings = Settings(
            host=("one", "per_rank")[round_ % 2],
            order=("program", "ready")[round_ == 2],
            contention=contention,
            slow_down=False,
        )
        fields: dict[str, Any] = {"semantics": ASYNC} if schedule == "pipedream" else {}
        fields["optimizer_sharding"] = round_ if devices[0][0] == 0 and len(devices[1]) > 1 else 0
        found = run(toy, devices, 2, schedule, batch=12, settings=settings, **fields)
        compare_with_reference(found, settings)


def compare_with_reference(found: Run, settings: Settings) -> None:
    program = found.program
    problem = ReferenceProblem.build(
        program.graph, found.cluster, found.job, settings,
        cost=program.cost, collectives=program.collectives,
    )  # fmt: skip
    expected = simulate_reference(problem, program.placement)
    rel = 1e-9 if settings.contention == "fair" else 0.0
    assert found.raw.step_time == pytest.approx(expected.step_time, rel=rel, abs=0)
    assert found.raw.start == pytest.approx(expected.start, rel=rel, abs=0)
    assert found.raw.end == pytest.approx(expected.end, rel=rel, abs=0)
    assert found.raw.allocated.tolist() == expected.allocated
