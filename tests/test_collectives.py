"""Collectives against closed forms worked by hand: wires carry 1 GB/s where not said."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.cluster import Cluster, Link
from simcore.collectives import ALGORITHMS, make_collective, topology
from simcore.curves import Curve, CurveKey
from simcore.errors import PlanError
from tests.networks import GB, cluster, cycle, mesh, reordered, servers, star, two_sides

GiB = 2**30
WAYS = [(kind, algorithm) for kind, names in ALGORITHMS.items() for algorithm in names]
FLAT = [way for way in WAYS if way[1] != "hierarchical"]
BUS = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0}  # of (n - 1) / n


def duration(kind, algorithm, network, members, num_bytes=GB):
    return make(kind, algorithm, network, members, num_bytes).duration


def make(kind, algorithm, network, members, num_bytes=GB):
    return make_collective(kind, int(num_bytes), network, members, algorithm=algorithm)


def moved(collective):
    """Bytes on all channels together."""
    return collective.volume * collective.usage.sum()


def fullest(collective, network):
    """How full the fullest channel is at the rate of an idle network."""
    bandwidth = np.array([network.channels[c].bandwidth for c in collective.channels])
    return (collective.usage * collective.volume / collective.duration / bandwidth).max()


# closed forms on an idle network, of 1 GB


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("kind", BUS)
def test_a_ring_on_a_star_passes_all_but_one_part(kind, size):
    seconds = BUS[kind] * (size - 1) / size
    assert duration(kind, "ring", star(size), range(size)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("size", [3, 4, 5, 8])
@pytest.mark.parametrize("kind", BUS)
def test_rings_on_a_mesh_use_all_wires_at_once(kind, size):
    seconds = BUS[kind] / size  # (n - 1) / n of the data over n - 1 wires
    assert duration(kind, "ring", mesh(size), range(size)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("size", [3, 4, 7, 10])
@pytest.mark.parametrize("kind", BUS)
def test_rings_on_a_cycle_go_both_ways(kind, size):
    seconds = BUS[kind] * (size - 1) / size / 2
    assert duration(kind, "ring", cycle(size), range(size)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("kind", BUS)
def test_a_ring_over_a_neck_is_as_fast_as_the_neck(kind):
    seconds = BUS[kind] * 5 / 6 / 0.25
    network = two_sides(3, neck=0.25)
    assert duration(kind, "ring", network, range(6)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("kind", BUS)
def test_rings_over_several_servers_use_all_their_ports(kind):
    seconds = BUS[kind] * 7 / 8 / 4
    assert duration(kind, "ring", servers(2, 4), range(8)) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("size", [3, 4, 8, 12])
def test_a_broadcast_on_a_star_sends_everything_once(algorithm, size):
    network = star(size)
    assert duration("broadcast", algorithm, network, range(size)) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("size", [3, 5])
def test_a_broadcast_leaves_its_root_by_all_wires(size):
    seconds = 1 / (size - 1)
    assert duration("broadcast", "ring", mesh(size), range(size)) == pytest.approx(seconds)


def test_a_broadcast_does_not_enter_its_root():
    network = mesh(3)
    wires = {channel.id for channel in network.channels if channel.dst == "d2"}
    for algorithm in ("ring", "tree"):
        assert not wires & set(make("broadcast", algorithm, network, [2, 0, 1]).channels)
        assert wires & set(make("broadcast", algorithm, network, [0, 1, 2]).channels)


@pytest.mark.parametrize(("size", "seconds"), [(2, 1.0), (3, 1.5), (4, 2.0), (8, 2.0), (13, 2.0)])
def test_a_double_tree_moves_the_data_twice_through_an_inner_member(size, seconds):
    assert duration("all_reduce", "tree", star(size), range(size)) == pytest.approx(seconds)


@pytest.mark.parametrize(("count", "size"), [(2, 2), (2, 4), (3, 4), (4, 8)])
def test_a_hierarchical_all_reduce_is_the_sum_of_its_phases(count, size):
    network = servers(count, size)
    inside, across = (size - 1) / size / 4, 2 * (count - 1) / count / size
    once = duration("reduce_scatter", "hierarchical", network, range(count * size))
    assert once == pytest.approx(inside + across / 2, rel=1e-9)
    assert duration("all_gather", "hierarchical", network, range(count * size)) == once
    twice = duration("all_reduce", "hierarchical", network, range(count * size))
    assert twice == pytest.approx(2 * inside + across, rel=1e-9)


def test_phases_that_use_one_wire_have_its_bytes_together():
    # both phases go over the wires of the star: 2 * 1/2 + 2 * 1/2 / 2 GB in each direction
    network = cluster(["n0", "n0", "n1", "n1"], [(f"d{i}", "hub", 1.0, 0.0) for i in range(4)])
    collective = make("all_reduce", "hierarchical", network, range(4))
    assert collective.volume == pytest.approx(1.5 * GB)
    assert collective.duration == pytest.approx(1.5)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_pairs_of_an_all_to_all_have_a_wire_each_or_share_one(size):
    on_mesh = duration("all_to_all", "pairwise", mesh(size), range(size))
    assert on_mesh == pytest.approx(1 / size, rel=1e-9)
    on_star = duration("all_to_all", "pairwise", star(size), range(size))
    assert on_star == pytest.approx((size - 1) / size, rel=1e-9)


def test_an_all_to_all_over_a_neck_crosses_it_with_all_pairs():
    # 9 pairs of a sixth each, in each direction
    assert duration("all_to_all", "pairwise", two_sides(3), range(6)) == pytest.approx(1.5)


@pytest.mark.parametrize(("kind", "algorithm"), FLAT)
def test_the_latency_counts_hops(kind, algorithm):
    for size, levels in ((2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)):
        once = {"ring": size - 1, "tree": levels, "pairwise": size - 1}[algorithm]
        collective = make(kind, algorithm, star(size, latency=0.25), range(size))
        assert collective.latency == 0.5 * once * (1 + (kind == "all_reduce"))


def test_the_latency_of_phases_adds():
    network = servers(3, 4, inside=(4.0, 1.0), port=(1.0, 10.0))
    assert make("all_reduce", "hierarchical", network, range(12)).latency == 2 * 3 * 2 + 4 * 20
    assert make("all_gather", "hierarchical", network, range(12)).latency == 3 * 2 + 2 * 20
    assert make("all_reduce", "ring", network, range(12)).latency == 2 * 11 * 20


# what goes over the network


@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_algorithms_of_a_kind_move_the_same_bytes(kind, algorithm, size):
    # each hop of these networks is two wires; an all-to-all sends 1/n, n (n - 1) times
    network = servers(2, size // 2, inside=(1.0, 0.0)) if size > 2 else star(2)
    if algorithm == "hierarchical" and size == 2:
        return
    total = 2 * (size - 1) * GB * (1 + (kind == "all_reduce"))
    assert moved(make(kind, algorithm, network, range(size))) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
@pytest.mark.parametrize("name", ["2x8xH100", "2x8xV100"])
def test_no_channel_is_above_its_bandwidth(kind, algorithm, name):
    network = Cluster.preset(name)
    collective = make(kind, algorithm, network, network.gpu_indices)
    full = fullest(collective, network)
    assert full == pytest.approx(1.0) or (algorithm == "hierarchical" and full < 1.0)
    assert (np.diff(collective.channels) > 0).all()
    assert (collective.usage > 0).all()


@st.composite
def networks(draw):
    """A mesh with wires of random widths and latencies, or servers of random sizes."""
    if draw(st.booleans()):
        size = draw(st.integers(2, 6))
        pairs = itertools.combinations(range(size), 2)
        widths = {pair: draw(st.sampled_from([0.5, 1.0, 2.0, 7.0])) for pair in pairs}
        network = mesh(size, rate=lambda a, b: widths[a, b], latency=draw(st.floats(0, 1e-3)))
    else:
        rates = st.tuples(st.floats(0.5, 8.0), st.floats(0, 1e-3))
        sizes = draw(st.sampled_from([(2, 2), (2, 4), (3, 3), (4, 1)]))
        network = servers(*sizes, inside=draw(rates), port=draw(rates))
    return network


@given(networks(), st.sampled_from(list(ALGORITHMS)), st.integers(1, 10**10))
def test_the_chosen_algorithm_is_the_quickest_and_fits_its_channels(network, kind, num_bytes):
    members = range(network.num_devices)
    chosen = make_collective(kind, num_bytes, network, members)
    for algorithm in ALGORITHMS[kind]:
        if algorithm == "hierarchical" and "net" not in network.switches:
            continue
        if algorithm == "hierarchical" and network.devices[0].node != network.devices[1].node:
            continue
        other = make(kind, algorithm, network, members, num_bytes)
        assert chosen.idle_time <= other.idle_time
    assert fullest(chosen, network) <= 1 + 1e-9
    bandwidth = np.array([network.channels[c].bandwidth for c in chosen.channels])
    seconds = chosen.usage / bandwidth
    assert seconds[chosen.usage == 1.0].max() == pytest.approx(seconds.max(), rel=1e-9)


@given(networks(), st.sampled_from(list(ALGORITHMS)), st.lists(st.integers(0, 10**10), min_size=2))
def test_more_bytes_never_take_less_time(network, kind, sizes):
    members = range(network.num_devices)
    times = [make_collective(kind, size, network, members).idle_time for size in sorted(sizes)]
    assert times == sorted(times)


@given(networks(), st.integers(1, 10**10))
def test_no_all_reduce_beats_its_lower_bound(network, num_bytes):
    # members send 2 (n - 1) times the data together, each at least once (Patarasuk and Yuan 2009)
    size = network.num_devices
    out = [sum(c.bandwidth for c in network.channels if c.src == f"d{i}") for i in range(size)]
    bound = max(2 * (size - 1) / sum(out), 1 / min(out)) * num_bytes
    best = make_collective("all_reduce", num_bytes, network, range(size))
    assert best.duration >= bound * (1 - 1e-9)


@given(networks(), st.sampled_from(FLAT), st.data())
def test_the_order_of_ranks_changes_a_broadcast_only(network, way, data):
    members = list(range(network.num_devices))
    order = data.draw(st.permutations(members))
    if way[0] == "broadcast":
        order = [0, *(member for member in order if member)]
    one, other = (make(*way, network, ranks) for ranks in (members, order))
    assert other.members == tuple(order)
    for field in ("latency", "duration", "volume"):
        assert getattr(one, field) == getattr(other, field)
    np.testing.assert_array_equal(one.usage, other.usage)


@given(st.permutations(range(5)), st.sampled_from(FLAT), st.data())
def test_the_order_of_devices_does_not_change_the_time(order, way, data):
    pairs = itertools.combinations(range(5), 2)
    widths = {pair: data.draw(st.sampled_from([0.5, 1.0, 2.0])) for pair in pairs}
    network = mesh(5, rate=lambda a, b: widths[a, b], latency=1e-6)
    if way[1] == "tree":  # equally quick trees may load wires differently
        widths = dict.fromkeys(widths, 1.0)
        network = mesh(5, latency=1e-6)
    root = order.index(0) if way[0] == "broadcast" else 0
    members = [root, *(device for device in range(5) if device != root)]
    one = make(*way, network, range(5))
    other = make(*way, reordered(network, order), members)
    assert other.latency == one.latency
    assert other.duration == pytest.approx(one.duration, rel=1e-9)


def test_two_groups_meet_on_the_wires_that_both_use():
    network = Cluster.preset("4xP100-PCIe")
    groups = [make("all_reduce", "ring", network, group) for group in ((0, 2), (1, 3))]
    shared = set(groups[0].channels) & set(groups[1].channels)
    assert {network.links[channel // 2].kind for channel in shared} == {"QPI"}
    apart = [make("all_reduce", "ring", network, group) for group in ((0, 1), (2, 3))]
    assert not set(apart[0].channels) & set(apart[1].channels)


# the choice


def choices(network, kind="all_reduce"):
    """The algorithms taken as the data grows."""
    sizes = [2**power for power in range(4, 36)]
    taken = [make_collective(kind, n, network, network.gpu_indices).algorithm for n in sizes]
    return [name for name, _ in itertools.groupby(taken)]


def test_little_data_takes_few_hops_and_much_data_takes_all_wires():
    assert choices(star(8, latency=1e-6)) == ["tree", "ring"]
    assert choices(Cluster.preset("8xV100-NVLink")) == ["tree", "ring"]
    assert choices(Cluster.preset("8xA100-NVSwitch")) == ["tree", "ring"]


def test_servers_take_the_hierarchy_between_the_two():
    assert choices(Cluster.preset("2x8xH100")) == ["tree", "hierarchical", "ring"]
    assert choices(Cluster.preset("2x8xH100"), "reduce_scatter") == ["hierarchical", "ring"]


def test_servers_on_a_slow_network_do_not_go_around_one_ring():
    assert "ring" not in choices(Cluster.preset("2x8xV100"))


def test_of_equally_fast_algorithms_the_ring_is_taken():
    assert make_collective("all_reduce", GiB, star(2), [0, 1]).algorithm == "ring"


# machines


@pytest.mark.parametrize(
    ("name", "bus_bandwidth"),
    [
        ("4xP100-PCIe", 9.0),
        ("4xV100-NVLink", 96.0),
        ("8xV100-NVLink", 144.0),
        ("8xA100-NVSwitch", 260.0),
        ("2x8xV100", 2.8),
        ("2x8xH100", 368.0),
        ("2xA100+4xT4", 12.0),
    ],
)
def test_the_bus_bandwidth_of_a_preset(name, bus_bandwidth):
    network = Cluster.preset(name)
    size = len(network.gpu_indices)
    seconds = duration("all_reduce", "ring", network, network.gpu_indices, GiB)
    assert 2 * (size - 1) / size * GiB / seconds == pytest.approx(bus_bandwidth * GB, rel=1e-9)


@pytest.mark.parametrize(("brick", "bus_bandwidth"), [(22.0, 132.0), (20.0, 120.0)])
def test_a_dgx_has_the_bus_bandwidth_that_nccl_expects_of_its_bricks(brick, bus_bandwidth):
    # NCCL takes 22 GB/s of a V100's brick, since 2.9 20 GB/s (SM70_NVLINK_BW in src/graph/topo.h)
    original = Cluster.preset("8xV100-NVLink")
    rates = {"NVLink2-1": brick * GB, "NVLink2-2": 2 * brick * GB}
    links = [replace(k, bandwidth=rates.get(k.kind, k.bandwidth)) for k in original.links]
    network = replace_links(original, links)
    seconds = duration("all_reduce", "ring", network, network.gpu_indices)
    assert 2 * 7 / 8 * GB / seconds == pytest.approx(bus_bandwidth * GB, rel=1e-9)


def replace_links(original: Cluster, links: list[Link]) -> Cluster:
    return Cluster(
        name="changed", devices=original.devices, switches=original.switches, links=links
    )


@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
@pytest.mark.parametrize("name", ["8xV100-NVLink", "2x8xV100", "4xP100-PCIe"])
def test_nothing_enters_a_cpu_or_passes_through_a_gpu(kind, algorithm, name):
    network = Cluster.preset(name)
    if algorithm == "hierarchical" and name != "2x8xV100":
        return
    members = network.gpu_indices[:6] if algorithm != "hierarchical" else network.gpu_indices
    ends = {network.devices[member].name for member in members} | set(network.switches)
    for channel in make(kind, algorithm, network, members).channels:
        assert {network.channels[channel].src, network.channels[channel].dst} <= ends


# curves


def curve_for(network, members, algorithm, *points):
    sizes, seconds = (np.array(axis, np.float64) for axis in zip(*points, strict=True))
    label = topology(network, members)
    return {CurveKey("all_reduce", algorithm, len(members), label): Curve(sizes, seconds)}


def test_a_curve_takes_the_place_of_the_closed_form():
    network = star(4)
    curves = curve_for(network, range(4), "ring", (GB, 5.0), (2 * GB, 7.0))
    collective = make_collective(
        "all_reduce", int(GB), network, range(4), algorithm="ring", curves=curves
    )
    plain = make("all_reduce", "ring", network, range(4))
    assert collective.latency == pytest.approx(3.0)
    assert collective.duration == pytest.approx(2.0)
    assert collective.volume == plain.volume
    np.testing.assert_array_equal(collective.usage, plain.usage)


def test_a_curve_above_the_bandwidth_fills_its_channel_and_no_more():
    network = star(4)
    curves = curve_for(network, range(4), "ring", (GB, 0.25), (2 * GB, 0.5))
    collective = make_collective("all_reduce", int(GB), network, range(4), curves=curves)
    assert collective.idle_time == pytest.approx(0.25)
    assert fullest(collective, network) == pytest.approx(1.0)


def test_a_measured_algorithm_is_taken_before_one_that_is_not():
    network = star(8, latency=1.0)
    curves = curve_for(network, range(8), "ring", (1, 90.0), (2, 91.0))
    assert make_collective("all_reduce", 1, network, range(8), curves={}).algorithm == "tree"
    assert make_collective("all_reduce", 1, network, range(8), curves=curves).algorithm == "ring"
    fixed = make_collective("all_reduce", 1, network, range(8), algorithm="tree", curves=curves)
    assert fixed.algorithm == "tree"


def test_a_curve_of_whatever_the_library_chose_holds_where_no_algorithm_is_fixed():
    network = star(4)
    curves = curve_for(network, range(4), "auto", (GB, 5.0), (2 * GB, 7.0))
    free = make_collective("all_reduce", int(GB), network, range(4), curves=curves)
    assert free.idle_time == pytest.approx(5.0)
    fixed = make_collective(
        "all_reduce", int(GB), network, range(4), algorithm="ring", curves=curves
    )
    assert fixed.idle_time == pytest.approx(1.5)


def test_a_curve_of_another_group_is_not_used():
    network = star(5)
    curves = curve_for(network, range(4), "ring", (GB, 5.0), (2 * GB, 7.0))
    collective = make_collective("all_reduce", int(GB), network, range(5), curves=curves)
    assert collective.idle_time == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("name", "members", "label"),
    [
        ("8xV100-NVLink", range(8), "1 node, V100-SXM2-16GB, NVLink2-1+NVLink2-2"),
        ("8xV100-NVLink", (0, 3), "1 node, V100-SXM2-16GB, NVLink2-2"),
        (
            "2x8xV100",
            (*range(8), *range(9, 17)),
            "2 nodes, V100-SXM2-16GB, Ethernet-25G+NVLink2-2+PCIe3x16",
        ),
        ("4xP100-PCIe", (0, 1), "1 node, P100-PCIe-16GB, PCIe3x16"),
    ],
)
def test_a_topology_is_named_by_what_its_rings_go_over(name, members, label):
    assert topology(Cluster.preset(name), members) == label


def test_links_without_a_kind_are_named_by_their_bandwidth():
    assert topology(star(2), [0, 1]) == "1 node, V100-SXM2-16GB, 1GBps"


# nothing to do, and errors


@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
def test_one_member_or_no_bytes_take_no_time(kind, algorithm):
    network = servers(2, 2, port=(1.0, 1.0))
    for members, num_bytes in (([1], 8), ([], 8), (range(4), 0)):
        collective = make(kind, algorithm, network, members, num_bytes)
        assert collective.idle_time == collective.volume == 0
        assert len(collective.channels) == len(collective.usage) == 0
        assert collective.algorithm == algorithm


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "all_reduc",
            {},
            "unknown collective 'all_reduc' (did you mean 'all_reduce'?); known: all",
        ),
        (
            "all_gather",
            {"algorithm": "tree"},
            "all_gather: unknown algorithm 'tree'; known: ring, hierarchical, auto",
        ),
        ("broadcast", {"members": [0, 1, 0]}, "broadcast: device 'd0' is a member twice"),
        ("broadcast", {"members": [0, 9]}, "broadcast: cluster 'toy' has no device number 9"),
        ("broadcast", {"members": [-1, 0]}, "broadcast: cluster 'toy' has no device number -1"),
        ("all_to_all", {"num_bytes": -1}, "all_to_all: bytes must not be negative, but are -1"),
        ("all_reduce", {"members": [0, 4]}, "all_reduce: no route from 'd0' to 'd4'"),
        (
            "all_reduce",
            {"algorithm": "hierarchical", "members": [0, 1]},
            "all_reduce: hierarchical needs two or more members in each of several nodes, as many "
            "in each; there are 2 in n0",
        ),
        (
            "all_reduce",
            {"algorithm": "hierarchical", "members": [0, 1, 2]},
            "as many in each; there are 2 in n0, 1 in n1",
        ),
        ("all_reduce", {"algorithm": "hierarchical", "members": [0, 2]}, "1 in n0, 1 in n1"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(kind, options, message):
    wires = [(f"d{i}", "hub", 1.0, 0.0) for i in range(4)]
    network = cluster(["n0", "n0", "n1", "n1", "n2"], wires)
    given_options = {"num_bytes": 8, "members": [0, 1, 2, 3]} | options
    num_bytes, members = given_options.pop("num_bytes"), given_options.pop("members")
    with pytest.raises(PlanError, match=re.escape(message)):
        make_collective(kind, num_bytes, network, members, **given_options)


def test_the_arrays_cannot_be_written():
    collective = make("all_reduce", "ring", star(3), range(3))
    with pytest.raises(ValueError, match="read-only"):
        collective.usage[0] = 2.0


# whole times


def test_a_ring_all_reduce_in_seconds():
    four = make_collective("all_reduce", GB, star(4, latency=0.25), [2, 0, 3, 1], algorithm="ring")
    assert four.idle_time == pytest.approx(1.5 + 6 * 0.5)
    assert make_collective("all_reduce", GB, star(4), [1], algorithm="ring").idle_time == 0.0
