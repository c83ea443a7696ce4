"""The stage-DAG planner: brute force on small cases, branches side by side, unequal devices."""

import pytest

from agents.pipelines.anneal import exhaustive
from agents.pipelines.bound import dag_bound
from agents.pipelines.env import Freedom
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.planners.pipeline_layouts import Demands
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from agents.planners.stage_dag import StageDagSearch
from agents.planners.stage_dag_orders import device_orders, node_orders
from agents.planners.stage_dag_plans import plan_stage_dag
from simcore import Cluster, GraphBuilder, OpGraph, Problem, simulate
from simcore.graph import Out, Phase
from simcore.sources import load_graph
from simcore.stages import stage_edges
from simcore.units import GiB
from tests.test_pipeline_planners import FAST, FREE, layers, space_of
from tests.test_planners import GPU, OTHER, mesh


def branches(seconds: tuple[tuple[float, ...], ...], *, batch: int = 8) -> OpGraph:
    """Branches that nothing feeds, and a last op that reads their ends; forward and backward."""
    builder = GraphBuilder("branches", batch=batch)
    made: dict[tuple[int, int], int] = {}
    for branch, times in enumerate(seconds):
        for k, time in enumerate(times):
            inputs = [builder.outputs(made[branch, k - 1])[0]] if k else []
            made[branch, k] = builder.op(
                f"f{branch}.{k}", module=f"net.{branch}.{k}", inputs=inputs,
                outputs=[Out((0, 1))], kernels=0, seconds=time / 2,
            )  # fmt: skip
    ends = [builder.outputs(made[b, len(times) - 1])[0] for b, times in enumerate(seconds)]
    join = builder.op(
        "join", module="net.join", inputs=ends, outputs=[Out((0, 1))], kernels=0, seconds=1e-3
    )
    last = builder.op(
        "bjoin", phase=Phase.B, inputs=[builder.outputs(join)[0]],
        outputs=[Out((0, 1)) for _ in seconds], unit_of=join, kernels=0, seconds=1e-3,
    )  # fmt: skip
    for branch, times in enumerate(seconds):
        gradient = builder.outputs(last)[branch]
        for k in reversed(range(len(times))):
            back = builder.op(
                f"b{branch}.{k}", phase=Phase.B, inputs=[gradient], outputs=[Out((0, 1))],
                unit_of=made[branch, k], kernels=0, seconds=times[k] / 2,
            )  # fmt: skip
            gradient = builder.outputs(back)[0]
    return builder.build(measured_on=GPU)


def search_of(graph: OpGraph, *gpus: str, **freedom: object) -> StageDagSearch:
    space = space_of(graph, mesh(*gpus, **FREE))
    return StageDagSearch.build(Simulator(nodes=NodeGraph.build(space)), Freedom(**freedom))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_the_planner_finds_what_brute_force_finds(microbatches: int) -> None:
    graph = branches(((1.0, 2.0), (3.0,)))
    how = {"microbatches": microbatches, "schedule": "1f1b", "recompute": False}
    search = search_of(graph, GPU, GPU, GPU, **how)
    search.run(Budget(evaluations=100))
    best = exhaustive(search.task)
    assert best is not None
    assert search.best is not None
    assert search.best[0].step_time <= best.score.step_time * (1 + 1e-9)
    assert search.best[0].step_time >= dag_bound(search.task)


def test_branches_are_stages_side_by_side() -> None:
    """One microbatch: two branches of 4 s take 4 s side by side, 8 s one after the other."""
    graph = branches(((2.0, 2.0), (2.0, 2.0)))
    search = search_of(graph, GPU, GPU, GPU, microbatches=1, copies=False)
    search.run(Budget(evaluations=60))
    assert search.best is not None
    assert search.best[0].step_time == pytest.approx(4.0, rel=0.01)


def test_a_pipeline_of_branches_is_less_deep_than_a_chain() -> None:
    """Four equal stages of 1 s a microbatch: the DAG fills over two stages, a chain over four."""
    graph = branches(((4.0, 4.0), (4.0, 4.0)))
    search = search_of(graph, *[GPU] * 5, microbatches=4, schedule="1f1b", copies=False)
    search.run(Budget(evaluations=100))
    assert search.best is not None
    chain = (4 + 3) * 1.0
    assert search.best[0].step_time < 0.8 * chain


def test_a_faster_gpu_gets_more_wherever_it_stands() -> None:
    graph = layers([1.0] * 12, measured_on=FAST)
    for order in ((FAST, OTHER), (OTHER, FAST)):
        search = search_of(graph, *order, copies=False)
        assert len(device_orders(search.task.simulator.nodes)) == 2
        search.run(Budget(evaluations=60))
        assert search.best is not None
        plan = search.best[1]
        sizes = {order[plan.devices[s][0]]: plan.stage.count(s) for s in range(plan.num_stages)}
        assert sizes[FAST] > sizes[OTHER]


def test_stages_that_do_not_fit_run_their_forward_again() -> None:
    graph = layers([1.0] * 8, kept=40 * GiB)
    search = search_of(graph, GPU, GPU, microbatches=8, schedule="gpipe", copies=False)
    search.run(Budget(evaluations=80))
    assert search.best is not None
    assert set(search.best[1].recompute) != {"none"}


def test_lines_go_forward_and_follow_branches() -> None:
    search = search_of(branches(((1.0, 1.0), (1.0, 1.0))), GPU, GPU)
    nodes = search.task.simulator.nodes
    lines = node_orders(nodes)
    assert len(lines) > 1
    for line in lines:
        place = {node: k for k, node in enumerate(line)}
        assert all(place[a] < place[b] for a, b in nodes.edges)


def test_the_same_evaluations_find_the_same_plan() -> None:
    graph = branches(((1.0, 3.0), (2.0, 1.0)))
    first, second = (search_of(graph, GPU, GPU, GPU) for _ in range(2))
    first.run(Budget(evaluations=50))
    second.run(Budget(evaluations=50))
    assert first.best == second.best
    assert len(first.seen) == 50


def test_one_call_gives_a_plan_that_the_simulator_confirms() -> None:
    space = space_of(branches(((2.0, 1.0), (3.0,))), mesh(GPU, GPU, GPU, **FREE))
    budget = Budget(evaluations=60)
    found = plan_stage_dag(space, Demands(), budget)
    assert found.plan is not None
    problem = space.problem
    result = simulate(problem.graph, problem.cluster, problem.job, found.plan)
    assert result.step_time == found.step_time
    assert result.feasible
    assert found.bound <= found.step_time
    assert budget.used == 60


def test_a_model_without_pipelines_is_told_why() -> None:
    space = space_of(layers([1.0] * 3), mesh(GPU, GPU))
    found = plan_stage_dag(space, Demands(microbatches=3), Budget(evaluations=5))
    assert found.plan is None
    assert "no pipeline" in found.note


def test_nodes_know_every_edge_that_gradients_go_along() -> None:
    """GNMT sends gradients of its attention past nodes that only hand activations on."""
    graph, job, _ = load_graph("gnmt-4", {"sequence_length": 4})
    space = PlacementSpace.build(Problem.build(graph, Cluster.preset("4xP100-PCIe"), job))
    nodes = NodeGraph.build(space)
    assert set(nodes.edges) > set(stage_edges(graph, nodes.node))
    assert nodes.edges == nodes.at(32).edges
    assert len(nodes.costs(32).sent) == len(nodes.edges)
