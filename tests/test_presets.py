"""The clusters that ship: which way tensors go in each machine, and who shares it with whom."""

import itertools
from collections.abc import Iterator

import pytest

from simcore.cluster import Cluster, presets
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Plan, Settings
from simcore.result import Result
from simcore.simulation import simulate
from simcore.units import GB

BETWEEN_SOCKETS = ("QPI", "UPI-SPR", "xGMI-Rome")
BETWEEN_NODES = ("Ethernet-25G", "InfiniBand-100G", "InfiniBand-400G")
every_preset = pytest.mark.parametrize("name", presets())


def gpu_pairs(cluster: Cluster) -> Iterator[tuple[int, int]]:
    return itertools.permutations(cluster.gpu_indices, 2)


def kinds(cluster: Cluster, a: int, b: int) -> list[str]:
    """The kinds of the links on a route."""
    return [cluster.links[channel // 2].kind for channel in cluster.route(a, b)]


def stops(cluster: Cluster, a: int, b: int) -> list[str]:
    """What a route passes through."""
    return [cluster.channels[channel].dst for channel in cluster.route(a, b)][:-1]


def is_direct(kind: str) -> bool:
    return kind.startswith("NVLink")


# routes


@every_preset
def test_no_route_passes_through_a_gpu_or_a_cpu(name: str) -> None:
    cluster = Cluster.preset(name)
    for a, b in itertools.permutations(range(cluster.num_devices), 2):
        assert not set(stops(cluster, a, b)) & set(cluster.device_names)


@every_preset
def test_a_route_and_the_way_back_use_the_two_directions_of_the_same_links(name: str) -> None:
    cluster = Cluster.preset(name)
    for a, b in itertools.permutations(range(cluster.num_devices), 2):
        back = [cluster.channels[channel].link for channel in cluster.route(b, a)]
        assert [cluster.channels[channel].link for channel in cluster.route(a, b)] == back[::-1]
        assert cluster.route_bandwidth[a, b] == cluster.route_bandwidth[b, a]
        assert cluster.route_latency[a, b] == pytest.approx(cluster.route_latency[b, a])


@every_preset
def test_between_gpus_nothing_goes_over_the_memory_of_the_host(name: str) -> None:
    cluster = Cluster.preset(name)
    for a, b in gpu_pairs(cluster):
        assert not any(kind.startswith("HostMemory") for kind in kinds(cluster, a, b))


@every_preset
def test_between_a_gpu_and_its_cpu_everything_goes_over_pcie_and_the_memory_of_the_host(
    name: str,
) -> None:
    cluster = Cluster.preset(name)
    cpus = set(range(cluster.num_devices)) - set(cluster.gpu_indices)
    for gpu, cpu in itertools.product(cluster.gpu_indices, cpus):
        if cluster.devices[gpu].node == cluster.devices[cpu].node:
            *pcie, memory = kinds(cluster, gpu, cpu)
            assert memory.startswith("HostMemory")
            assert {kind[:4] for kind in pcie} == {"PCIe"}


@every_preset
def test_a_pair_with_nvlink_uses_it_and_nothing_else(name: str) -> None:
    cluster = Cluster.preset(name)
    devices = set(cluster.device_names)
    for link in cluster.links:
        if is_direct(link.kind) and {link.a, link.b} <= devices:
            a, b = cluster.device_index(link.a), cluster.device_index(link.b)
            assert kinds(cluster, a, b) == kinds(cluster, b, a) == [link.kind]


@pytest.mark.parametrize("name", ["8xA100-NVSwitch", "2x8xH100"])
def test_in_a_node_with_nvswitch_every_pair_meets_there(name: str) -> None:
    cluster = Cluster.preset(name)
    for a, b in gpu_pairs(cluster):
        if cluster.devices[a].node == cluster.devices[b].node:
            (switch,) = stops(cluster, a, b)
            assert switch.endswith("nvswitch")
            assert all(is_direct(kind) for kind in kinds(cluster, a, b))


@pytest.mark.parametrize(
    ("name", "near", "far"),
    [
        ("4xP100-PCIe", [(0, 1), (2, 3)], [(0, 2), (0, 3), (1, 2), (1, 3)]),
        ("2xA100+4xT4", [(0, 1), (2, 3), (2, 5)], [(0, 2), (1, 5)]),
        ("8xV100-NVLink", [], [(0, 5), (0, 6), (0, 7), (1, 4), (3, 4), (2, 7)]),
    ],
)
def test_pcie_crosses_from_socket_to_socket_once_and_only_where_it_has_to(
    name: str, near: list[tuple[int, int]], far: list[tuple[int, int]]
) -> None:
    cluster = Cluster.preset(name)
    for pairs, crossings in ((near, 0), (far, 1)):
        for a, b in pairs:
            found = kinds(cluster, a, b)
            assert sum(kind in BETWEEN_SOCKETS for kind in found) == crossings
            assert {kind[:4] for kind in found if kind not in BETWEEN_SOCKETS} == {"PCIe"}


@every_preset
def test_the_network_is_for_other_nodes_only_and_is_narrow_there(name: str) -> None:
    cluster = Cluster.preset(name)
    for a, b in gpu_pairs(cluster):
        found = kinds(cluster, a, b)
        ports = [kind for kind in found if kind in BETWEEN_NODES]
        is_far = cluster.devices[a].node != cluster.devices[b].node
        assert len(ports) == (2 if is_far else 0)  # out of one node, into the other
        if is_far:
            widths = {cluster.links[c // 2].kind: cluster.channels[c].bandwidth
                      for c in cluster.route(a, b)}  # fmt: skip
            assert cluster.route_bandwidth[a, b] == min(widths.values())
            # only a card of 100 Gb/s carries more than the PCIe 3 slot that it is in
            assert widths[ports[0]] < 1.25 * min(widths.values())
            assert ports[0] == "InfiniBand-100G" or widths[ports[0]] == min(widths.values())


def test_each_gpu_of_an_h100_server_has_a_port_of_its_own() -> None:
    cluster = Cluster.preset("2x8xH100")
    here = cluster.gpu_indices[:8]
    far = cluster.gpu_indices[8]
    ports = {stops(cluster, gpu, far)[0] for gpu in here}
    assert len(ports) == 8
    assert all(stops(cluster, gpu, far)[1] == "fabric" for gpu in here)


# who shares


def sent_at_once(cluster: Cluster, pairs: list[tuple[int, int]], contention: str) -> Result:
    """One GB from each first to each second device, all from 1 s on."""
    names = [f"{side}{number}" for number in range(len(pairs)) for side in "ab"]
    gpu = cluster.devices[cluster.gpu_indices[0]].kind
    graph = OpGraph.from_edges(
        [(name, 1.0) for name in names],
        [(f"a{number}", f"b{number}", 10**9) for number in range(len(pairs))],
        measured_on=gpu,
        batch=1,
    )
    job, settings = Job(batch=1, assume_linear=True), Settings(contention=contention)
    placement = [device for pair in pairs for device in pair]
    plan = Plan.from_placement(graph, cluster, job, placement, settings=settings)
    return simulate(graph, cluster, job, plan)


def seconds(cluster: Cluster, pairs: list[tuple[int, int]], contention: str) -> list[float]:
    """How long each of these takes, without its latency, in the unit of one alone."""
    taken = []
    for t in sent_at_once(cluster, pairs, contention).run.transfers():
        alone = GB / cluster.route_bandwidth[t.source, t.target]
        taken.append((t.end - t.request - cluster.route_latency[t.source, t.target]) / alone)
    return taken


@pytest.mark.parametrize(
    ("name", "pairs", "times"),
    [
        ("4xP100-PCIe", [(0, 2), (1, 3)], 2.0),  # QPI carries both
        ("4xP100-PCIe", [(0, 2), (3, 1)], 1.0),  # one each way
        ("4xP100-PCIe", [(0, 1), (2, 3)], 1.0),  # a socket each
        ("4xV100-NVLink", [(0, 1), (2, 3)], 1.0),
        ("8xV100-NVLink", [(0, 5), (1, 4)], 2.0),  # both leave by the PCIe switch of 0 and 1
        ("8xA100-NVSwitch", [(0, 4), (1, 5), (2, 6), (3, 7)], 1.0),
        ("8xA100-NVSwitch", [(0, 4), (1, 4), (2, 4), (3, 4)], 4.0),  # all into one port
        ("2x8xV100", [(0, 9), (1, 10), (2, 11)], 3.0),  # one network card a server
        ("2x8xH100", [(0, 9), (1, 10), (2, 11)], 1.0),  # one a GPU
        ("2x8xH100", [(0, 9), (1, 9)], 2.0),
        (
            "2xA100+4xT4",
            [(0, 2), (1, 3)],
            12 / 10,
        ),  # the T4's PCIe 3 is narrower than half of xGMI?
    ],
)
def test_tensors_sent_at_once_share_what_both_cross(
    name: str, pairs: list[tuple[int, int]], times: float
) -> None:
    cluster = Cluster.preset(name)
    assert seconds(cluster, pairs, "fair") == pytest.approx([times] * len(pairs), rel=1e-3)
    assert seconds(cluster, pairs, "none") == pytest.approx([1.0] * len(pairs), rel=1e-3)
