"""Pipelines as tasks: closed forms, memory in flight, copies, ties, batches, the reference."""

from dataclasses import replace

import numba
import numpy as np
import pytest

from simcore import run
from simcore.errors import PlanError
from simcore.job import Job
from simcore.kernel import Engine, Status
from simcore.lower import Problem
from simcore.pipeline import Cost, Part, Tie, slices
from simcore.pipeline_batch import PipelineProblem, simulate_pipelines, stack_tables
from simcore.pipeline_tasks import pipeline_program
from simcore.plan import Settings
from simcore.schedule import Schedule, max_in_flight
from simcore.schedule_names import make_schedule
from simcore.schedule_times import simulate_unit
from simcore.signature import Phase
from tests.pipelines import RANKS, V100, chain_of, pipeline_of, play, tables_of
from tests.reference import ReferenceProblem, simulate_reference

SECONDS = {Phase.F: 1.0, Phase.I: 1.0, Phase.W: 1.0}


def step(schedule: Schedule, **seconds: float) -> float:
    """Returns the step time without hops and updates."""
    given = {Phase[name]: value for name, value in seconds.items()}
    return play(pipeline_of(schedule, tables_of(schedule, given)))[1].step_time


# closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (4, 4), (8, 32), (3, 7)])
def test_the_bubble_of_gpipe_and_1f1b(name: str, p: int, m: int) -> None:
    time = step(make_schedule(name, p, m), F=1.0, B=2.0)
    assert 1 - m * 3.0 / time == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 16, 4)])
def test_the_bubble_of_interleaved_stages(p: int, m: int, v: int) -> None:
    schedule = make_schedule("interleaved", p, m, stages_per_rank=v)
    time = step(schedule, F=1.0, B=2.0)
    assert 1 - m * v * 3.0 / time == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_the_idle_time_of_zero_bubble_h1_and_h2(p: int, m: int) -> None:
    f, b, w = 2.0, 2.5, 1.5  # b is the input gradient, as in the paper
    for name, idle in (("zb-h1", (p - 1) * (f + b - w)), ("zb-h2", (p - 1) * (f + b - 2 * w))):
        if name == "zb-h2" and m < 2 * p - 1:
            continue
        schedule = make_schedule(name, p, m)
        run = play(pipeline_of(schedule, tables_of(schedule, {Phase.F: f, Phase.I: b, Phase.W: w})))
        mine = run[1].placement == 0
        end = run[1].end[mine].max()
        assert end - m * (f + b + w) == pytest.approx(idle), name


def test_costly_hops_give_the_event_models_times_to_the_nanosecond() -> None:
    # 4,000,000 bytes at 50 GiB/s and 0.5 us, which the published figures round to whole ns
    hop, published = 75.005e-6, {(4, 8): 4500.08, (8, 32): 16800.34, (8, 1024): 444609.02}
    for (p, m), microseconds in published.items():
        if numba.config.DISABLE_JIT and m > 100:
            continue  # half a minute
        schedule = make_schedule("1f1b", p, m)
        tables = tables_of(schedule, {Phase.F: 100e-6, Phase.B: 200e-6}, message=1000)
        cluster = chain_of(p, bandwidth=1000 / (hop - 0.5e-6), latency=0.5e-6)
        time = play(pipeline_of(schedule, tables), cluster)[1].step_time
        assert time * 1e6 == pytest.approx(microseconds, abs=0.01)


@pytest.mark.parametrize(("costs", "step_time"), [((10, 10, 10, 40), 190), ((20, 20, 20, 20), 140)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fill_and_drain_count_not_only_the_slowest_stage(
    name: str, costs: tuple[int, ...], step_time: int
) -> None:
    schedule = make_schedule(name, 4, 4)
    seconds = {Phase.F: [c / 2 for c in costs], Phase.B: [c / 2 for c in costs]}
    assert play(pipeline_of(schedule, tables_of(schedule, seconds)))[1].step_time == step_time


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_tasks_run_when_the_plain_evaluator_says(name: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        p, m = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        schedule = make_schedule(name, p, m)
        seconds = {phase: rng.uniform(0.5, 2, p) for phase in (Phase.F, Phase.I, Phase.W)}
        seconds[Phase.B] = seconds[Phase.I] + seconds[Phase.W]
        tables = tables_of(schedule, {k: v.tolist() for k, v in seconds.items()}, message=10**9)
        settings = replace_settings(contention="none")
        found = play(pipeline_of(schedule, tables), chain_of(p, latency=0.25), settings)[1]
        phases = {action.phase for row in schedule.actions for action in row}
        cost = {phase: seconds[phase].tolist() for phase in phases}
        expected = simulate_unit(schedule, cost, hop=1.25)
        assert found.step_time == pytest.approx(expected.step, rel=1e-12)


def replace_settings(**changes: str) -> Settings:
    return Settings(**({"host": "per_rank", "contention": "fifo"} | changes))


# memory


def test_each_stage_of_1f1b_holds_as_many_microbatches_as_are_in_flight() -> None:
    for p, m in ((4, 8), (4, 2), (6, 6)):
        schedule = make_schedule("1f1b", p, m)
        tables = tables_of(schedule, {Phase.F: 1.0, Phase.B: 2.0}, saved=1000)
        allocated = play(pipeline_of(schedule, tables))[1].allocated
        assert allocated.tolist() == [1000 * min(m, p - s) for s in range(p)]
        assert allocated.tolist() == [1000 * count for count in max_in_flight(schedule)]


def test_gpipe_holds_all_microbatches_and_gradients_from_the_first_backward_on() -> None:
    schedule = make_schedule("gpipe", 2, 4)
    tables = tables_of(schedule, {Phase.F: 1.0, Phase.B: 2.0}, saved=1000, gradient=300)
    assert play(pipeline_of(schedule, tables))[1].allocated.tolist() == [4300, 4300]


def test_split_backwards_keep_what_weight_gradients_need() -> None:
    schedule = make_schedule("zb-h1", 4, 8)
    tables = tables_of(schedule, SECONDS, saved=1000, kept=1000)
    allocated = play(pipeline_of(schedule, tables))[1].allocated
    assert allocated.tolist() == [1000 * c for c in max_in_flight(schedule, until=Phase.W)]


def test_what_a_stage_holds_and_needs_inside_a_phase_counts_once() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    tables = tables_of(
        schedule, {Phase.F: 1.0, Phase.B: 2.0}, message=50, saved=100, parameter_bytes=1000,
        buffer_bytes=20, state_bytes=2000,
    )  # fmt: skip
    extra = np.zeros_like(tables.extra)
    extra[:, Phase.F] = 400
    tables = replace(tables, extra=extra)
    allocated = play(pipeline_of(schedule, tables))[1].allocated
    assert allocated.tolist() == [3020 + 100 + 400, 3020 + 400]


def test_asynchronous_stages_keep_a_version_of_the_weights_for_each_minibatch_in_flight() -> None:
    schedule = make_schedule("pipedream", 3, 9)
    tables = tables_of(schedule, {Phase.F: 1.0, Phase.B: 2.0}, parameter_bytes=1000)
    assert play(pipeline_of(schedule, tables))[1].allocated.tolist() == [3000, 2000, 1000]


@pytest.mark.parametrize(
    ("sharding", "held"), [(0, 1000 + 2000 + 800), (1, 1000 + 1000 + 800), (2, 1000 + 1000 + 400)]
)
def test_sharded_optimizers_divide_state_and_gradients(sharding: int, held: int) -> None:
    schedule = make_schedule("1f1b", 2, 2)
    tables = tables_of(
        schedule, {Phase.F: 1.0, Phase.B: 2.0}, parameter_bytes=1000, state_bytes=2000, gradient=800
    )
    part = Part(800, Cost(np.array([2.0]), np.zeros(1), np.zeros(1)))
    pipeline = pipeline_of(
        schedule, tables, copies=2, parts=[(part,), (part,)], optimizer_sharding=sharding
    )
    pipeline = replace(pipeline, buckets=type(pipeline.buckets)(as_views=True))
    assert play(pipeline)[1].allocated.tolist() == [held] * 4


# copies and ties


def test_copies_fetch_the_samples_they_lack_once() -> None:
    assert list(slices(2, 2)) == [(0, 0, 0.5), (1, 1, 0.5)]
    assert list(slices(1, 2)) == [(0, 0, 0.5), (0, 1, 0.5)]
    assert list(slices(2, 3)) == [(0, 0, 1 / 3), (0, 1, 1 / 6), (1, 1, 1 / 6), (1, 2, 1 / 3)]
    for a in range(1, 7):
        for b in range(1, 7):
            found = list(slices(a, b))
            assert sum(share for _, _, share in found) == pytest.approx(1)
            for copy in range(b):
                assert sum(s for _, t, s in found if t == copy) == pytest.approx(1 / b)


def test_buckets_are_summed_while_the_last_backward_goes_on() -> None:
    schedule = make_schedule("1f1b", 1, 2)
    tables = tables_of(schedule, {Phase.F: 1.0, Phase.B: 2.0, Phase.U: 0.5}, gradient=10**9)
    half = Part(5 * 10**8, Cost(np.array([1.0]), np.zeros(1), np.zeros(1)))
    pipeline = pipeline_of(schedule, tables, copies=2, parts=[(half, half)])
    run = play(pipeline)[1]
    # two forwards and backwards, 6 s; 0.5 GB over 1 GB/s each way: the first bucket is hidden
    assert run.step_time == pytest.approx(6.0 + 0.5 + 0.5)


def test_an_update_waits_for_the_gradients_of_a_tied_parameter() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    tables = tables_of(schedule, {Phase.F: 1.0, Phase.B: 2.0, Phase.U: 1.0})
    ties = [Tie(1, 0, 3 * 10**9, is_updated=False), Tie(0, 1, 2 * 10**9, is_updated=True)]
    problem, run = play(pipeline_of(schedule, tables, ties=ties))
    start = dict(zip(problem.graph.op_names, run.start.tolist(), strict=True))
    assert start["0B0"] == 4.0
    assert start["0U"] == 4.0 + 3.0  # the last backward of stage 1 ended at 4
    assert start["1U"] == 4.0
    assert start["1U copies"] == 8.0 + 2.0


# the same by other ways

SCHEDULES = [("gpipe", 3, 4, 1), ("1f1b", 4, 6, 1), ("zb-h1", 3, 5, 1), ("interleaved", 2, 4, 2)]


@pytest.mark.parametrize("contention", ["none", "port", "ordered", "fifo", "fair"])
@pytest.mark.parametrize(("name", "p", "m", "v"), SCHEDULES)
def test_batches_equal_single_runs(name: str, p: int, m: int, v: int, contention: str) -> None:
    rng = np.random.default_rng(5)
    schedule = make_schedule(name, p, m, stages_per_rank=v)
    settings, cluster = replace_settings(contention=contention), chain_of(p, latency=1e-3)
    problem = PipelineProblem.build(cluster, Job(), schedule, settings)
    made = [pipeline_of(schedule, random_tables(schedule, rng)) for _ in range(5)]
    batch = simulate_pipelines(problem, stack_tables(made, problem))
    assert (batch.status == Status.OK).all()
    for row, pipeline in enumerate(made):
        _, run = play(pipeline, cluster, settings)
        assert batch.step_time[row] == run.step_time
        assert batch.allocated[row].tolist() == run.allocated.tolist()


def random_tables(schedule: Schedule, rng: np.random.Generator) -> "object":
    stages = schedule.num_stages
    seconds = {phase: rng.uniform(0.5, 2, stages).tolist() for phase in Phase}
    sizes = {
        name: rng.integers(0, 10**6, stages)
        for name in ("saved", "kept", "gradient", "parameter_bytes", "state_bytes")
    }
    tables = tables_of(schedule, seconds, message=int(rng.integers(0, 10**9)), **sizes)
    shape = tables.seconds.shape
    return replace(
        tables,
        extra=rng.integers(0, 10**6, tables.extra.shape),
        ahead=rng.uniform(0, 0.2, shape),
        launch=rng.uniform(0.2, 0.5, shape),
        accumulate=rng.uniform(0, 0.3, tables.accumulate.shape),
        new_gradient=rng.integers(0, 10**5, tables.new_gradient.shape),
    )


def test_sweep_and_event_loop_agree_on_pipelines() -> None:
    rng = np.random.default_rng(6)
    schedule = make_schedule("1f1b", 4, 8)
    for contention in ("none", "port", "ordered"):
        problem = PipelineProblem.build(
            chain_of(4), Job(), schedule, replace_settings(contention=contention)
        )
        made = [pipeline_of(schedule, random_tables(schedule, rng)) for _ in range(4)]
        stages = stack_tables(made, problem)
        found = [
            simulate_pipelines(
                replace(problem, problem=replace(problem.problem, engine=engine)), stages
            )
            for engine in (Engine.SWEEP, Engine.EVENTS)
        ]
        assert np.array_equal(found[0].step_time, found[1].step_time)
        assert np.array_equal(found[0].allocated, found[1].allocated)


def test_a_batch_gives_the_same_bits_on_one_thread_and_on_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "MIN_OPS_PER_THREAD", 1)
    rng = np.random.default_rng(7)
    schedule = make_schedule("1f1b", 4, 8)
    problem = PipelineProblem.build(chain_of(4), Job(), schedule, RANKS)
    made = [pipeline_of(schedule, random_tables(schedule, rng)) for _ in range(8)]
    stages = stack_tables(made, problem)
    one, two = (simulate_pipelines(problem, stages, threads=threads) for threads in (1, 2))
    assert np.array_equal(one.step_time, two.step_time)
    assert np.array_equal(one.allocated, two.allocated)


@pytest.mark.parametrize("contention", ["none", "fifo", "fair"])
@pytest.mark.parametrize(("name", "p", "m", "v"), [*SCHEDULES, ("pipedream", 2, 5, 1)])
def test_compiled_equals_reference_on_pipelines(
    name: str, p: int, m: int, v: int, contention: str
) -> None:
    rng = np.random.default_rng(8)
    schedule = make_schedule(name, p, m, stages_per_rank=v)
    tables = replace(random_tables(schedule, rng), ahead=np.zeros(1), launch=np.zeros(1))
    shape = tables.seconds.shape
    tables = replace(tables, ahead=np.zeros(shape), launch=np.zeros(shape))
    part = Part(10**8, Cost(np.array([0.7]), np.zeros(1), np.zeros(1)))
    parts = [(part, part)] * schedule.num_stages
    pipeline = pipeline_of(schedule, tables, copies=2, parts=parts)
    cluster, settings = chain_of(2 * p, latency=1e-3), replace_settings(contention=contention)
    program = pipeline_program("toy", cluster, pipeline)
    rest = {"cost": program.cost, "collectives": program.collectives}
    run = play(pipeline, cluster, settings)[1]
    slow = simulate_reference(
        ReferenceProblem.build(program.graph, cluster, Job(), settings, **rest),
        program.placement.tolist(),
    )
    assert run.step_time == pytest.approx(slow.step_time, rel=1e-12)
    assert run.end.tolist() == pytest.approx(slow.end, rel=1e-12)
    assert run.allocated.tolist() == slow.allocated


def test_a_batch_refuses_other_schedules_and_copies() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    problem = PipelineProblem.build(chain_of(2), Job(), schedule, RANKS)
    other = make_schedule("gpipe", 2, 4)
    with pytest.raises(PlanError, match="another schedule"):
        stack_tables([pipeline_of(other, tables_of(other, SECONDS))], problem)
    with pytest.raises(PlanError, match="copies"):
        stack_tables([pipeline_of(schedule, tables_of(schedule, SECONDS), copies=2)], problem)
    with pytest.raises(PlanError, match="2 devices for 3 ranks"):
        PipelineProblem.build(chain_of(2), Job(), make_schedule("1f1b", 3, 4), RANKS)


def test_the_host_of_a_rank_can_be_the_limit() -> None:
    schedule = make_schedule("1f1b", 1, 3)
    tables = tables_of(schedule, {Phase.F: 1.0, Phase.B: 1.0})
    launch = np.full(tables.launch.shape, 3.0)
    ahead = np.full(tables.ahead.shape, 2.5)
    time = play(pipeline_of(schedule, replace(tables, launch=launch, ahead=ahead)))[1].step_time
    assert time == pytest.approx(5 * 3.0 + 3.0 + 2.5)  # six tasks and the update, host bound


def test_a_problem_of_tasks_is_played_by_any_engine_that_applies() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    problem, run = play(pipeline_of(schedule, tables_of(schedule, SECONDS)), settings=RANKS)
    assert isinstance(problem, Problem)
    assert problem.engine == Engine.EVENTS
    assert run.placement.tolist().count(0) == 9  # four forwards, four backwards, one update
    assert V100 in problem.cost.kinds
