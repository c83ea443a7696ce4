"""Chains and DAGs of stages together in the portfolio: promises, device order, why a plan won."""

from itertools import pairwise
from typing import Any

import pytest

from agents import portfolio
from agents.pipelines.anneal import exhaustive
from agents.pipelines.env import Freedom, PipelineTask
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import DagPlan, Simulator
from agents.planners.pipeline_layouts import Demands
from agents.planners.pipeline_plans import Pipelines
from agents.planners.pipeline_union import AllPipelines
from agents.planners.recorder import Budget
from agents.planners.stage_dag import StageDagSearch
from agents.planners.stage_dag_orders import MOST_ROWS, device_orders
from agents.planners.stage_dag_plans import StageDags
from agents.portfolio import PortfolioResult, Progress
from simcore import Cluster, Job, OpGraph, Problem, simulate
from simcore.cluster import Device, Link
from simcore.errors import InfeasibleError
from simcore.plan_summary import MODEL_ERROR
from simcore.units import GiB
from tests.running import graph_of
from tests.test_pipeline_planners import FAST, FREE, layers, space_of
from tests.test_planners import GPU, OTHER, mesh
from tests.test_stage_dag import branches

JOB = Job(batch=8, optimizer="sgd", assume_linear=True)
TOWERS = ((2.0, 2.0, 2.0), (2.0, 2.0, 2.0))


def find(graph: OpGraph, cluster: Cluster, **options: Any) -> PortfolioResult:
    usual: dict[str, Any] = {"evaluations": 150, "strategy": "pipeline", "demands": Demands()}
    return portfolio.plan(graph, cluster, JOB, **usual | options)


# the portfolio


@pytest.mark.parametrize("strategy", ["pipeline", "auto"])
def test_stages_with_unlike_copies_are_in_the_plan_that_is_written(strategy: str) -> None:
    """Layers of 4 s and 2 s on three GPUs: two share the first; chains have one GPU for each."""
    graph, cluster = layers([4.0, 2.0]), mesh(*[GPU] * 3, **FREE)
    demands = Demands(microbatches=4, schedule="1f1b")
    found = find(graph, cluster, strategy=strategy, demands=demands, evaluations=400)
    chains = Pipelines.build(space_of(graph, cluster), demands)
    chains.run(Budget(evaluations=400))
    assert chains.best is not None
    assert [len(stage.devices) for stage in found.plan.stages] == [2, 1]
    assert found.result.step_time < 0.7 * chains.best.step_time
    assert found.baselines["pipeline"] == found.result.step_time
    assert "the best chain of equal stages" in found.notes["pipeline"]
    assert found.lower_bound <= found.result.step_time
    assert found.plan.validate(graph, cluster, JOB) == []
    assert simulate(graph, cluster, JOB, found.plan).step_time == found.result.step_time


def test_the_bound_is_that_of_the_whole_space() -> None:
    space = space_of(layers([1.0, 3.0, 2.0, 1.0]), mesh(GPU, FAST, OTHER))
    both = AllPipelines.build(space, Demands())
    assert both.bound == min(both.chains.bound, both.dags.bound)
    both.run(Budget(evaluations=80))
    assert both.best is not None
    assert both.bound <= both.best.step_time


def test_both_kinds_share_the_evaluations_and_repeat() -> None:
    graph, cluster = branches(TOWERS), mesh(GPU, GPU, OTHER)
    runs = [AllPipelines.build(space_of(graph, cluster), Demands()) for _ in range(2)]
    for both in runs:
        both.run(Budget(evaluations=60))
        assert both.chains.search is not None
        assert both.dags.search is not None
        assert both.chains.search.tried
        assert len(both.chains.search.tried) + len(both.dags.search.seen) == 60
    assert runs[0].best == runs[1].best
    assert runs[0].best_time == runs[1].best_time


@pytest.mark.parametrize("device", ["d0", "d2"])
@pytest.mark.parametrize("module", ["net.0.0", "net.join"])
def test_a_pinned_module_stays_wherever_its_device_stands(module: str, device: str) -> None:
    graph, cluster = branches(((2.0, 1.0), (3.0,))), mesh(GPU, GPU, GPU, **FREE)
    found = find(graph, cluster, pins={module: device})
    op = {"net.0.0": "f0.0", "net.join": "join"}[module]
    stage = next(stage for stage in found.plan.stages if op in stage.ops)
    assert stage.devices == (device,)


def test_dags_know_pins_that_chains_cannot_meet_in_order() -> None:
    """The last layer is pinned to the first device: only other orders of devices go with that."""
    graph, cluster = layers([1.0] * 6), mesh(GPU, GPU, GPU, **FREE)
    free = find(graph, cluster, demands=Demands(schedule="1f1b"))
    found = find(graph, cluster, demands=Demands(schedule="1f1b"), pins={"net.5": "d0"})
    assert found.plan.stages[-1].devices == ("d0",)
    assert found.result.step_time == pytest.approx(free.result.step_time, rel=0.1)


def test_excluded_devices_and_reserved_memory_are_left_alone() -> None:
    graph = layers([1.0] * 6, parameters=2 * GiB)
    cluster = mesh(*[GPU] * 4, **FREE)
    found = find(graph, cluster, exclude=["d1"], reserve_memory=2 * GiB)
    used = {name for stage in found.plan.stages for name in stage.devices}
    assert "d1" not in used
    assert found.feasible
    assert all(use.reserved <= 14 * GiB for use in found.result.devices)


def test_an_interruption_keeps_the_best_dag_of_stages() -> None:
    graph, cluster = branches(TOWERS), mesh(*[GPU] * 4, **FREE)

    def press(progress: Progress) -> None:
        if progress.evaluations > 90:
            raise KeyboardInterrupt

    demands = Demands(microbatches=1)
    found = find(graph, cluster, demands=demands, evaluations=140, progress=press)
    assert found.interrupted
    assert found.feasible
    assert found.result.step_time < 8.0  # one branch after the other takes 12 s


def test_what_does_not_fit_says_by_how_much() -> None:
    graph, cluster = layers([1.0] * 3, parameters=9 * GiB), mesh(GPU, GPU, GPU)
    both = AllPipelines.build(space_of(graph, cluster), Demands())
    assert both.dags.search is not None
    halves = DagPlan(
        stage=(0, 0, 1), devices=((0,), (1,)), recompute=("none", "none"), microbatches=2
    )
    both.dags.search._try(halves, Budget())
    assert both.best is None
    assert both.nearest == both.dags.nearest
    assert both.worst is not None
    assert both.dags.overflow is not None
    assert both.worst.device == "d0"  # two layers with their gradients
    assert 0 < both.worst.excess < both.dags.overflow  # d1 is over too
    with pytest.raises(InfeasibleError, match="no pipeline of layers on mesh"):
        find(graph, cluster, evaluations=40)


# the order of devices


def unequal(*kinds: str) -> Cluster:
    """A line of devices: neighbours have a fast link, others go through all between."""
    devices = tuple(Device(f"d{k}", kind, "node0", 16 * GiB) for k, kind in enumerate(kinds))
    links = tuple(
        Link(a.name, b.name, "", 1e9 * (k + 1), 0.0) for k, (a, b) in enumerate(pairwise(devices))
    )
    relays = tuple(
        Device(device.name, device.kind, device.node, device.memory, forwards=True)
        for device in devices
    )
    return Cluster(name="line", devices=relays, links=links)


@pytest.mark.parametrize("kinds", [(OTHER, FAST, GPU), (FAST, OTHER, GPU), (GPU, OTHER, FAST)])
def test_the_best_order_of_unequal_devices_and_links_is_found(kinds: tuple[str, ...]) -> None:
    """Against all plans: every order of three GPUs of three kinds on unequal links."""
    graph = layers([1.0, 2.0, 1.5, 1.0, 0.5], activation=400_000_000, measured_on=FAST)
    space = space_of(graph, unequal(*kinds))
    how = Freedom(copies=False, microbatches=4, schedule="1f1b", recompute=False)
    task = PipelineTask.build(Simulator(nodes=NodeGraph.build(space)), how)
    best = exhaustive(task)
    search = StageDagSearch(task=task)
    search.run(Budget(evaluations=150))
    assert best is not None
    assert search.best is not None
    assert search.best[0].step_time <= best.score.step_time * (1 + 1e-9)
    by_index = tuple(sorted(space.devices))
    used = [devices[0] for devices in best.plan.devices]
    assert tuple(used) != by_index or kinds == (FAST, OTHER, GPU) or len(used) < 3


def test_rows_tell_devices_apart_by_kind_and_route() -> None:
    alike = NodeGraph.build(space_of(layers([1.0] * 4), mesh(*[GPU] * 4)))
    assert len(device_orders(alike)) == 1
    kinds = NodeGraph.build(space_of(layers([1.0] * 4), mesh(FAST, FAST, OTHER, OTHER)))
    assert len(device_orders(kinds)) == 6  # ways to put two of each in a row
    many = NodeGraph.build(space_of(layers([1.0] * 9), mesh(FAST, *[OTHER] * 4, *[GPU] * 4)))
    rows = device_orders(many)
    assert 6 <= len(rows) <= MOST_ROWS
    assert all(sorted(row) == list(range(9)) for row in rows)


@pytest.mark.slow
def test_more_than_sixteen_stages_are_possible() -> None:
    graph = layers([1.0] * 18, batch=64)
    space = space_of(graph, mesh(*[GPU] * 18, **FREE), batch=64)
    dags = StageDags.build(space, Demands(microbatches=64, schedule="1f1b"))
    dags.run(Budget(evaluations=12))
    assert dags.search is not None
    assert dags.search.best is not None
    assert dags.search.best[1].num_stages == 18


# why a plan won


def test_the_runner_up_is_named_with_its_reason() -> None:
    graph = layers([1e-2] * 8, parameters=200_000_000, activation=16_000)
    found = find(graph, mesh(*[GPU] * 4), strategy="auto", evaluations=400)
    assert found.plan.is_pipeline
    why = found.why
    assert why is not None
    assert why.runner_up is not None
    assert why.winner.step_time_s == found.result.step_time
    assert why.margin == pytest.approx(why.runner_up.step_time_s / found.result.step_time - 1)
    for use in (why.winner, why.runner_up):
        spent = use.compute + use.bubble + use.communication + use.launch
        assert spent == pytest.approx(1.0)
        assert use.fits
    gained = why.runner_up.step_time_s - why.winner.step_time_s
    assert sum(why.gains.values()) == pytest.approx(gained)
    text = why.words()
    for word in ("pipeline wins", "bubble", "exposed communication", why.runner_up.strategy):
        assert word in text
    assert why.because is not None
    assert why.record()["because"] == why.because


def test_a_slower_strategy_loses_by_its_exposed_communication() -> None:
    """Copies that sum 800 MB over slow links wait for them; stages send next to nothing."""
    graph = layers([1e-2] * 4, parameters=200_000_000, activation=16_000)
    found = find(graph, mesh(GPU, GPU), strategy="auto", evaluations=400)
    assert found.why is not None
    assert found.why.runner_up is not None
    if found.why.runner_up.strategy == "data_parallel":
        assert found.why.because == "communication"


def test_memory_is_the_reason_where_nothing_else_fits() -> None:
    graph = layers([1.0] * 6, parameters=3 * GiB)
    found = find(graph, mesh(*[GPU] * 4), strategy="pipeline")
    assert found.why is not None
    assert found.why.runner_up is None
    assert found.why.because == "memory"
    assert "No other strategy fits" in found.why.words()
    assert found.why.record()["runner_up"] is None


def test_a_strategy_that_was_asked_for_does_not_win_over_a_faster_one() -> None:
    """Stages send gigabytes to one another; copies of the model send next to nothing."""
    graph = layers([1e-2] * 4, parameters=4, activation=2_000_000_000)
    found = find(graph, mesh(GPU, GPU), strategy="pipeline", evaluations=100)
    assert found.why is not None
    assert found.why.margin is not None
    assert found.why.margin < -MODEL_ERROR
    text = found.why.words()
    assert "Faster is data_parallel, which takes" in text
    assert f"({-found.why.margin:.1%} less)" in text
    assert "wins" not in text
    assert "model's error" not in text
    assert "decides" not in text


def test_no_pipeline_with_a_part_on_the_cpu_is_said_without_a_time() -> None:
    graph, job = graph_of("skip")
    cluster = Cluster.preset("4xV100-NVLink")
    found = portfolio.plan(graph, cluster, job, evaluations=50, pins={"first": "cpu0"})
    assert found.baselines["pipeline"] is None
    assert found.notes["pipeline"] == "no cut of the model into stages can be run"


def test_copies_that_win_are_explained_too() -> None:
    graph = layers([1e-2] * 8, parameters=4, activation=80)
    problem_cluster = mesh(*[GPU] * 4, bandwidth=1e10)
    found = find(graph, problem_cluster, strategy="auto", evaluations=300)
    assert found.plan.provenance is not None
    assert found.plan.provenance.strategy == "data_parallel"
    assert found.why is not None
    assert found.why.winner.strategy == "data_parallel"
    assert Problem.build(graph, problem_cluster, JOB).cluster.num_devices == 4
