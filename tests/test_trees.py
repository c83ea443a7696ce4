"""Double binary trees: their shape, and where they lie on real machines."""

import math

import pytest

from simcore.cluster import Cluster
from simcore.trees import binary_tree, find_double_tree
from tests.networks import mesh, servers, star

SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17, 31, 40]


def halves(trees):
    """The edges of each tree."""
    ends = zip(trees.parent.tolist(), trees.child.tolist(), strict=True)
    return [list(zip(parent, child, strict=True)) for parent, child in ends]


def depths(edges):
    """Member -> hops below the root."""
    (root,) = {parent for parent, _ in edges} - {child for _, child in edges}
    depth = {root: 0}
    while len(depth) <= len(edges):
        depth |= {child: depth[parent] + 1 for parent, child in edges if parent in depth}
    return depth


def children(edges, member):
    return sum(parent == member for parent, _ in edges)


def test_a_tree_of_fourteen_worked_by_hand():
    below = {0: [8], 8: [4, 12], 4: [2, 6], 12: [10, 13], 2: [1, 3], 6: [5, 7], 10: [9, 11]}
    parent, child = binary_tree(14).tolist()
    assert dict(zip(child, parent, strict=True)) == {c: p for p in below for c in below[p]}


@pytest.mark.parametrize("root", [None, 1])
@pytest.mark.parametrize("size", SIZES)
def test_both_trees_reach_all_members_in_few_hops(size, root):
    for edges in halves(find_double_tree(star(size), tuple(range(size)), root)):
        depth = depths(edges)
        assert sorted(depth) == list(range(size))
        assert max(depth.values()) <= math.ceil(math.log2(size))
        assert root is None or depth[root] == 0


@pytest.mark.parametrize("root", [None, 1])
@pytest.mark.parametrize("size", SIZES)
def test_a_member_below_the_roots_has_children_in_one_tree_only(size, root):
    trees = halves(find_double_tree(star(size), tuple(range(size)), root))
    for member in range(size):
        counts = [children(edges, member) for edges in trees]
        is_root = [depths(edges)[member] == 0 for edges in trees]
        assert all(count <= 1 + (not root) for count, root in zip(counts, is_root, strict=True))
        assert any(is_root) or min(counts) == 0


@pytest.mark.parametrize(("size", "hops"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_the_latency_is_that_of_the_deepest_leaf(size, hops):
    network = star(size, latency=0.25)
    assert find_double_tree(network, tuple(range(size))).latency == hops * 0.5


def test_servers_have_a_tree_each_below_a_tree_of_heads():
    network = servers(4, 4, inside=(1.0, 1.0), port=(1.0, 10.0))
    trees = find_double_tree(network, tuple(range(16)))
    assert trees.latency == 2 * 20.0 + 2 * 2.0
    for edges in halves(trees):
        assert sorted(depths(edges)) == list(range(16))
        assert sum(parent // 4 != child // 4 for parent, child in edges) == 3


def test_the_two_trees_leave_a_server_by_different_ports():
    heads = [
        {member for edge in edges if edge[0] // 4 != edge[1] // 4 for member in edge}
        for edges in halves(find_double_tree(servers(2, 4), tuple(range(8))))
    ]
    assert not heads[0] & heads[1]


def test_servers_of_one_device_are_one_tree():
    trees = find_double_tree(servers(4, 1), (0, 1, 2, 3))
    assert [len(depths(edges)) for edges in halves(trees)] == [4, 4]


def test_a_broadcast_starts_at_its_root_in_its_node():
    for edges in halves(find_double_tree(servers(3, 4), tuple(range(12)), 6)):
        assert depths(edges)[6] == 0


def test_the_quickest_wires_are_taken():
    # two trees of four without the slow wire: both have a place with three neighbours
    network = mesh(4, rate=lambda a, b: 0.1 if (a, b) == (1, 3) else 1.0)
    for edges in halves(find_double_tree(network, (0, 1, 2, 3))):
        assert {1, 3} not in [set(edge) for edge in edges]


def test_the_trees_of_a_dgx_stay_on_nvlink():
    network = Cluster.preset("8xV100-NVLink")
    trees = find_double_tree(network, network.gpu_indices)
    assert trees.latency == pytest.approx(3 * 5e-6)
    assert {len(network.route(*edge)) for edges in halves(trees) for edge in edges} == {1}


def test_the_order_of_equal_devices_does_not_change_the_latency():
    network = Cluster.preset("8xV100-NVLink")
    latencies = {find_double_tree(network, quad).latency for quad in ((0, 1, 2, 3), (4, 5, 6, 7))}
    assert latencies == {2 * network.links[0].latency}
