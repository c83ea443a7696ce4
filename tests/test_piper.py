"""Piper's program gives its authors' figures, and what brute force gives where it is exact."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.exact.piper import (
    VANILLA,
    Config,
    PiperEdge,
    PiperNode,
    PiperProblem,
    PiperStage,
    piper_seconds,
    read_piper,
    without,
)
from agents.exact.piper_graph import piper_graph, piper_stages
from agents.exact.piper_planner import plan_equal_stages, plan_piper
from agents.exact.stage_plan import make_stage_plan
from simcore.cluster import Cluster
from simcore.errors import GraphError, InfeasibleError, PlanError
from simcore.job import Job
from simcore.simulation import simulate

# (memory GiB, devices) -> seconds per sample of Piper and of equal stages; planning notes, 4.2
PUBLISHED = {
    (80, 8): (0.122007, 0.122007),
    (80, 32): (0.030844, 0.030844),
    (8, 8): (0.165856, 0.230978),
    (8, 32): (0.041515, 0.051351),
    (8, 64): (0.020201, 0.025725),
    (1, 128): (0.038872, None),
}
PUBLISHED_LARGE = {
    (80, 64): (0.015650, 0.015650),
    (80, 128): (0.008053, 0.008053),
    (8, 128): (0.010121, 0.012911),
    (8, 256): (0.005081, 0.006505),
    (8, 512): (0.002561, 0.003301),
    (1, 256): (0.017791, None),
}


def bert(data: Path, memory: float, devices: int) -> PiperProblem:
    problem = read_piper(data / "piper" / "bert32a100.json")
    return msgspec.structs.replace(
        problem,
        max_memory_per_device=memory * 2.0**30,
        max_devices=devices,
        bandwidth=25.0 * 2**30,
    )


def check(data: Path, case: tuple[int, int], figures: tuple[float, float | None]) -> None:
    problem = bert(data, *case)
    plan = plan_piper(problem)
    assert round(plan.seconds_per_sample, 6) == figures[0]
    assert piper_seconds(problem, plan.stages) == pytest.approx(plan.seconds_per_sample)
    if figures[1] is None:
        with pytest.raises(InfeasibleError):
            plan_equal_stages(problem)
    else:
        assert round(plan_equal_stages(problem).seconds_per_sample, 6) == figures[1]


@pytest.mark.parametrize(("case", "figures"), PUBLISHED.items())
def test_bert_32_takes_what_the_authors_print(
    data: Path, case: tuple[int, int], figures: tuple[float, float | None]
) -> None:
    check(data, case, figures)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "figures"), PUBLISHED_LARGE.items())
def test_bert_32_on_many_devices_takes_what_the_authors_print(
    data: Path, case: tuple[int, int], figures: tuple[float, float | None]
) -> None:
    check(data, case, figures)


def test_without_recomputation_bert_32_is_as_slow_as_the_authors_print(data: Path) -> None:
    plan = plan_piper(without(bert(data, 8, 8), recompute=True))
    assert round(plan.seconds_per_sample, 6) == 0.259752


@pytest.mark.parametrize(("memory", "devices"), [(2, 8), (1, 64)])
def test_what_does_not_fit_is_refused(data: Path, memory: int, devices: int) -> None:
    with pytest.raises(InfeasibleError, match=f"no pipeline on {devices} devices"):
        plan_piper(bert(data, memory, devices))


@st.composite
def problems(draw: st.DrawFn) -> PiperProblem:
    count = draw(st.integers(1, 4))
    number = st.integers(0, 9).map(float)
    edges = [
        PiperEdge(one, other, draw(number))
        for one, other in itertools.combinations(range(count), 2)
        if draw(st.booleans())
    ]

    def config(node: int) -> Config:
        return Config(
            VANILLA,
            draw(number),
            draw(number),
            draw(st.integers(0, 3)),
            draw(st.integers(0, 3)),
            {str(e.source_id): draw(number) for e in edges if e.dest_id == node},
            {str(e.dest_id): draw(number) for e in edges if e.source_id == node},
        )

    nodes = [
        PiperNode(node, {t: [config(node)] for t in ("1", "2")[: draw(st.integers(1, 2))]})
        for node in range(count)
    ]
    return PiperProblem(
        draw(st.sampled_from([6.0, 12.0, 100.0])),
        draw(st.integers(1, 4)),
        2.0,
        draw(st.sampled_from([1, 2, 4, 6])),
        nodes,
        edges,
    )


def all_pipelines(problem: PiperProblem) -> Iterator[tuple[PiperStage, ...]]:
    """Yields all pipelines, written apart from the planner."""
    count = len(problem.nodes)
    for stages in range(1, count + 1):
        for owner in itertools.product(range(stages), repeat=count):
            if set(owner) != set(range(stages)):
                continue
            if any(owner[e.source_id] > owner[e.dest_id] for e in problem.edges):
                continue
            shapes = itertools.product((1, 2, 3, 4), (1, 2))
            for degrees in itertools.product(list(shapes), repeat=stages):
                yield tuple(
                    PiperStage(part := members(owner, stage), d, t, (VANILLA,) * len(part))
                    for stage, (d, t) in enumerate(degrees)
                )


def members(owner: tuple[int, ...], stage: int) -> tuple[int, ...]:
    return tuple(node for node, at in enumerate(owner) if at == stage)


@given(problems())
@settings(max_examples=40)
def test_with_one_configuration_a_node_the_program_is_exact(problem: PiperProblem) -> None:
    best = min(
        (
            piper_seconds(problem, stages)
            for stages in all_pipelines(problem)
            if sum(s.replicas * s.tensor_degree for s in stages) <= problem.max_devices
        ),
        default=math.inf,
    )
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            plan_piper(problem)
        return
    plan = plan_piper(problem)
    assert plan.seconds_per_sample == pytest.approx(best)
    assert piper_seconds(problem, plan.stages) == pytest.approx(best)


def test_times_in_milliseconds_can_be_scaled(data: Path) -> None:
    path = data / "piper" / "bert32a100.json"
    whole = read_piper(path).nodes[3].configs["1"][0].time_per_sample
    assert read_piper(path, time_unit=1e-3).nodes[3].configs["1"][0].time_per_sample == whole / 1e3


def test_a_malformed_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"nodes": []}')
    with pytest.raises(GraphError, match=r"bad\.json: not a Piper file"):
        read_piper(path)


def test_the_simulator_rates_a_plan_of_piper(data: Path) -> None:
    problem = without(bert(data, 80, 8), tensor=True)
    plan = plan_piper(problem)
    graph = piper_graph(problem, "bert32")
    cluster = Cluster.preset("8xA100-NVSwitch")
    job = Job(batch=256, assume_linear=True, optimizer="sgd")
    made = make_stage_plan(graph, cluster, job, piper_stages(plan), microbatches=32)
    assert made.validate(graph, cluster, job) == []
    assert simulate(graph, cluster, job, made).step_time > 0


def test_stages_that_split_tensors_are_not_converted(data: Path) -> None:
    plan = plan_piper(bert(data, 8, 8))
    with pytest.raises(PlanError, match="cannot be converted"):
        piper_stages(plan)
