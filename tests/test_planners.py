"""Planners: worked examples, known optima, and what holds for every one of them."""

import itertools
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from agents.planners.anneal import Anneal
from agents.planners.chain_split import (
    ChainSplit,
    _close,
    balanced,
    crossing_time,
    least_crossing,
)
from agents.planners.constraints import resolve_limits
from agents.planners.earliest import upward_ranks
from agents.planners.exhaustive import Exhaustive
from agents.planners.heft import Heft, schedule
from agents.planners.m_etf import MEtf, earliest_first
from agents.planners.m_topo import MTopo, fill
from agents.planners.moves import Moves
from agents.planners.random_placement import RandomPlacement
from agents.planners.recorder import Budget, Found, Recorder, Scores
from agents.planners.round_robin import RoundRobin
from agents.planners.single_device import CpuOnly, SingleDevice
from agents.planners.space import PlacementSpace, Planner
from agents.planners.tidy import Tidy, merges
from simcore import Cluster, GraphBuilder, Job, OpGraph, Problem, Settings, Status
from simcore.cluster import Device, Link
from simcore.errors import PlanError, UsageError
from simcore.graph import OpClass, Out, Phase, Role
from simcore.units import GiB
from tests.strategies import build_cost

GPU, OTHER, THIRD, CPU = (
    "V100-SXM2-16GB",
    "T4-16GB",
    "P100-PCIe-16GB",
    "CPU-2x-Xeon-E5-2698v4",
)
PLANNERS: tuple[Planner, ...] = (
    SingleDevice(),
    RoundRobin(),
    RandomPlacement(),
    ChainSplit(),
    MTopo(),
    MEtf(),
    Heft(),
    CpuOnly(),
    Exhaustive(limit=300),
    Anneal(),
    Tidy(),
)


def mesh(
    *kinds: str, memory: float = 16.0, bandwidth: float = 1e9, latency: float = 0.0
) -> Cluster:
    """A cluster in which every pair has a link of its own; memory in GiB, bandwidth in bytes/s."""
    devices = tuple(
        Device(f"d{index}", kind, "node0", round(memory * GiB)) for index, kind in enumerate(kinds)
    )
    links = tuple(
        Link(f"d{a}", f"d{b}", "", bandwidth, latency)
        for a, b in itertools.combinations(range(len(kinds)), 2)
    )
    return Cluster(name="mesh", devices=devices, links=links)


def random_graph(rng: np.random.Generator, num_ops: int) -> OpGraph:
    """A random graph whose op i reads one to three of the ten ops before it."""
    ops = {f"op{index}": float(rng.integers(1, 20)) * 1e-3 for index in range(num_ops)}
    edges = [
        (f"op{source}", f"op{target}", int(rng.integers(0, 20)) * 1_000_000)
        for target in range(1, num_ops)
        for source in {int(rng.integers(max(0, target - 10), target)) for _ in range(3)}
    ]
    return OpGraph.from_edges(ops, edges)


def chain(sizes: list[float], *, seconds: float = 1e-3) -> OpGraph:
    """A training step of layers: parameters of the given GiB, as large gradients, 1 MiB of data."""
    builder = GraphBuilder("chain", batch=4)
    layers, data = [], None
    for index, size in enumerate(sizes):
        parameter = builder.parameter(f"layer{index}.weight", round(size * GiB))
        op = builder.op(
            f"layer{index}",
            module=f"net.{index // 2}.layer{index}",
            inputs=[parameter] if data is None else [data, parameter],
            outputs=[Out(2**20)],
            kernels=0,
            seconds=seconds,
        )
        layers.append((op, parameter))
        data = builder.outputs(op)[0]
    gradient, parameter_gradients = data, {}
    for index, (op, parameter) in reversed(list(enumerate(layers))):
        assert gradient is not None
        back = builder.op(
            f"layer{index}.backward",
            phase=Phase.B,
            inputs=[gradient, parameter],
            outputs=[Out(2**20), Out(round(sizes[index] * GiB), role=Role.GRADIENT)],
            unit_of=op,
            kernels=0,
            seconds=2 * seconds,
        )
        gradient, parameter_gradients[index] = builder.outputs(back)
    for index, (op, parameter) in enumerate(layers):
        builder.op(
            f"layer{index}.update",
            phase=Phase.U,
            op_class=OpClass.UPDATE,
            inputs=[parameter, parameter_gradients[index]],
            outputs=[Out(round(sizes[index] * GiB), storage_of=parameter, role=Role.PARAMETER)],
            unit_of=op,
            kernels=0,
            seconds=0.0,
        )
    return builder.build()


def space_of(graph: OpGraph, cluster: Cluster, **options: str) -> PlacementSpace:
    settings = Settings(**options)  # type: ignore[arg-type]
    return PlacementSpace.build(Problem.build(graph, cluster, Job(optimizer="sgd"), settings))


def search(
    planner: Planner, space: PlacementSpace, evaluations: int = 10_000, seed: int = 0
) -> Recorder:
    recorder = Recorder(space=space)
    planner.search(space, np.random.default_rng(seed), Budget(evaluations=evaluations), recorder)
    return recorder


def best_of_all(space: PlacementSpace) -> float:
    """The optimum by brute force."""
    every = itertools.product(range(space.num_devices), repeat=space.num_units)
    scores = space.evaluate(np.array(list(every), np.int32))
    return float(np.where(scores.status == Status.OK, scores.step_time, np.inf).min())


# Topcuoglu, Hariri and Wu 2002, figure 2 and table 1: ten tasks, three processors

HEFT_SECONDS = [
    (14, 16, 9),
    (13, 19, 18),
    (11, 13, 19),
    (13, 8, 17),
    (12, 13, 10),
    (13, 16, 9),
    (7, 15, 11),
    (5, 11, 14),
    (18, 12, 20),
    (21, 7, 16),
]
HEFT_EDGES = [
    (1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23),
    (4, 8, 27), (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13),
]  # fmt: skip


@pytest.fixture
def heft_example() -> PlacementSpace:
    cluster, job = mesh(GPU, OTHER, THIRD, bandwidth=1.0), Job()
    graph = OpGraph.from_edges(
        {f"T{task}": 0.0 for task in range(1, 11)},
        [(f"T{a}", f"T{b}", num_bytes) for a, b, num_bytes in HEFT_EDGES],
    )
    cost = build_cost(HEFT_SECONDS, np.zeros((10, 3)).tolist(), (GPU, OTHER, THIRD), job)
    return PlacementSpace.build(Problem.build(graph, cluster, job, cost=cost))


def test_heft_ranks_the_example_of_its_paper(heft_example: PlacementSpace) -> None:
    ranks = upward_ranks(heft_example, heft_example.devices)
    expected = [108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert ranks == pytest.approx(expected, abs=1e-3)


def test_heft_schedules_the_example_of_its_paper_in_80(heft_example: PlacementSpace) -> None:
    planned = schedule(heft_example)
    assert planned.makespan == 80
    assert planned.placement.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]
    assert planned.end.tolist() == [9, 40, 28, 26, 38, 42, 49, 62, 68, 80]


def test_heft_fills_a_gap_that_an_earlier_op_left() -> None:
    # "small" is ranked last; d1 is idle until "near" starts there at 1
    graph = OpGraph.from_edges(
        {"root": 1.0, "far": 2.0, "near": 2.0, "wide": 9.0, "small": 0.5},
        [("root", "far", 0), ("root", "near", 0), ("far", "wide", 1), ("near", "wide", 1)],
    )
    planned = schedule(space_of(graph, mesh(GPU, GPU, bandwidth=1.0)))
    end = dict(zip(graph.op_names, planned.end.tolist(), strict=True))
    assert (end["near"], end["wide"], end["small"]) == (3.0, 13.0, 0.5)


def test_etf_takes_the_op_that_can_start_first() -> None:
    # b starts at 2 beside a; c could there at 5, elsewhere at 3; d at 6 beside c, at 7 beside b
    graph = OpGraph.from_edges(
        {"a": 2.0, "b": 3.0, "c": 3.0, "d": 1.0},
        [("a", "b", 1), ("a", "c", 1), ("b", "d", 1), ("c", "d", 1)],
    )
    placement = earliest_first(space_of(graph, mesh(GPU, GPU, bandwidth=1.0)))
    assert placement.tolist() == [0, 0, 1, 1]


def test_etf_and_heft_leave_a_device_that_is_full() -> None:
    space = space_of(chain([3.0] * 6), mesh(GPU, GPU, GPU, memory=16.0))  # 6 GiB a layer
    for placement in (earliest_first(space), schedule(space).placement):
        assert sorted(np.bincount(placement, minlength=3).tolist()) == [2, 2, 2]


def test_topo_fills_devices_to_an_equal_share() -> None:
    space = space_of(chain([1.0] * 6), mesh(GPU, GPU, GPU))
    assert fill(space, (0, 1, 2)).tolist() == [0, 0, 0, 1, 1, 1]  # share: two layers and one more
    assert fill(space, (2, 0)).tolist() == [2, 2, 2, 2, 0, 0]


def test_a_balanced_split_gives_every_part_its_share() -> None:
    assert balanced(np.array([1.0, 1, 1, 1, 1, 1]), np.array([1.0, 2])).tolist() == [
        0, 0, 1, 1, 1, 1,
    ]  # fmt: skip
    assert balanced(np.array([1.0, 3, 1, 3]), np.ones(2)).tolist() == [0, 0, 1, 1]


def test_the_cheapest_cut_is_where_the_least_crosses() -> None:
    graph = OpGraph.from_edges(
        {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0},
        [("a", "b", 5), ("b", "c", 2), ("c", "d", 5), ("a", "d", 1)],
    )
    space = space_of(graph, mesh(GPU, GPU, bandwidth=1.0))
    crossing = crossing_time(space)
    assert crossing.tolist() == [6, 3, 6, 0]
    parts = least_crossing(space, (0, 1), crossing, 1.0)
    assert [part.tolist() for part in parts] == [[0, 0, 0, 0], [0, 0, 1, 1]]


def test_the_least_of_a_moving_window_is_its_first_smallest() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(1, 30))
        values = np.where(rng.random(size) < 0.3, np.inf, rng.integers(0, 5, size))
        first = np.sort(rng.integers(0, size + 1, size))
        cost, cut = _close(values, first)
        for end, begin in enumerate(first.tolist()):
            assert cost[end] == values[begin:end].min(initial=np.inf)
            if np.isfinite(cost[end]):
                assert cut[end] == begin + values[begin:end].argmin()


def test_a_model_too_large_for_one_device_is_split() -> None:
    space = space_of(chain([2.0] * 6), mesh(GPU, GPU, memory=16.0))  # 24 GiB with gradients
    assert search(SingleDevice(), space).best is None
    split = search(ChainSplit(), space).best
    assert split is not None
    assert split.placement.tolist() == [0, 0, 0, 1, 1, 1]
    annealed = search(Anneal(), space, 2000).best
    assert annealed is not None
    assert annealed.step_time <= split.step_time


def test_layers_of_very_different_sizes_are_not_taken_for_equal() -> None:
    """Four layers of 0.6 GiB, then eight of 13 GiB, on four devices of 40 GiB."""
    builder = GraphBuilder("uneven")
    data = None
    for index, size in enumerate([0.6] * 4 + [13.0] * 8):
        parameter = builder.parameter(f"w{index}", round(size * GiB))
        inputs = [parameter] if data is None else [data, parameter]
        op = builder.op(f"l{index}", inputs=inputs, outputs=[Out(8)], kernels=0, seconds=1e-3)
        data = builder.outputs(op)[0]
    graph = builder.build()
    space = space_of(graph, mesh("A100-PCIE-40GB", "A100-PCIE-40GB", "A100-PCIE-40GB",
                                 "A100-PCIE-40GB", memory=40.0))  # fmt: skip
    best = search(ChainSplit(), space).best
    assert best is not None
    assert best.feasible
    assert len(set(best.placement.tolist())) <= 4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["program", "ready"])
def test_annealing_reaches_the_optimum_of_a_toy(seed: int, order: str) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 6 + seed % 2)
    space = space_of(graph, mesh(GPU, GPU, GPU), order=order)
    found = search(Anneal(), space, 3000, seed).best
    assert found is not None
    assert found.step_time == best_of_all(space)


def test_annealing_walks_out_of_what_does_not_fit() -> None:
    space = space_of(chain([2.0] * 6), mesh(GPU, GPU, memory=16.0))
    recorder = search(Anneal(), space, 2000)  # it starts with everything on one device
    assert recorder.nearest is not None
    assert recorder.best is not None


def test_the_exhaustive_search_is_brute_force() -> None:
    space = space_of(random_graph(np.random.default_rng(7), 6), mesh(GPU, GPU, GPU))
    recorder = search(Exhaustive(), space)
    assert recorder.evaluations == 3**6
    assert recorder.best is not None
    assert recorder.best.step_time == best_of_all(space)
    assert search(Exhaustive(limit=3**6 - 1), space).evaluations == 0


class Watched:
    """A space that refuses placements that are not allowed."""

    def __init__(self, space: PlacementSpace) -> None:
        self.space = space

    def evaluate(self, unit_placements: NDArray[np.integer]) -> Scores:
        units = np.arange(self.space.num_units)
        assert unit_placements.shape[1] == self.space.num_units
        assert self.space.allowed[units, unit_placements].all()
        return self.space.evaluate(unit_placements)

    def complexity(self, unit_placement: NDArray[np.integer]) -> tuple[int, int]:
        return self.space.complexity(unit_placement)


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
@pytest.mark.parametrize("seed", range(3))
def test_every_planner_keeps_to_what_is_allowed(planner: Planner, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph, cluster = random_graph(rng, 5 if planner.name == "exhaustive" else 60), mesh(*[GPU] * 4)
    problem = Problem.build(graph, cluster, Job())
    pins = {unit: int(rng.integers(3)) for unit in range(0, graph.num_units, 4)}
    space = PlacementSpace.build(problem, pins=pins, exclude={3})
    recorder = Recorder(space=Watched(space))
    ChainSplit().search(space, rng, Budget(), recorder)
    planner.search(space, rng, Budget(evaluations=400), recorder)
    assert recorder.best is not None
    assert recorder.best.feasible


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_every_planner_is_repeatable(planner: Planner) -> None:
    space = space_of(random_graph(np.random.default_rng(3), 40), mesh(*[GPU] * 3))
    curves = []
    for _ in range(2):
        recorder = search(planner, space, 300, seed=5)
        curves.append([(f.placement.tobytes(), f.step_time, f.evaluations) for f in recorder.curve])
    assert curves[0] == curves[1]


def test_list_schedulers_are_quick_on_five_thousand_ops() -> None:
    space = space_of(random_graph(np.random.default_rng(1), 5000), mesh(*[GPU] * 8))
    for plan in (
        lambda: schedule(space),
        lambda: earliest_first(space),
        lambda: fill(space, (0, 1)),
    ):
        started = time.perf_counter()
        plan()
        assert time.perf_counter() - started < 5.0


def test_simple_strategies_leave_the_cpu_alone() -> None:
    graph = random_graph(np.random.default_rng(0), 12)
    cost = build_cost([(1e-3, 1e-3)] * 12, [(0.0, 0.0)] * 12, (GPU, CPU), Job())
    problem = Problem.build(graph, mesh(GPU, GPU, CPU), Job(), cost=cost)
    space = PlacementSpace.build(problem)
    assert space.devices == (0, 1)
    for planner in (SingleDevice(), RoundRobin(), RandomPlacement(), ChainSplit(), MTopo()):
        found = search(planner, space).best
        assert found is not None
        assert set(found.placement.tolist()) <= {0, 1}
    only = PlacementSpace.build(problem, exclude={0, 1})
    assert only.devices == (2,)


def test_the_cpu_is_tried_alone_where_no_gpu_has_the_memory() -> None:
    devices = (Device("gpu", GPU, "n", 2 * GiB), Device("cpu", CPU, "n", 64 * GiB))
    cluster = Cluster(name="small", devices=devices, links=(Link("gpu", "cpu", "", 1e9, 0.0),))
    graph = chain([2.0] * 2)
    cost = build_cost(
        [(1e-3, 1.0)] * graph.num_ops, [(0.0, 0.0)] * graph.num_ops, (GPU, CPU), Job()
    )
    space = PlacementSpace.build(Problem.build(graph, cluster, Job(), cost=cost))
    found = search(CpuOnly(), space).best
    assert found is not None
    assert found.placement.tolist() == [1, 1]


def test_kept_memory_is_close_to_what_the_simulator_counts() -> None:
    space = space_of(chain([1.0, 2.0, 3.0]), mesh(GPU, GPU, memory=64.0))
    assert (space.memory / GiB).round(2).tolist() == [2.0, 4.0, 6.0]
    assert space.least_memory == 6 * GiB


# moves and tidying


def test_neighbours_change_something_and_stay_in_range() -> None:
    space = space_of(random_graph(np.random.default_rng(2), 30), mesh(*[GPU] * 3))
    moves, rng = Moves.of(space), np.random.default_rng(0)
    start = space.default
    changed = sum((moves.neighbour(start, rng, step / 300) != start).any() for step in range(300))
    assert changed > 200
    assert not start.any()  # no neighbour is made in place


def test_modules_of_several_units_move_together() -> None:
    moves = Moves.of(space_of(chain([0.1] * 6), mesh(GPU, GPU)))
    assert [units.tolist() for units in moves.modules] == [[0, 1], [2, 3], [4, 5]]


def test_tidying_gives_up_what_costs_nothing() -> None:
    graph = OpGraph.from_edges(
        {"a": 1.0, "b": 5.0, "c": 1.0, "d": 1.0}, [("a", "c", 0), ("c", "d", 0), ("b", "d", 0)]
    )
    space = space_of(graph, mesh(GPU, GPU, GPU))
    recorder = Recorder(space=space)
    recorder.evaluate("walk", np.array([[0, 1, 2, 1]]), Budget())
    Tidy().search(space, np.random.default_rng(0), Budget(), recorder)
    assert recorder.best is not None
    assert recorder.best.step_time == 6.0
    assert recorder.best.finder == "walk+tidy"
    assert recorder.best.complexity[0] == 2


def test_merges_empty_a_device_or_move_a_run() -> None:
    space = space_of(OpGraph.from_edges({"a": 1.0, "b": 1.0, "c": 1.0}, []), mesh(GPU, GPU))
    merged = {tuple(p.tolist()) for p in merges(space, np.array([0, 1, 0], np.int32))}
    assert merged == {(1, 1, 1), (0, 0, 0), (1, 1, 0), (0, 1, 1)}


# budget and recorder


def test_a_part_of_a_budget_spends_the_whole() -> None:
    whole = Budget(evaluations=100)
    part = whole.part(0.25)
    part.charge(10)
    assert (part.room(), whole.room()) == (15, 90)
    assert (part.spent(), whole.spent()) == (0.4, 0.1)
    part.charge(15)
    assert not part.left()
    assert whole.left()
    whole.charge(75)
    assert not whole.left()


def test_stopping_a_part_stops_the_whole() -> None:
    whole = Budget(seconds=1000.0)
    part = whole.part(0.5)
    assert part.seconds_left() == pytest.approx(500.0, rel=0.01)
    part.stop()
    assert not whole.left()


def test_a_budget_without_limits_is_never_spent() -> None:
    budget = Budget()
    budget.charge(10**9)
    assert (budget.left(), budget.room(), budget.seconds_left()) == (True, None, None)
    with pytest.raises(ValueError, match="seconds is -1"):
        Budget(seconds=-1.0)


class Given:
    """Scores that are decided beforehand, one placement after the other."""

    def __init__(self, *scores: tuple[float, int]) -> None:
        self.scores = list(scores)

    def evaluate(self, unit_placements: NDArray[np.integer]) -> Scores:
        given = [self.scores.pop(0) for _ in unit_placements]
        over = np.array([overflow for _, overflow in given], np.int64)
        status = np.where(over > 0, Status.OUT_OF_MEMORY, Status.OK).astype(np.uint8)
        return Scores(np.array([step_time for step_time, _ in given]), over, status)

    def complexity(self, unit_placement: NDArray[np.integer]) -> tuple[int, int]:
        return len(set(unit_placement.tolist())), 0


def test_of_equal_placements_the_simpler_and_then_the_first_is_kept() -> None:
    recorder, budget = Recorder(space=Given((2.0, 0), (2.0, 0), (2.0, 0))), Budget()
    for finder, placement in (("a", [0, 1]), ("b", [1, 1]), ("c", [0, 0])):
        recorder.evaluate(finder, np.array([placement]), budget)
    assert recorder.best is not None
    assert recorder.best.finder == "b"
    assert [(found.finder, found.evaluations) for found in recorder.curve] == [("a", 1), ("b", 2)]


def test_the_least_overflow_is_kept_until_something_fits() -> None:
    recorder, budget = Recorder(space=Given((1.0, 9), (5.0, 3), (9.0, 0), (1.0, 1))), Budget()
    for finder in "abcd":
        recorder.evaluate(finder, np.array([[0]]), budget)
    assert recorder.nearest is not None
    assert recorder.best is not None
    assert (recorder.nearest.overflow, recorder.best.finder) == (1, "c")


def test_an_evaluation_budget_pays_for_the_first_placements_only() -> None:
    recorder, budget = Recorder(space=Given((1.0, 0), (1.0, 0))), Budget(evaluations=2)
    assert len(recorder.evaluate("a", np.zeros((5, 1), np.int32), budget).step_time) == 2
    assert len(recorder.evaluate("a", np.zeros((5, 1), np.int32), budget).step_time) == 0
    assert recorder.evaluations == 2


def test_a_placement_that_is_not_legal_is_never_kept() -> None:
    lonely = Cluster(name="apart", devices=(Device("a", GPU, "n", GiB), Device("b", GPU, "n", GiB)))
    graph = OpGraph.from_edges({"x": 1.0, "y": 1.0}, [("x", "y", 1)])
    space = space_of(graph, lonely)
    recorder = Recorder(space=space)
    recorder.evaluate("a", np.array([[0, 1]]), Budget())
    assert (recorder.best, recorder.nearest, recorder.evaluations) == (None, None, 1)
    assert search(Anneal(), space, 200).best is not None


def test_found_placements_are_ordered_by_overflow_then_time() -> None:
    placement = np.zeros(1, np.int32)
    fits = Found(placement, 9.0, 0, (1, 0), "a", 1)
    over = Found(placement, 1.0, 5, (1, 0), "b", 1)
    assert fits.beats(over)
    assert not fits.beats(fits)
    assert over.beats(None)


# demands


def test_a_pin_holds_for_a_module_and_all_inside_it() -> None:
    graph, cluster = chain([0.1] * 6), mesh(GPU, GPU, GPU)
    limits = resolve_limits(graph, cluster, {"net.1": "d2", "layer0": "d1"}, ["d0"])
    assert limits.pins == {2: 2, 3: 2, 0: 1}
    assert limits.exclude == {0}


@pytest.mark.parametrize(
    ("pins", "exclude", "message"),
    [
        ({"net.7": "d0"}, [], "no module or op 'net.7'"),
        ({"layer9": "d0"}, [], "did you mean"),
        ({"net": "d9"}, [], "no device 'd9'.*devices: d0, d1, d2"),
        ({"net": "d0", "net.1": "d1"}, [], "--pin net.1=d1 contradicts --pin net=d0"),
        ({"net": "d0"}, ["d0"], "d0 is excluded"),
        ({}, ["d0", "d1", "d2"], "no device of mesh is left"),
        ({}, ["gpu"], "no device 'gpu'"),
        ({"": "d0"}, [], "no module or op ''"),
    ],
)
def test_demands_that_make_no_sense_are_refused(
    pins: dict[str, str], exclude: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_limits(chain([0.1] * 6), mesh(GPU, GPU, GPU), pins, exclude)


def test_an_op_without_a_device_is_named() -> None:
    graph = OpGraph.from_edges({"x": 1.0}, [])
    problem = Problem.build(graph, mesh(GPU, CPU), Job())
    with pytest.raises(PlanError, match="'x' can run on d0 only"):
        PlacementSpace.build(problem, exclude={0})
