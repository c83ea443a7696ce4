"""Auto-MAP's plans: known answers unprompted, pipelines of sharded stages, reasons, bounds."""

import json
import time

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agents.automap.bounds import mesh_bound
from agents.automap.combined import BEST, KINDS, SLOTS, Combined
from agents.automap.contention import link_rates
from agents.automap.explain import decision_name
from agents.automap.operators import OperatorPartition
from agents.automap.planner import device_sets, optimum
from agents.planners.pipeline_shards import CombinedSearch
from agents.planners.recorder import Budget
from agents.planners.shard_reasons import row_of
from agents.planners.sharding import Shardings
from agents.planners.space import PlacementSpace
from simcore import Cluster, Job, Problem, Settings, simulate
from simcore.frontends.torch_capture import capture
from simcore.graph import OpGraph, Role
from simcore.kernel import Change
from simcore.kernel.shard_records import STEPS
from simcore.plan import Plan
from simcore.shard_space import WHOLE, ShardSpace
from simcore.shards import sharded_plan
from simcore.sources import load_graph
from tests.sharded_models import GPUS, JOB, SWITCH, images, transformer

SERVERS = Cluster.preset("2x8xV100")
WIDE = Job(batch=4096)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return transformer(4)


def space_of(graph: OpGraph, cluster: Cluster = SWITCH) -> PlacementSpace:
    return PlacementSpace.build(Problem.build(graph, cluster, JOB, Settings()))


def split_storages(problem: OperatorPartition, row: np.ndarray) -> set[str]:
    """Returns the names of the parameters that a plan splits, where few layers are left."""
    space = problem.folded.spaces[0]
    split = {
        storage
        for decision, groups in enumerate(space.decisions)
        for group in groups
        for storage, _ in space.linkage.groups[group].places
        if row[decision] != WHOLE
    }
    held = np.flatnonzero(space.graph.tensor_role == Role.PARAMETER).tolist()
    return {
        space.graph.tensor_names[t] for t in held if int(space.graph.tensor_storage[t]) in split
    }


def names_of(problem: OperatorPartition, row: np.ndarray) -> set[str]:
    return {decision_name(problem, d) for d in np.flatnonzero(row != WHOLE).tolist()}


# known answers


def test_vgg_splits_convolutions_by_samples_and_the_wide_layers_by_width() -> None:
    graph, job, _ = load_graph("vgg-19")
    problem = OperatorPartition.build(graph, SERVERS, job, device_sets(SERVERS)[0], {"x": 16})
    row, _ = optimum(problem)
    assert "samples" in names_of(problem, row)
    split = split_storages(problem, row)
    assert {"classifier.0.weight", "classifier.3.weight"} <= split
    assert not any(name.startswith("features") for name in split)


class Recommender(nn.Module):
    """A large table and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2_000_000, 128)
        self.layers = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        seen = self.layers(self.table(ids).flatten(1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(seen, clicked)


def recommender() -> OpGraph:
    with torch.device("meta"):
        model = Recommender()
    inputs = (torch.zeros(4096, 8, dtype=torch.long), torch.zeros(4096))
    return capture(model, inputs, name="recommender")


def test_a_large_table_is_split_and_not_copied() -> None:
    graph, cluster = recommender(), Cluster.preset("4xP100-PCIe")
    gpus = device_sets(cluster)[0]
    problem = OperatorPartition.build(graph, cluster, WIDE, gpus, {"x": 4})
    row, _ = optimum(problem)
    assert "table.weight" in split_storages(problem, row)


@pytest.mark.slow
def test_experts_are_spread_and_the_rest_is_split_by_samples() -> None:
    graph, job, _ = load_graph("moe-stacked")
    problem = OperatorPartition.build(graph, SWITCH, job, GPUS, {"x": 8})
    row, _ = optimum(problem)
    assert "samples" in names_of(problem, row)
    split = split_storages(problem, row)
    assert split
    assert all(".moe." in name for name in split)


# bounds


@pytest.mark.parametrize("mesh", [{"x": 4}, {"dp": 2, "x": 2}, {"x": 2, "y": 2}])
def test_no_plan_in_full_beats_the_bound_of_its_mesh(mesh: dict[str, int]) -> None:
    graph = images()
    problem = OperatorPartition.build(graph, SWITCH, JOB, GPUS[:4], mesh)
    bound, rng, count = mesh_bound(problem.additive), np.random.default_rng(0), 0
    for _ in range(20):
        row = np.array([rng.choice(values) for values in problem.additive.values], np.int8)
        plan = problem.plan(row)
        if plan is None:
            continue
        for contention in ("fair", "ordered"):
            settings = msgspec.structs.replace(plan.settings, contention=contention)
            full = simulate(graph, SWITCH, JOB, msgspec.structs.replace(plan, settings=settings))
            assert bound <= full.step_time
            count += 1
    assert count > 4


def test_a_collective_keeps_its_busiest_link_busy_no_longer_than_it_takes() -> None:
    for cluster, names in ((SERVERS, device_sets(SERVERS)[0]), (SWITCH, GPUS[:4])):
        space = ShardSpace.build(images(), cluster, JOB, names, {"x": len(names)})
        rate, curve = link_rates(space)[0], space.tables.timings[0]
        for change in (Change.ALL_REDUCE, Change.ALL_GATHER):
            seconds = curve["duration"][change][24 * STEPS]  # at 16 MiB
            assert 0.0 < rate[change] * 2**24 <= seconds * (1 + 1e-9)


# devices and pipelines


def test_meshes_are_laid_over_all_gpus_or_one_server() -> None:
    sets = device_sets(SERVERS)
    assert [len(names) for names in sets] == [16, 8]
    assert {name.split(".")[0] for name in sets[1]} == {"n0"}
    assert device_sets(SWITCH, GPUS[:3]) == [GPUS[:3]]


def test_pipelines_of_sharded_stages_are_searched_and_repeat_exactly(graph: OpGraph) -> None:
    problem = Combined.build(space_of(graph), list(range(4)))
    search, again = CombinedSearch(problem), CombinedSearch(problem)
    search.run(Budget(evaluations=25))
    again.run(Budget(evaluations=25))
    assert search.tried == again.tried
    assert search.fits
    assert search.step_time == min(
        time for row, (time, over) in search.tried.items() if not over and search.bound.shares(row)
    )
    staged = (1, 1, KINDS.index("tensor"), 1, 0, 0, 0)
    for row in (search.row, staged):
        assert row is not None
        plan = problem.plan(row)
        assert plan is not None
        loaded = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
        assert simulate(graph, SWITCH, JOB, loaded).step_time == problem.simulated(row)[0]
    for other in search.alternatives():
        assert other.seconds >= 0.0
        assert other.slot in SLOTS
        assert other.chosen != other.other


def test_the_best_groups_are_a_way_to_share_a_stage() -> None:
    cluster = Cluster.preset("4xP100-PCIe")
    task = Problem.build(recommender(), cluster, WIDE, Settings())
    problem = Combined.build(PlacementSpace.build(task), list(range(4)))
    row = [0, 2, KINDS.index(BEST), 0, 0, 0, 0]
    assert KINDS.index(BEST) in problem.legal(row[:2])
    assert problem.simulated(row)[0] < problem.baseline


# reasons


def test_a_plan_of_a_known_style_is_a_row_of_its_space(graph: OpGraph) -> None:
    plan = sharded_plan(graph, SWITCH, JOB, GPUS[:4], {"tp": ("tensor", 2)})
    part = OperatorPartition.build(graph, SWITCH, JOB, GPUS[:4], {"dp": 2, "tp": 2})
    row = row_of(part, plan)
    assert row.tolist() == part.folded.spaces[0].styled({"tp": "tensor"}).tolist()
    assert part.sharding(row)["tp"] == plan.stages[0].sharding["tp"]


def test_the_search_says_why_its_plan_is_best_and_what_is_next(graph: OpGraph) -> None:
    shardings = Shardings(space=space_of(graph))
    shardings.run(Budget(evaluations=300))
    reasons, best = shardings.reasons(), shardings.best
    assert reasons is not None
    assert best is not None
    assert reasons.step_time == best.step_time
    assert reasons.runner_up is not None
    assert reasons.runner_up[0] > best.step_time
    record = json.loads(json.dumps(reasons.record()))
    assert record["sentences"] == reasons.lines()
    assert any(line.startswith("Runner-up") for line in record["sentences"])


def test_an_interrupted_search_keeps_its_best_pipeline(graph: OpGraph) -> None:
    begin, calls = time.process_time(), []

    def stop(_: Budget) -> None:
        calls.append(time.process_time() - begin)
        if len(calls) == 12:
            raise KeyboardInterrupt

    shardings = Shardings(space=space_of(graph), listener=stop)
    with pytest.raises(KeyboardInterrupt):
        shardings.run(Budget(evaluations=4000))
    assert shardings.best is not None
