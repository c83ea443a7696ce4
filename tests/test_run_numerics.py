"""Plans run on gloo processes: loss and gradients are those of one device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from calibration.run.fleet import Fleet
from calibration.run.launch import Launch, ranks_of
from calibration.run.source import cut_samples, real_model
from calibration.run.tensor_parallel import Style, TensorWork, parallel_styles
from calibration.run.work import StepReport
from simcore.cluster import Cluster
from simcore.errors import RunError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Plan, Ref, Settings, Stage
from simcore.signature import Phase
from simcore.sources import load_graph
from tests import run_models
from tests.pipelines import chain_of

BATCH, SEED, TOLERANCE = 8, 5, 2e-5
FACTORIES = "tests.run_models"


@dataclass(frozen=True)
class Case:
    """A model and where its units go."""

    factory: str
    cuts: tuple[str, ...]  # names that begin the modules of each later stage
    schedule: str = "none"
    microbatches: int = 1
    ranks: int = 2
    actions: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.factory}-{self.schedule}-{self.microbatches}"


def stage_numbers(graph: OpGraph, cuts: Sequence[str]) -> list[int]:
    """Cuts a graph's units in program order, before the first unit of each named module."""
    forward = np.flatnonzero(graph.phase == Phase.F)
    first = [
        int(graph.unit[next(op for op in forward if graph.op_modules[op].startswith(cut))])
        for cut in cuts
    ]
    order = {unit: place for place, unit in enumerate(dict.fromkeys(graph.unit[forward].tolist()))}
    limits = [order[unit] for unit in first]
    return [sum(order.get(u, 0) >= limit for limit in limits) for u in range(graph.num_units)]


def plan_of(
    case: Case, graph: OpGraph, cluster: Cluster, job: Job, numbers: Sequence[int] = ()
) -> Plan:
    numbers = numbers or stage_numbers(graph, case.cuts)
    if case.schedule == "none":
        return Plan.from_placement(graph, cluster, job, numbers)
    count = max(numbers) + 1
    rank_of = [s % case.ranks for s in range(count)]
    if case.schedule == "zbv":
        rank_of = [min(s, count - 1 - s) for s in range(count)]
    names = graph.unit_names
    stages = tuple(
        Stage(
            name=f"stage{number}",
            devices=(cluster.devices[rank_of[number]].name,),
            ops=tuple(n for n, stage in zip(names, numbers, strict=True) if stage == number),
            mesh={"dp": 1},
        )
        for number in range(count)
    )
    changes = any("batch_norm" in target for target in graph.op_targets)
    return Plan(
        graph=Ref(name=graph.name, hash=graph.content_hash()),
        cluster=Ref(name=cluster.name, hash=cluster.content_hash()),
        job=job,
        job_hash=job.content_hash(),
        stages=stages,
        microbatches=case.microbatches,
        schedule=case.schedule,
        actions=case.actions,
        semantics=("batch norm per microbatch",) if changes else (),
        settings=Settings(host="per_rank"),
    )


def eager(source: str, job: Job, microbatches: int) -> tuple[float, dict[str, np.ndarray]]:
    """Returns loss and gradients of one device that sees the microbatches one after the other."""
    model = real_model(source, job, BATCH, SEED)
    size, losses = BATCH // microbatches, []
    for begin in range(0, BATCH, size):
        args, kwargs = cut_samples((model.args, model.kwargs), BATCH, begin, begin + size)
        loss = model.module(*args, **kwargs)
        loss.backward(torch.tensor(1 / microbatches))
        losses.append(loss.item())
    found = {n: p.grad.double().numpy() for n, p in model.module.named_parameters()}
    return sum(losses) / microbatches, found


@pytest.fixture(scope="module")
def pair() -> Iterator[Fleet]:
    with Fleet(["cpu"] * 2, backend="gloo", timeout=60) as fleet:
        yield fleet


def check(
    fleet: Fleet,
    plan: Plan,
    graph: OpGraph,
    cluster: Cluster,
    microbatches: int,
    repeats: int = 1,
) -> None:
    """Runs steps of a plan and holds the first against one device."""
    source = graph.name
    ranks = ranks_of(plan, graph, cluster, source, Launch(device="cpu", seed=SEED))
    number = fleet.load(ranks.works)
    reports = fleet.step(number, keeps_gradients=True)
    loss, expected = eager(source, plan.job, microbatches)
    assert mean_loss(reports) == pytest.approx(loss, rel=1e-5)
    found = {name: value for report in reports for name, value in report.gradients.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=TOLERANCE, atol=1e-6, err_msg=name)
    for _ in range(repeats):
        reports = fleet.step(number)
    assert mean_loss(reports) < loss  # the update arrives where it is used
    fleet.ask("drop", number=number)


def mean_loss(reports: Sequence[StepReport]) -> float:
    losses = [loss for report in reports for loss in report.losses]
    return sum(losses) / len(losses)


def graph_of(factory: str, optimizer: str = "sgd") -> tuple[OpGraph, Job]:
    graph, job, _ = load_graph(f"{FACTORIES}:{factory}", {"batch": BATCH, "optimizer": optimizer})
    return graph, job


GPT_CUT, SKIP_CUT = ("blocks.1",), ("middle",)
FOUR = ("blocks.1", "blocks.2", "blocks.3")
CASES = [
    Case("tiny_gpt", GPT_CUT, "gpipe", 4),
    Case("tiny_bert", GPT_CUT, "1f1b", 4),
    Case("tiny_gpt", GPT_CUT, "zb-h1", 4),
    Case("tiny_gpt", GPT_CUT, "zb-h2", 4),
    Case("skip", SKIP_CUT, "1f1b", 2),
    Case("skip", SKIP_CUT, "zb-h1", 4),
    Case("recurrent", ("head",), "gpipe", 2),
    Case("two_branch", ("head",), "1f1b", 2),
    Case("long_gpt", FOUR, "interleaved", 4),
    Case("long_gpt", FOUR, "zb-h1", 2),
    Case("long_gpt", FOUR, "zbv", 4),
    Case(
        "tiny_gpt", GPT_CUT, "custom", 2,
        actions=(("0F0", "0F1", "0B1", "0B0"), ("1F0", "1F1", "1B1", "1B0")),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pipeline_trains_as_one_device_does(pair: Fleet, case: Case) -> None:
    graph, job = graph_of(case.factory)
    cluster = chain_of(2)
    check(pair, plan_of(case, graph, cluster, job), graph, cluster, case.microbatches)


@pytest.mark.parametrize("factory", ["tiny_gpt", "skip", "two_branch", "recurrent"])
def test_any_placement_trains_as_one_device_does(pair: Fleet, factory: str) -> None:
    graph, job = graph_of(factory)
    cluster = chain_of(2)
    for seed in range(3):
        places = np.random.default_rng(seed).integers(0, 2, graph.num_units)
        plan = Plan.from_placement(graph, cluster, job, places)
        check(pair, plan, graph, cluster, 1)


@pytest.mark.parametrize("num_bytes", [0, 1024, 25 * 2**20])
def test_copies_train_as_one_device_does(pair: Fleet, num_bytes: int) -> None:
    graph, job = graph_of("tiny_gpt")
    cluster = chain_of(2)
    plan = Plan.data_parallel(graph, cluster, job, cluster.device_names)
    check(pair, plan, graph, cluster, 1)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_trains_as_one_device_does(pair: Fleet, recompute: str) -> None:
    graph, job = graph_of("tiny_gpt")
    cluster = chain_of(2)
    plan = plan_of(Case("tiny_gpt", GPT_CUT, "1f1b", 4), graph, cluster, job)
    stages = tuple(replace(stage, recompute=recompute) for stage in plan.stages)
    check(pair, replace(plan, stages=stages), graph, cluster, 4)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
def test_optimizers_update_as_on_one_device(pair: Fleet, optimizer: str) -> None:
    graph, job = graph_of("skip", optimizer)
    cluster = chain_of(2)
    plan = plan_of(Case("skip", SKIP_CUT, "1f1b", 2), graph, cluster, job)
    check(pair, plan, graph, cluster, 2)


def test_sharded_layers_train_as_one_device_does(pair: Fleet) -> None:
    source, job = f"{FACTORIES}:tiny_gpt", Job(batch=BATCH, optimizer="sgd")
    styles: dict[str, Style] = {"positions": "row"}
    for block in range(2):
        styles |= {f"blocks.{block}.up": "column", f"blocks.{block}.down": "row"}
    number = pair.load([TensorWork(source=source, job=job, styles=styles, seed=SEED)] * 2)
    reports = pair.step(number, keeps_gradients=True)
    loss, expected = eager(source, job, 1)
    assert mean_loss(reports) == pytest.approx(loss, rel=1e-5)
    assert reports[0].gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(
            reports[0].gradients[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name
        )
    assert mean_loss(pair.step(number)) < loss
    pair.ask("drop", number=number)


def test_layers_that_cannot_be_sharded_are_refused() -> None:
    for path, reason in (("norm", "a LayerNorm"), ("nothing", "no such module")):
        with pytest.raises(RunError, match=f"tensor parallel: {path}: {reason}"):
            parallel_styles(run_models.tiny_gpt()[0], {path: "row"})


@pytest.mark.slow
def test_four_ranks_train_as_one_device_does() -> None:
    cluster = chain_of(4)
    eight = tuple(f"blocks.{block}" for block in range(1, 8))
    with Fleet(["cpu"] * 4, backend="gloo", timeout=120) as fleet:
        for case in (
            Case("long_gpt", FOUR, "1f1b", 4, ranks=4),
            Case("long_gpt", FOUR, "zb-h2", 8, ranks=4),
            Case("deep_gpt", eight, "interleaved", 4, ranks=4),
            Case("deep_gpt", eight, "zbv", 8, ranks=4),
        ):
            graph, job = graph_of(case.factory)
            plan = plan_of(case, graph, cluster, job)
            check(fleet, plan, graph, cluster, case.microbatches)
        places = np.random.default_rng(1).integers(0, 4, graph.num_units)
        check(fleet, Plan.from_placement(graph, cluster, job, places), graph, cluster, 1)
        graph, job = graph_of("skip")
        case = Case("skip", ("side", "middle", "last"), "1f1b", 4, ranks=4)
        check(fleet, plan_of(case, graph, cluster, job), graph, cluster, 4, repeats=20)


@pytest.mark.slow
def test_two_branches_run_side_by_side_as_stages_of_a_dag() -> None:
    """A stage for each branch and one for what joins them; the edges are 0-2 and 1-2."""
    graph, job = graph_of("two_branch")
    first = {unit: op for op, unit in reversed(list(enumerate(graph.unit.tolist())))}
    branch = {"left": 0, "right": 1}
    numbers = [
        branch.get(graph.op_modules[first[unit]].partition(".")[0], 2)
        for unit in range(graph.num_units)
    ]
    images = next(u for u, name in enumerate(graph.op_names) if name == "input.images")
    numbers[graph.unit[images]] = 0
    cluster = chain_of(3)
    with Fleet(["cpu"] * 3, backend="gloo", timeout=120) as fleet:
        case = Case("two_branch", (), "1f1b", 4, ranks=3)
        check(fleet, plan_of(case, graph, cluster, job, numbers), graph, cluster, 4, repeats=20)


def test_what_is_only_simulated_is_refused() -> None:
    graph, job = graph_of("tiny_gpt")
    cluster = chain_of(4)
    plan = plan_of(Case("tiny_gpt", GPT_CUT, "1f1b", 4), graph, cluster, job)
    wide = tuple(
        replace(stage, devices=cluster.device_names[2 * n : 2 * n + 2], mesh={"dp": 2})
        for n, stage in enumerate(plan.stages)
    )
    for other, reason in (
        (replace(plan, stages=wide, microbatches=2), "stages have copies"),
        (replace(plan, job=job.replace(clip_norm=1.0), job_hash=""), "clips gradients"),
    ):
        with pytest.raises(RunError, match=reason):
            ranks_of(other, graph, cluster, graph.name, Launch(device="cpu"))
    with pytest.raises(RunError, match="this machine has 0"):
        ranks_of(plan, graph, cluster, graph.name, Launch(device="cuda"))
