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
from agents.automap.planner import GroupSearch
from agents.planners.data_parallel import data_parallel
from agents.planners.pipeline_layouts import ANYTHING
from agents.planners.pipeline_shards import preferred
from agents.planners.recorder import Budget
from agents.planners.shard_bounds import Searched, proven
from agents.planners.shard_sets import shard_sets
from agents.planners.sharding import Shardings
from agents.planners.space import PlacementSpace
from agents.portfolio_search import Search
from simcore import Cluster, Problem, Settings, simulate
from simcore.errors import JobError, PlanError
from simcore.frontends.torch_capture import capture
from simcore.graph import OpGraph
from simcore.plan import ONE_HOST, Constraints
from simcore.shards import is_sharded
from tests.sharded_models import GPUS, JOB, SWITCH, images, transformer
from tests.test_planners import CPU, mesh

SERVERS = Cluster.preset("2x8xV100")
WITHOUT_HOST = msgspec.structs.replace(ONE_HOST, launch="graph")  # or the host decides all


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


@pytest.mark.parametrize(
    ("name", "contention"),
    [
        ("layers", "fair"),
        ("layers", "none"),
        ("towers", "fair"),
        pytest.param("towers", "none", marks=pytest.mark.slow),
        pytest.param("transformer", "fair", marks=pytest.mark.slow),
        pytest.param("transformer", "none", marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize("budget", [Budget(evaluations=3), Budget(0.0)])
def test_a_search_that_was_cut_short_bounds_what_it_did_not_look_at(
    graphs: dict[str, OpGraph], budget: Budget
) -> None:
    cluster = Cluster.preset("4xV100-NVLink")
    whole, short = (Shardings(space=space_of(graphs["layers"], cluster)) for _ in "ab")
    whole.run(Budget(evaluations=300))
    whole.prove(Budget())
    short.run(budget)
    assert not short.searched.all_styles
    assert short.proven == 0.0
    floor = short.bound
    short.prove(Budget(evaluations=0))
    assert floor == short.bound  # nothing was looked at
    short.prove(Budget())
    assert floor <= short.bound <= whole.bound
    assert whole.best is not None
    assert whole.bound <= whole.best.step_time


def test_what_remains_is_bounded_by_the_floor_of_its_devices(graphs: dict[str, OpGraph]) -> None:
    space = space_of(graphs["layers"])
    sets = shard_sets(space.problem, gpus_of(SWITCH, 4))
    search = GroupSearch(space=space, sets=[each.names for each in sets])
    search.run(Budget(evaluations=0))
    assert search.unknown
    assert search.bound == math.inf
    searched = Searched(sets=sets, groups=search, all_styles=True)
    assert proven(searched, math.inf, sharded=True) == sets[0].floor
    search.prove(Budget())
    assert not search.unknown
    assert proven(searched, math.inf, sharded=True) == search.bound > sets[0].floor
    searched.all_styles = False
    assert proven(searched, math.inf, sharded=True) == sets[0].floor


# clusters of several kinds, batches that do not divide

MIXED = Cluster.preset("2xA100+4xT4")


def test_on_several_kinds_each_kind_and_numbers_that_divide_the_batch_are_tried(
    graphs: dict[str, OpGraph],
) -> None:
    job = msgspec.structs.replace(JOB, batch=64)
    problem = Problem.build(graphs["layers"], MIXED, job, ONE_HOST)
    sets = shard_sets(problem, range(MIXED.num_devices))
    names = [MIXED.devices[k].name for k in MIXED.gpu_indices]
    assert [list(each.names) for each in sets if each.is_uniform] == [names[:2], names[2:]]
    mixed = [list(each.names) for each in sets if not each.is_uniform]
    assert sorted(mixed, key=len) == [names[:4], names]
    assert sets == sorted(sets, key=lambda each: each.floor)
    switch = Problem.build(graphs["layers"], SWITCH, job, ONE_HOST)
    three = shard_sets(switch, gpus_of(SWITCH, 3))
    assert [len(each.names) for each in three] == [3, 2]
    assert [len(each.names) for each in shard_sets(switch, gpus_of(SWITCH, 4))] == [4]


def test_a_cluster_of_several_kinds_has_a_sharded_plan_and_a_bound_of_its_own(
    graphs: dict[str, OpGraph],
) -> None:
    space = space_of(graphs["layers"], MIXED, WITHOUT_HOST)
    shardings = Shardings(space=space, proves=True)
    shardings.run(Budget(evaluations=300))
    assert shardings.best is not None
    assert shardings.best.shares
    kinds = {
        MIXED.devices[MIXED.device_index(n)].kind for n in shardings.best.plan.stages[0].devices
    }
    assert kinds == {"A100-PCIE-40GB"}
    assert shardings.searched.floor < shardings.bound == shardings.proven
    feasible = [each for each in shardings.tried if each.result.feasible and each.shares]
    assert shardings.bound <= min(each.step_time for each in feasible)
    # all plans of pairs of equal GPUs, and samples of all four
    for each, bound in shardings.searched.pipelines:
        problem = Combined.build(space, [MIXED.device_index(name) for name in each.names])
        rows = [row for row in rows_of(problem) if bound.shares(row)]
        for place in np.random.default_rng(0).permutation(len(rows))[:30].tolist():
            seconds = problem.simulated(rows[place])[0]
            assert shardings.bound <= seconds
            assert each.floor <= seconds


@pytest.mark.parametrize("cluster", [MIXED, SWITCH])
def test_no_equal_shares_beat_the_floor_of_their_devices(
    graphs: dict[str, OpGraph], cluster: Cluster
) -> None:
    space = space_of(graphs["layers"], cluster, WITHOUT_HOST)
    shardings = Shardings(space=space)
    shardings.run(Budget(evaluations=60))
    floors = {each.names: each.floor for each in shardings.searched.sets}
    for each in shardings.tried:
        devices = tuple(name for stage in each.plan.stages for name in stage.devices)
        least = min(floors[names] for names in floors if set(names) == set(devices))
        assert 0.0 < least <= each.step_time


def test_auto_says_of_every_kind_what_it_cannot_beat(graphs: dict[str, OpGraph]) -> None:
    space = space_of(graphs["layers"], Cluster.preset("4xV100-NVLink"))
    search = Search(space, Constraints(), ("auto", ANYTHING), Budget(60.0), None)
    search.copies = data_parallel(space)
    search.shardings = Shardings(space=space)
    search.shardings.run(Budget(evaluations=30))
    before = search.bounds()
    assert before.keys() == {"placement", "data_parallel", "sharding"}
    assert before["sharding"] == search.shardings.searched.floor == min(before.values())
    search._prove_shardings()
    after = search.bounds()
    assert after["sharding"] > before["sharding"]
    best = search.shardings.best
    assert best is not None
    assert after["sharding"] <= best.step_time


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
