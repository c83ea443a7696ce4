"""Plans run on gloo processes: loss and gradients are those of one device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from calibration.run.fleet import Fleet
from calibration.run.launch import Launch, ranks_of
from simcore.cluster import Cluster
from simcore.errors import RunError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Buckets, Plan, Ref, Settings, Stage
from simcore.shards import linkage_of
from simcore.signature import Phase
from tests.pipelines import chain_of
from tests.running import check, graph_of


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


@pytest.fixture(scope="module")
def pair() -> Iterator[Fleet]:
    with Fleet(["cpu"] * 2, backend="gloo", timeout=60) as fleet:
        yield fleet


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


def with_copies(plan: Plan, cluster: Cluster, copies: int) -> Plan:
    """The same pipeline with copies of each rank's devices."""
    ranks = list(dict.fromkeys(stage.devices for stage in plan.stages))
    names = cluster.device_names
    devices = [names[copies * n : copies * (n + 1)] for n in range(len(ranks))]
    stages = tuple(
        replace(stage, devices=devices[ranks.index(stage.devices)], mesh={"dp": copies})
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_bytes"),
    [
        (Case("tiny_gpt", ("blocks.1",), "1f1b", 2), 0),
        (Case("tiny_gpt", ("blocks.1",), "zb-h1", 4), 1024),
        (Case("long_gpt", ("blocks.1", "blocks.2", "blocks.3"), "interleaved", 4), 4096),
        (Case("skip", ("middle",), "gpipe", 2), 256),
    ],
    ids=str,
)
def test_copies_of_a_pipeline_train_as_one_device_does(case: Case, num_bytes: int) -> None:
    graph, job = graph_of(case.factory)
    cluster = chain_of(4)
    plan = with_copies(plan_of(case, graph, cluster, job), cluster, 2)
    plan = replace(plan, buckets=Buckets(num_bytes=num_bytes))
    with Fleet(["cpu"] * 4, backend="gloo", timeout=120) as fleet:
        check(fleet, plan, graph, cluster, case.microbatches, repeats=10)


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
    names = cluster.device_names
    uneven = tuple(
        replace(stage, devices=names[n : 2 * n + 1], mesh={"dp": n + 1})
        for n, stage in enumerate(plan.stages)
    )
    sharded = with_copies(plan, cluster, 2)
    group = linkage_of(graph).groups[-1].name
    sharded = replace(
        sharded,
        stages=tuple(
            replace(stage, mesh={"dp": 1, "tp": 2}, sharding={"tp": (group,)})
            for stage in sharded.stages
        ),
    )
    for other, reason in (
        (replace(plan, stages=uneven, microbatches=2), "different numbers of copies"),
        (sharded, "stages are sharded"),
        (replace(plan, job=job.replace(clip_norm=1.0), job_hash=""), "clips gradients"),
    ):
        with pytest.raises(RunError, match=reason):
            ranks_of(other, graph, cluster, graph.name, Launch(device="cpu"))
    with pytest.raises(RunError, match="this machine has 0"):
        ranks_of(plan, graph, cluster, graph.name, Launch(device="cuda"))
