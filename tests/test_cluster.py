import itertools
import math
import pickle

import numpy as np
import pytest

from simcore.cluster import Cluster, Device, Link, presets, resolve
from simcore.errors import ClusterError

KIND = "V100-SXM2-16GB"
HEADER = 'format = "placewright-cluster/1"\nname = "toy"\n'
TWO = """
devices = [{ name = "a", kind = "T4-16GB" }, { name = "b", kind = "T4-16GB", memory_GiB = 2 }]
links = [{ a = "a", b = "b", bandwidth_GBps = 10, latency_us = 5 }]
"""


def make(names, links, switches=(), forwards=()):
    """A cluster from (a, b, bandwidth) links with latency 1."""
    devices = [Device(n, KIND, "node0", 2**30, n in forwards) for n in names]
    links = [Link(a, b, "", bandwidth, 1.0) for a, b, bandwidth in links]
    return Cluster(name="toy", devices=devices, switches=switches, links=links)


def every_path(cluster, source, target):
    """Yields all simple paths as channel ids; the definition that routes are checked against."""
    passes = {d.name: d.forwards for d in cluster.devices} | dict.fromkeys(cluster.switches, True)

    def walk(node, seen, path):
        if node == target:
            yield path
            return
        if path and not passes[node]:
            return
        for channel in cluster.channels:
            if channel.src == node and channel.dst not in seen:
                yield from walk(channel.dst, seen | {channel.dst}, (*path, channel.id))

    yield from walk(source, {source}, ())


def best_path(cluster, source, target):
    def rank(path):
        return -min(cluster.channels[c].bandwidth for c in path), len(path), path

    return min(every_path(cluster, source, target), key=rank, default=())


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_joins_all_its_devices(name):
    cluster = Cluster.preset(name)
    assert cluster.name == name
    assert cluster.reachable.all()
    assert cluster.gpu_indices


def test_the_presets_that_users_are_promised_are_there():
    promised = "4xP100-PCIe 4xV100-NVLink 8xV100-NVLink 2x8xV100 8x8xV100 8xA100-NVSwitch 2x8xH100"
    assert set(presets()) >= {*promised.split(), "2xA100+4xT4", "1xV100"}


def test_a_link_gives_one_channel_in_each_direction():
    cluster = make("ab", [("a", "b", 3.0)])
    assert [(c.id, c.src, c.dst, c.link) for c in cluster.channels] == [
        (0, "a", "b", 0),
        (1, "b", "a", 0),
    ]
    assert cluster.route(0, 1) == (0,)
    assert cluster.route(1, 0) == (1,)


def test_a_route_through_a_switch_adds_latencies_and_takes_the_least_bandwidth():
    cluster = make("ab", [("a", "s", 4.0), ("s", "b", 2.0)], switches=["s"])
    assert cluster.route(0, 1) == (0, 2)
    assert cluster.route_latency[0, 1] == 2.0
    assert cluster.route_bandwidth[0, 1] == 2.0


def test_the_wider_route_wins_over_the_shorter():
    cluster = make("ab", [("a", "b", 1.0), ("a", "s", 2.0), ("s", "b", 2.0)], switches=["s"])
    assert cluster.route(0, 1) == (2, 4)


def test_among_equally_wide_routes_the_shorter_wins_then_the_least_channel_ids():
    links = [("a", "s", 2.0), ("s", "b", 2.0), ("a", "b", 2.0), ("a", "b", 2.0)]
    assert make("ab", links, switches=["s"]).route(0, 1) == (4,)


def test_devices_are_not_passed_through_unless_they_forward():
    links = [("a", "b", 1.0), ("b", "c", 1.0)]
    closed, open_ = make("abc", links), make("abc", links, forwards="b")
    assert not closed.reachable[0, 2]
    assert closed.route(0, 2) == ()
    assert closed.route_bandwidth[0, 2] == 0
    assert open_.route(0, 2) == (0, 2)


def test_a_device_reaches_itself_at_once():
    cluster = make("ab", [])
    assert cluster.reachable.tolist() == [[True, False], [False, True]]
    assert cluster.route(0, 0) == ()
    assert cluster.route_latency[0, 0] == 0
    assert cluster.route_bandwidth[0, 0] == math.inf


@pytest.mark.parametrize("seed", range(40))
def test_routes_equal_the_best_of_all_simple_paths(seed):
    rng = np.random.default_rng(seed)
    devices, switches = ["a", "b", "c", "d"], ["s", "t"]
    pairs = list(itertools.combinations(devices + switches, 2))
    links = [
        (*pairs[k], float(rng.integers(1, 4))) for k in rng.integers(0, len(pairs), rng.integers(9))
    ]
    cluster = make(devices, links, switches, forwards=rng.choice(devices, 1))
    for i, j in itertools.permutations(range(4), 2):
        assert cluster.route(i, j) == best_path(cluster, devices[i], devices[j])


def test_gpus_of_a_dgx1_without_nvlink_between_them_meet_over_pcie():
    cluster = Cluster.preset("8xV100-NVLink")
    assert [cluster.channels[c].dst for c in cluster.route(0, 3)] == ["gpu3"]
    assert cluster.route_bandwidth[0, 3] == 2 * cluster.route_bandwidth[0, 1]
    over_pcie = ["plx0", "root0", "root1", "plx2", "gpu5"]
    assert [cluster.channels[c].dst for c in cluster.route(0, 5)] == over_pcie


def test_every_gpu_of_a_dgx1_has_six_nvlink_bricks():
    links = Cluster.preset("8xV100-NVLink").links
    for gpu in (f"gpu{i}" for i in range(8)):
        kinds = [link.kind for link in links if gpu in (link.a, link.b)]
        assert kinds.count("NVLink2-1") + 2 * kinds.count("NVLink2-2") == 6


def test_copies_inside_a_node_are_faster_than_between_nodes():
    for name in ("2x8xV100", "2x8xH100"):
        cluster = Cluster.preset(name)
        node = [device.node for device in cluster.devices]
        first, other, far = cluster.gpu_indices[0], cluster.gpu_indices[1], cluster.gpu_indices[8]
        assert node[first] == node[other] != node[far]
        assert cluster.route_bandwidth[first, other] > 2 * cluster.route_bandwidth[first, far]


def test_cpus_are_devices_but_not_gpus():
    cluster = Cluster.preset("4xP100-PCIe")
    assert cluster.gpu_indices == (0, 1, 2, 3)
    assert cluster.device_index("cpu0") == 4


def test_a_cluster_of_128_devices_routes_every_pair():
    links, switches = [], ["fabric"]
    for node in range(16):
        switches.append(f"s{node}")
        links += [(f"n{node}g{gpu}", f"s{node}", 9.0) for gpu in range(8)]
        links.append((f"s{node}", "fabric", 1.0))
    names = [f"n{node}g{gpu}" for node in range(16) for gpu in range(8)]
    cluster = make(names, links, switches)
    assert cluster.reachable.all()
    assert cluster.first_hop[-1] == len(cluster.hops) == 16 * 8 * 7 * 2 + 128 * 120 * 4


def test_a_file_gives_si_units_and_the_memory_of_the_kind_unless_stated():
    cluster = Cluster.from_toml(HEADER + TWO, "toy.toml")
    assert [device.memory for device in cluster.devices] == [round(14.75 * 2**30), 2 * 2**30]
    assert cluster.links[0] == Link("a", "b", "", 10e9, 5 * 1e-6)


def test_a_link_of_a_kind_may_override_one_number():
    text = HEADER + TWO.replace(
        "bandwidth_GBps = 10, latency_us = 5", "kind = 'QPI', latency_us = 1"
    )
    link = Cluster.from_toml(text, "toy.toml").links[0]
    assert (link.bandwidth, link.latency) == (9e9, 1e-6)


def test_the_hash_follows_content_and_not_text_or_name():
    base = Cluster.from_toml(HEADER + TWO, "toy.toml")
    same = Cluster.from_toml("# note\n" + HEADER.replace("toy", "other") + TWO, "x.toml")
    wider = Cluster.from_toml(HEADER + TWO.replace("= 10", "= 11"), "toy.toml")
    assert base.content_hash() == same.content_hash() != wider.content_hash()
    assert len(base.content_hash()) == 16


def test_a_cluster_survives_pickling():
    cluster = Cluster.preset("2xA100+4xT4")
    assert pickle.loads(pickle.dumps(cluster)).content_hash() == cluster.content_hash()


def test_route_arrays_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        make("ab", []).route_latency[0, 1] = 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"b", kind', '"a", kind', "two nodes are named 'a'"),
        ('b = "b"', 'b = "c"', "'a'-'c': no device or switch is named 'c'"),
        ('b = "b"', 'b = "a"', "joins a node with itself"),
        ("= 10", "= 0", "bandwidth must be positive"),
        ("= 10", "= -1", "bandwidth must be positive"),
        ("= 10", "= nan", "bandwidth must be positive"),
        ("= 10", "= inf", "bandwidth must be positive"),
        ("latency_us = 5", "latency_us = -5", "latency must be finite and not negative"),
        ("latency_us = 5", "latency_us = nan", "latency must be finite and not negative"),
        ("bandwidth_GBps = 10, ", "", "give kind, or bandwidth_GBps and latency_us"),
        ("memory_GiB = 2", "memory_GiB = 0", "device 'b': memory_GiB must be positive"),
        ("memory_GiB = 2", "memory_GiB = nan", "device 'b': memory_GiB must be positive"),
        ("memory_GiB = 2", "memory_GB = 2", r"memory_GB.*\(b\)"),
        ("memory_GiB = 2", "memory_GiB = '2'", r"memory_GiB.*\(b\)"),
        ("latency_us = 5", "delay = 5", r"delay.*\(a-b\)"),
        ("T4-16GB", "T4", "device 'a': unknown device kind 'T4'.*T4-16GB"),
        ("bandwidth_GBps = 10", "kind = 'NVLnk2-1'", "did you mean 'NVLink2-1'"),
        ("links = [", "links = [[", "toy.toml"),
    ],
)
def test_a_malformed_file_is_refused_with_file_entry_and_reason(old, new, message):
    text = HEADER + TWO.replace(old, new, 1)
    assert text != HEADER + TWO
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.from_toml(text, "toy.toml")
    assert str(caught.value).startswith("toy.toml: ")


def test_a_cluster_needs_a_device():
    with pytest.raises(ClusterError, match="at least one device"):
        Cluster(name="empty", devices=())


def test_unknown_keys_and_formats_are_refused():
    for header in (HEADER + "colour = 1\n", HEADER.replace("/1", "/2"), "name = 'x'\n"):
        with pytest.raises(ClusterError, match=r"colour|format"):
            Cluster.from_toml(header + TWO, "toy.toml")


def test_a_cluster_is_found_by_preset_name_or_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(HEADER + TWO)
    assert resolve(path).name == resolve(str(path)).name == "toy"
    assert resolve("1xV100").num_devices == 2


def test_an_unknown_cluster_is_refused_with_a_suggestion_and_the_list():
    with pytest.raises(ClusterError, match=r"did you mean '4xV100-NVLink'.*2x8xH100"):
        resolve("4xv100-nvlnk")
    for path in ("missing.toml", "a\0.toml"):
        with pytest.raises(ClusterError, match=r"\.toml: cannot be read"):
            resolve(path)


def test_an_unknown_device_name_is_refused_with_the_list():
    with pytest.raises(ClusterError, match=r"no device 'gpu9'.*gpu0, gpu1"):
        Cluster.preset("4xP100-PCIe").device_index("gpu9")


def test_devices_and_links_can_be_made_from_kinds():
    assert Device.of_kind("a", KIND).memory == round(15.77 * 2**30)
    assert Link.of_kind("a", "b", "QPI").bandwidth == 9e9
    with pytest.raises(ClusterError, match="device 'a': unknown device kind"):
        Device.of_kind("a", "V101")
    with pytest.raises(ClusterError, match="link 'a'-'b': unknown link kind"):
        Link.of_kind("a", "b", "string")
