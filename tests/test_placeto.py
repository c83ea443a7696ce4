"""``--like placeto`` against Placeto's simulator, written down here from its description.

Of it: a device keeps one queue of ops, first come, first served, and a sender one queue of tensors;
a tensor is sent once, whatever the number of devices that read it; nothing else is waited for.
"""

import argparse
import heapq
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from simcore import options
from simcore.cluster import Cluster, Device, Link
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.lower import Problem
from simcore.plan import LIKE, Settings
from simcore.simulation import simulate_batch

KIND = "V100-SXM2-16GB"
BANDWIDTH = 7.6e9  # bytes/s, what Placeto sends at


def placeto(
    seconds: Sequence[float],
    edges: Sequence[tuple[int, int]],
    size: Sequence[float],
    placement: Sequence[int],
    *,
    once: bool,
) -> float:
    """Plays a placement and returns its time, in s.

    Args:
        seconds: of each op, s.
        edges: (op, op that reads its tensor).
        size: of each op's tensor, bytes.
        placement: device of each op.
        once: whether one send serves all devices, as in Placeto; otherwise each gets its own.
    """
    missing = [sum(reader == op for _, reader in edges) for op in range(len(seconds))]
    queues: dict[tuple[str, int], list[tuple[int, set[int]]]] = {}
    events: list[tuple[float, int, tuple[str, int], int, set[int]]] = []
    busy: set[tuple[str, int]] = set()
    count, now = itertools.count(), 0.0

    def queue(kind: str, device: int, task: int, targets: set[int]) -> None:
        queues.setdefault((kind, device), []).append((task, targets))

    def start() -> None:
        for place, waiting in queues.items():
            if waiting and place not in busy:
                task, targets = waiting.pop(0)
                busy.add(place)
                takes = seconds[task] if place[0] == "op" else size[task] / BANDWIDTH
                heapq.heappush(events, (now + takes, next(count), place, task, targets))

    for op, number in enumerate(missing):
        if not number:
            queue("op", placement[op], op, {placement[op]})
    start()
    while events:
        now, _, place, task, targets = heapq.heappop(events)
        busy.discard(place)
        readers = [reader for op, reader in edges if op == task]
        for reader in readers:
            missing[reader] -= placement[reader] in targets
            if placement[reader] in targets and not missing[reader]:
                queue("op", placement[reader], reader, {placement[reader]})
        others = sorted({placement[reader] for reader in readers} - {placement[task]})
        if place[0] == "op" and others:
            for served in [set(others)] if once else [{device} for device in others]:
                queue("bus", placement[task], task, served)
        start()
    return now


def random_dag(
    rng: np.random.Generator, num_ops: int
) -> tuple[OpGraph, list[tuple[int, int]], list[int]]:
    """Ops of 10 to 500 us; each reads one or two of the four before it; edges and bytes."""
    seconds = rng.uniform(10e-6, 500e-6, num_ops)
    size: list[int] = rng.integers(1_000, 4_000_000, num_ops).tolist()
    edges = []
    for op in range(1, num_ops):
        before = np.arange(max(0, op - 4), op)
        read = rng.choice(before, size=min(len(before), int(rng.integers(1, 3))), replace=False)
        edges += [(int(source), op) for source in sorted(read)]
    graph = OpGraph.from_edges(
        [(f"o{op}", float(time)) for op, time in enumerate(seconds)],
        [(f"o{a}", f"o{b}", size[a]) for a, b in edges],
        measured_on=KIND,
    )
    return graph, edges, size


def mesh(size: int) -> Cluster:
    devices = [Device(f"d{i}", KIND, "n0", 2**34, forwards=False) for i in range(size)]
    pairs = itertools.combinations(range(size), 2)
    links = [Link(f"d{a}", f"d{b}", "", BANDWIDTH, 0.0) for a, b in pairs]
    return Cluster(name="mesh", devices=devices, links=links)


def both(
    rng: np.random.Generator, num_ops: int, devices: int, *, once: bool
) -> tuple[list[float], list[float]]:
    """Step times of 30 placements of one graph, by Placeto and here."""
    graph, edges, size = random_dag(rng, num_ops)
    placements = rng.integers(devices, size=(30, num_ops)).astype(np.int32)
    problem = Problem.build(graph, mesh(devices), Job(), LIKE["placeto"])
    assert graph.fixed is not None
    seconds = graph.fixed.seconds.tolist()
    theirs = [placeto(seconds, edges, size, plan, once=once) for plan in placements.tolist()]
    return theirs, simulate_batch(problem, placements).step_time.tolist()


@pytest.mark.parametrize("num_ops", [12, 60, 300])
def test_times_are_those_of_placeto_between_two_devices(num_ops: int) -> None:
    for index in range(5):
        theirs, ours = both(np.random.default_rng([3, index]), num_ops, 2, once=True)
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("devices", [3, 4, 8])
def test_between_more_only_a_tensor_that_several_of_them_read_makes_a_difference(
    devices: int,
) -> None:
    for index in range(5):
        rng = [np.random.default_rng([5, index]) for _ in range(2)]
        theirs, ours = both(rng[0], 60, devices, once=False)
        assert ours == pytest.approx(theirs, rel=1e-12)
        shared, _ = both(rng[1], 60, devices, once=True)
        assert shared != pytest.approx(theirs, rel=1e-3)


def settings_of(*arguments: str, base: Settings | None = None) -> Settings:
    parser = argparse.ArgumentParser()
    options.add_settings_options(parser)
    return options.settings_of(parser.parse_args(arguments), base)


def test_the_command_line_knows_the_simulators_and_lets_options_go_before() -> None:
    assert set(options.LIKE) == set(LIKE)
    planned = Settings(host="per_rank", contention="fifo")
    assert settings_of(base=planned) == planned
    assert settings_of("--like", "placeto", base=planned) == LIKE["placeto"]
    mixed = settings_of("--like", "placeto", "--contention", "fair", "--slow-down", "on")
    assert mixed == Settings(order="ready", launch="graph")
