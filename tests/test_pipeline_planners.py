"""Pipeline planners: known cuts, optima by brute force, and what holds for every plan tried."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from agents.planners.pipeline_bound import estimate, pipeline_bound
from agents.planners.pipeline_chain import Candidate, Chain
from agents.planners.pipeline_cuts import (
    best_cuts,
    chain_order,
    equal_split,
    ranks_of,
    safe_cuts,
    stages_at,
    thin_out,
)
from agents.planners.pipeline_layouts import ANYTHING, Demands, Layout, arrangements, layouts
from agents.planners.pipeline_plans import CHANGES, Pipelines, check_demands
from agents.planners.pipeline_search import PipelineSearch, _Queue
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from simcore import Cluster, GraphBuilder, Job, OpGraph, Problem, Settings, simulate
from simcore.errors import PlanError, UsageError
from simcore.graph import OpClass, Out, Phase, Role
from simcore.schedule_names import make_schedule
from simcore.sources import load_graph
from simcore.stages import check_stages
from simcore.units import GiB, MiB
from tests.test_planners import CPU, GPU, OTHER, mesh

FAST = "A100-PCIE-40GB"
FREE = {"bandwidth": 1e15, "latency": 0.0}  # hops that take nothing


def layers(
    seconds: list[float],
    *,
    batch: int = 8,
    parameters: int = 4,
    activation: int = 8,
    kept: int = 0,
    target: str = "",
    measured_on: str = GPU,
    has_labels: bool = False,
) -> OpGraph:
    """A measured training step: a third of each layer's seconds for F, I and W.

    Args:
        seconds: of each layer, for the whole batch.
        batch: samples.
        parameters: bytes of each layer.
        activation: bytes between layers, for the whole batch.
        kept: more bytes of each layer from forward to backward, for the whole batch.
        target: of forward ops.
        measured_on: device kind.
        has_labels: whether the last layer reads an input that no other reads.
    """
    builder = GraphBuilder("layers", batch=batch)
    labels: tuple[int, ...] = ()
    if has_labels:
        op = builder.op("labels", op_class=OpClass.INPUT, outputs=[Out((0, 1))], seconds=0.0)
        labels = builder.outputs(op)
    weights = [builder.parameter(f"w{k}", parameters) for k in range(len(seconds))]
    ops: list[int] = []
    for k, time in enumerate(seconds):
        inputs = [weights[k], *([builder.outputs(ops[-1])[0]] if ops else [])]
        inputs += labels if k == len(seconds) - 1 else ()
        ops.append(
            builder.op(
                f"f{k}",
                module=f"net.{k}",
                target=target,
                inputs=inputs,
                outputs=[Out((0, activation // batch)), Out((0, kept // batch))],
                kernels=0,
                seconds=time / 3,
            )
        )
    gradient = builder.outputs(ops[-1])[0]
    sums = {}
    for k in reversed(range(len(seconds))):
        back = builder.op(
            f"b{k}",
            phase=Phase.B,
            inputs=[gradient, weights[k], builder.outputs(ops[k])[1]],
            outputs=[Out((0, activation // batch))],
            unit_of=ops[k],
            kernels=0,
            seconds=seconds[k] / 3,
        )
        weight = builder.op(
            f"g{k}",
            phase=Phase.B,
            inputs=[gradient, builder.outputs(ops[k])[1]],
            outputs=[Out(parameters, role=Role.GRADIENT)],
            unit_of=ops[k],
            kernels=0,
            seconds=seconds[k] / 3,
        )
        gradient, sums[k] = builder.outputs(back)[0], builder.outputs(weight)[0]
    for k in range(len(seconds)):
        builder.op(
            f"u{k}",
            phase=Phase.U,
            op_class=OpClass.UPDATE,
            inputs=[weights[k], sums[k]],
            outputs=[Out(parameters, storage_of=weights[k], role=Role.PARAMETER)],
            unit_of=ops[k],
            kernels=0,
            seconds=0.0,
            elements=parameters // 4,
        )
    return builder.build(measured_on=measured_on)


def space_of(
    graph: OpGraph, cluster: Cluster, *, batch: int = 8, settings: Settings | None = None
) -> PlacementSpace:
    job = Job(batch=batch, optimizer="sgd", assume_linear=True)
    settings = settings or Settings(slow_down=False)
    return PlacementSpace.build(Problem.build(graph, cluster, job, settings))


def search(space: PlacementSpace, demands: Demands = ANYTHING, evaluations: int = 60) -> Pipelines:
    found = Pipelines.build(space, demands)
    found.run(Budget(evaluations=evaluations))
    return found


def layout(ranks: int, microbatches: int, schedule: str = "1f1b", copies: int = 1) -> Layout:
    devices = np.arange(ranks * copies).reshape(ranks, copies)
    return Layout(
        devices=tuple(map(tuple, devices.tolist())), microbatches=microbatches, schedule=schedule
    )


# equal split


def test_38_equal_layers_on_8_stages_give_no_stage_more_than_5() -> None:
    bounds = equal_split(np.ones(38), 8)
    assert bounds.tolist() == [0, 5, 10, 15, 20, 25, 30, 34, 38]
    slowest = int(np.diff(bounds).max())
    assert 38 + (32 - 1) * slowest == 193  # layer times with 32 microbatches
    assert 38 + (32 - 1) * (38 - 7 * 4) == 348  # with the remainder in the last stage


def test_equal_layers_are_split_as_evenly_as_can_be_whatever_their_number() -> None:
    for count in range(1, 40):
        for parts in range(1, count + 1):
            sizes = np.diff(equal_split(np.ones(count), parts))
            assert sizes.max() == -(-count // parts)
            assert sizes.min() == count // parts
            assert (np.diff(sizes) <= 0).all()


@pytest.mark.parametrize("seed", range(60))
def test_an_equal_split_has_the_lightest_heaviest_part(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 10))
    parts = int(rng.integers(1, count + 1))
    weights = rng.integers(0, 6, count).astype(float) if seed % 2 else rng.random(count)
    bounds = equal_split(weights, parts)
    assert (np.diff(bounds) > 0).all()
    assert (bounds[0], bounds[-1]) == (0, count)
    assert heaviest(weights, bounds.tolist()) == pytest.approx(
        min(
            heaviest(weights, [0, *cuts, count])
            for cuts in itertools.combinations(range(1, count), parts - 1)
        )
    )


def heaviest(weights: NDArray[np.float64], bounds: list[int]) -> float:
    return max(float(weights[a:b].sum()) for a, b in itertools.pairwise(bounds))


def test_more_parts_than_items_are_refused() -> None:
    with pytest.raises(PlanError, match="3 items cannot be split into 4 parts"):
        equal_split(np.ones(3), 4)


# the dynamic program


@pytest.mark.parametrize("seed", range(120))
def test_the_dynamic_program_finds_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    places, microbatches = int(rng.integers(2, 9)), int(rng.integers(1, 6))
    stages = int(rng.integers(1, places))
    seconds = spans(rng.random((stages, places - 1)))
    seconds[rng.random(seconds.shape) < 0.1] = np.inf  # where it does not fit
    hops = rng.random((stages, places)) * rng.choice([0.0, 0.1, 1.0, 3.0])
    hops[0] = 0.0
    best = min(
        fill_and_run(seconds, hops, microbatches, (0, *cuts, places - 1))
        for cuts in itertools.combinations(range(1, places - 1), stages - 1)
    )
    found = best_cuts(seconds, hops, microbatches)
    if found is None:
        assert best == np.inf
        return
    assert found.cost == pytest.approx(best, rel=1e-9)
    assert fill_and_run(seconds, hops, microbatches, found.bounds) == pytest.approx(best, rel=1e-9)


def spans(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of items between two places, [stage, place, place], of those of items."""
    ahead = np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)
    between = ahead[:, None, :] - ahead[:, :, None]
    place = np.arange(ahead.shape[1])
    return np.where(place[None, :, None] < place[None, None, :], between, np.inf)


def fill_and_run(
    seconds: NDArray[np.float64],
    hops: NDArray[np.float64],
    microbatches: int,
    bounds: tuple[int, ...],
) -> float:
    """The sum over stages and (microbatches - 1) times the slowest."""
    work = [seconds[s, a, b] for s, (a, b) in enumerate(itertools.pairwise(bounds))]
    moved = [hops[s, a] for s, a in enumerate(bounds[:-1])]
    again = (microbatches - 1) * max(*work, *moved) if microbatches > 1 else 0.0
    return float(sum(work) + sum(moved) + again)


def test_the_slowest_stage_alone_does_not_decide() -> None:
    """On a slow first device one layer costs 4; the slowest stage is 4 with 1 or with 4 layers."""
    seconds = spans(np.array([[4.0] * 6, [1.0] * 6]))
    found = best_cuts(seconds, np.zeros((2, 7)), 2)
    assert found is not None
    assert found.bounds == (0, 1, 6)
    assert found.cost == 4 + 5 + 5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("seconds", "step"), [((10.0, 10.0, 10.0, 40.0), 190.0), ((20.0,) * 4, 140.0)]
)
def test_the_simulated_step_has_fill_and_drain(
    schedule: str, seconds: tuple[float, ...], step: float
) -> None:
    """Sum over stages and (m - 1) times the slowest: 190, not 160; 140, not 80."""
    graph = layers([4 * time for time in seconds])
    chain = Chain.build(space_of(graph, mesh(*[GPU] * 4, **FREE)))
    candidate = chain.cut(layout(4, 4, schedule))
    assert candidate is not None
    assert candidate.bounds == (0, 1, 2, 3, 4)
    tried = PipelineSearch(chain=chain, layouts=[]).simulate(candidate, Budget())
    assert tried is not None
    assert tried.step_time == pytest.approx(step, rel=1e-6)


def test_the_planner_balances_what_it_may_cut() -> None:
    """Seven layers of 10, 10, 10, 10, 10, 10 and 20 s: two stages of 40, not of 30 and 50."""
    space = space_of(layers([10.0] * 6 + [20.0]), mesh(GPU, GPU, **FREE))
    found = Chain.build(space).cut(layout(2, 8))
    assert found is not None
    assert found.bounds == (0, 4, 7)


def test_cuts_are_put_where_little_crosses() -> None:
    """A hop of 1 s beats perfect balance; without its cost the cut is in the middle."""
    graph = layers([4.0] * 4, activation=8 * MiB)
    for bandwidth, cut in ((1e15, 2), (8 * MiB / 8.0, None)):
        space = space_of(graph, mesh(GPU, GPU, bandwidth=bandwidth))
        found = search(space).best
        assert found is not None
        stages = [len(stage.ops) for stage in found.plan.stages]
        if cut is not None:
            assert stages == [cut, 4 - cut]
        assert found.step_time > 8.0 / 2


# memory


def test_the_memory_of_a_stage_is_kept() -> None:
    """Layers of 1.4 GiB, their gradients and what is added to them: three fill 16 GB."""
    graph = layers([1.0] * 2 + [30.0] * 2 + [1.0] * 4, parameters=1433 * MiB)
    space = space_of(graph, mesh(*[GPU] * 3, **FREE))
    found = search(space, evaluations=20)
    assert found.best is not None
    assert max(len(stage.ops) for stage in found.best.plan.stages) == 3
    task = (graph, space.problem.cluster, space.problem.job)
    assert simulate(*task, found.best.plan).feasible


def test_early_stages_of_1f1b_get_fewer_layers_where_activations_bind() -> None:
    """The first of three stages holds three microbatches, the last one."""
    graph = layers([1.0] * 9, kept=16 * GiB)  # 2 GiB a layer and microbatch
    chain = Chain.build(space_of(graph, mesh(*[GPU] * 3, **FREE)))
    found = chain.cut(layout(3, 8))
    assert found is not None
    assert found.recompute == ("none",) * 3
    sizes = np.diff(found.bounds).tolist()
    assert sizes[0] < sizes[1] < sizes[2]


def test_what_does_not_fit_runs_its_forward_again() -> None:
    graph = layers([1.0] * 4, kept=16 * GiB)  # 32 GiB a stage
    space = space_of(graph, mesh(GPU, GPU, **FREE))
    found = search(space, Demands(microbatches=8, schedule="gpipe"))
    assert found.best is not None
    assert {stage.recompute for stage in found.best.plan.stages} == {"full"}
    assert found.best.step_time == pytest.approx(4 / 2 * (4 / 3) * 9 / 8, rel=1e-3)


def test_nothing_fits_is_said_with_the_bytes() -> None:
    space = space_of(layers([1.0] * 2, parameters=9 * GiB), mesh(GPU, GPU))
    found = search(space, evaluations=10)
    assert found.best is None
    assert found.why_none.startswith("no cut") or "GiB on d" in found.why_none


# unlike devices


def test_a_faster_gpu_gets_more_layers() -> None:
    space = space_of(layers([1.0] * 12, measured_on=FAST), mesh(FAST, OTHER, **FREE))
    chain = Chain.build(space)
    found = chain.cut(layout(2, 8))
    assert found is not None
    work = space.work.sum(axis=0)
    share = found.bounds[1] / 12
    assert share == pytest.approx(work[1] / work.sum(), abs=1 / 12)
    assert share > 0.6


def test_fast_devices_first_and_last_are_both_tried() -> None:
    space = space_of(layers([1.0] * 4, measured_on=FAST), mesh(OTHER, FAST, FAST, OTHER))
    placed = {tuple(d for rank in way for d in rank) for way in arrangements(space, 4, 1)}
    assert {(0, 1, 2, 3), (1, 2, 0, 3), (3, 0, 2, 1)} <= placed


def test_devices_that_are_alike_are_arranged_once() -> None:
    space = space_of(layers([1.0] * 4), mesh(*[GPU] * 4))
    assert len(list(arrangements(space, 4, 1))) == 1
    assert len(list(arrangements(space, 2, 2))) == 1


def test_a_device_that_may_not_run_a_layer_does_not() -> None:
    graph = layers([1.0] * 4)
    job = Job(batch=8, optimizer="sgd", assume_linear=True)
    problem = Problem.build(graph, mesh(GPU, GPU, **FREE), job, Settings(slow_down=False))
    unit = {name: number for number, name in enumerate(graph.unit_names)}
    for pinned, sizes in (({"f0": 0, "f2": 0}, [3, 1]), ({"f0": 1}, None)):
        space = PlacementSpace.build(problem, pins={unit[op]: d for op, d in pinned.items()})
        found = search(space, Demands(schedule="1f1b"), evaluations=30).best
        if sizes is None:
            assert found is None
            continue
        assert found is not None
        assert [len(stage.ops) for stage in found.plan.stages] == sizes


# the chain


def test_labels_stand_with_their_reader() -> None:
    graph = layers([1.0] * 4, has_labels=True)
    names = [graph.unit_names[unit] for unit in chain_order(graph)]
    assert names == ["f0", "f1", "f2", "labels", "f3"]


@pytest.mark.parametrize("seed", range(8))
def test_any_safe_cuts_go_together(seed: int, gnmt: OpGraph) -> None:
    order = chain_order(gnmt)
    rank, cuts = ranks_of(order), safe_cuts(gnmt, order)
    assert len(cuts) > 10
    rng = np.random.default_rng(seed)
    some = np.sort(rng.choice(cuts, int(rng.integers(1, len(cuts) + 1)), replace=False))
    check_stages(gnmt, stages_at(some, rank))


@pytest.fixture(scope="module")
def gnmt() -> OpGraph:
    """A real model with skip connections: attention reads the encoder from every decoder layer."""
    return load_graph("gnmt-4", {})[0]


def test_few_cuts_are_kept_the_cheapest_of_each_share() -> None:
    cuts, crossing = np.arange(1, 100), np.ones(99)
    crossing[::10] = 0.5  # cuts 1, 11, 21, ...
    kept = thin_out(cuts, np.ones(100), crossing, 10)
    assert kept.tolist() == list(range(1, 100, 10))
    assert thin_out(cuts, np.ones(100), crossing, 99) is cuts


# layouts


def test_layouts_divide_the_batch_and_fit_the_devices() -> None:
    space = space_of(layers([1.0] * 8, batch=12), mesh(*[GPU] * 5), batch=12)
    tried = layouts(space, ANYTHING)
    assert len(tried) == len(set(tried))
    assert {(x.num_ranks, x.copies) for x in tried} == {(2, 1), (2, 2), (3, 1), (4, 1), (5, 1)}
    for each in tried:
        assert 12 % (each.rounds * each.copies) == 0
        used = [device for rank in each.devices for device in rank]
        assert len(set(used)) == each.num_devices <= 5
        assert each.sharding == 0 or each.copies > 1
    assert {each.schedule for each in tried} == {"1f1b", "gpipe", "zb-h1", "interleaved"}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved", "zbv"])
def test_layouts_have_the_microbatches_that_a_schedule_can_be_made_of(schedule: str) -> None:
    space = space_of(layers([1.0] * 8), mesh(*[GPU] * 3, **FREE), batch=12)
    found = {
        layout.microbatches
        for layout in layouts(space, Demands(schedule=schedule))
        if (layout.num_ranks, layout.copies) == (3, 1)
    }
    per_rank = {"interleaved": 2, "zbv": 2}.get(schedule, 1)
    for count in (m for m in range(1, 13) if 12 % m == 0):
        try:
            make_schedule(schedule, 3, count, stages_per_rank=per_rank)
            assert count in found
        except PlanError:
            assert count not in found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_microbatches_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    for ranks, count in itertools.product((2, 3, 5), (1, 2, 3, 5, 8, 20)):
        devices = tuple((rank,) for rank in range(ranks))
        layout = Layout(devices=devices, microbatches=count, schedule=schedule)
        if schedule != "interleaved" or count % ranks == 0:
            assert layout.most_in_flight == max(layout.in_flight()[0])


def test_layouts_that_were_not_estimated_are_tried_last() -> None:
    space = space_of(layers([1.0] * 6), mesh(*[GPU] * 4, **FREE))
    chain, tried = Chain.build(space), layouts(space, ANYTHING)
    ticks = itertools.count()
    budget = Budget(8, clock=lambda: float(next(ticks)))
    queue = _Queue(chain, tried, budget)
    first = [math.isfinite(seconds) for seconds, _, _ in queue.waiting]
    assert 0 < sum(first) < len(tried)
    assert first == sorted(first, reverse=True)
    popped = [queue.pop() for _ in tried]
    assert {layout for _, layout in popped} == set(tried)
    assert all(seconds == pytest.approx(estimate(chain, layout)) for seconds, layout in popped)


def test_demands_fix_microbatches_and_schedule() -> None:
    space = space_of(layers([1.0] * 8), mesh(*[GPU] * 4))
    tried = layouts(space, Demands(microbatches=4, schedule="gpipe"))
    assert {(each.microbatches, each.schedule) for each in tried} == {(4, "gpipe")}
    assert {each.schedule for each in layouts(space, Demands(schedule="zbv"))} == {"zbv"}


@pytest.mark.parametrize(
    ("demands", "message"),
    [
        (Demands(schedule="1fb1"), "did you mean '1f1b'"),
        (Demands(schedule="pipedream"), "needs --allow asynchronous"),
        (Demands(microbatches=5), "a batch of 8 does not divide by it"),
    ],
)
def test_demands_that_cannot_be_met_are_refused(demands: Demands, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_demands(demands, 8)


# the search


@pytest.mark.parametrize("kinds", [(GPU,) * 4, (FAST, OTHER, OTHER), (GPU, GPU, CPU)])
def test_every_plan_tried_is_valid_and_takes_what_was_recorded(kinds: tuple[str, ...]) -> None:
    graph = layers([1.0, 3.0, 2.0, 1.0, 2.0, 2.0], parameters=40 * MiB, measured_on=kinds[0])
    space = space_of(graph, mesh(*kinds, bandwidth=1e10), settings=Settings())
    found = search(space)
    assert found.search is not None
    assert found.best is not None
    assert found.search.tried
    task = (graph, space.problem.cluster, space.problem.job)
    for tried in found.search.tried:
        plan = found.search.plan(tried.candidate)
        assert plan.validate(*task) == []
        result = simulate(*task, plan)
        assert result.step_time == tried.step_time
        assert result.overflow == tried.overflow
        assert tried.step_time >= found.bound
        assert tried.overflow or found.best.step_time <= tried.step_time


def test_the_same_evaluations_find_the_same_plan() -> None:
    space = space_of(layers([1.0, 3.0, 2.0, 1.0, 2.0, 2.0]), mesh(*[GPU] * 4))
    first, second = (search(space, evaluations=40) for _ in range(2))
    assert first.best == second.best
    assert first.search is not None
    assert second.search is not None
    assert first.search.tried == second.search.tried
    assert len(first.search.tried) == 40


def test_moving_cuts_improves_on_a_bad_start() -> None:
    space = space_of(layers([1.0] * 12), mesh(GPU, GPU, **FREE))
    chain = Chain.build(space)
    start = Candidate(layout=layout(2, 8), bounds=(0, 1, 12), recompute=("none", "none"))
    finder = PipelineSearch(chain=chain, layouts=[])
    tried = finder.simulate(start, Budget())
    assert tried is not None
    finder._improve(tried, Budget())
    assert finder.best is not None
    assert finder.best.candidate.bounds == (0, 6, 12)
    assert finder.best.candidate.method == "shifted"


def test_an_even_split_is_tried_beside_the_balanced_one() -> None:
    space = space_of(layers([1.0, 5.0, 1.0, 1.0, 1.0, 1.0]), mesh(GPU, GPU))
    found = search(space, evaluations=30).search
    assert found is not None
    assert {"balanced", "equal"} <= {tried.candidate.method for tried in found.tried}


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_estimate_is_near_for_even_layers(shape: tuple[int, int], schedule: str) -> None:
    ranks, copies = shape
    chain = Chain.build(space_of(layers([1.0] * 8), mesh(*[GPU] * 4, **FREE)))
    one = layout(ranks, 4, schedule, copies)
    candidate = chain.cut(one)
    assert candidate is not None
    tried = PipelineSearch(chain=chain, layouts=[]).simulate(candidate, Budget())
    assert tried is not None
    assert estimate(chain, one) == pytest.approx(tried.step_time, rel=0.1)


def test_the_bound_is_the_work_the_heaviest_layer_and_one_microbatch() -> None:
    graph = layers([1.0] * 6 + [6.0])
    chain = Chain.build(space_of(graph, mesh(*[GPU] * 4, **FREE)))
    assert pipeline_bound(chain, [layout(4, 8)]) == pytest.approx(6.0)  # the heaviest
    assert pipeline_bound(chain, [layout(2, 4, copies=2)]) == pytest.approx(3.0)  # all / 4, or half
    assert pipeline_bound(chain, [layout(2, 1)]) == pytest.approx(
        8.0
    )  # F and I of the only microbatch
    assert pipeline_bound(chain, []) == np.inf


# the mathematics


def test_batch_norm_is_not_split_unasked() -> None:
    graph = layers([1.0] * 4, target="aten.batch_norm.default")
    space = space_of(graph, mesh(GPU, GPU, **FREE))
    found = search(space)
    assert found.best is not None
    assert found.best.plan.microbatches == 1
    assert found.best.plan.semantics == ()
    assert "with batch norm per microbatch (--allow batch-norm)" in found.note
    allowed = search(space, Demands(allow=frozenset(CHANGES.values())))
    assert allowed.best is not None
    assert allowed.best.plan.microbatches > 1
    assert allowed.best.plan.semantics == ("batch norm per microbatch",)
    assert allowed.best.step_time < found.best.step_time
    assert allowed.note == ""


def test_an_asynchronous_pipeline_is_found_where_it_is_allowed() -> None:
    space = space_of(layers([1.0] * 4), mesh(GPU, GPU, **FREE))
    demands = Demands(schedule="pipedream", allow=frozenset({CHANGES["asynchronous"]}))
    found = search(space, demands, evaluations=5)
    assert found.best is not None
    assert found.best.plan.semantics == ("asynchronous updates",)
    assert found.best.step_time == pytest.approx(2.0, rel=0.02)  # half of the work
    assert found.best.step_time >= found.bound


# where there are none


def test_the_reason_for_no_pipeline_is_given() -> None:
    graph = layers([1.0] * 4)
    assert search(space_of(graph, mesh(GPU, CPU))).note == "needs two GPUs"
    job = Job(optimizer="sgd")
    unknown = Problem.build(graph, mesh(GPU, GPU), job)
    assert "batch is unknown" in search(PlacementSpace.build(unknown)).note
    fixed = Problem.build(graph, mesh(GPU, GPU), Job(batch=8, optimizer="sgd"))
    assert "assume-linear" in search(PlacementSpace.build(fixed)).note


def test_idle_gpus_are_explained() -> None:
    """Three layers on four GPUs, and a batch that no two copies can share."""
    graph = layers([1.0] * 3, batch=7)
    found = search(space_of(graph, mesh(*[GPU] * 4), batch=7))
    assert found.best is not None
    used = {name for stage in found.best.plan.stages for name in stage.devices}
    assert len(used) == 3
    assert found.note.startswith("3 of 4 GPUs")
    assert replace(found).note == found.note


def test_stages_with_room_left_run_nothing_again() -> None:
    """Where the search begins with all stages running again, those that need not stop it."""
    graph = layers([1.0] * 4, kept=4 * GiB)
    chain = Chain.build(space_of(graph, mesh(GPU, GPU, **FREE)))
    start = Candidate(layout=layout(2, 8), bounds=(0, 2, 4), recompute=("full", "full"))
    finder = PipelineSearch(chain=chain, layouts=[])
    tried = finder.simulate(start, Budget())
    assert tried is not None
    finder._improve(tried, Budget())
    assert finder.best is not None
    assert finder.best.candidate.recompute == ("none", "none")


def test_a_search_goes_on_where_it_stopped() -> None:
    space = space_of(layers([1.0, 3.0, 2.0, 1.0, 2.0, 2.0]), mesh(*[GPU] * 4))
    found = Pipelines.build(space, ANYTHING)
    for _ in range(2):
        found.run(Budget(evaluations=20))
    assert found.search is not None
    assert len(found.search.tried) == 40
    assert len({tried.candidate for tried in found.search.tried}) == 40
