"""Closed forms of collectives against numbers worked by hand: wires carry 1 GB/s."""

import itertools

import pytest

from simcore.cluster import Cluster
from simcore.collectives import ring_all_reduce
from simcore.errors import PlanError
from tests.strategies import Network, build_cluster

V100 = "V100-SXM2-16GB"
GB = 1e9


def wired(num_devices: int, wires: list[tuple[str, str, float, float]]) -> Cluster:
    """Devices and switches joined by wires of (a, b, GB/s, latency in s)."""
    switches = len({end for wire in wires for end in wire[:2] if end.startswith("s")})
    links = tuple((a, b, rate, latency * 1e6) for a, b, rate, latency in wires)
    return build_cluster(Network((V100,) * num_devices, False, switches, links))


def mesh(num_devices: int, latency: float = 0.0) -> Cluster:
    pairs = itertools.combinations(range(num_devices), 2)
    return wired(num_devices, [(f"d{a}", f"d{b}", 1.0, latency) for a, b in pairs])


@pytest.mark.parametrize(
    ("num_devices", "seconds"), [(2, 12.0), (3, 16.0), (4, 18.0), (6, 20.0), (12, 22.0)]
)
def test_a_ring_passes_all_but_one_part_twice(num_devices, seconds):
    cluster = mesh(num_devices)
    assert ring_all_reduce(12 * GB, cluster, range(num_devices)) == pytest.approx(seconds)


@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_each_step_waits_one_latency(num_devices):
    cluster = mesh(num_devices, latency=0.25)
    assert ring_all_reduce(0, cluster, range(num_devices)) == 2 * (num_devices - 1) * 0.25


def test_one_device_has_nothing_to_do():
    assert ring_all_reduce(GB, mesh(2), [1]) == 0.0
    assert ring_all_reduce(GB, mesh(2), []) == 0.0


def test_the_narrowest_wire_and_the_longest_latency_set_the_pace():
    wires = [("d0", "d1", 1.0, 0.0), ("d1", "d2", 0.5, 0.25), ("d0", "d2", 4.0, 0.125)]
    assert ring_all_reduce(3 * GB, wired(3, wires), [0, 1, 2]) == pytest.approx(4 * (2.0 + 0.25))


def test_latencies_of_a_route_add():
    star = [(f"d{device}", "s0", 1.0, 0.25) for device in range(3)]
    assert ring_all_reduce(0, wired(3, star), [0, 1, 2]) == 4 * 0.5


def test_both_directions_of_a_wire_work_at_once():
    star = [(f"d{device}", "s0", 1.0, 0.0) for device in range(4)]
    assert ring_all_reduce(4 * GB, wired(4, star), range(4)) == pytest.approx(6.0)


def test_hops_that_share_a_channel_share_its_bandwidth():
    neck = [("s0", "s1", 1.0, 0.0), ("d0", "s0", 1.0, 0.0), ("d1", "s1", 1.0, 0.0)]
    neck += [("d2", "s0", 1.0, 0.0), ("d3", "s1", 1.0, 0.0)]
    cluster = wired(4, neck)
    assert ring_all_reduce(4 * GB, cluster, [0, 2, 1, 3]) == pytest.approx(6.0)
    assert ring_all_reduce(4 * GB, cluster, [0, 1, 2, 3]) == pytest.approx(12.0)  # two at a time


def test_turning_the_ring_changes_nothing():
    cluster = Cluster.preset("8xV100-NVLink")
    times = {ring_all_reduce(GB, cluster, [*range(k, 8), *range(k)]) for k in range(8)}
    assert len(times) == 1


def test_a_ring_without_a_route_names_the_two_devices():
    cluster = wired(3, [("d0", "d1", 1.0, 0.0)])
    with pytest.raises(PlanError, match="data parallel: no route from 'd1' to 'd2'"):
        ring_all_reduce(GB, cluster, [0, 1, 2])
