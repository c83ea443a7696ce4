"""Factors: the atomic dimensions of every storage, and the atomic loops of every op.

Ops see the same memory in different shapes: [batch, position, width], [batch * position, width],
[batch, head, position, part of width]. Every size and stride that occurs cuts the elements of a
storage; together the cuts are its factors, outermost first. A loop is cut where any of its tensors
is, and cuts the others in turn, until nothing changes. What remains of a loop is then one loop per
factor, and to split it is to split a factor of every tensor that has it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from simcore.errors import GraphError
from simcore.graph import OpGraph
from simcore.loops import Access, Loop, LoopKind, OpLoops
from simcore.sharding.affine import ONE, at, over, times
from simcore.signature import Affine

NOT_SPLIT = -1  # the factor of an access that lacks a loop


class AtomicLoop(NamedTuple):
    """A loop that runs over one factor of each tensor that has it.

    Attributes:
        name: of the loop it is a part of.
        size: iterations.
        most: what a number of parts must divide: the size of the smallest factor it runs over.
        kind: what splitting it takes.
        dim: dimension of the op's signature that shrinks with it.
        inner: bytes of the collectives inside the op if it is split.
        factor: of the storage of each access, NOT_SPLIT where it has none, [access].
    """

    name: str
    size: Affine
    most: Affine
    kind: LoopKind
    dim: str
    inner: Affine
    factor: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What may be split.

    Attributes:
        sizes: of the factors of each storage, outermost first, [storage][factor].
        loops: of each op, [op].
    """

    sizes: tuple[tuple[Affine, ...], ...]
    loops: tuple[tuple[AtomicLoop, ...], ...]


def find_factors(graph: OpGraph) -> Factors:
    """Returns the factors of a captured graph.

    Raises:
        GraphError: a graph without loops (one of measured seconds, or a coarse one).
    """
    if graph.loops is None:
        raise GraphError(
            f"{graph.name}: what its ops run over is not known (only captured models tell), so it "
            "cannot be sharded"
        )
    chains = _Chains(graph, graph.loops)
    chains.refine()
    chains.find_indexed()
    loops = tuple(() if op is None else tuple(chains.atomic(op)) for op in graph.loops)
    return Factors(sizes=chains.sizes(), loops=loops)


class _Chains:
    """For each storage, its cuts: elements below which a factor ends, each divides the next."""

    def __init__(self, graph: OpGraph, loops: Iterable[OpLoops | None]) -> None:
        self.batch = graph.batch or 1
        self.ops = [op for op in loops if op is not None]
        self.storage = graph.tensor_storage.tolist()
        self.cuts: list[list[Affine]] = [[] for _ in range(graph.num_storages)]
        itemsize: dict[int, int] = {}
        mixed: set[int] = set()
        for access in self._accesses():
            index = self.storage[access.tensor]
            if itemsize.setdefault(index, access.itemsize) != access.itemsize:
                mixed.add(index)
        largest = _largest(graph, self.batch)
        for index, size in itemsize.items():
            elements = None if index in mixed else over(largest[index], (size, 0))
            if elements is not None and at(elements, self.batch) > 0:
                self.cuts[index] = [ONE, elements] if elements != ONE else [ONE]
        for access in self._accesses():
            for dim in access.dims:
                if at(dim.size, self.batch) > 1 and at(dim.stride, self.batch) > 0:
                    self._cut(self.storage[access.tensor], dim.stride)
                    self._cut(self.storage[access.tensor], times(dim.stride, dim.size))
        self.indexed: set[tuple[int, int]] = set()  # (storage, factor) of which accesses see one

    def _accesses(self) -> Iterable[Access]:
        return (access for op in self.ops for access in op.accesses)

    def _cut(self, storage: int, point: Affine | None) -> bool:
        """Cuts a storage; returns whether that is new. A point that fits no chain is left out."""
        cuts = self.cuts[storage]
        if point is None or not cuts or point in cuts:
            return False
        value = at(point, self.batch)
        place = next((i for i, cut in enumerate(cuts) if at(cut, self.batch) > value), len(cuts))
        if place in (0, len(cuts)) or over(point, cuts[place - 1]) is None:
            return False
        if over(cuts[place], point) is None:
            return False
        cuts.insert(place, point)
        return True

    def refine(self) -> None:
        """Lets the tensors of every loop cut each other until nothing changes."""
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                for loop in range(len(op.loops)):
                    changed |= self._refine(op, loop)

    def _refine(self, op: OpLoops, loop: int) -> bool:
        places = [place for place in self._places(op, loop) if place is not None]
        if len(places) < 2:
            return False
        inside = dict.fromkeys(cut for place in places for cut in self._inside(*place))
        changed = False
        for storage, stride, size in places:
            have = set(self._inside(storage, stride, size))
            for cut in inside:
                if cut not in have:
                    changed |= self._cut(storage, times(stride, cut))
        return changed

    def _places(self, op: OpLoops, loop: int) -> list[tuple[int, Affine, Affine] | None]:
        """Returns (storage, stride, size) of a loop in each access, None where it has none."""
        found: list[tuple[int, Affine, Affine] | None] = []
        for access in op.accesses:
            dims = [d for d in access.dims if d.loop == loop and at(d.stride, self.batch) > 0]
            dims = [d for d in dims if at(d.size, self.batch) > 1]
            place = (self.storage[access.tensor], dims[0].stride, dims[0].size) if dims else None
            found.append(place)
        return found

    def _inside(self, storage: int, stride: Affine, size: Affine) -> list[Affine]:
        """Returns the cuts within a dimension, in iterations of its loop, its end included."""
        cuts, top = self.cuts[storage], times(stride, size)
        if stride not in cuts or top not in cuts:
            return []
        between = cuts[cuts.index(stride) + 1 : cuts.index(top) + 1]
        quotients = [over(cut, stride) for cut in between]
        return [quotient for quotient in quotients if quotient is not None]

    def sizes(self) -> tuple[tuple[Affine, ...], ...]:
        """Returns the sizes of the factors, outermost first."""
        found = []
        for cuts in self.cuts:
            pairs = zip(cuts[1:], cuts[:-1], strict=True)
            sizes = [over(above, below) for above, below in pairs]
            found.append(tuple(size for size in reversed(sizes) if size is not None))
        return tuple(found)

    def atomic(self, op: OpLoops) -> Iterable[AtomicLoop]:
        """Yields the loops of an op that can be split, one for each factor, outermost first."""
        for number, loop in enumerate(op.loops):
            places = self._places(op, number)
            known = [self._inside(*place) for place in places if place is not None]
            if not known or not all(known):
                continue  # it runs over a part of a factor somewhere
            common = [cut for cut in known[0] if all(cut in other for other in known[1:])]
            for below, above in reversed(list(zip([ONE, *common], common, strict=False))):
                if (made := self._atomic(loop, places, below, above)) is not None:
                    yield made

    def _atomic(
        self,
        loop: Loop,
        places: list[tuple[int, Affine, Affine] | None],
        below: Affine,
        above: Affine,
    ) -> AtomicLoop | None:
        """Returns the part of a loop between two cuts, None where a factor cannot be split."""
        size = over(above, below)
        if size is None:
            return None
        factor, most = [], size
        for place in places:
            if place is None:
                factor.append(NOT_SPLIT)
                continue
            storage, stride, _ = place
            cuts = self.cuts[storage]
            top = cuts.index(times(stride, above))  # type: ignore[arg-type]
            outer = over(cuts[top], cuts[top - 1])
            index = len(cuts) - 1 - top
            if outer is None or (storage, index) in self.indexed:
                return None
            factor.append(index)
            most = min(most, outer, key=lambda each: at(each, self.batch))
        return AtomicLoop(loop.name, size, most, loop.kind, loop.dim, loop.inner, tuple(factor))

    def find_indexed(self) -> None:
        """Notes the factors that some access has one place of (a slice): they cannot be split."""
        for access in self._accesses():
            storage = self.storage[access.tensor]
            cuts = self.cuts[storage]
            seen: set[int] = set()
            for dim in access.dims:
                top = times(dim.stride, dim.size)
                low = at(dim.stride, self.batch)
                high = low if top is None else at(top, self.batch)
                inside = (i for i, cut in enumerate(cuts[1:]) if low < at(cut, self.batch) <= high)
                seen.update(inside)
            missing = set(range(len(cuts) - 1)) - seen
            self.indexed |= {(storage, len(cuts) - 2 - place) for place in missing}


def _largest(graph: OpGraph, batch: int) -> list[Affine]:
    """Returns the bytes of each storage, [storage]."""
    largest: list[Affine] = [(0, 0)] * graph.num_storages
    pairs = graph.tensor_bytes.tolist()
    for storage, pair in zip(graph.tensor_storage.tolist(), pairs, strict=True):
        if at((pair[0], pair[1]), batch) > at(largest[storage], batch):
            largest[storage] = (pair[0], pair[1])
    return largest
