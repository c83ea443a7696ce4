"""How every storage of a sharded model is taken apart, and what its tensors are called there."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from calibration.run.layouts import NEVER, Layout, LayoutError, strides_of
from calibration.run.recording import Recording, Ref
from calibration.run.shard_ops import operands_like
from simcore.graph import OpGraph
from simcore.sharding.affine import at
from simcore.sharding.groups import Linkage
from simcore.sharding.local import LocalGraph
from simcore.sharding.states import Axis


def find_layouts(
    graph: OpGraph, linkage: Linkage, local: LocalGraph, axes: Sequence[Axis], batch: int
) -> dict[int, Layout]:
    """Returns how each storage is taken apart: by the axes that ever split its groups.

    Args:
        graph: the whole graph.
        linkage: its groups.
        local: what one device does.
        axes: of the mesh, without that of the copies.
        batch: samples of one copy.
    """
    used: dict[int, set[int]] = defaultdict(set)
    for tensor, axis, factor in _splits(local):
        place = int(graph.tensor_storage[tensor]), factor
        used[linkage.group_of[place]].add(axis)
    found = {}
    for storage, factors in enumerate(linkage.factors.sizes):
        dims: list[tuple[int, int, int]] = []
        for factor, pair in enumerate(factors):
            size = at(pair, batch)
            for axis in sorted(used.get(linkage.group_of.get((storage, factor), NEVER), ())):
                if size % axes[axis].size:
                    dims = [each for each in dims if each[2] != factor]
                    size = at(pair, batch)
                    break
                dims.append((axes[axis].size, axis + 1, factor))
                size //= axes[axis].size
            dims.append((size, NEVER, factor))
        dims = [each for each in dims if each[0] != 1]
        found[storage] = Layout(*(tuple(each[n] for each in dims) for n in range(3)))
    return found


def _splits(local: LocalGraph) -> Iterator[tuple[int, int, int]]:
    """Yields (tensor, axis, factor) of everything that is ever split."""
    states = local.states
    known = [*enumerate(states.made), *enumerate(states.settled)]
    known += [need for needs in states.needs for need in needs]
    for change in local.changes.values():
        known += [(change.tensor, change.before), (change.tensor, change.after)]
    for tensor, state in dict.fromkeys(known):
        for axis, factor in enumerate(state):
            if factor >= 0:
                yield tensor, axis, factor


def example_refs(recording: Recording) -> dict[int, Ref]:
    """Returns one tensor of each storage."""
    found: dict[int, Ref] = dict(recording.homes)

    def note(ref: Ref) -> Ref:
        found.setdefault(ref.storage, ref)
        return ref

    for call in recording.calls.values():
        operands_like([*call.args, call.kwargs, *call.outputs], note)
    for each in recording.trained:
        note(each.gradient)
    return found


def dimension_of(layout: Layout, axis: int, factor: int) -> int:
    """Returns the dimension that an axis splits of a factor, -1 = none."""
    pairs = list(zip(layout.axes, layout.factors, strict=True))
    if factor < 0:
        return -1
    if (axis, factor) not in pairs:
        raise LayoutError("devices along the axis do not divide it")
    return pairs.index((axis, factor))


def whole_ref(layout: Layout, storage: int, dtype: torch.dtype) -> Ref:
    """Returns all of a storage, by its dimensions."""
    sizes = layout.sizes or (1,)
    return Ref(storage, dtype, sizes, strides_of(sizes), 0)
