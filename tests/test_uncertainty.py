"""Draws of what costs may really be, and the deciles of a step time."""

import dataclasses
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from simcore.cli import main
from simcore.cluster import Cluster
from simcore.cost import cost_table
from simcore.errors import UsageError
from simcore.graph import OpGraph
from simcore.graph_file import write_graph
from simcore.job import Job
from simcore.models.megatron import MegatronShape, sized
from simcore.op_curves import CostSource
from simcore.plan import Plan
from simcore.simulation import simulate
from simcore.uncertainty import (
    Draws,
    Interval,
    Spread,
    communication_share,
    draw_scales,
    op_errors,
    sampled,
    total_error,
)

JOB = Job(batch=8, optimizer="adam")
EXACT = Spread(link=0.0, machine=0.0)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    from simcore.frontends.torch_capture import capture

    shape = MegatronShape(layers=2, width=64, heads=2, length=16, vocabulary=128)
    built = sized(shape)
    return capture(built.module, built.inputs, JOB, name="gpt")


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.preset("4xP100-PCIe")


@pytest.fixture(scope="module")
def plan(graph: OpGraph, cluster: Cluster) -> Plan:
    gpus = [cluster.device_names[index] for index in cluster.gpu_indices]
    return Plan.data_parallel(graph, cluster, JOB, gpus)


def deciles(
    graph: OpGraph, cluster: Cluster, plan: Plan, spread: Spread | None = None, **more: int
) -> Interval:
    draws = Draws(**({"samples": 10} | more), spread=spread or Spread())
    return sampled(graph, cluster, JOB, plan, draws)


def test_a_decile_lies_on_each_side_of_the_simulated_step(
    graph: OpGraph, cluster: Cluster, plan: Plan
) -> None:
    found = deciles(graph, cluster, plan, samples=30)
    assert found.p10 < found.p50 < found.p90
    assert found.p10 < simulate(graph, cluster, JOB, plan).step_time < found.p90


def test_the_same_seed_draws_the_same(graph: OpGraph, cluster: Cluster, plan: Plan) -> None:
    first = deciles(graph, cluster, plan, seed=3)
    assert first == deciles(graph, cluster, plan, seed=3)
    assert first != deciles(graph, cluster, plan, seed=4)


def test_a_machine_of_unknown_state_widens_the_interval(
    graph: OpGraph, cluster: Cluster, plan: Plan
) -> None:
    narrow = deciles(graph, cluster, plan, EXACT)
    wide = deciles(graph, cluster, plan, dataclasses.replace(EXACT, machine=0.5))
    assert wide.p90 / wide.p10 > narrow.p90 / narrow.p10


def test_links_matter_only_where_the_step_waits_for_them(
    graph: OpGraph, cluster: Cluster, plan: Plan
) -> None:
    alone = Plan.data_parallel(graph, cluster, JOB, plan.stages[0].devices[:1])
    free = dataclasses.replace(EXACT, link=1.0)
    assert communication_share(simulate(graph, cluster, JOB, alone)) == 0.0
    assert communication_share(simulate(graph, cluster, JOB, plan)) > 0.0
    assert deciles(graph, cluster, alone, free) == deciles(graph, cluster, alone, EXACT)
    assert deciles(graph, cluster, plan, free) != deciles(graph, cluster, plan, EXACT)


def test_ops_of_one_signature_are_wrong_together_and_those_of_one_class_in_part(
    graph: OpGraph,
) -> None:
    error = np.full((graph.num_ops, 1), 0.3)
    scales = draw_scales(graph, error, Spread(shared=0.5), np.random.default_rng(0))[:, 0]
    known = graph.signature >= 0
    first = {number: scales[op] for op, number in reversed(list(enumerate(graph.signature)))}
    assert all(scales[op] == first[graph.signature[op]] for op in np.flatnonzero(known))
    draws = [
        np.log(draw_scales(graph, error, Spread(shared=0.5), np.random.default_rng(seed))[:, 0])
        for seed in range(300)
    ]
    alike = np.flatnonzero(known & (graph.op_class == graph.op_class[np.argmax(known)]))
    pair = np.array([[draw[alike[0]], draw[alike[-1]]] for draw in draws])
    assert graph.signature[alike[0]] != graph.signature[alike[-1]]
    assert 0.3 < np.corrcoef(pair.T)[0, 1] < 0.7
    assert pair.std() == pytest.approx(np.log(1.3), rel=0.1)


def test_the_error_of_a_sum_is_that_of_its_draws(graph: OpGraph) -> None:
    source = np.random.default_rng(1)
    error = source.uniform(0.05, 0.2, graph.num_ops)
    seconds = source.uniform(0.0, 1.0, graph.num_ops)
    spread = Spread(shared=0.3)
    draws = [
        (draw_scales(graph, error[:, None], spread, source)[:, 0] * seconds).sum()
        for _ in range(2000)
    ]
    said = total_error(seconds, error, graph.op_class, graph.signature, spread.shared)
    assert np.std(draws) / seconds.sum() == pytest.approx(said, rel=0.1)
    assert total_error(0 * seconds, error, graph.op_class, graph.signature, 0.3) == 0.0


def test_what_a_curve_says_of_another_program_is_less_certain_than_what_was_measured_in_it(
    graph: OpGraph,
) -> None:
    cost = cost_table(graph, JOB, ("P100-PCIe-16GB",), (None,))
    known = dataclasses.replace(EXACT, transfer=0.0)
    np.testing.assert_allclose(op_errors(cost, known), cost.relative_error)
    more = op_errors(cost, dataclasses.replace(EXACT, transfer=0.3))
    modelled = np.isin(cost.source, (CostSource.CURVE, CostSource.ROOFLINE))
    assert modelled.any()
    assert (more[modelled] >= np.expm1(0.3)).all()
    assert (more[modelled] > cost.relative_error[modelled]).all()
    fixed = dataclasses.replace(cost, source=np.full_like(cost.source, CostSource.FIXED))
    np.testing.assert_allclose(op_errors(fixed, EXACT), cost.relative_error)


def test_no_error_is_no_draw(graph: OpGraph) -> None:
    none = np.zeros((graph.num_ops, 2))
    assert (draw_scales(graph, none, Spread(), np.random.default_rng(0)) == 1.0).all()


def test_deciles_need_ten_samples(graph: OpGraph, cluster: Cluster, plan: Plan) -> None:
    with pytest.raises(UsageError, match="at least 10 samples, not 3"):
        deciles(graph, cluster, plan, samples=3)


def test_the_command_says_the_deciles(
    graph: OpGraph, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, where = tmp_path / "plan.json", tmp_path / "graph.json"
    write_graph(graph, where)
    plan.save(out)
    more = ["--graph", str(where), "--cluster", "4xP100-PCIe", "--samples", "10", "--json"]
    assert main(["simulate", str(out), *more]) == 0
    record = json.loads(capsys.readouterr().out)
    interval = record["interval_s"]
    assert interval["samples"] == 10
    assert interval["p10"] < interval["p50"] < interval["p90"]


def test_too_few_draws_and_code_of_a_plan_are_refused_before_anything_is_captured(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    named = msgspec.structs.replace(plan.graph, source="somewhere:factory")
    msgspec.structs.replace(plan, graph=named).save(out)
    for more, said in (
        (["--graph", "bert-base", "--samples", "9"], "at least 10 samples, not 9"),
        (["--cluster", "4xP100-PCIe"], "somewhere:factory, which is not run"),
    ):
        assert main(["simulate", str(out), *more]) == 2
        printed = capsys.readouterr().err
        assert said in printed
        assert "capturing" not in printed


@pytest.mark.parametrize(
    "spread",
    [{"shared": 2.0}, {"shared": -0.5}, {"link": -1.0}, {"machine": float("inf")},
     {"transfer": float("nan")}],
)  # fmt: skip
def test_a_spread_that_is_none_is_refused(spread: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=rf"spread: {next(iter(spread))} must be from 0 to"):
        Spread(**spread)


def test_more_samples_than_a_million_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 1,000,000 samples"):
        Draws(samples=10**20)
