"""Observations: the same whatever ops are called and however many devices there are."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from agents.families import family, generated, tasks_of
from agents.observe import (
    CHOICE_FEATURES,
    DEVICE_FEATURES,
    EDGE_FEATURES,
    GROUP_FEATURES,
    OP_FEATURES,
    PAIR_FEATURES,
    observe,
    observe_cluster,
)
from agents.planners.grouping import Grouping
from agents.planners.space import PlacementSpace
from agents.task import toy
from simcore import Cluster, Job, OpGraph, Problem
from simcore.errors import UsageError
from simcore.graph import Phase

CLUSTERS = ("4xP100-PCIe", "4xV100-NVLink", "8xV100-NVLink", "2xA100+4xT4", "1xV100")


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_numbers_are_finite_small_and_as_many_as_announced(name):
    (task,) = tasks_of(family(["generated:1"]), [Cluster.preset(name)], num_groups=20)
    seen = observe(task.grouping)
    devices = task.num_devices
    assert seen.graph.ops.shape[1] == OP_FEATURES
    assert seen.graph.edges.shape[1] == EDGE_FEATURES
    assert seen.groups.shape == (task.num_groups, GROUP_FEATURES)
    assert seen.cluster.devices.shape == (devices, DEVICE_FEATURES)
    assert seen.cluster.pairs.shape == (devices, devices, PAIR_FEATURES)
    assert seen.choices.shape == (task.num_groups, devices, CHOICE_FEATURES)
    for values in (seen.graph.ops, seen.graph.edges, seen.groups, seen.cluster.devices,
                   seen.cluster.pairs, seen.choices):  # fmt: skip
        assert np.isfinite(values).all()
        assert np.abs(values).max(initial=0.0) <= 8.0


def test_equal_devices_are_told_apart():
    (task,) = tasks_of(family(["generated:1"]), [Cluster.preset("4xP100-PCIe")], num_groups=20)
    devices = observe_cluster(task.grouping.space).devices
    assert len(np.unique(devices, axis=0)) == task.num_devices


def test_names_and_the_order_of_words_decide_nothing():
    names = ("a", "b", "c", "d")
    graphs = []
    for rename in (lambda name: name, lambda name: f"z{ord(name)}"):
        seconds = [(rename(name), 1e-3) for name in names]
        edges = [(rename("a"), rename(name), 1000) for name in "bcd"]
        graphs.append(OpGraph.from_edges(seconds, edges))
    seen = [
        observe(Grouping.of(PlacementSpace.build(
            Problem.build(graph, Cluster.preset("4xV100-NVLink"), Job())), 4))
        for graph in graphs
    ]  # fmt: skip
    assert_allclose(seen[0].graph.ops, seen[1].graph.ops)
    assert_allclose(seen[0].choices, seen[1].choices)


def test_seconds_and_bytes_are_relative():
    edges = [("a", "b", 1000), ("b", "c", 4000)]
    seen = []
    for scale in (1, 10):
        seconds = [(name, scale * 1e-3 * (1 + i)) for i, name in enumerate("abc")]
        sized = [(a, b, scale * size) for a, b, size in edges]
        graph = OpGraph.from_edges(seconds, sized)
        problem = Problem.build(graph, Cluster.preset("4xV100-NVLink"), Job())
        seen.append(observe(Grouping.of(PlacementSpace.build(problem), 3)))
    assert_allclose(seen[0].graph.ops, seen[1].graph.ops, rtol=1e-5)
    assert_allclose(seen[0].graph.edges, [[0.5, 1.0], [1.0, 1.0]], rtol=1e-6)


def test_the_top_level_is_the_longest_way_to_an_op():
    seen = observe(toy().grouping)
    column = OP_FEATURES - 2 * 6 - 1  # the last before the rank's code
    # source, then branch a (2 ms ops): 0, 1, 3, 5 of the 13 ms to the join
    assert_allclose(seen.graph.ops[:4, column] * 13, [0, 1, 3, 5], atol=1e-5)


def test_generated_graphs_are_training_steps_decided_by_their_seed():
    graph = generated(3)
    assert graph.content_hash() == generated(3).content_hash()
    assert graph.content_hash() != generated(4).content_hash()
    assert {Phase.F, Phase.B, Phase.U} == set(graph.phase.tolist())
    assert graph.num_units < graph.num_ops / 2


@pytest.mark.parametrize("source", ["generated:", "generated:0", "generated:x"])
def test_a_number_of_graphs_has_to_be_one(source):
    with pytest.raises(UsageError, match="generated:COUNT"):
        family([source])
