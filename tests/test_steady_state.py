from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import DeadlockError, PlanError
from simcore.schedule import Action, Edges, Schedule, chain, needs
from simcore.schedule_check import check
from simcore.schedule_names import SCHEDULE_NAMES, make_schedule
from simcore.schedule_run import Cost, Hop
from simcore.schedule_times import simulate_unit
from simcore.signature import Phase
from simcore.steady_state import (
    SEMANTICS_ASYNC,
    Period,
    steady_period,
    weight_memory_factor,
    weight_versions,
)

ONE_TWO = {Phase.F: 1.0, Phase.B: 2.0}
FOUR = {Phase.F: 1.0, Phase.B: 2.0, Phase.I: 1.25, Phase.W: 0.75}
DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))
FROM, TO = 140, 200  # minibatches; the 60 between are a multiple of 1 to 6, whatever cycle binds


def endless(
    units: Sequence[Sequence[tuple[int, Phase, int]]], minibatches: int, edges: Edges = ()
) -> Schedule:
    """Returns units (stage, phase, minibatch in round 0), one a rank, repeated without end, cut."""
    rounds = range(-minibatches, 2 * minibatches)
    rows = [
        tuple(
            Action(stage, phase, first + number)
            for number in rounds
            for stage, phase, first in unit
            if 0 <= first + number < minibatches
        )
        for unit in units
    ]
    stage_rank = dict(sorted((s, rank) for rank, unit in enumerate(units) for s, _, _ in unit))
    return Schedule(
        name="endless",
        num_ranks=len(units),
        num_stages=len(stage_rank),
        num_microbatches=minibatches,
        stage_rank=tuple(stage_rank.values()),
        actions=tuple(rows),
        asynchronous=True,
        edges=edges,
    )


def in_flight(limits: Sequence[int], minibatches: int, edges: Edges = ()) -> Schedule:
    """Returns 1F1B without a flush and with so many minibatches in flight, [stage]."""
    units = [[(s, Phase.F, held - 1), (s, Phase.B, 0)] for s, held in enumerate(limits)]
    return endless(units, minibatches, edges)


def slope(make: Callable[[int], Schedule], cost: Cost, hop: Hop) -> float:
    """Returns seconds per minibatch between two long runs."""
    short, long = (simulate_unit(make(count), cost, hop).step for count in (FROM, TO))
    return (long - short) / (TO - FROM)


def slope_with_updates(
    schedule: Schedule, cost: Mapping[Phase, Sequence[float]], hop: float, update: Sequence[float]
) -> float:
    """Returns the slope of one run, from the definition: after each backward the rank updates."""
    before, after = schedule.predecessors, schedule.successors
    rank_of = schedule.stage_rank
    done: dict[Action, float] = {}
    free, position = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    while len(done) < sum(map(len, schedule.actions)):
        for rank, row in enumerate(schedule.actions):
            if position[rank] == len(row):
                continue
            action = row[position[rank]]
            inputs = needs(action, before, after)
            if not done.keys() >= set(inputs):
                continue
            there = [done[x] + hop * (rank_of[x.stage] != rank) for x in inputs]
            done[action] = max(free[rank], *there, 0.0) + cost[action.phase][action.stage]
            free[rank] = done[action] + update[action.stage] * (action.phase == Phase.B)
            position[rank] += 1
    return (done[Action(0, Phase.B, 190)] - done[Action(0, Phase.B, 130)]) / 60


class Drawn(NamedTuple):
    edges: Edges
    stages: int
    cost: dict[Phase, list[float]]
    hop: dict[tuple[int, int], float]

    def make(self, minibatches: int) -> Schedule:
        return make_schedule("pipedream", self.stages, minibatches, edges=self.edges)

    def period(self, minibatches: int = 16) -> Period:
        return steady_period(self.make(minibatches), self.cost, self.hop)


@st.composite
def pipelines(draw: st.DrawFn) -> Drawn:
    stages = draw(st.integers(1, 5))
    seconds = st.integers(0, 12) | st.floats(0.0, 10.0)
    pairs = [(i, j) for i in range(stages) for j in range(i + 1, stages)]
    any_edges = st.lists(st.sampled_from(pairs), unique=True) if pairs else st.just([])
    edges = draw(st.just(chain(stages)) | any_edges.map(tuple)) or chain(stages)
    cost = {phase: [float(draw(seconds)) for _ in range(stages)] for phase in (Phase.F, Phase.B)}
    hop = {way: float(draw(seconds)) for a, b in edges for way in ((a, b), (b, a))}
    return Drawn(edges, stages, cost, hop)


@given(pipelines())
def test_the_period_is_the_slope_over_many_minibatches(drawn: Drawn) -> None:
    long = slope(drawn.make, drawn.cost, drawn.hop)
    assert drawn.period().seconds == pytest.approx(long, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("edges", [(), DIAMOND])
def test_the_period_of_any_seconds_is_the_slope(seed: int, edges: Edges) -> None:
    rng = np.random.default_rng(seed)
    hop = {
        way: float(rng.random() * seed / 10)
        for a, b in edges or chain(5)
        for way in ((a, b), (b, a))
    }
    cost = {phase: rng.random(5).tolist() for phase in (Phase.F, Phase.B)}
    drawn = Drawn(edges, 5, cost, hop)
    assert drawn.period().seconds == pytest.approx(slope(drawn.make, cost, hop), rel=1e-9)


@given(pipelines())
def test_the_cycle_proves_the_period(drawn: Drawn) -> None:
    period = drawn.period()
    schedule = drawn.make(TO)
    steps = [*zip(period.cycle, period.cycle[1:], strict=False)]
    first = period.cycle[0]
    again = first._replace(microbatch=first.microbatch + period.minibatches)
    seconds = 0.0
    for one, other in [*steps, (period.cycle[-1], again)]:
        hop = 0.0
        if one.stage == other.stage:
            row = [action._replace(microbatch=action.microbatch + 100) for action in (one, other)]
            places = [schedule.actions[one.stage].index(action) for action in row]
            assert places[1] == places[0] + 1
        else:
            assert one in needs(other, schedule.predecessors, schedule.successors)
            hop = drawn.hop[one.stage, other.stage]
        seconds += drawn.cost[one.phase][one.stage] + hop
    assert seconds == pytest.approx(period.seconds * period.minibatches, rel=1e-12, abs=1e-300)
    assert period.ranks == tuple(action.stage for action in period.cycle)
    assert min(action.microbatch for action in period.cycle) == 0


@given(pipelines(), st.data())
def test_no_second_less_makes_the_period_longer(drawn: Drawn, data: st.DataObject) -> None:
    period = drawn.period().seconds
    phase = data.draw(st.sampled_from([Phase.F, Phase.B]))
    stage = data.draw(st.integers(0, drawn.stages - 1))
    drawn.cost[phase][stage] += data.draw(st.floats(0.0, 5.0))
    slower = drawn.period().seconds
    assert slower >= period
    for way in drawn.hop:
        drawn.hop[way] += data.draw(st.floats(0.0, 5.0))
    assert drawn.period().seconds >= slower
    updated = steady_period(drawn.make(16), drawn.cost, drawn.hop, update=0.5).seconds
    assert updated >= drawn.period().seconds


@given(pipelines())
def test_twice_the_seconds_are_twice_the_period(drawn: Drawn) -> None:
    twice = Drawn(
        drawn.edges,
        drawn.stages,
        {phase: [2 * x for x in row] for phase, row in drawn.cost.items()},
        {way: 2 * x for way, x in drawn.hop.items()},
    )
    assert twice.period().seconds == 2 * drawn.period().seconds
    assert twice.period().cycle == drawn.period().cycle


def closed_form(
    cost: Mapping[Phase, Sequence[float]], hop: float, limits: Sequence[int], update: float = 0.0
) -> float:
    """Returns the slowest loop of a chain: from a stage down to another and up again.

    From F of stage i, (limit of i) - (limit of j) + 1 minibatches pass until stage i runs F again;
    a stage's own loop is i = j.
    """
    total = np.add(cost[Phase.F], cost[Phase.B])
    return max(
        (float(total[i : j + 1].sum()) + 2 * (j - i) * hop + update) / (limits[i] - limits[j] + 1)
        for i in range(len(limits))
        for j in range(i, len(limits))
    )


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("hop", [0.0, 0.1, 0.5, 4.0])
@pytest.mark.parametrize("update", [0.0, 0.25, 3.0])
def test_pipedream_has_a_closed_form(stages: int, hop: float, update: float) -> None:
    rng = np.random.default_rng(stages)
    cost = {phase: rng.integers(1, 9, stages).tolist() for phase in (Phase.F, Phase.B)}
    schedule = make_schedule("pipedream", stages, stages + 2)
    period = steady_period(schedule, cost, hop, update)
    limits = range(stages, 0, -1)
    assert period.seconds == pytest.approx(closed_form(cost, hop, limits, update), rel=1e-12)
    slowest = max(f + b for f, b in zip(*cost.values(), strict=True)) + update
    if not hop:
        assert period.seconds == slowest


def test_equal_stages_wait_for_hops_only_between_them() -> None:
    # round all p stages there are 2(p - 1) hops and p minibatches in flight
    for stages in (2, 4, 8):
        period = steady_period(make_schedule("pipedream", stages, 20), ONE_TWO, 0.5)
        assert period.seconds == 3 + 2 * 0.5 * (stages - 1) / stages
        assert period.minibatches == stages
        assert period.hop_seconds == stages - 1


@pytest.mark.parametrize(
    "limits",
    [(1, 1), (2, 1), (3, 1), (8, 1), (4, 4), (3, 2, 1), (6, 4, 1), (2, 2, 1), (9, 5, 3, 2)],
)
@pytest.mark.parametrize("hop", [0.0, 1.0, 7.5])
def test_minibatches_in_flight_hide_hops(limits: tuple[int, ...], hop: float) -> None:
    stages = len(limits)
    cost = {Phase.F: [1.0] * stages, Phase.B: [2.0] * stages}
    schedule = in_flight(limits, 24)
    period = steady_period(schedule, cost, hop)
    assert period.seconds == pytest.approx(closed_form(cost, hop, limits), rel=1e-12)
    assert period.seconds == pytest.approx(
        slope(lambda count: in_flight(limits, count), cost, hop), rel=1e-9
    )
    assert weight_versions(schedule) == limits


def test_more_in_flight_are_never_slower_and_enough_are_as_fast_as_the_slowest_stage() -> None:
    seconds = [steady_period(in_flight((n, 1), 24), ONE_TWO, 4.0).seconds for n in range(1, 8)]
    assert seconds == [14.0, 7.0, 14 / 3, 3.5, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("update", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("hop", [0.0, 0.3, 6.0])
@pytest.mark.parametrize("edges", [(), DIAMOND])
def test_the_update_keeps_its_rank_but_not_its_gradient(
    edges: Edges, hop: float, update: float
) -> None:
    cost = {Phase.F: [1.0, 2.0, 0.5, 1.0, 1.0], Phase.B: [2.0, 2.5, 1.0, 1.5, 2.0]}
    updates = [update * factor for factor in (1.0, 0.2, 2.0, 0.5, 1.0)]
    long = make_schedule("pipedream", 5, TO, edges=edges)
    period = steady_period(make_schedule("pipedream", 5, 12, edges=edges), cost, hop, updates)
    slow = slope_with_updates(long, cost, hop, updates)
    assert period.seconds == pytest.approx(slow, rel=1e-9)


def test_one_rank_never_waits() -> None:
    period = steady_period(make_schedule("pipedream", 1, 2), ONE_TWO, 99.0, update=0.5)
    assert period == Period(
        seconds=3.5,
        cycle=(Action(0, Phase.F, 0), Action(0, Phase.B, 0), Action(0, Phase.U, 0)),
        ranks=(0, 0, 0),
        minibatches=1,
        hop_seconds=0.0,
    )
    assert str(period) == "3.5 s per minibatch: rank 0 never waits: 0F0 0B0 0U0, every 1 minibatch"


def test_words_say_which_loop_of_hops_binds() -> None:
    hop = {(0, 1): 1.0, (1, 0): 1.0, (1, 2): 5.0, (2, 1): 2.0}
    period = steady_period(make_schedule("pipedream", 3, 8), ONE_TWO, hop)
    assert str(period) == (
        "6.5 s per minibatch: ranks 1, 2 wait for each other, 7 s of 13 s in hops: "
        "1F0 2F0 2B0 1B0, every 2 minibatches"
    )


def test_a_rank_comes_before_an_equal_loop_of_several() -> None:
    period = steady_period(make_schedule("pipedream", 4, 8), ONE_TWO)
    assert set(period.ranks) == {0}
    assert steady_period(make_schedule("pipedream", 4, 8), {Phase.F: 0, Phase.B: 0}).seconds == 0.0


def test_the_slowest_stage_is_the_one_that_never_waits() -> None:
    cost: Cost = {Phase.F: [1.0, 1.0, 3.0, 1.0], Phase.B: 2.0}
    period = steady_period(make_schedule("pipedream", 4, 8), cost, 0.1)
    assert (period.seconds, set(period.ranks)) == (5.0, {2})


def looped(name: str, ranks: int, minibatches: int) -> Schedule:
    per_rank = {"interleaved": 2, "zbv": 2}.get(name, 1)
    schedule = make_schedule(name, ranks, minibatches, stages_per_rank=per_rank)
    return replace(schedule, asynchronous=True)


@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name != "gpipe"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("hop", [0.0, 0.7])
def test_any_order_that_repeats_has_a_period(name: str, ranks: int, hop: float) -> None:
    # several stages on a rank, split backwards, rounds of several minibatches, a V
    counts = (120, 240)
    short, long = (simulate_unit(looped(name, ranks, m), FOUR, hop).step for m in counts)
    period = steady_period(looped(name, ranks, 48), FOUR, hop)
    assert period.seconds == pytest.approx((long - short) / 120, rel=1e-9)


def blocks(stage: int, size: int, ahead: int, minibatches: int) -> tuple[Action, ...]:
    """Returns as many forwards, then as many backwards; the forwards are some minibatches ahead."""
    actions = [
        Action(stage, phase, start + k + (ahead if phase == Phase.F else 0))
        for start in range(-size * (ahead // size + 1), minibatches, size)
        for phase in (Phase.F, Phase.B)
        for k in range(size)
    ]
    return tuple(action for action in actions if 0 <= action.microbatch < minibatches)


def two_blocks(sizes: tuple[int, int], ahead: int, minibatches: int) -> Schedule:
    rows = (blocks(0, sizes[0], ahead, minibatches), blocks(1, sizes[1], 0, minibatches))
    return replace(in_flight((1, 1), minibatches), actions=rows)


def test_blocks_of_minibatches_repeat_too() -> None:
    period = steady_period(two_blocks((3, 3), 0, 12), ONE_TWO)
    assert period.seconds == (3 + 1) * 3 / 3  # each block is flushed
    assert period.minibatches == 3
    long = slope(lambda count: two_blocks((3, 3), 0, count), ONE_TWO, 0.0)
    assert period.seconds == pytest.approx(long, rel=1e-9)


@pytest.mark.parametrize("hop", [0.0, 0.5, 3.0])
def test_ranks_with_different_blocks_repeat_together(hop: float) -> None:
    long = slope(lambda count: two_blocks((3, 2), 3, count), ONE_TWO, hop)
    period = steady_period(two_blocks((3, 2), 3, 18), ONE_TWO, hop)
    assert period.seconds == pytest.approx(long, rel=1e-9)
    with pytest.raises(PlanError, match=r"different numbers of minibatches, and 10 are too few"):
        steady_period(two_blocks((3, 2), 3, 10), ONE_TWO, hop)


def test_the_ends_may_be_run_otherwise() -> None:
    regular = in_flight((3, 1), 24)
    row = list(regular.actions[0])
    first, last = row.index(Action(0, Phase.B, 0)), row.index(Action(0, Phase.F, 23))
    row[first - 1], row[first] = row[first], row[first - 1]  # 0F0 0F1 0B0 0F2
    row.insert(last - 2, row.pop(last))  # 0F23 before 0F22's backward
    irregular = replace(regular, actions=(tuple(row), regular.actions[1]))
    check(irregular)
    assert steady_period(irregular, ONE_TWO, 4.0) == steady_period(regular, ONE_TWO, 4.0)


@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name != "pipedream"])
def test_a_synchronous_schedule_has_no_steady_state(name: str) -> None:
    schedule = replace(looped(name, 2, 8), asynchronous=False)
    with pytest.raises(PlanError, match=f"^schedule '{name}' is synchronous: it is flushed"):
        steady_period(schedule, FOUR)


def test_a_schedule_that_repeats_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"4 minibatches show no .*stage 0 has 4 in flight; "):
        steady_period(make_schedule("pipedream", 4, 4), ONE_TWO)
    with pytest.raises(PlanError, match="8 minibatches show no steady state, for stage 0 has 8 in"):
        steady_period(looped("gpipe", 2, 8), FOUR)
    row = [Action(0, phase, k) for k in range(8) for phase in (Phase.F, Phase.B)]
    for place in (3, 7, 9):  # 0B1 0F2, 0B3 0F4 and 0B4 0F5 change places: 1, 2, then 1 ...
        row[place], row[place + 1] = row[place + 1], row[place]
    uneven = replace(in_flight((1,), 8), actions=(tuple(row),))
    with pytest.raises(PlanError, match="rank 0 repeats no unit of actions in 8 minibatches"):
        steady_period(uneven, ONE_TWO)


def test_a_schedule_that_would_stop_later_is_refused() -> None:
    # four ranks in a ring, each with two stages; two of them take a forward four minibatches ahead
    # of the one they give, two four behind: nine minibatches wait for each other, eight do not
    def ring(minibatches: int) -> Schedule:
        units = [
            [
                (2 * rank + side, phase, ahead[side] - (phase == Phase.B))
                for phase in (Phase.F, Phase.B)
                for side in (0, 1)
            ]
            for rank, ahead in enumerate([(4, 0), (0, 4), (0, 4), (4, 0)])
        ]
        return endless(units, minibatches, ((1, 2), (3, 4), (5, 6), (7, 0)))

    check(ring(8))
    with pytest.raises(
        DeadlockError, match=r"^schedule 'endless': if it went on, these would wait"
    ):
        steady_period(ring(8), ONE_TWO)
    with pytest.raises(DeadlockError, match=r"^schedule 'endless': deadlock"):
        check(ring(9))


def test_seconds_and_schedules_are_checked() -> None:
    schedule = make_schedule("pipedream", 2, 8)
    with pytest.raises(PlanError, match="cost of phase U is no seconds"):
        steady_period(schedule, ONE_TWO, update=-1.0)
    with pytest.raises(PlanError, match="cost of phase U has 3 numbers for 2 stages"):
        steady_period(schedule, ONE_TWO, update=[1.0, 1.0, 1.0])
    with pytest.raises(PlanError, match="no cost of phase B"):
        steady_period(schedule, {Phase.F: 1.0})
    with pytest.raises(PlanError, match="hop 0 -> 1: nan is no seconds"):
        steady_period(schedule, ONE_TWO, float("nan"))
    broken = replace(schedule, actions=(schedule.actions[0][:-1], schedule.actions[1]))
    with pytest.raises(PlanError, match=r"0B7.* is missing"):
        steady_period(broken, ONE_TWO)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_stage_of_pipedream_keeps_a_version_for_each_stage_from_it_on(stages: int) -> None:
    schedule = make_schedule("pipedream", stages, 2 * stages)
    assert weight_versions(schedule) == tuple(range(stages, 0, -1))
    assert weight_memory_factor(schedule) == tuple(map(float, range(stages, 0, -1)))
    # the first of equal stages holds as many weights as a replica of the whole model
    assert weight_memory_factor(schedule)[0] / stages == 1.0
    # fp32 Adam: 4 bytes of weights, 4 of gradient and 8 of state become 4 (p - s) + 12
    adam = weight_memory_factor(schedule, 4 / 16)
    assert [16 * factor for factor in adam] == [4 * n + 12 for n in range(stages, 0, -1)]


def test_a_synchronous_schedule_keeps_one_version() -> None:
    schedule = make_schedule("1f1b", 4, 8)
    assert weight_versions(schedule) == (1, 1, 1, 1)
    assert weight_memory_factor(schedule) == (1.0,) * 4
    with pytest.raises(PlanError, match=r"share .*: 1\.5 is not from 0 to 1"):
        weight_memory_factor(schedule, 1.5)


def test_asynchronous_plans_have_a_word_for_it() -> None:
    assert SEMANTICS_ASYNC == "asynchronous updates"
