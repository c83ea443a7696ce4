"""Rings against numbers worked by hand, a solver of linear programs, and real machines."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from simcore.cluster import Cluster, presets
from simcore.rings import find_rings, nearest_order, pack, routes_of
from tests.networks import GB, cluster, cycle, mesh, reordered, servers, star, two_sides

WIDTHS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 7.0])


def hops(order):
    return list(zip(order, [*order[1:], order[0]], strict=True))


def crossings(network, members):
    """Channel -> share of the data, each ring's hops counted."""
    shares = np.zeros(len(network.channels))
    for ring in find_rings(network, tuple(members)):
        for hop in hops(ring.order):
            for channel in network.route(*hop):
                shares[channel] += ring.share
    return shares


def ring_rate(network, members):
    """Bytes/s that go around, the channel with most to carry being full."""
    shares = crossings(network, members)
    return min(c.bandwidth / shares[c.id] for c in network.channels if shares[c.id])


def used_kinds(network, members):
    shares = crossings(network, members)
    return {network.links[c.link].kind for c in network.channels if shares[c.id]}


# the linear program


def test_a_packing_program_worked_by_hand():
    # 2 x + y <= 8, x + 3 y <= 9: where both are equal
    answer = pack(np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([8.0, 9.0]))
    np.testing.assert_allclose(answer, [3.0, 2.0])


@given(
    st.integers(1, 8).flatmap(
        lambda columns: st.lists(
            st.tuples(
                st.lists(st.integers(0, 3), min_size=columns, max_size=columns),
                st.sampled_from([0.5, 1.0, 2.0, 24.0]),
            ),
            min_size=1,
            max_size=8,
        )
    )
)
def test_the_program_has_the_optimum_that_a_solver_finds(rows):
    load = np.array([[*row] for row, _ in rows] + [[1] * len(rows[0][0])], np.float64)
    capacity = np.array([*(limit for _, limit in rows), 5.0])
    answer = pack(load, capacity)
    assert (answer >= 0).all()
    assert (load @ answer <= capacity * (1 + 1e-9)).all()
    solved = linprog(-np.ones(load.shape[1]), A_ub=load, b_ub=capacity)
    assert answer.sum() == pytest.approx(-solved.fun, rel=1e-9)


# toys


@pytest.mark.parametrize("size", range(3, 9))
def test_a_mesh_is_full_in_both_directions(size):
    network = mesh(size)
    assert ring_rate(network, range(size)) == pytest.approx((size - 1) * GB, rel=1e-9)


@pytest.mark.parametrize("size", [9, 11, 13])
def test_a_larger_mesh_of_a_prime_number_is_full_too(size):
    strides = size // 2 if size != 9 else 3  # 3 does not go around 9
    assert ring_rate(mesh(size), range(size)) == pytest.approx(2 * strides * GB)


def test_two_devices_are_one_ring():
    (ring,) = find_rings(mesh(2), (1, 0))
    assert ring == ((0, 1), 1.0)


@pytest.mark.parametrize("size", [3, 8, 12])
def test_a_star_is_as_fast_as_one_of_its_wires(size):
    assert ring_rate(star(size), range(size)) == pytest.approx(GB)


@pytest.mark.parametrize("size", [3, 5, 8, 11])
def test_a_cycle_is_used_in_both_directions(size):
    network = cycle(size)
    assert ring_rate(network, range(size)) == pytest.approx(2 * GB)
    for ring in find_rings(network, tuple(range(size))):
        assert {abs(a - b) for a, b in hops(ring.order)} == {1, size - 1}


def test_a_neck_between_two_switches_is_crossed_once_in_each_direction():
    shares = crossings(two_sides(3), range(6))
    np.testing.assert_allclose(shares[:2], 1.0)


def test_slow_detours_are_not_mixed_with_direct_wires():
    # a triangle of wires, and a switch that would add a third ring
    wires = [("d0", "d1", 2.0, 0.0), ("d1", "d2", 2.0, 0.0), ("d0", "d2", 2.0, 0.0)]
    wires += [(f"d{i}", "hub", 1.0, 0.0) for i in range(3)]
    network = cluster(["n0"] * 3, wires)
    assert ring_rate(network, range(3)) == 4 * GB
    assert not crossings(network, range(3))[6:].any()


def test_of_equally_fast_rings_those_of_least_latency_are_taken():
    # any ring fills the four ports; behind them only 0-2-1-3 has short wires
    wires = [(f"d{i}", f"p{i}", 1.0, 0.0) for i in range(4)]
    for a, b in itertools.combinations(range(4), 2):
        wires.append((f"p{a}", f"p{b}", 9.0, 5.0 if (a, b) in ((0, 1), (2, 3)) else 1.0))
    rings = find_rings(cluster(["n0"] * 4, wires), (0, 1, 2, 3))
    assert rings == (((0, 2, 1, 3), 0.5), ((0, 3, 1, 2), 0.5))


def test_a_slower_set_of_rings_that_is_as_fast_is_not_taken():
    # found by drawing networks: the first rings that a solver meets are as fast, but wait for 6 s
    rates = [2.0, 9.0, 9.0, 2.0, 2.0, 9.0]
    wires = [(f"d{i}", f"p{i}", rate, 0.0) for i, rate in enumerate(rates)]
    between = [(1.0, 2), (1.0, 1), (2.0, 3), (0.5, 1), (2.0, 3), (1.0, 1), (0.5, 1), (0.5, 1)]
    between += [(0.5, 2), (0.5, 3), (1.0, 2), (2.0, 3), (2.0, 2), (2.0, 3), (1.0, 3)]
    for (a, b), (rate, latency) in zip(itertools.combinations(range(6), 2), between, strict=True):
        wires.append((f"p{a}", f"p{b}", rate, float(latency)))
    network = cluster(["n0"] * 6, wires)
    rings = find_rings(network, tuple(range(6)))
    assert ring_rate(network, range(6)) == pytest.approx(2 * GB)
    assert max(network.route_latency[hop] for ring in rings for hop in hops(ring.order)) == 5.0


def test_rails_are_kept_where_the_network_between_them_is_narrow():
    wires = [("r0", "spine", 0.1, 0.0), ("r1", "spine", 0.1, 0.0)]
    for device in range(4):
        wires += [
            (f"d{device}", f"s{device // 2}", 4.0, 0.0),
            (f"d{device}", f"r{device % 2}", 1, 0.0),
        ]
    network = cluster(["n0", "n0", "n1", "n1"], wires)
    assert not crossings(network, range(4))[:4].any()
    assert ring_rate(network, range(4)) == pytest.approx(2 * GB)


def test_all_ports_of_a_node_are_used():
    network = servers(3, 4)
    assert ring_rate(network, range(12)) == pytest.approx(4 * GB)


def test_rings_over_servers_follow_all_the_rings_of_a_server():
    # one ring of a mesh of four would carry 2 / (3 / 4) GB/s
    wires = [(f"d{i}", "net", 0.9, 0.0) for i in range(8)]
    for start in (0, 4):
        pairs = itertools.combinations(range(start, start + 4), 2)
        wires += [(f"d{a}", f"d{b}", 1.0, 0.0) for a, b in pairs]
    network = cluster(["n0"] * 4 + ["n1"] * 4, wires)
    assert ring_rate(network, range(8)) == pytest.approx(4 * 0.9 * GB)


def test_nodes_of_different_sizes_make_rings_together():
    network = servers(2, 4)
    assert ring_rate(network, [0, 1, 2, 4]) == pytest.approx(GB)  # one port in n1
    assert {len(ring.order) for ring in find_rings(network, (0, 1, 2, 4))} == {4}


def test_the_nearest_order_stays_behind_a_switch():
    network = two_sides(4)
    assert nearest_order(routes_of(network), [0, 4, 1, 5, 2, 6]) == [0, 1, 2, 4, 5, 6]


# properties


@given(st.integers(3, 6), st.data())
def test_a_ring_visits_all_members_and_no_channel_is_too_full(size, data):
    widths = {pair: data.draw(WIDTHS) for pair in itertools.combinations(range(size), 2)}
    network = mesh(size, rate=lambda a, b: widths[a, b])
    members = tuple(range(size))
    rings = find_rings(network, members)
    assert sum(ring.share for ring in rings) == pytest.approx(1.0)
    assert all(sorted(ring.order) == list(members) for ring in rings)
    everything = [order for order in itertools.permutations(members) if order[0] == 0]
    load = np.zeros((len(network.channels), len(everything)))
    for number, order in enumerate(everything):
        for hop in hops(order):
            load[list(network.route(*hop)), number] += 1
    bandwidth = [channel.bandwidth / GB for channel in network.channels]
    solved = linprog(-np.ones(len(everything)), A_ub=load, b_ub=bandwidth)
    assert ring_rate(network, members) == pytest.approx(-solved.fun * GB, rel=1e-9)


@given(st.permutations(range(5)), st.data())
def test_the_order_of_the_devices_does_not_change_the_rate(order, data):
    widths = {pair: data.draw(WIDTHS) for pair in itertools.combinations(range(5), 2)}
    network = mesh(5, rate=lambda a, b: widths[a, b])
    rate = ring_rate(network, range(5))
    assert ring_rate(reordered(network, order), range(5)) == pytest.approx(rate, rel=1e-9)


def test_the_order_of_the_members_does_not_change_the_rings():
    network = Cluster.preset("8xV100-NVLink")
    assert find_rings(network, (3, 1, 0, 2)) == find_rings(network, (0, 1, 2, 3))


# machines


@pytest.mark.parametrize("name", presets())
def test_no_hop_of_a_preset_passes_through_a_device(name):
    network = Cluster.preset(name)
    members = network.gpu_indices
    for ring in find_rings(network, members) if len(members) > 1 else ():
        for hop in hops(ring.order):
            inside = [network.channels[channel].dst for channel in network.route(*hop)[:-1]]
            assert set(inside) <= set(network.switches)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("4xP100-PCIe", 9.0),  # QPI
        ("4xV100-NVLink", 96.0),  # four of the bricks that each GPU has
        ("8xV100-NVLink", 144.0),  # all six
        ("8xA100-NVSwitch", 260.0),
        ("2x8xV100", 2.8),  # Ethernet
        ("2x8xH100", 368.0),  # eight ports of InfiniBand, a little less than NVLink
        ("2xA100+4xT4", 12.0),
    ],
)
def test_the_rate_of_a_preset_is_that_of_its_narrowest_place(name, rate):
    network = Cluster.preset(name)
    assert ring_rate(network, network.gpu_indices) == pytest.approx(rate * GB, rel=1e-9)


def test_the_rings_of_a_dgx_fill_single_links_once_and_double_links_twice():
    network = Cluster.preset("8xV100-NVLink")
    shares = crossings(network, network.gpu_indices)
    for channel in network.channels:
        bricks = {"NVLink2-1": 1, "NVLink2-2": 2}.get(network.links[channel.link].kind, 0)
        assert shares[channel.id] == pytest.approx(bricks / 6)


@pytest.mark.parametrize(
    ("members", "rate"),
    [
        ((0, 3), 48.0),  # a double link
        ((0, 1), 24.0),  # a single one
        ((0, 5), 9.0),  # none: PCIe and QPI
        ((0, 1, 2, 3), 96.0),
        ((0, 1, 4, 5), 48.0),  # one ring, two of its links single
        ((1, 2, 5, 6), 48.0),
    ],
)
def test_part_of_a_dgx_has_the_rings_that_its_links_allow(members, rate):
    network = Cluster.preset("8xV100-NVLink")
    assert ring_rate(network, members) == pytest.approx(rate * GB, rel=1e-9)


def test_gpus_on_one_socket_do_not_go_over_the_other():
    network = Cluster.preset("4xP100-PCIe")
    assert used_kinds(network, (0, 1)) == {"PCIe3x16"}
    assert used_kinds(network, (0, 1, 2, 3)) == {"PCIe3x16", "QPI"}


def test_rings_leave_a_server_on_the_side_of_its_network():
    network = Cluster.preset("2x8xV100")
    kinds = used_kinds(network, network.gpu_indices)
    assert "QPI" not in kinds
    assert {"NVLink2-2", "Ethernet-25G"} <= kinds


def test_a_large_group_is_quick_to_find():
    network = servers(32, 8)
    routes_of(network)
    start = time.perf_counter()
    rings = find_rings(network, tuple(range(256)))
    assert time.perf_counter() - start < 2.0
    assert len(rings) == 8
    assert ring_rate(network, range(256)) == pytest.approx(4 / (7 / 8) * GB)  # the wires inside
