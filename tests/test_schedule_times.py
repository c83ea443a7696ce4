from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import PlanError
from simcore.layout_text import parse_layout
from simcore.schedule import to_arrays
from simcore.schedule_messages import add_messages
from simcore.schedule_names import SCHEDULE_NAMES, make_schedule
from simcore.schedule_times import UnitTimes, simulate_unit
from simcore.signature import Phase

ONE_TWO = {Phase.F: 1.0, Phase.B: 2.0}
PER_RANK = {"interleaved": 2, "zbv": 2}


def split(forward: float, backward: float, weight: float) -> dict[Phase, float]:
    return {Phase.F: forward, Phase.I: backward, Phase.W: weight}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_the_bubble_is_the_known_one(name: str, ranks: int, microbatches: int) -> None:
    times = simulate_unit(make_schedule(name, ranks, microbatches), ONE_TWO)
    assert times.step == (microbatches + ranks - 1) * 3
    assert times.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("per_rank", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("cost", [(1.0, 1.0), (1.0, 2.0), (3.0, 2.0)])
def test_the_interleaved_bubble_is_the_known_one(
    ranks: int, per_rank: int, rounds: int, cost: tuple[float, float]
) -> None:
    microbatches = rounds * ranks
    schedule = make_schedule("interleaved", ranks, microbatches, stages_per_rank=per_rank)
    times = simulate_unit(schedule, dict(zip((Phase.F, Phase.B), cost, strict=True)))
    chunks = per_rank * microbatches + ranks - 1
    assert times.step == chunks * sum(cost)
    assert times.bubble == pytest.approx((ranks - 1) / chunks, abs=1e-12)


def test_one_microbatch_at_a_time_keeps_one_gpu_busy() -> None:
    bubbles = [
        simulate_unit(make_schedule("gpipe", 4, m), ONE_TWO).bubble for m in (1, 4, 8, 16, 32)
    ]
    assert [round(100 * bubble) for bubble in bubbles] == [75, 43, 27, 16, 9]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_slowest_stage_is_not_all(name: str) -> None:
    schedule = make_schedule(name, 4, 4)
    for forward, times in ((4.0, (10.0, 10.0, 10.0, 40.0)), (8.0, (20.0, 20.0, 20.0, 20.0))):
        forwards = [forward * total / times[0] for total in times]
        backwards = [total - part for total, part in zip(times, forwards, strict=True)]
        cost = {Phase.F: forwards, Phase.B: backwards}
        assert simulate_unit(schedule, cost).step == sum(times) + 3 * max(times)
    assert sum((10, 10, 10, 40)) + 3 * 40 == 190
    assert sum((20, 20, 20, 20)) + 3 * 20 == 140


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [6, 8, 16])
@pytest.mark.parametrize(
    "cost", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (2.0, 3.0, 2.0), (3.0, 5.0, 1.0), (3.0, 2.0, 2.0)]
)
def test_zb_h1_idles_as_its_paper_says(
    ranks: int, microbatches: int, cost: tuple[float, float, float]
) -> None:
    # arXiv 2401.10241, section 2.3: (p - 1)(F + B - W). The handcrafted order reaches it, from
    # p microbatches on, where the weight gradient is the shortest of the three
    forward, backward, weight = cost
    times = simulate_unit(make_schedule("zb-h1", ranks, microbatches), split(*cost))
    bubble = (ranks - 1) * (forward + backward - weight)
    assert times.step == microbatches * sum(cost) + bubble
    assert times.idle_inside()[0] == bubble


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [11, 16, 24])
@pytest.mark.parametrize(
    "cost", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (2.0, 3.0, 2.0), (3.0, 5.0, 1.0), (3.0, 2.0, 2.0)]
)
def test_zb_h2_idles_as_its_paper_says(
    ranks: int, microbatches: int, cost: tuple[float, float, float]
) -> None:
    # (p - 1)(F + B - 2W), on the first rank from its first start to its last end, from 2p - 1
    # microbatches on and where the weight gradient is the shortest; the ranks do not end together
    forward, backward, weight = cost
    times = simulate_unit(make_schedule("zb-h2", ranks, microbatches), split(*cost))
    assert times.idle_inside()[0] == (ranks - 1) * (forward + backward - 2 * weight)
    if forward == backward == weight:
        assert not times.idle_inside().any()
        assert times.step == 3 * microbatches + ranks - 1


def test_zbv_has_no_bubble_when_all_passes_are_equal() -> None:
    times = simulate_unit(make_schedule("zbv", 4, 12, stages_per_rank=2), split(1.0, 1.0, 1.0))
    assert not times.idle_inside().any()


def test_a_weight_gradient_longer_than_the_others_breaks_the_closed_form() -> None:
    times = simulate_unit(make_schedule("zb-h1", 4, 8), split(1.0, 1.0, 2.0))
    assert times.step > 8 * 4 + 3 * (1 + 1 - 2)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "hops", "published"),
    [(4, 8, 16, 4_500.08), (8, 32, 68, 16_800.34), (8, 1024, 1804, 444_609.02)],
)
def test_hops_lengthen_every_round(
    ranks: int, microbatches: int, hops: int, published: float
) -> None:
    # us; 4,000,000 bytes at 50 GiB/s and 0.5 us. ASTRA-sim, whose values these are, counts whole ns
    cost = {Phase.F: 100.0, Phase.B: 200.0}
    exact = 4e6 / (50 * 2**30) * 1e6 + 0.5
    schedule = make_schedule("1f1b", ranks, microbatches)
    closed_form = (microbatches + ranks - 1) * 300.0
    assert simulate_unit(schedule, cost, exact).step == pytest.approx(closed_form + hops * exact)
    cut = np.floor(exact * 1e3) / 1e3
    assert simulate_unit(schedule, cost, cut).step == pytest.approx(published, abs=1e-6)
    assert simulate_unit(schedule, cost, exact).step == pytest.approx(published, abs=1.5)


@pytest.mark.parametrize(
    ("microbatches", "asynchronous", "stream", "blocking"),
    [(2, 15.6, 15.8, 22.2), (4, 27.6, 27.8, 42.3), (8, 51.6, 51.8, 82.5)],
)
def test_a_receive_posted_early_may_hold_up_what_is_ready(
    microbatches: int, asynchronous: float, stream: float, blocking: float
) -> None:
    schedule = make_schedule("interleaved", 2, microbatches, stages_per_rank=2)
    assert simulate_unit(schedule, ONE_TWO, 0.1).step == pytest.approx(asynchronous)
    for receives, step in (("stream", stream), ("blocking", blocking)):
        times = simulate_unit(schedule, ONE_TWO, 0.1, receives=receives)  # type: ignore[arg-type]
        assert times.step == pytest.approx(step)
        assert times.busy() == pytest.approx(2 * microbatches * 3)


def test_the_messages_of_two_ranks_are_those_torch_prints() -> None:
    rows = add_messages(make_schedule("interleaved", 2, 2, stages_per_rank=2))
    assert " ".join(map(str, rows[1])) == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3B0 3SEND_B0 1RECV_B0 "
        "3F1 3B1 3SEND_B1 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1"
    )


def test_a_loss_that_costs_a_layer_slows_an_even_layout() -> None:
    # 80 layers on 8 ranks of 5 chunks; the loss costs as much as a layer, the embedding nothing
    uneven = parse_layout("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL")
    even = parse_layout("Et*2|(t*2|)*38,t*2L")
    schedule = make_schedule("interleaved", 8, 16, stages_per_rank=5)
    steps = []
    for chunks in (even, uneven):
        layers = [chunk.count("t") + chunk.count("L") for chunk in chunks]
        cost = {Phase.F: layers, Phase.B: [2 * count for count in layers]}
        steps.append(simulate_unit(schedule, cost).step)
    assert steps[0] > steps[1]


def test_hops_may_differ_by_edge() -> None:
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    schedule = make_schedule("1f1b", 4, 1, edges=edges)
    hop = {(0, 1): 1.0, (1, 3): 1.0, (3, 1): 0.0, (1, 0): 0.0}
    hop |= {(0, 2): 5.0, (2, 3): 0.5, (3, 2): 0.0, (2, 0): 7.0}
    times = simulate_unit(schedule, ONE_TWO, hop)
    order = to_arrays(schedule)
    start = {
        (stage, phase): time
        for stage, phase, time in zip(order.stage, order.phase, times.start, strict=True)
    }
    assert start[3, Phase.F] == 7.5  # after stage 2: 1 + 5 + 1 + 0.5
    assert start[0, Phase.B] == 8.5 + 2 + 2 + 7
    del hop[2, 0]
    with pytest.raises(PlanError, match="hop 2 -> 0: None is no seconds"):
        simulate_unit(schedule, ONE_TWO, hop)


def test_stages_on_one_rank_need_no_hop() -> None:
    schedule = make_schedule("zbv", 1, 3, stages_per_rank=2)
    assert simulate_unit(schedule, split(1.0, 1.0, 1.0), 99.0).step == 18.0
    assert simulate_unit(schedule, split(0.0, 0.0, 0.0), 99.0).bubble == 0.0


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        ({Phase.F: 1.0}, "no cost of phase B"),
        ({Phase.F: 1.0, Phase.B: [1.0, 2.0, 3.0]}, "cost of phase B has 3 numbers for 2 stages"),
        ({Phase.F: -1.0, Phase.B: 1.0}, "cost of phase F is no seconds"),
        ({Phase.F: 1.0, Phase.B: [1.0, float("nan")]}, "cost of phase B is no seconds"),
    ],
)
def test_a_bad_cost_is_refused(cost: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=f"^schedule '1f1b': {reason}"):
        simulate_unit(make_schedule("1f1b", 2, 2), cost)
    with pytest.raises(PlanError, match=r"hop 0 -> 1: -1\.0 is no seconds"):
        simulate_unit(make_schedule("1f1b", 2, 2), ONE_TWO, -1.0)


@given(
    name=st.sampled_from(SCHEDULE_NAMES),
    ranks=st.integers(1, 4),
    rounds=st.integers(1, 3),
    seconds=st.lists(st.integers(0, 5), min_size=32, max_size=32),
    hop=st.integers(0, 3),
)
def test_waiting_for_messages_never_shortens_a_step(
    name: str, ranks: int, rounds: int, seconds: list[int], hop: int
) -> None:
    schedule = make_schedule(name, ranks, rounds * ranks, stages_per_rank=PER_RANK.get(name, 1))
    stages = schedule.num_stages
    cost = {phase: seconds[8 * phase : 8 * phase + stages] for phase in list(Phase)[:4]}
    times: dict[str, UnitTimes] = {
        receives: simulate_unit(schedule, cost, float(hop), receives=receives)
        for receives in ("asynchronous", "stream", "blocking")
    }
    for slow in (times["stream"], times["blocking"]):
        assert (slow.start >= times["asynchronous"].start).all()
    for result in times.values():
        assert (result.idle_inside() >= 0).all()
        for row in np.split(np.arange(result.start.size), result.first_action[1:-1]):
            assert (result.start[row][1:] >= result.end[row][:-1]).all()
