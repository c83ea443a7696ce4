"""Moves of groups: what groups there are, when they move, and that it pays where branches are."""

import dataclasses
import itertools

import numpy as np
import pytest

from agents.planners import anneal
from agents.planners.anneal import Anneal
from agents.planners.chain_split import ChainSplit
from agents.planners.grouping import Grouping
from agents.planners.moves import Moves
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from bench.graphs import layered_dag
from simcore import Cluster, Job, OpGraph, Problem

CLUSTER = Cluster.preset("4xV100-NVLink")


def branches(width: int = 8, depth: int = 20) -> OpGraph:
    """Chains side by side, issued in turn: op 0 of each, then op 1 of each; a join at the end."""
    names = [[f"b{branch}.{step}" for step in range(depth)] for branch in range(width)]
    seconds = {names[b][step]: 1e-3 for step in range(depth) for b in range(width)}
    edges = [
        (line[step], line[step + 1], 50_000_000) for line in names for step in range(depth - 1)
    ]
    edges += [(line[-1], "join", 1_000) for line in names]
    return OpGraph.from_edges(seconds | {"join": 1e-4}, edges, name="branches")


def chain(length: int = 120) -> OpGraph:
    names = [f"op{step}" for step in range(length)]
    edges = [(a, b, 1_000_000) for a, b in itertools.pairwise(names)]
    return OpGraph.from_edges(dict.fromkeys(names, 1e-3), edges, name="chain")


def space_of(graph: OpGraph, **limits) -> PlacementSpace:
    return PlacementSpace.build(Problem.build(graph, CLUSTER, Job()), **limits)


def without_groups(space: PlacementSpace) -> Moves:
    return dataclasses.replace(Moves.of(space), groups=(), group_share=0.0)


def walk(moves: Moves, space: PlacementSpace, seed: int, steps: int = 200) -> np.ndarray:
    rng, state, states = np.random.default_rng(seed), space.default, []
    for step in range(steps):
        state = moves.neighbour(state, rng, step / steps)
        states.append(state)
    return np.stack(states)


def test_members_are_the_units_of_each_group():
    grouping = Grouping.of(space_of(layered_dag(100)), 16)
    members = grouping.members
    assert len(members) == grouping.num_groups
    assert sorted(np.concatenate(members).tolist()) == list(range(100))
    for group, units in enumerate(members):
        assert set(grouping.group[units].tolist()) == {group}
        assert (np.diff(units) > 0).all()


def test_groups_are_distinct_and_have_several_units_but_not_all():
    moves = Moves.of(space_of(layered_dag(100)))
    sets = [tuple(units.tolist()) for units in moves.groups]
    assert len(sets) == len(set(sets))
    assert {1 < len(units) < 100 for units in sets} == {True}


def test_in_a_chain_groups_are_runs_and_the_walk_is_the_one_without_them():
    space = space_of(chain())
    moves = Moves.of(space)
    assert moves.groups
    assert moves.group_share == 0.0
    assert (walk(moves, space, 7) == walk(without_groups(space), space, 7)).all()


def test_a_graph_of_a_few_units_has_no_groups():
    assert Moves.of(space_of(layered_dag(12))).group_share == 0.0


def test_beside_branches_groups_move_together():
    space = space_of(branches())
    moves = Moves.of(space)
    assert 0.3 < moves.group_share <= 0.8
    sets = {tuple(units.tolist()) for units in moves.groups}
    rng, whole = np.random.default_rng(0), 0
    for _ in range(300):
        moved = np.flatnonzero(moves.neighbour(space.default, rng, 0.5) != space.default)
        whole += tuple(moved.tolist()) in sets
    assert whole > 50


def test_groups_keep_to_what_is_allowed():
    space = space_of(branches(), pins={3: 2, 40: 3}, exclude=[1])
    states = walk(Moves.of(space), space, 0)
    assert space.allowed[np.arange(space.num_units), states].all()


def test_the_same_seed_walks_the_same_way():
    space = space_of(branches())
    first, again = (walk(Moves.of(space), space, 5) for _ in range(2))
    assert (first == again).all()
    assert (first != walk(Moves.of(space), space, 6)).any()


def test_group_moves_pay_beside_branches(monkeypatch: pytest.MonkeyPatch):
    space = space_of(branches())

    def found(seed: int) -> float:
        recorder = Recorder(space=space)
        ChainSplit().search(space, np.random.default_rng(0), Budget(), recorder)
        rng, budget = np.random.default_rng(seed), Budget(evaluations=3000)
        Anneal().search(space, rng, budget, recorder)
        assert recorder.best is not None
        return recorder.best.step_time

    grouped = [found(seed) for seed in range(4)]

    class Ungrouped:
        of = staticmethod(without_groups)

    monkeypatch.setattr(anneal, "Moves", Ungrouped)
    single = [found(seed) for seed in range(4)]
    assert np.mean(grouped) < 0.95 * np.mean(single)
