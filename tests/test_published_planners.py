"""PipeDream's and DAPPLE's planners: published plans, brute force, hand counts, the simulator."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.exact.dapple import (
    DappleProblem,
    DappleStage,
    Place,
    allreduce_seconds,
    analytic_seconds,
    plan_dapple,
    schedule_seconds,
    transfer_seconds,
)
from agents.exact.pipedream_planner import PipeDreamPlan, plan_pipedream, profile_states
from agents.exact.stage_plan import NamedStage, make_stage_plan
from agents.planners.recorder import Budget
from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.frontends.pipedream import Profile, parse_profile, read_pipedream
from simcore.job import Job
from simcore.simulation import simulate

INSIDE, BETWEEN = 15.75e9, 1.25e9  # bytes/s
# (cuts with replicas), speed-up over one GPU, over data parallel on 4 GPUs; planning notes, 5.1
FOUR_GPUS = {
    "alexnet": ([(0, 6, 2), (6, 9, 1), (9, 22, 1)], 3.846, 1.486),
    "resnet18": ([(0, 59, 3), (59, 100, 1)], 3.940, 1.019),
    "resnet50": ([(0, 45, 1), (45, 98, 1), (98, 165, 1), (165, 240, 1)], 3.977, 1.038),
    "resnet101": ([(0, 86, 1), (86, 193, 1), (193, 301, 1), (301, 410, 1)], 3.955, 1.070),
}
SIXTEEN_GPUS = {
    "alexnet": (5.651, 2.974),
    "resnet18": (11.056, 1.013),
    "resnet50": (10.262, 1.024),
}


def profile(data: Path, name: str) -> Profile:
    path = data / "pipedream" / f"{name}.graph.txt"
    return parse_profile(path.read_text(), path.name)


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_pipedream_plans_four_gpus_as_published(data: Path, name: str) -> None:
    cuts, single, parallel = FOUR_GPUS[name]
    plan = plan_pipedream(profile(data, name), (4,), (INSIDE,))
    assert [(stage.begin, stage.end, stage.replicas) for stage in plan.stages] == cuts
    assert round(plan.speedup, 3) == single
    assert round(plan.speedup_over_data_parallel, 3) == parallel


@pytest.mark.parametrize("name", SIXTEEN_GPUS)
def test_pipedream_plans_four_servers_as_published(data: Path, name: str) -> None:
    plan = plan_pipedream(profile(data, name), (4, 4), (INSIDE, BETWEEN))
    assert round(plan.speedup, 3) == SIXTEEN_GPUS[name][0]
    assert round(plan.speedup_over_data_parallel, 3) == SIXTEEN_GPUS[name][1]
    assert sum(stage.replicas for stage in plan.stages) == 16


def chain(rows: list[tuple[int, int, int]]) -> Profile:
    """Returns a chain of layers with these milliseconds, output bytes and parameter bytes."""
    lines = [
        f"node{n} -- Linear -- forward_compute_time={time}.0, backward_compute_time={time}.0, "
        f"activation_size={output}.0, parameter_size={weight}.0"
        for n, (time, output, weight) in enumerate(rows)
    ]
    lines += [f"\tnode{n} -- node{n + 1}" for n in range(len(rows) - 1)]
    return parse_profile("\n".join(lines), "chain")


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cut in itertools.combinations(range(1, total), parts - 1):
        ends = (0, *cut, total)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def pipedream_seconds(
    rows: list[tuple[int, int, int]], sizes: tuple[int, ...], copies: tuple[int, ...]
) -> float:
    """Returns the slowest stage or transfer; the first stage's transfers count with the next's."""
    ends = np.cumsum([0, *sizes])
    worst = 0.0
    for stage, m in enumerate(copies):
        part = rows[ends[stage] : ends[stage + 1]]
        compute = sum(2 * time for time, _, _ in part) / 1e3
        gradients = 4 * (m - 1) * sum(weight for _, _, weight in part) / (1e3 * m)
        worst = max(worst, (compute + gradients) / m)
        if stage:
            worst = max(worst, 2 * rows[ends[stage] - 1][1] / (1e3 * m))
            if stage < len(sizes) - 1:
                worst = max(worst, 2 * rows[ends[stage + 1] - 1][1] / (1e3 * m))
    return worst


rows = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=6
)


@given(rows, st.integers(1, 4))
@settings(max_examples=60)
def test_pipedream_agrees_with_brute_force_on_chains(
    layers: list[tuple[int, int, int]], gpus: int
) -> None:
    best = min(
        pipedream_seconds(layers, sizes, copies)
        for stages in range(1, min(len(layers), gpus) + 1)
        for sizes in shares(len(layers), stages)
        for copies in shares(gpus, stages)
    )
    plan = plan_pipedream(chain(layers), (gpus,), (1e3,))
    assert plan.pipeline_seconds == pytest.approx(best)
    sizes = tuple(stage.end - stage.begin for stage in plan.stages)
    copies = tuple(stage.replicas for stage in plan.stages)
    assert pipedream_seconds(layers, sizes, copies) == pytest.approx(best)


def rate(data: Path, name: str, plan: PipeDreamPlan) -> float:
    graph = read_pipedream(data / "pipedream" / f"{name}.graph.txt")
    cluster = Cluster.preset("4xV100-NVLink")
    job = Job(batch=48, assume_linear=True, optimizer="sgd")
    stages = [NamedStage(stage.layers, stage.replicas) for stage in plan.stages]
    made = make_stage_plan(graph, cluster, job, stages)
    assert made.validate(graph, cluster, job) == []
    return simulate(graph, cluster, job, made).step_time


@pytest.mark.parametrize(("name", "most"), [("alexnet", 1.1), ("resnet18", 1.1)])
def test_the_simulator_is_near_what_pipedream_expects(data: Path, name: str, most: float) -> None:
    plan = plan_pipedream(profile(data, name), (4,), (INSIDE,))
    assert 1.0 <= rate(data, name, plan) / plan.pipeline_seconds < most


def test_a_cluster_with_too_few_gpus_is_refused(data: Path) -> None:
    graph = read_pipedream(data / "pipedream" / "alexnet.graph.txt")
    with pytest.raises(PlanError, match="the stages need 9 GPUs"):
        make_stage_plan(
            graph, Cluster.preset("4xV100-NVLink"), Job(batch=48), [NamedStage(("node2",), 9)]
        )


def dapple(rows: list[tuple[int, int, int]], servers: int, gpus: int, count: int) -> DappleProblem:
    return DappleProblem(profile_states(chain(rows)), servers, gpus, float(count), count)


def test_dapple_counts_two_stages_as_by_hand() -> None:
    # two servers of one GPU; 2 x (4 + 2) ms and 2 x 4 ms; 1 MB cut = 1 ms at 1 GB/s
    problem = dapple([(4, 0, 0), (2, 10**6, 0), (4, 0, 0)], 2, 1, 3)
    stages = [DappleStage(0, 2, (1, 0)), DappleStage(2, 3, (0, 1))]
    assert analytic_seconds(problem, stages) == pytest.approx(0.012 * 2 + 0.020 + 0.001)
    assert schedule_seconds(problem, [DappleStage(0, 3, (1, 0))]) == pytest.approx(0.060)
    # first stage, ms: F 0-6 6-12 12-18, B 18-24 24-30 and, its gradient here at 32, 32-38;
    # second: F 7-11, B 11-15, F 15-19, B 19-23, F 23-27, B 27-31; the hop back ends at 32
    assert schedule_seconds(problem, stages) == pytest.approx(0.038)


def test_dapple_counts_transfers_and_sums_as_by_hand() -> None:
    assert allreduce_seconds((1, 0), 6e9) == 0
    assert allreduce_seconds((4, 0), 25e9) == pytest.approx(2 * 3 / 4 / 2)
    assert allreduce_seconds((2, 2), 3e9) == pytest.approx(2 * 3 / 4)
    assert transfer_seconds((2, 0), (1, 0), 25e9) == pytest.approx(1.0)
    assert transfer_seconds((2, 0), (0, 1), 1e9) == pytest.approx(1.0)
    assert transfer_seconds((1, 1), (0, 1), 1e9) == pytest.approx(0.5)
    assert transfer_seconds((1, 1), (1, 1), 3e9) == pytest.approx(1.0)


def all_places(used: Place, gpus: int) -> Iterator[Place]:
    for place in itertools.product(*(range(gpus - taken + 1) for taken in used)):
        if any(place):
            yield place


def all_plans(
    num_states: int, used: Place, gpus: int, stages: tuple[DappleStage, ...] = ()
) -> Iterator[tuple[DappleStage, ...]]:
    begin = stages[-1].end if stages else 0
    if begin == num_states:
        yield stages
        return
    for end in range(begin + 1, num_states + 1):
        for place in all_places(used, gpus):
            taken = tuple(a + b for a, b in zip(used, place, strict=True))
            yield from all_plans(num_states, taken, gpus, (*stages, DappleStage(begin, end, place)))


megabytes = st.integers(0, 9).map(lambda size: size * 10**6)


@given(
    st.lists(st.tuples(st.integers(1, 9), megabytes, megabytes), min_size=2, max_size=4),
    st.sampled_from([(1, 3), (3, 1)]),
    st.integers(1, 5),
)
@settings(max_examples=40)
def test_dapple_agrees_with_brute_force_on_chains(
    layers: list[tuple[int, int, int]], machine: tuple[int, int], count: int
) -> None:
    problem = dapple(layers, *machine, count)
    plan = plan_dapple(problem)
    nothing = (0,) * machine[0]
    best = min(
        analytic_seconds(problem, stages) for stages in all_plans(len(layers), nothing, machine[1])
    )
    assert plan.is_optimal
    assert plan.seconds == pytest.approx(best)
    assert analytic_seconds(problem, plan.stages) == plan.seconds


def test_dapple_ends_with_its_budget() -> None:
    ticks = itertools.count()
    budget = Budget(2, clock=lambda: float(next(ticks)))
    layers = [(3, 10**6, 10**9), (5, 10**5, 10**6), (2, 10**6, 10**9), (4, 10**5, 10**8)]
    problem = dapple(layers, 2, 2, 5)
    assert plan_dapple(problem).is_optimal
    assert not plan_dapple(problem, budget).is_optimal


def test_dapple_does_not_lose_to_data_parallelism(data: Path) -> None:
    states = profile_states(profile(data, "alexnet"))
    problem = DappleProblem(states, 2, 4, 4.0, 16)
    plan = plan_dapple(problem)
    copies = analytic_seconds(problem, [DappleStage(0, states.num_states, (4, 4))])
    assert plan.is_optimal
    assert plan.seconds < copies / 2
    assert math.isfinite(schedule_seconds(problem, plan.stages))
