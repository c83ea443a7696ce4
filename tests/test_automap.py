"""Auto-MAP's problems: exact tables, peers that agree with brute force, bounds, masks, plans."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from agents.automap.additive import Additive, dominated, item_costs
from agents.automap.batches import BatchParallel
from agents.automap.bounds import mesh_bound
from agents.automap.combined import KINDS, SLOTS, Combined
from agents.automap.contention import link_rates, slow_down
from agents.automap.cuts import PipelineCuts
from agents.automap.eliminate import eliminate
from agents.automap.episodes import PlanEnv
from agents.automap.explain import choices_of, decision_name
from agents.automap.ilp import Limits, solve
from agents.automap.operators import ALL, OperatorPartition, Pruning
from agents.automap.planner import GroupSearch, meshes, optimum
from agents.automap.problem import DEAD_END, Toy, all_plans
from agents.automap.search import Found, anneal, draw, exhaustive, greedy, is_legal, random_search
from agents.dqn import Config, train
from agents.planners.pipeline_chain import Chain
from agents.planners.pipeline_layouts import Layout
from agents.planners.recorder import Budget
from agents.planners.sharding import Shardings
from agents.planners.space import PlacementSpace
from simcore import Cluster, Problem, Settings, simulate
from simcore.errors import PlanError
from simcore.graph import OpGraph
from simcore.plan import Plan
from simcore.shard_batch import simulate_folded
from simcore.shard_fold import extended
from simcore.shard_space import WHOLE
from tests.sharded_models import GPUS, JOB, SWITCH, images, mixture, transformer

MESHES: tuple[dict[str, int], ...] = ({"x": 4}, {"dp": 2, "x": 2}, {"x": 2, "y": 2})
CURVE = 2e-5  # of collectives that are read from a curve


@pytest.fixture(scope="module")
def graphs() -> dict[str, OpGraph]:
    return {"transformer": transformer(4), "mixture": mixture(), "images": images()}


def partition(
    graph: OpGraph, mesh: dict[str, int], pruning: Pruning = ALL, **given: Any
) -> OperatorPartition:
    devices = GPUS[: math.prod(mesh.values())]
    return OperatorPartition.build(graph, SWITCH, JOB, devices, mesh, pruning=pruning, **given)


def random_rows(additive: Additive, count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([[rng.choice(v) for v in additive.values] for _ in range(count)], np.int8)


def sizes(additive: Additive) -> list[int]:
    return [len(values) for values in additive.values]


def space_of(graph: OpGraph, count: int = 4) -> PlacementSpace:
    problem = Problem.build(graph, SWITCH, JOB, Settings())
    space = PlacementSpace.build(problem)
    assert len(space.devices) >= count
    return space


# tables


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["transformer", "mixture", "images"])
def test_tables_add_up_to_what_the_kernel_lowers(
    graphs: dict[str, OpGraph], name: str, mesh: dict[str, int]
) -> None:
    problem = partition(graphs[name], mesh)
    additive = problem.additive
    rows = random_rows(additive, 12)
    parts = [
        np.concatenate([costs.sum(axis=1) for costs in item_costs(space, rows, link_rates(space))])
        for space in problem.folded.spaces
    ]
    whole = extended(parts[0], parts[1:], problem.folded.layers)
    for quantity in range(6):
        found = additive.cost([table[quantity] for table in additive.tables], rows)
        assert found == pytest.approx(whole[:, quantity], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
def test_no_plan_beats_the_bound_and_none_keeps_less_than_is_counted(
    graphs: dict[str, OpGraph], mesh: dict[str, int]
) -> None:
    for graph in graphs.values():
        problem = partition(graph, mesh)
        rows = random_rows(problem.additive, 60)
        found = simulate_folded(problem.folded, rows)
        bound = mesh_bound(problem.additive)
        assert 0 < bound <= found.step_time.min()
        kept = problem.additive.cost(problem.additive.kept(), rows)
        assert (kept <= found.allocated).all()


def test_a_table_that_is_too_large_is_refused(graphs: dict[str, OpGraph]) -> None:
    with pytest.raises(PlanError, match="one op depends on"):
        Additive.build(partition(graphs["transformer"], MESHES[0]).folded, most_rows=2)


def test_pairs_over_one_network_card_slow_each_other_down() -> None:
    cluster = Cluster.preset("2x8xV100")
    pairs = [[cluster.device_index(f"n{node}.gpu{k}") for node in (0, 1)] for k in range(8)]
    assert slow_down(cluster, "all_reduce", pairs) == pytest.approx(8.0, rel=0.01)
    assert slow_down(cluster, "all_reduce", pairs[:1]) == pytest.approx(1.0)
    servers = [[pair[node] for pair in pairs] for node in (0, 1)]
    assert slow_down(cluster, "all_reduce", servers) == pytest.approx(1.0)


# exact peers


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_program_and_elimination_find_the_least_sum_of_all_plans(
    graphs: dict[str, OpGraph], mesh: dict[str, int]
) -> None:
    for graph in graphs.values():
        additive = partition(graph, mesh).additive
        problem = partition(graph, mesh, Pruning(dominated=False, memory=False))
        plans = all_plans(problem, most=70_000)
        if plans is None:
            continue
        costs = additive.cost(additive.objective(), problem.rows(plans))
        least = eliminate(sizes(additive), additive.scopes, additive.objective())
        found = solve(additive, additive.objective())
        assert least.value == pytest.approx(costs.min(), rel=1e-9)
        assert found.value == pytest.approx(costs.min(), rel=1e-6)
        assert found.is_proven


def test_the_program_keeps_to_memory_and_leaves_out_what_it_is_told(
    graphs: dict[str, OpGraph],
) -> None:
    problem = partition(graphs["transformer"], {"x": 4}, Pruning(dominated=False, memory=False))
    additive, tables = problem.additive, problem.additive.objective()
    plans = all_plans(problem, most=70_000)
    assert plans is not None
    rows = problem.rows(plans)
    costs, kept = additive.cost(tables, rows), additive.cost(additive.kept(), rows)
    limit = float(np.quantile(kept, 0.2))
    found = solve(additive, tables, Limits(kept=limit))
    assert found.value == pytest.approx(costs[kept <= limit].min(), rel=1e-6)
    best = solve(additive, tables)
    other = solve(additive, tables, Limits(excluded=(best.row,), uses_all=True))
    assert not np.array_equal(other.row, best.row)
    assert (other.row != WHOLE).any()
    with pytest.raises(PlanError, match="no sharding keeps to the limits"):
        solve(additive, tables, Limits(kept=1.0))


def test_elimination_is_the_dynamic_program_on_a_chain() -> None:
    rng = np.random.default_rng(0)
    tables = [rng.random((3, 3)) for _ in range(7)]
    value = np.zeros(3)
    for table in tables:
        value = (value[:, None] + table).min(axis=0)
    scopes = [(k, k + 1) for k in range(7)]
    found = eliminate([3] * 8, scopes, tables)
    assert found.value == pytest.approx(value.min())
    pairs = zip(found.places[:-1], found.places[1:], strict=True)
    along = sum(table[pair] for table, pair in zip(tables, pairs, strict=True))
    assert along == pytest.approx(found.value)


# pruning


@pytest.mark.parametrize("mesh", MESHES)
def test_pruning_keeps_an_optimum_of_the_objective(
    graphs: dict[str, OpGraph], mesh: dict[str, int]
) -> None:
    for graph in graphs.values():
        problem = partition(graph, mesh)
        keep = dominated(problem.additive)
        less = problem.additive.restricted(keep)
        whole = eliminate(
            sizes(problem.additive), problem.additive.scopes, problem.additive.objective()
        )
        found = eliminate(sizes(less), less.scopes, less.objective())
        assert found.value == pytest.approx(whole.value, rel=1e-12)
        assert all(row.any() for row in keep)


def test_folding_loses_nothing_that_treats_layers_alike(graphs: dict[str, OpGraph]) -> None:
    folded = partition(graphs["transformer"], {"x": 4})
    whole = partition(graphs["transformer"], {"x": 4}, Pruning(fold=False))
    assert folded.folded.num_decisions < whole.folded.num_decisions
    _, least = optimum(whole)
    _, alike = optimum(folded)
    assert least <= alike * (1 + 1e-9)
    assert alike <= least * 1.01  # layers are alike, so is what is best for them


def test_the_memory_bound_forbids_exactly_what_cannot_fit(graphs: dict[str, OpGraph]) -> None:
    graph = graphs["transformer"]
    problem = partition(graph, {"x": 4}, Pruning(dominated=False))
    plans = all_plans(
        partition(graph, {"x": 4}, Pruning(dominated=False, memory=False)), most=70_000
    )
    assert plans is not None
    plans = plans[:: max(1, len(plans) // 200)]
    kept = problem.additive.cost(problem.additive.kept(), problem.rows(plans))
    object.__setattr__(problem, "capacity", float(np.quantile(kept, 0.3)))
    legal = np.array([is_legal(problem, plan) for plan in plans])
    assert (legal == (kept <= problem.capacity)).all()
    assert 0 < legal.sum() < len(legal)


# searches


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_searches_agree_with_brute_force(graphs: dict[str, OpGraph], seed: int) -> None:
    problem = partition(graphs["mixture"], {"x": 4})
    best = exhaustive(problem)
    assert best.is_exact
    found = [
        anneal(problem, 1000, seed=seed),
        greedy(problem, 1000, seed=seed),
    ]
    for each in found:
        assert each.step_time == pytest.approx(best.step_time, rel=1e-9)
    learned = train(Config(evaluations=800, seed=seed, updates=4), problem).found
    assert best.step_time * (1 - 1e-9) <= learned.step_time <= 1.1 * best.step_time
    assert random_search(problem, 50, seed=seed).step_time >= best.step_time


def test_searches_make_as_many_evaluations_as_they_may() -> None:
    toy = Toy(6, 3)
    for search in (random_search, greedy, anneal):
        found: Found = search(toy, 70, seed=0)
        assert found.evaluations == 70
        assert found.found_at <= 70


def test_random_plans_are_legal() -> None:
    toy = Toy(6, 3)
    plans, alive = draw(toy, 40, np.random.default_rng(0))
    assert alive.all()
    assert all(is_legal(toy, plan) for plan in plans)


def test_more_plans_than_may_be_tried_are_refused() -> None:
    with pytest.raises(PlanError, match="more than 10 plans"):
        exhaustive(Toy(6, 3), most=10)


# the other problems


def test_the_batch_is_found_without_being_told(graphs: dict[str, OpGraph]) -> None:
    for name in ("transformer", "images"):
        problem = BatchParallel.build(graphs[name], 4)
        best = exhaustive(problem)
        assert best.chosen is not None
        assert best.chosen.tolist() == [1] * problem.num_slots  # the first dimension of each
        assert best.reward > 0.5
        none = problem.evaluate(np.zeros((1, problem.num_slots), np.int64))
        assert none.reward[0] == 0.0


def test_cuts_of_the_search_are_those_of_the_dynamic_program(graphs: dict[str, OpGraph]) -> None:
    space = space_of(graphs["transformer"])
    ranks = tuple((device,) for device in space.devices[:3])
    layout = Layout(devices=ranks, microbatches=4, schedule="1f1b")
    problem = PipelineCuts.build(Chain.build(space, most=12), layout)
    best = exhaustive(problem)
    assert best.step_time == pytest.approx(problem.optimum, rel=1e-12)
    assert best.reward >= 0.0
    found = train(Config(evaluations=800, updates=4), problem).found
    assert found.step_time <= problem.optimum * 1.02


def test_the_combined_problem_has_data_parallel_and_mixed_plans(
    graphs: dict[str, OpGraph],
) -> None:
    space = space_of(graphs["transformer"])
    problem = Combined.build(space, space.devices)
    assert problem.num_slots == len(SLOTS)
    rows = np.array([[0] * 7, [1, 1, KINDS.index("tensor"), 1, 0, 0, 0]])
    assert all(is_legal(problem, row) for row in rows)
    worth = problem.evaluate(rows)
    assert worth.reward[0] == pytest.approx(0.0)
    assert np.isfinite(worth.step_time).all()
    plan = problem.plan(rows[1].tolist())
    assert plan is not None
    assert len(plan.stages) == 2
    assert plan.stages[0].mesh == {"dp": 2, "tp": 2}
    found = greedy(problem, 12, seed=0)
    assert found.reward >= 0.0


@pytest.mark.filterwarnings("ignore:.*not within the observation space.*")
def test_an_environment_is_one_of_gymnasium(graphs: dict[str, OpGraph]) -> None:
    env = PlanEnv(partition(graphs["mixture"], {"x": 4}))
    check_env(env, skip_render_check=True)
    seen, _ = env.reset()
    is_over, reward, info = False, 0.0, dict[str, Any]()
    while not is_over:
        action = np.int64(np.flatnonzero(seen["action_mask"])[0])
        seen, reward, is_over, cut, info = env.step(action)
        assert not cut
    assert info["step_time"] > 0
    assert math.isfinite(reward)
    env = PlanEnv(Toy(3, 3))
    env.reset()
    env.step(np.int64(1))
    assert env.step(np.int64(1))[1:3] == (DEAD_END, True)  # the mask forbids it


# plans


@pytest.mark.parametrize("mesh", MESHES)
def test_a_row_is_a_plan_that_takes_as_long_in_full(
    graphs: dict[str, OpGraph], mesh: dict[str, int]
) -> None:
    problem = partition(graphs["mixture"], mesh)
    rows = [row for row in random_rows(problem.additive, 40) if problem.plan(row) is not None][:2]
    assert rows
    for row in rows:
        plan = problem.plan(row)
        assert isinstance(plan, Plan)
        settings = problem.folded.spaces[0].settings
        full = simulate(graphs["mixture"], SWITCH, JOB, with_settings(plan, settings))
        batch = simulate_folded(problem.folded, row[None])
        assert batch.step_time[0] == pytest.approx(full.step_time, rel=5e-3)


def with_settings(plan: Plan, settings: Settings) -> Plan:
    return msgspec.structs.replace(plan, settings=settings)


def test_meshes_use_all_devices() -> None:
    for count in (2, 6, 8):
        assert all(math.prod(mesh.values()) == count for mesh in meshes(count))
    assert {"dp": 2, "x": 2, "y": 2} in meshes(8)


def test_the_planner_finds_a_plan_on_each_mesh_and_says_why(graphs: dict[str, OpGraph]) -> None:
    space = space_of(graphs["transformer"])
    search = GroupSearch(space=space, sets=[GPUS[:4]])
    search.run(Budget(evaluations=400))
    found = search.found
    assert found
    assert found == sorted(found, key=lambda each: each.rank)
    best = found[0]
    assert best.optimum <= best.additive * (1 + 1e-9)
    choices = choices_of(best.problem, best.row)
    names = [decision_name(best.problem, d) for d in range(len(best.row))]
    assert {c.name for c in choices if c.is_split} == {
        names[d] for d in np.flatnonzero(best.row != WHOLE)
    }
    for choice in choices:
        row, axes = best.row.copy(), best.problem.folded.spaces[0].axes
        decision = names.index(choice.name)
        row[decision] = WHOLE if choice.is_split else axes.index(choice.axis)
        other = simulate_folded(best.problem.folded, row[None]).step_time[0]
        sign = 1 if choice.is_split else -1
        assert choice.saves == pytest.approx(sign * (other - best.step_time), abs=1e-9)
        tables = best.problem.additive.tables
        parts = best.problem.additive.cost([t[1] for t in tables], np.stack([row, best.row]))
        paid = sum(p.seconds for kind, p in choice.paid.items() if kind != "sum_over_copies")
        assert sign * paid == pytest.approx(parts[1] - parts[0], abs=1e-9)


def test_the_sharding_strategy_is_never_worse_than_its_styles(graphs: dict[str, OpGraph]) -> None:
    space = space_of(graphs["images"])
    shardings = Shardings(space=space)
    shardings.run(Budget(evaluations=600))
    fitting = [each for each in shardings.tried if each.result.feasible]
    styles = [each.step_time for each in fitting if each.shares]
    assert shardings.best is not None
    assert shardings.best.step_time <= min(styles)
    assert shardings.grouped
