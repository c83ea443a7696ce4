"""The exact planners for the largest load agree with brute force and with published figures."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agents.exact.contiguous import best_contiguous
from agents.exact.cut_bound import cut_bound
from agents.exact.free import best_free
from agents.exact.load_bounds import work_bound
from agents.exact.max_load import (
    MaxLoadProblem,
    device_loads,
    make_max_load,
    objective,
    read_max_load,
)
from agents.exact.profile_problem import profile_problem
from agents.exact.units import forward_units, free_units
from simcore.errors import GraphError
from simcore.frontends.dnn_partitioning import DeviceLimits, Edge, Node, PartitioningFile
from simcore.frontends.pipedream import parse_profile

ROOT = Path(__file__).resolve().parents[1]
# the optimum among contiguous splits, by the authors' program: planning notes, section 3.4
PUBLISHED = {
    "bert_l-3_inference": 27.9186,
    "bert_l-3_training": 65.3031,
    "bert_l-12_inference": 147.478,
    "bert_L-12_training": 437.998,
    "resnet50_inference": 124.349,
    "resnet50_training": 255.194,
}
# the best of the published heuristics there (local search ignores memory and contiguity)
HEURISTICS = {
    "bert_l-3_inference": 27.5741,
    "bert_l-3_training": 65.3031,
    "bert_l-12_inference": 147.478,
    "bert_L-12_training": 437.998,
    "resnet50_inference": 124.349,
    "resnet50_training": 255.194,
}


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 7) -> MaxLoadProblem:
    count = draw(st.integers(1, max_nodes))
    training = draw(st.booleans())
    number = st.integers(0, 20).map(float)
    nodes = [
        Node(
            index,
            draw(number),
            draw(number),
            float(draw(st.integers(0, 5))),
            draw(st.integers(0, 9)) > 0,
            False,
            draw(st.sampled_from([None, index, index, index, 0])),
        )
        for index in range(count)
    ]
    pairs = list(itertools.combinations(range(count), 2))
    chosen = [pair for pair in pairs if draw(st.integers(0, 2)) == 0]
    costs = [float(draw(st.integers(0, 6))) for _ in nodes]
    edges = [Edge(one, other, costs[one]) for one, other in chosen]
    if training:
        classes = {node.id: node.color for node in nodes if node.color is not None}
        for index, color in classes.items():
            nodes.append(Node(count + index, draw(number), draw(number), 1.0, True, True, color))
        edges += [
            Edge(count + other, count + one, float(one % 3))
            for one, other in chosen
            if one in classes and other in classes
        ]
    cpus = draw(st.integers(0, 1))
    limits = DeviceLimits(
        accelerators=draw(st.integers(1, 3 - cpus)),
        cpus=cpus,
        accelerator_memory=float(draw(st.sampled_from([4, 8, 12, 100]))),
    )
    return make_max_load(PartitioningFile(nodes, edges), limits, "drawn")


def all_loads(problem: MaxLoadProblem) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Scores every placement of the classes, written apart from the planners."""
    num_classes = int(problem.color.max()) + 1
    classes = np.array(list(itertools.product(range(problem.num_devices), repeat=num_classes)))
    device = classes[:, problem.color]
    worst = np.zeros(len(device))
    for d in range(problem.num_devices):
        here = device == d
        if d >= problem.num_accelerators:
            worst = np.maximum(worst, here @ problem.cpu_time)
            continue
        load = np.where(here, problem.accelerator_time, 0.0).sum(axis=1)
        for tensor, writer in enumerate(problem.tensor_node):
            span = slice(problem.first_reader[tensor], problem.first_reader[tensor + 1])
            readers = here[:, problem.readers[span]]
            writes = here[:, writer]
            crosses = np.where(writes, ~readers.all(axis=1), readers.any(axis=1))
            load = load + crosses * problem.tensor_cost[tensor]
        load[here @ problem.memory > problem.capacity] = math.inf
        worst = np.maximum(worst, load)
    return device, worst


def is_pipeline(problem: MaxLoadProblem, device: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns which placements, [placement, node], let devices stand in a row."""
    source, target = problem.edges
    forward = ~problem.is_backward[source] & ~problem.is_backward[target]
    seen = np.zeros((len(device), problem.num_devices, problem.num_devices), np.int64)
    for one, other in zip(source[forward], target[forward], strict=True):
        seen[np.arange(len(device)), device[:, one], device[:, other]] = 1
    for d in range(problem.num_devices):
        seen[:, d, d] = 0
    walk, closed = seen.copy(), np.zeros(len(device), np.int64)
    for _ in range(problem.num_devices):
        closed += np.trace(walk, axis1=1, axis2=2)
        walk = np.minimum(walk @ seen, 1)
    return closed == 0


@given(problems())
@settings(max_examples=100)
def test_contiguous_splits_agree_with_brute_force(problem: MaxLoadProblem) -> None:
    device, worst = all_loads(problem)
    best = worst[is_pipeline(problem, device)].min(initial=math.inf)
    solution = best_contiguous(problem)
    assert solution.load == pytest.approx(best, abs=1e-9)
    if math.isfinite(best):
        assert solution.is_optimal
        assert solution.placement is not None
        assert objective(problem, solution.placement) == pytest.approx(best, abs=1e-9)


@given(problems(max_nodes=5))
@settings(max_examples=20)
def test_free_placement_agrees_with_brute_force(problem: MaxLoadProblem) -> None:
    _, worst = all_loads(problem)
    solution = best_free(problem, seconds=20)
    assert solution.load == pytest.approx(worst.min(), rel=1e-6, abs=1e-6)
    assert solution.bound <= worst.min() * (1 + 1e-6) + 1e-6


@pytest.mark.slow
@given(problems(max_nodes=10))
@settings(max_examples=100)
def test_ten_ops_on_three_devices_agree_with_brute_force(problem: MaxLoadProblem) -> None:
    device, worst = all_loads(problem)
    free = best_free(problem, seconds=60)
    assert free.load == pytest.approx(worst.min(), rel=1e-6, abs=1e-6)
    best = worst[is_pipeline(problem, device)].min(initial=math.inf)
    assert best_contiguous(problem).load == pytest.approx(best, abs=1e-9)


@given(problems(), st.integers(0, 2**32 - 1))
def test_the_evaluator_scores_placements_as_brute_force_does(
    problem: MaxLoadProblem, seed: int
) -> None:
    device, worst = all_loads(problem)
    pick = np.random.default_rng(seed).integers(len(device))
    assert objective(problem, device[pick]) == pytest.approx(worst[pick])


@given(problems())
def test_no_placement_is_below_the_work_bound(problem: MaxLoadProblem) -> None:
    _, worst = all_loads(problem)
    for units in (
        free_units(problem, merge_leaves=False),
        forward_units(problem, merge_leaves=False),
    ):
        if units.num_units == int(problem.color.max()) + 1:
            assert work_bound(problem, units) <= worst.min() * (1 + 1e-9)


@given(problems())
@settings(max_examples=100)
def test_no_contiguous_split_is_below_the_bound_with_cuts(problem: MaxLoadProblem) -> None:
    device, worst = all_loads(problem)
    best = worst[is_pipeline(problem, device)].min(initial=math.inf)
    units = forward_units(problem, merge_leaves=True)
    low = work_bound(problem, units)
    if math.isfinite(best):
        assert cut_bound(problem, units, (low, 2 * best + 1), None) <= best * (1 + 1e-6)


def test_the_bound_with_cuts_counts_a_transfer_that_cannot_be_avoided() -> None:
    # both halves of the work are needed, and the only cut between them costs 3 on each side
    nodes = [Node(i, 5.0, 100.0, 1.0, True, False, None) for i in range(2)]
    limits = DeviceLimits(accelerators=2, cpus=0, accelerator_memory=10.0)
    problem = make_max_load(PartitioningFile(nodes, [Edge(0, 1, 3.0)]), limits, "pair")
    units = forward_units(problem, merge_leaves=True)
    assert work_bound(problem, units) == 5.0
    assert 7.5 < cut_bound(problem, units, (5.0, 10.0), None) <= 8.0


def test_a_chain_is_cut_where_hand_counting_cuts_it() -> None:
    # times 4 2 2 4, a tensor of cost 1 between neighbours: 4+2+1 | 1+2+4
    nodes = [Node(i, t, 100.0, 1.0, True, False, None) for i, t in enumerate([4.0, 2.0, 2.0, 4.0])]
    edges = [Edge(0, 1, 1.0), Edge(1, 2, 1.0), Edge(2, 3, 1.0)]
    limits = DeviceLimits(accelerators=2, cpus=1, accelerator_memory=10.0)
    problem = make_max_load(PartitioningFile(nodes, edges), limits, "chain")
    solution = best_contiguous(problem)
    assert (solution.load, solution.bound) == (7.0, 7.0)
    assert solution.placement is not None
    assert solution.placement.tolist() == [0, 0, 1, 1]


def test_an_operator_that_fits_nowhere_leaves_no_split() -> None:
    nodes = [Node(0, 1.0, 1.0, 5.0, True, False, None)]
    limits = DeviceLimits(accelerators=2, cpus=0, accelerator_memory=4.0)
    problem = make_max_load(PartitioningFile(nodes, []), limits, "big")
    for solve in (best_contiguous, best_free):
        solution = solve(problem)
        assert solution.placement is None
        assert math.isinf(solution.load)


def test_a_forward_operator_cannot_read_a_backward_one() -> None:
    nodes = [Node(0, 1.0, 1.0, 1.0, True, True, 0), Node(1, 1.0, 1.0, 1.0, True, False, 1)]
    limits = DeviceLimits(accelerators=1, cpus=0, accelerator_memory=4.0)
    with pytest.raises(GraphError, match="wrong: edge 0 -> 1: from a backward"):
        make_max_load(PartitioningFile(nodes, [Edge(0, 1, 1.0)]), limits, "wrong")


def solve_file(data: Path, name: str) -> None:
    path = data / "dnn_partitioning" / "estimated_costs_operator_graphs" / f"{name}.json"
    problem = read_max_load(path)
    solution = best_contiguous(problem)
    assert solution.load == pytest.approx(PUBLISHED[name], rel=1e-4 / 2)
    assert solution.is_optimal
    assert solution.placement is not None
    assert objective(problem, solution.placement) == pytest.approx(solution.load, rel=1e-9)
    _, memory = device_loads(problem, solution.placement)
    assert (memory[: problem.num_accelerators] <= problem.capacity).all()


@pytest.mark.parametrize("name", ["resnet50_inference", "resnet50_training", "bert_l-3_inference"])
def test_published_optima_are_reached(data: Path, name: str) -> None:
    solve_file(data, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_l-3_training", "bert_l-12_inference", "bert_L-12_training"])
def test_published_optima_of_the_large_files_are_reached(data: Path, name: str) -> None:
    solve_file(data, name)


def test_a_limit_at_the_optimum_still_finds_it(data: Path) -> None:
    """The work that fits devices is a sum of floats; rounding must not close the last ideal."""
    from agents.exact.compiled_splits import Limits
    from agents.exact.ideals import Search, make_ideals

    text = (data / "pipedream" / "gnmt.graph.txt").read_text()
    problem = profile_problem(parse_profile(text, "gnmt"))
    units = forward_units(problem, merge_leaves=True)
    ideals = make_ideals(units, 10_000)
    assert ideals is not None
    wide = Limits(problem.num_accelerators, problem.num_cpus, problem.capacity, math.inf)
    best = Search(units, ideals, wide).run().load
    for slack in (1e-3, 1e-6, 1e-9):
        narrow = wide._replace(upper=best * (1 + slack))
        assert Search(units, ideals, narrow).run().load == best
    assert Search(units, ideals, wide._replace(upper=best)).run().unit_device is None


@pytest.mark.slow
def test_a_wide_graph_gets_a_split_and_a_bound(data: Path) -> None:
    text = (data / "pipedream" / "nasnetamobile.graph.txt").read_text()
    problem = profile_problem(parse_profile(text, "nasnetamobile"))
    solution = best_contiguous(problem, seconds=20)
    assert solution.num_ideals is None
    assert solution.placement is not None
    assert objective(problem, solution.placement) == pytest.approx(solution.load)
    assert solution.load < 1.5 * solution.bound


@pytest.mark.slow
@pytest.mark.parametrize("name", HEURISTICS)
def test_free_placements_are_no_worse_than_the_published_heuristics(data: Path, name: str) -> None:
    folder = data / "dnn_partitioning" / "estimated_costs_operator_graphs"
    problem = read_max_load(folder / f"{name}.json")
    solution = best_free(problem, seconds=20)
    assert solution.placement is not None
    assert objective(problem, solution.placement) == pytest.approx(solution.load)
    assert solution.load <= HEURISTICS[name] * (1 + 1e-4)
    assert solution.bound <= solution.load
