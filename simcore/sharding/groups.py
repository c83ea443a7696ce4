"""Linkage groups: factors that some op runs over together, so that one decision forces all.

Splitting the width of a feed-forward block splits the output of its first product, everything
pointwise after it, the input of its second product, both weights, their gradients and their
updates: one decision, not thirty. A group is a class of the relation "some loop runs over both".
"""

from collections.abc import Iterator
from typing import NamedTuple

from networkx.utils import UnionFind

from simcore.errors import PlanError
from simcore.graph import OpGraph, Role
from simcore.sharding.affine import at
from simcore.sharding.factors import NOT_SPLIT, AtomicLoop, Factors, find_factors
from simcore.signature import Affine

BATCH = "batch"  # the name of the group of samples
NO_GROUP = -1

Place = tuple[int, int]  # (storage, factor)


class Group(NamedTuple):
    """Factors that are split together.

    Attributes:
        name: ``batch``, or the largest parameter in it, else the first tensor, and the number of
            its factor, outermost 0: ``layers.0.linear1.weight:0``.
        size: of the smallest factor; a number of parts must divide it.
        places: the factors.
    """

    name: str
    size: Affine
    places: tuple[Place, ...]


class Linkage(NamedTuple):
    """What may be split in a graph, and together with what.

    Attributes:
        factors: of every storage, and the atomic loops of every op.
        groups: in the order in which their first factor occurs.
        group_of: group of each factor, NO_GROUP where no loop runs over it.
        loop_group: group of each atomic loop, [op][atomic loop].
    """

    factors: Factors
    groups: tuple[Group, ...]
    group_of: dict[Place, int]
    loop_group: tuple[tuple[int, ...], ...]

    def number(self, name: str) -> int:
        """Returns the number of a group by its name."""
        for number, group in enumerate(self.groups):
            if group.name == name:
                return number
        raise PlanError(f"no linkage group {name!r} in this graph")


def find_linkage(graph: OpGraph) -> Linkage:
    """Returns the linkage groups of a captured graph.

    Raises:
        GraphError: a graph without loops.
    """
    factors = find_factors(graph)
    union = UnionFind()
    smallest: dict[Place, Affine] = {}
    growing: list[Place] = []
    for op, loop in _loops(factors):
        places = _places(graph, op, loop)
        union.union(*places)
        for place in places:
            size = factors.sizes[place[0]][place[1]]
            known = smallest.get(place, size)
            smallest[place] = min(known, loop.most, size, key=lambda s: at(s, graph.batch or 1))
        if loop.size[1]:
            growing.append(places[0])
    union.union(*growing)
    members: dict[Place, list[Place]] = {}
    for place in smallest:
        members.setdefault(union[place], []).append(place)
    names = _names(graph)
    batch_root = union[growing[0]] if growing else None
    groups = []
    for root, places in members.items():
        size = min((smallest[place] for place in places), key=lambda s: at(s, graph.batch or 1))
        name = BATCH if root == batch_root else _name(places, names)
        groups.append(Group(name, size, tuple(places)))
    group_of = {place: number for number, group in enumerate(groups) for place in group.places}
    loop_group = tuple(
        tuple(group_of[_places(graph, op, loop)[0]] for loop in loops)
        for op, loops in enumerate(factors.loops)
    )
    return Linkage(factors, tuple(groups), group_of, loop_group)


def _loops(factors: Factors) -> Iterator[tuple[int, AtomicLoop]]:
    return ((op, loop) for op, loops in enumerate(factors.loops) for loop in loops)


def _places(graph: OpGraph, op: int, loop: AtomicLoop) -> list[Place]:
    """Returns the factors that an atomic loop runs over."""
    known = graph.loops_of(op)
    accesses = known.accesses if known is not None else ()
    return [
        (int(graph.tensor_storage[access.tensor]), factor)
        for access, factor in zip(accesses, loop.factor, strict=True)
        if factor != NOT_SPLIT
    ]


def _names(graph: OpGraph) -> dict[int, tuple[int, str]]:
    """Returns, for each storage, how little it says, and its name: large parameters say most."""
    names: dict[int, tuple[int, str]] = {}
    roles, sizes = graph.tensor_role.tolist(), graph.tensor_bytes[:, 0].tolist()
    for tensor, storage in enumerate(graph.tensor_storage.tolist()):
        rank = -sizes[tensor] if roles[tensor] == Role.PARAMETER else 1
        names.setdefault(storage, (rank, graph.tensor_names[tensor]))
    return names


def _name(places: list[Place], names: dict[int, tuple[int, str]]) -> str:
    """Returns the name of a group: of its largest parameter, else of what was seen first."""
    storage, factor = min(places, key=lambda place: names[place[0]][0])
    return f"{names[storage][1]}:{factor}"
