"""What must hold of communication whatever the problem, checked on what the simulator reports."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from simcore import run as running
from simcore.errors import DeadlockError
from simcore.graph import OpClass
from simcore.plan import Settings
from simcore.profile import Limits
from simcore.result import RawRun
from simcore.simulation import run_placement, simulate_batch
from simcore.units import GB
from tests.reference_rates import fair_rates
from tests.reference_toys import STAR, by_class, collective, toy
from tests.strategies import (
    Case,
    build_cluster,
    compiled_problem,
    draw_busy_case,
    draw_placement,
    renamed,
    seeded,
    twice_as_fast,
)

DISCIPLINES = ("none", "port", "ordered", "fifo", "fair")
NUM_CASES = 150
every_discipline = pytest.mark.parametrize("contention", DISCIPLINES)


def with_settings(case: Case, **changes: Any) -> Case:
    return case._replace(settings=msgspec.structs.replace(case.settings, **changes))


def play(case: Case) -> RawRun:
    return run_placement(compiled_problem(case), case.placement, case.priorities)


def busy_cases(seed: int, contention: str, **settings: Any) -> Iterator[tuple[Case, RawRun]]:
    """Problems with everything that communication knows, and what the simulator says of them."""
    for index in range(NUM_CASES):
        case = draw_busy_case(seeded(np.random.default_rng([seed, index])), contention)
        case = with_settings(case, **settings)
        try:
            yield case, play(case)
        except DeadlockError:
            assert case.settings.p2p != "copy"


# channels


class Flow(NamedTuple):
    """A transfer or a collective that moved bytes."""

    start: float  # s
    end: float  # s
    work: float  # bytes
    usage: Mapping[int, float]  # channel -> bytes on it per byte
    cap: float  # bytes/s on an idle network
    devices: tuple[int, ...]
    is_copy: bool


def flows_of(case: Case, run: RawRun) -> list[Flow]:
    cluster, found = case.cluster, []
    for t in run.transfers():
        if t.num_bytes:
            usage = dict.fromkeys(cluster.route(t.source, t.target), 1.0)
            cap = float(cluster.route_bandwidth[t.source, t.target])
            found.append(Flow(t.start, t.end, t.num_bytes, usage, cap, (t.source, t.target), True))
    for op, group in case.collectives.items():
        if group.volume and group.duration:
            usage = dict(zip(group.channels.tolist(), group.usage.tolist(), strict=True))
            cap, times = group.volume / group.duration, (float(run.start[op]), float(run.end[op]))
            found.append(Flow(*times, group.volume, usage, cap, group.members, False))
    return found


@pytest.mark.parametrize("contention", ["ordered", "fifo", "fair"])
def test_no_channel_carries_more_in_any_time_than_its_bandwidth_allows(contention: str) -> None:
    for case, run in busy_cases(41, contention):
        flows = flows_of(case, run)
        for channel in case.cluster.channels:
            mine = [flow for flow in flows if flow.usage.get(channel.id)]
            for first, last in itertools.product(mine, mine):
                inside = [f for f in mine if first.start <= f.start and f.end <= last.end]
                carried = sum(flow.work * flow.usage[channel.id] for flow in inside)
                room = max(0.0, last.end - first.start) * channel.bandwidth
                assert carried <= room * (1 + 1e-9) + 1e-3


def slowed(case: Case, flow: Flow, computing: set[int]) -> float:
    """How many times longer a flow takes while these devices compute."""
    assert case.limits is not None
    factors = [
        case.limits[device].copy_beside_compute
        if flow.is_copy
        else case.limits[device].collective_beside_compute
        for device in {*flow.devices} & computing
    ]
    return max(factors, default=1.0) if case.settings.slow_down else 1.0


@pytest.mark.parametrize("slow_down", [False, True])
def test_fair_rates_over_the_reported_times_add_up_to_the_bytes(slow_down: bool) -> None:
    """Rates are found anew, from who was under way when, by the slow progressive filling."""
    checked = 0
    for case, run in busy_cases(43, "fair", slow_down=slow_down):
        flows = flows_of(case, run)
        bandwidth = [channel.bandwidth for channel in case.cluster.channels]
        ran = [op for op in np.flatnonzero(run.placement >= 0) if run.end[op] > run.start[op]]
        events = {*run.start[ran], *run.end[ran]}
        events |= {flow.start for flow in flows} | {flow.end for flow in flows}
        moved = np.zeros(len(flows))
        for now, later in itertools.pairwise(sorted(events)):
            active = [k for k, flow in enumerate(flows) if flow.start <= now < flow.end]
            computing = {int(run.placement[op]) for op in ran if run.start[op] <= now < run.end[op]}
            offers = [
                (f.usage, f.cap / slowed(case, f, computing))
                for f in map(flows.__getitem__, active)
            ]
            for k, rate in zip(active, fair_rates(offers, bandwidth), strict=True):
                moved[k] += rate * (later - now)
        assert moved == pytest.approx([flow.work for flow in flows], rel=1e-6, abs=1e-3)
        checked += len(flows)
    assert checked > NUM_CASES


def test_no_device_sends_or_receives_more_at_once_than_it_has_engines() -> None:
    for case, run in busy_cases(47, "fair"):
        flows = [flow for flow in flows_of(case, run) if flow.is_copy]
        assert case.limits is not None
        for one in flows:
            beside = [flow.devices for flow in flows if flow.start <= one.start < flow.end]
            for device, limits in enumerate(case.limits):
                assert sum(source == device for source, _ in beside) <= limits.out_engines
                received = sum(target == device for _, target in beside)
                assert received <= (limits.in_engines or received)


# more of something, other units, other names, more threads


@pytest.mark.parametrize("contention", ["none", "port", "ordered"])
def test_a_wider_link_never_lengthens_a_step_in_a_fixed_order(contention: str) -> None:
    wider = 0
    for case, run in busy_cases(53, contention, order="program", slow_down=False):
        for number, (a, b, bandwidth, latency) in enumerate(case.network.links):
            links = list(case.network.links)
            links[number] = (a, b, 2 * bandwidth, latency)
            cluster = build_cluster(case.network._replace(links=tuple(links)))
            if np.array_equal(cluster.hops, case.cluster.hops):  # else transfers go elsewhere
                faster = play(case._replace(cluster=cluster))
                assert (faster.end <= run.end).all()
                wider += faster.step_time < run.step_time
    assert wider > 5


@pytest.mark.parametrize("contention", ["none", "port", "ordered"])
def test_a_faster_collective_never_lengthens_a_step_in_a_fixed_order(contention: str) -> None:
    for case, run in busy_cases(59, contention, order="program", slow_down=False):
        for op, group in case.collectives.items():
            faster = replace(group, duration=group.duration / 2, latency=group.latency / 2)
            changed = case._replace(collectives={**case.collectives, op: faster})
            assert (play(changed).end <= run.end).all()


@every_discipline
def test_twice_the_rates_and_half_the_latencies_halve_every_time_exactly(contention: str) -> None:
    for case, run in busy_cases(61, contention):
        assert case.limits is not None
        fast = twice_as_fast(case)._replace(
            limits=tuple(
                limit._replace(message_overhead=limit.message_overhead / 2) for limit in case.limits
            ),
            collectives={
                op: replace(group, latency=group.latency / 2, duration=group.duration / 2)
                for op, group in case.collectives.items()
            },
        )
        assert times(play(fast)) == [time / 2 for time in times(run)]


def times(run: RawRun) -> list[float]:
    fields = ("start", "end", "transfer_request", "transfer_start", "transfer_end")
    return [time for field in fields for time in getattr(run, field).tolist()]


@every_discipline
def test_other_names_in_the_same_order_change_nothing(contention: str) -> None:
    for case, run in busy_cases(67, contention):
        assert times(play(renamed(case, "z"))) == times(run)


@every_discipline
def test_the_number_of_threads_changes_nothing(
    contention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MIN_OPS_PER_THREAD", 1)  # so that few ops are worth a thread
    for index in range(10):
        rng = np.random.default_rng([71, index])
        draws = seeded(rng)
        case = draw_busy_case(draws, contention)
        devices = len(case.network.kinds)
        plans = np.stack([draw_placement(draws, case.graph, devices) for _ in range(31)])
        problem = compiled_problem(case)
        one, *others = (simulate_batch(problem, plans, threads=n) for n in (1, 2, 3))
        for other in others:
            assert other.step_time.tobytes() == one.step_time.tobytes()
            assert other.allocated.tobytes() == one.allocated.tobytes()
            assert other.status.tobytes() == one.status.tobytes()


# every input matters


LIMITS = Limits(
    out_engines=1,
    in_engines=2,
    message_overhead=0.25,
    copy_beside_compute=1.5,
    collective_beside_compute=1.25,
    compute_beside_copy=by_class({OpClass.MATMUL: 2.0}),
    compute_beside_collective=by_class({OpClass.MATMUL: 3.0}),
)
SECONDS = [1, 2, 3, 9, 2, 4, 5, 1, 1, 1]
COMPUTES = (0, 1, 2, 4, 5, 6, 7, 8, 9)
WIRES = [(0, 1, [3, 7]), (0, 1, [5]), (1, 1, [3]), (1, 2, [7]), (2, 1, [7]), (3, 1, [4])]
WIRES += [(4, 2, [8])]


def base(**changes: Any) -> Case:
    """A problem in which all that communication depends on matters."""
    given: dict[str, Any] = {
        "seconds": SECONDS,
        "wires": WIRES,
        "placement": [0, 1, 0, -1, 0, 1, 2, 2, 1, 2],
        "launch_seconds": [0.1] * 10,
        "links": [(a, b, rate, 0.05) for a, b, rate, _ in STAR],
        "collectives": {3: collective([0, 1], 3.0, 2 * GB, {0: 1.0, 2: 0.5}, latency=0.2)},
        "limits": dict.fromkeys(range(3), LIMITS),
        "classes": dict.fromkeys(COMPUTES, OpClass.MATMUL),
    }
    return toy(**(given | changes))


def with_limits(**changes: Any) -> Case:
    case = base()
    assert case.limits is not None
    return case._replace(limits=tuple(limit._replace(**changes) for limit in case.limits))


def with_collective(**changes: Any) -> Case:
    case = base()
    return case._replace(collectives={3: replace(case.collectives[3], **changes)})


def with_link(number: int, **changes: float) -> Case:
    case = base()
    links = list(case.network.links)
    a, b, rate, latency = links[number]
    links[number] = (a, b, changes.get("rate", rate), changes.get("latency", latency))
    return case._replace(cluster=build_cluster(case.network._replace(links=tuple(links))))


def with_bytes(number: int) -> Case:
    wires = list(WIRES)
    producer, size, readers = wires[number]
    wires[number] = (producer, size + 0.5, readers)
    return base(wires=wires)


def with_seconds(op: int) -> Case:
    return base(seconds=[s + (number == op) for number, s in enumerate(SECONDS)])


def with_launch(op: int) -> Case:
    return base(launch_seconds=[0.1 + 20.0 * (number == op) for number in range(10)])


SETTINGS: dict[tuple[str, Any], Callable[[], Case]] = {
    (field, value): lambda field=field, value=value: base(**{field: value})  # type: ignore[misc]
    for field, values in {
        "order": ["ready"],
        "host": ["per_rank"],
        "launch": ["graph"],
        "p2p": ["inline", "rendezvous"],
        "contention": ["none", "port", "ordered", "fifo"],
        "slow_down": [False],
    }.items()
    for value in values
}
OF_LIMITS = {
    "out_engines": 2,
    "in_engines": 1,
    "message_overhead": 0.5,
    "copy_beside_compute": 2.0,
    "collective_beside_compute": 2.0,
    "compute_beside_copy": by_class({}),
    "compute_beside_collective": by_class({}),
}
OF_COLLECTIVE = {
    "latency": 0.3,
    "duration": 4.0,
    "volume": 2.5 * GB,
    "channels": np.array([1, 3]),
    "usage": np.array([1.0, 1.0]),
    "members": (0, 1, 2),
}
CHANGES: dict[str, Callable[[], Case]] = {
    **{f"{field} {value}": change for (field, value), change in SETTINGS.items()},
    **{f"limit {k}": lambda k=k, v=v: with_limits(**{k: v}) for k, v in OF_LIMITS.items()},  # type: ignore[misc]
    **{f"its {k}": lambda k=k, v=v: with_collective(**{k: v}) for k, v in OF_COLLECTIVE.items()},  # type: ignore[misc]
    **{f"bandwidth {n}": lambda n=n: with_link(n, rate=0.5) for n in range(3)},  # type: ignore[misc]
    **{f"latency {n}": lambda n=n: with_link(n, latency=9e4) for n in range(3)},  # type: ignore[misc]
    **{f"bytes {n}": lambda n=n: with_bytes(n) for n in (0, 1, 3, 4, 6)},  # type: ignore[misc]
    **{f"seconds {op}": lambda op=op: with_seconds(op) for op in COMPUTES},  # type: ignore[misc]
    **{f"launch {op}": lambda op=op: with_launch(op) for op in COMPUTES},  # type: ignore[misc]
    "sync": lambda: base(sync=[1]),
    "classes": lambda: base(classes={}),
    "placement": lambda: base(placement=[0, 1, 0, -1, 0, 1, 1, 2, 1, 2]),
}


def test_the_table_of_changes_leaves_no_setting_and_no_limit_out() -> None:
    fields = {field.name for field in msgspec.structs.fields(Settings)}
    assert {field for field, _ in SETTINGS} == fields - {"granularity"}  # which is of pipelines
    assert OF_LIMITS.keys() == set(Limits._fields)


@pytest.mark.parametrize("change", CHANGES)
def test_every_input_changes_the_result(change: str) -> None:
    assert times(play(base())) != times(play(CHANGES[change]()))


def test_equal_input_gives_the_same_bits() -> None:
    assert times(play(base())) == times(play(base()))
