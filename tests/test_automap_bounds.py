"""Bounds of sharded plans against plans that are simulated in full, and what a search answers."""

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agents import portfolio
from agents.automap.bounds import lean_bound, mesh_bound
from agents.automap.combined import KINDS, SLOTS, ZERO, Combined
from agents.automap.combined_bound import CombinedBound, Work, filled
from agents.automap.operators import OperatorPartition
from agents.planners.pipeline_shards import preferred
from agents.planners.recorder import Budget
from agents.planners.sharding import Shardings
from agents.planners.space import PlacementSpace
from simcore import Cluster, Problem, Settings, simulate
from simcore.errors import JobError, PlanError
from simcore.frontends.torch_capture import capture
from simcore.graph import OpGraph
from simcore.plan import ONE_HOST
from simcore.shards import is_sharded
from tests.sharded_models import GPUS, JOB, SWITCH, images, transformer
from tests.test_planners import CPU, mesh

SERVERS = Cluster.preset("2x8xV100")
WITHOUT_HOST = msgspec.structs.replace(ONE_HOST, launch="graph")  # or the host decides all
ALONE = ("transformer", "towers", "layers")


class Towers(nn.Module):
    """Two halves that do not wait for each other, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1024)) for _ in "ab"
        )
        self.head = nn.Linear(2048, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], 1)
        return nn.functional.cross_entropy(self.head(both), target)


class Layers(nn.Module):
    """Linear layers of different work, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (2048, 4096, 1024, 4096, 512)
        pairs = itertools.pairwise(sizes)
        self.body = nn.Sequential(*(nn.Linear(a, b) for a, b in pairs))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), target)


def captured(model: type[nn.Module]) -> OpGraph:
    inputs = (torch.zeros(16, 2048), torch.zeros(16, dtype=torch.long))
    return capture(model(), inputs, name=model.__name__.lower())


@pytest.fixture(scope="module")
def graphs() -> dict[str, OpGraph]:
    return {
        "transformer": transformer(2),
        "images": images(),
        "towers": captured(Towers),
        "layers": captured(Layers),
    }


def space_of(
    graph: OpGraph, cluster: Cluster = SWITCH, settings: Settings = ONE_HOST
) -> PlacementSpace:
    return PlacementSpace.build(Problem.build(graph, cluster, JOB, settings))


def gpus_of(cluster: Cluster, count: int) -> list[int]:
    return [k for k, d in enumerate(cluster.devices) if not d.kind.startswith("CPU")][:count]


def rows_of(problem: Combined) -> list[tuple[int, ...]]:
    """Returns every row of a combined problem."""
    heads: list[tuple[int, ...]] = [()]
    for _ in SLOTS:
        heads = [(*head, action) for head in heads for action in problem.legal(head)]
    return heads


# pipelines of sharded stages


@pytest.mark.parametrize("contention", ["fair", "none"])
@pytest.mark.parametrize("name", ALONE)
def test_no_plan_of_a_combined_problem_beats_its_bound(
    graphs: dict[str, OpGraph], name: str, contention: str
) -> None:
    settings = msgspec.structs.replace(WITHOUT_HOST, contention=contention)
    space = space_of(graphs[name], SWITCH, settings)
    problem = Combined.build(space, gpus_of(SWITCH, 4))
    bound, rows = CombinedBound(problem=problem), rows_of(problem)
    rng, near = np.random.default_rng(0), math.inf
    count = 12 if name == "transformer" else 40
    for place in rng.permutation(len(rows))[:count].tolist():
        seconds = problem.simulated(rows[place])[0]
        if math.isfinite(seconds):
            assert 0.0 < bound.of(rows[place]) <= seconds
            near = min(near, seconds / bound.of(rows[place]))
    assert near < (1.5 if name == "transformer" else 1.15)  # it is no empty promise


def test_no_plan_over_two_servers_beats_its_bound(graphs: dict[str, OpGraph]) -> None:
    problem = Combined.build(space_of(graphs["layers"], SERVERS), gpus_of(SERVERS, 16))
    bound, rows = CombinedBound(problem=problem), rows_of(problem)
    for place in np.random.default_rng(1).permutation(len(rows))[:25].tolist():
        assert bound.of(rows[place]) <= problem.simulated(rows[place])[0]


def test_the_least_bound_is_below_the_best_of_all_plans(graphs: dict[str, OpGraph]) -> None:
    problem = Combined.build(space_of(graphs["layers"]), gpus_of(SWITCH, 2))
    bound = CombinedBound(problem=problem)
    for sharded in (True, False):
        rows = [row for row in rows_of(problem) if bound.shares(row) == sharded]
        best = min(problem.simulated(row)[0] for row in rows)
        assert 0.0 < bound.least(sharded=sharded, plain=True) <= best
    without = bound.least(sharded=False, plain=False)
    assert without >= bound.least(sharded=False, plain=True)


def test_branches_that_do_not_wait_for_each_other_fill_no_pipeline(
    graphs: dict[str, OpGraph],
) -> None:
    for name, waits in (("towers", False), ("layers", True)):
        problem = Combined.build(space_of(graphs[name]), gpus_of(SWITCH, 2))
        assert (CombinedBound(problem=problem).waits_from == 0) == waits


def test_ranks_that_wait_bound_more_than_ranks_that_do_not() -> None:
    work = Work(1.0, 2.0, 1.5, 0.1, 0.0, 0.0, (0.0, 0.0, 0.0), 0)
    loose = work._replace(loose=(1.0, 2.0, 1.5))
    equal = 8 * 3.0 / 4 + 0.1 / 4
    assert filled(work, (4, 8), "interleaved") == pytest.approx(equal)
    assert filled(loose, (4, 8), "1f1b") == pytest.approx(equal)
    waits = filled(work, (4, 8), "1f1b")
    assert equal <= filled(work, (4, 8), "zb-h1") < waits
    # ranks whose share of the work shrinks by 1 - 1/8 each end at the same time
    assert waits == pytest.approx(3.0 / (1.0 - (1.0 - 1.0 / 8) ** 4))
    assert filled(work._replace(heaviest=2.0), (4, 8), "1f1b") == 16.0
    # one microbatch on its way through all stages and back
    assert filled(work, (8, 2), "interleaved") == 3.0
    assert filled(work, (8, 2), "zb-h1") == pytest.approx(2.5)


# groups on a mesh


@pytest.mark.parametrize("contention", ["fair", "none"])
@pytest.mark.parametrize("axes", [{"x": 4}, {"dp": 2, "x": 2}, {"x": 2, "y": 2}])
def test_no_plan_in_less_memory_beats_the_lean_bound(
    graphs: dict[str, OpGraph], axes: dict[str, int], contention: str
) -> None:
    graph = graphs["layers"]
    problem = OperatorPartition.build(graph, SWITCH, JOB, GPUS[:4], axes)
    shares = contention != "none"
    least = lean_bound(problem, shares_links=shares)
    plain = mesh_bound(problem.additive, shares_links=shares)
    settings = msgspec.structs.replace(WITHOUT_HOST, contention=contention, host="per_rank")
    rng, count = np.random.default_rng(0), 0
    for _ in range(6):
        row = np.array([rng.choice(values) for values in problem.additive.values], np.int8)
        plan = problem.plan(row)
        if plan is None:
            continue
        plan = msgspec.structs.replace(plan, settings=settings)
        assert plain <= simulate(graph, SWITCH, JOB, plan).step_time
        for zero, microbatches in ((1, 1), (3, 1), (3, 2)):
            lean = msgspec.structs.replace(
                plan, schedule="gpipe", microbatches=microbatches, optimizer_sharding=zero
            )
            try:
                assert least <= simulate(graph, SWITCH, JOB, lean).step_time
            except (PlanError, JobError):
                continue
            count += 1
    assert count > 3


# what a search answers


def test_a_search_that_proves_bounds_all_that_it_may_answer_with(
    graphs: dict[str, OpGraph],
) -> None:
    cluster = Cluster.preset("4xV100-NVLink")
    shardings = Shardings(space=space_of(graphs["layers"], cluster), proves=True)
    work = shardings.bound
    shardings.run(Budget(evaluations=300))
    assert shardings.best is not None
    assert work < shardings.bound == shardings.proven <= shardings.best.step_time
    found = [each for each in shardings.tried if each.shares]
    assert found
    assert all(shardings.bound <= each.step_time for each in found)
    problem = Combined.build(shardings.space, gpus_of(cluster, 4))
    bound, rng = CombinedBound(problem=problem), np.random.default_rng(0)
    rows = [row for row in rows_of(problem) if bound.shares(row)]
    for place in rng.permutation(len(rows))[:25].tolist():
        assert shardings.bound <= problem.simulated(rows[place])[0]


def test_a_search_that_was_cut_short_proves_no_more_than_the_work(
    graphs: dict[str, OpGraph],
) -> None:
    shardings = Shardings(space=space_of(graphs["layers"]), proves=True)
    work = shardings.bound
    shardings.run(Budget(evaluations=3))
    assert shardings.proven == 0.0
    assert shardings.bound == work


def test_the_sharding_strategy_shares_out_more_than_the_samples() -> None:
    cluster = Cluster.preset("4xV100-NVLink")
    found = portfolio.plan(transformer(2), cluster, JOB, strategy="sharding", evaluations=150)
    plan = found.plan
    assert msgspec.json.encode(plan)  # numbers of numpy cannot be
    assert is_sharded(plan) or (len(plan.stages) == 1 and plan.optimizer_sharding)
    assert found.sharding is not None
    assert found.sharding.shares


@pytest.mark.slow  # tables of all meshes of 16 GPUs
def test_a_few_evaluations_are_not_all_spent_on_baselines() -> None:
    found = portfolio.plan(images(), SERVERS, JOB, strategy="sharding", evaluations=20)
    assert found.feasible
    assert found.baselines["sharding"] == found.result.step_time


def test_more_of_zero_is_taken_only_where_it_gains_more_than_the_error() -> None:
    times = {0: 1.02, 1: 1.0, 3: 1.01}
    assert preferred(times, times.__getitem__, int) == 0
    assert preferred({**times, 0: 1.04}, {**times, 0: 1.04}.__getitem__, int) == 1
    assert preferred([], times.__getitem__, int) is None


def test_copies_need_no_sharded_optimizer_where_they_fit(graphs: dict[str, OpGraph]) -> None:
    shardings = Shardings(space=space_of(graphs["layers"]))
    shardings.run(Budget(evaluations=80))
    assert shardings.best is not None
    assert shardings.best.plan.optimizer_sharding == 0


def test_only_gpus_share_a_model_out(graphs: dict[str, OpGraph]) -> None:
    shardings = Shardings(space=space_of(graphs["layers"], mesh(CPU, CPU)))
    shardings.run(Budget(evaluations=20))
    assert shardings.note == "only GPUs share a model out, and there are fewer than two"
    assert not shardings.tried


def test_a_combined_problem_says_its_choices_in_words(graphs: dict[str, OpGraph]) -> None:
    problem = Combined.build(space_of(graphs["layers"]), gpus_of(SWITCH, 4))
    kind = SLOTS.index("kind")
    said = [problem.says(kind, action) for action in range(len(KINDS))]
    assert said[0] == "no op split"
    assert "tensor parallel" in said
    assert problem.says(SLOTS.index("zero"), ZERO.index(3)) == "3"
