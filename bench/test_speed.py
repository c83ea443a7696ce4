"""Benchmarks of the simulator, for pytest-benchmark: ``pytest bench/test_speed.py``.

Groups: *frequent* calls, *targeted* behaviours, *whole* jobs. `bench.regress` runs this file and
compares every time with the yardstick of the same run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.graphs import layered_dag, random_placements
from bench.rewards import mesh, star
from bench.yardstick import measure
from simcore import Cluster, Job, OpGraph, Plan, Problem, Settings, simulate, simulate_batch
from simcore.kernel import Engine

COUNT = 100_000  # push-pops of one yardstick round
DEVICES = 4
BATCH = {1_000: 200, 10_000: 24}


@pytest.fixture(scope="module", params=sorted(BATCH))
def graph(request: pytest.FixtureRequest) -> OpGraph:
    """The layered DAG at two sizes."""
    return layered_dag(request.param)


def problem_of(graph: OpGraph, engine: Engine, **settings: str) -> Problem:
    """Returns the graph's problem with the engine chosen."""
    problem = Problem.build(graph, mesh(DEVICES), Job(), Settings(**settings))
    return replace(problem, engine=engine)


def test_yardstick(benchmark: Any) -> None:
    """Times push-pops on a flat heap: what every other time is divided by."""
    benchmark.extra_info["per"] = COUNT
    benchmark.pedantic(measure, args=(COUNT,), rounds=40, warmup_rounds=2)


@pytest.mark.benchmark(group="frequent")
def test_lower(benchmark: Any, graph: OpGraph) -> None:
    """Times making a problem."""
    benchmark.extra_info["per"] = graph.num_ops
    cluster, job = mesh(DEVICES), Job()
    benchmark.pedantic(Problem.build, args=(graph, cluster, job), rounds=10, warmup_rounds=1)


@pytest.mark.benchmark(group="frequent")
def test_simulate_one_plan(benchmark: Any, graph: OpGraph) -> None:
    """Times one call of simulate, result included."""
    benchmark.extra_info["per"] = graph.num_ops
    cluster, job = mesh(DEVICES), Job()
    rng = np.random.default_rng(0)
    plan = Plan.from_placement(graph, cluster, job, rng.integers(DEVICES, size=graph.num_units))
    benchmark.pedantic(simulate, args=(graph, cluster, job, plan), rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(group="targeted")
@pytest.mark.parametrize("contention", ["none", "port", "ordered", "fifo"])
@pytest.mark.parametrize("order", ["program", "ready"])
def test_event_loop(benchmark: Any, graph: OpGraph, order: str, contention: str) -> None:
    """Times the event loop under every discipline, one thread."""
    problem = problem_of(graph, Engine.EVENTS, order=order, contention=contention)
    run_batch(benchmark, problem)


@pytest.mark.benchmark(group="targeted")
@pytest.mark.parametrize("order", ["program", "ready"])
@pytest.mark.parametrize("topology", [mesh, star])
def test_fair(
    benchmark: Any, graph: OpGraph, topology: Callable[[int], Cluster], order: str
) -> None:
    """Times the event loop where channels are shared, one thread."""
    problem = Problem.build(graph, topology(DEVICES), Job(), Settings(order=order))
    run_batch(benchmark, problem)


@pytest.mark.benchmark(group="targeted")
@pytest.mark.parametrize("contention", ["none", "port", "ordered"])
def test_sweep(benchmark: Any, graph: OpGraph, contention: str) -> None:
    """Times the sweep, one thread."""
    run_batch(benchmark, problem_of(graph, Engine.SWEEP, contention=contention))


@pytest.mark.benchmark(group="whole")
@pytest.mark.parametrize("contention", ["none", "port"])
def test_rewards(benchmark: Any, graph: OpGraph, contention: str) -> None:
    """Times a batch of rewards as an agent asks for them, one thread."""
    run_batch(benchmark, problem_of(graph, Engine.LANES, contention=contention))


def run_batch(benchmark: Any, problem: Problem) -> None:
    """Times a batch of random placements; what is compared is the time per op and placement."""
    count = BATCH[problem.graph.num_ops]
    plans = random_placements(count, problem.graph.num_ops, np.arange(DEVICES), 0)
    benchmark.extra_info["per"] = count * problem.graph.num_ops
    benchmark.pedantic(
        simulate_batch, args=(problem, plans), kwargs={"threads": 1}, rounds=12, warmup_rounds=1
    )
