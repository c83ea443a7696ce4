"""Writes rows of a pipeline as an `OpGraph`: names, sizes, and which tensors share memory.

Each microbatch has its own tensors. What later microbatches add to a gradient lives where the first
one's does; parameters and buffers are held once per device. What is received from copies of another
number is whole memory of its own beside the slices that it is put together from.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph, Phase, Role, Sized
from simcore.pipeline_op_rows import NOWHERE, Kind
from simcore.pipeline_op_tensors import Layout, Places
from simcore.pipeline_op_uses import list_uses
from simcore.steady_state import weight_versions

_GRADIENTS_SHARDED = 2  # ZeRO's name for it
_HELD = ("parameters", "gradients", "buckets")
# by Kind: class, phase and target of what is no op of the graph
_CLASS = (0, OpClass.POINTWISE, OpClass.VIEW, OpClass.VIEW, OpClass.COLLECTIVE, OpClass.COLLECTIVE)
_PHASE = (0, Phase.B, 0, Phase.U, Phase.B, Phase.U)
_TARGET = ("", "add", "receive", "hand_on", "", "all_gather")


class GraphWriter:
    """Writes the graph of a layout."""

    def __init__(self, layout: Layout, sized: Sequence[Sized]) -> None:
        """Fills the arrays of the new tensors.

        Args:
            layout: ops and tensors.
            sized: the graph's sizes on each stage, [stage].
        """
        self.layout, self.staged, self.sized = layout, layout.staged, sized
        self.old, rows = layout.staged.graph, layout.rows
        self.kind, self.stage = rows.kind[layout.row], rows.stage[layout.row]  # [op]
        self.is_op = self.kind == Kind.OP
        self.item = np.where(self.is_op, rows.item[layout.row], 0)  # [op] of the old graph
        self.base = np.full(layout.num_tensors, NOWHERE)  # [tensor] of the old graph
        self.num_bytes = np.zeros(layout.num_tensors, np.int64)  # [tensor]
        self.label = -1 - np.arange(layout.num_tensors)  # [tensor] alike where the storage is
        self.home = self._home()
        self._hold()
        self._make()

    def write(self) -> OpGraph:
        """Returns the new graph.

        Raises:
            PlanError: updates of stages wait for each other.
        """
        old, layout, item, is_op = self.old, self.layout, self.item, self.is_op
        uses = list_uses(layout)
        producer = np.repeat(np.arange(len(item)), np.diff(layout.first_output))
        producer = np.concatenate([np.full(layout.num_held, NOWHERE), producer])
        if (producer[uses.tensor] >= uses.op).any():
            raise PlanError(f"{old.name}: stages wait for each other's updates in a cycle")
        role = np.where(self.base == NOWHERE, np.uint8(Role.ACTIVATION), old.tensor_role[self.base])
        workspace = np.where(
            is_op, np.stack([s.workspace for s in self.sized])[self.stage, item], 0
        )
        return OpGraph(
            name=f"{old.name} in {self.staged.cut.num_stages} stages",
            op_names=self._op_names(),
            op_modules=self._words(old.op_modules, [""] * len(Kind)),
            op_targets=self._words(old.op_targets, _TARGET),
            phase=np.where(is_op, old.phase[item], np.array(_PHASE)[self.kind]).astype(np.uint8),
            op_class=np.where(is_op, old.op_class[item], np.array(_CLASS)[self.kind]).astype(
                np.uint8
            ),
            signature=np.full(len(item), NOWHERE, np.int32),
            signatures=(),
            unit=self._units(),
            kernels=np.where(is_op, old.kernels[item], self.kind == Kind.ADD).astype(np.int32),
            sync=is_op & old.sync[item],
            workspace=_constant(workspace),
            resident=_constant(self._own_resident() + sum(self.held().values())),
            elements=self._elements(),
            first_input=np.searchsorted(uses.op, np.arange(len(item) + 1)).astype(np.int64),
            inputs=uses.tensor.astype(np.int32),
            first_output=layout.first_output,
            tensor_names=self._tensor_names(producer),
            tensor_producer=producer.astype(np.int32),
            tensor_bytes=_constant(self.num_bytes),
            tensor_storage=np.unique(self.label, return_inverse=True)[1].astype(np.int32),
            tensor_role=role,
            batch=old.batch,
        )

    # tensors

    def _home(self) -> NDArray[np.int64]:
        """Returns the microbatch in whose memory a sum of gradients lives, [storage]."""
        staged, rows = self.staged, self.layout.rows
        home = np.zeros(self.old.num_storages, np.int64)
        runs = self.layout.makers.op[0, staged.maker]
        if runs.size and not staged.pipeline.schedule.asynchronous:
            home[self.old.tensor_storage[staged.gradients]] = rows.microbatch[runs.min(axis=1)]
        return home

    def _hold(self) -> None:
        """Fills in parameters and buffers."""
        held = np.arange(self.layout.num_held)
        self.base[held] = held
        self.num_bytes[held] = np.max([s.tensor_bytes[held] for s in self.sized], axis=0)
        self.label[held] = self.old.tensor_storage[held]

    def _make(self) -> None:
        """Fills in what ops make."""
        layout, rows = self.layout, self.layout.rows
        made = layout.made()
        by_update = self.staged.cut.phase[rows.item[made.row]] == Phase.U
        self._fill(made, rows.microbatch[made.row], again=self._makes_again(made))
        self._divide(made, by_update & ~self._is_persistent(made))
        sent, num_bytes = layout.sent()
        self._fill(sent, rows.microbatch[sent.row])
        self.num_bytes[sent.tensor] = num_bytes
        for kind in (Kind.ADD, Kind.RECEIVE, Kind.HAND_ON):
            self._fill(extra := layout.extra(kind), rows.microbatch[extra.row])
            if kind == Kind.HAND_ON:
                self._divide(extra, ~self._is_persistent(extra))
        shared = layout.shared()
        self._fill(shared, rows.microbatch[shared.row])
        self._divide(shared, np.ones(len(shared.row), np.bool_))
        if self.staged.pipeline.optimizer_sharding == _GRADIENTS_SHARDED:
            self.num_bytes[shared.tensor] = 0  # resident: all parts are there until the update
            self.label[shared.tensor] = -1 - shared.tensor

    def _fill(
        self,
        places: Places,
        microbatch: NDArray[np.int64],
        *,
        again: NDArray[np.bool_] | bool = False,
    ) -> None:
        """Fills in tensors that stand for one of the old graph each."""
        staged, rows = self.staged, self.layout.rows
        stage, base = rows.stage[places.row], places.base
        sizes = np.stack([s.tensor_bytes for s in self.sized])
        storage = self.old.tensor_storage[base].astype(np.int64)
        once = rows.kind[places.row] != Kind.OP
        once |= staged.cut.phase[np.where(once, 0, rows.item[places.row])] == Phase.U
        once &= rows.kind[places.row] != Kind.RECEIVE
        if not staged.pipeline.schedule.asynchronous:
            microbatch = np.where(once, self.home[storage], microbatch)
        widest, count = int(staged.copies.max()), staged.pipeline.schedule.num_microbatches
        label = storage * (widest + 1) + staged.copies[stage]
        label = ((label * widest + places.copy) * count + microbatch) * 2 + again
        label = np.where(self._is_persistent(places), storage, self.old.num_storages + label)
        self.base[places.tensor] = base
        self.num_bytes[places.tensor] = sizes[stage, base]
        self.label[places.tensor] = label

    def _makes_again(self, made: Places) -> NDArray[np.bool_]:
        """Returns which tensors live in memory of a forward that runs again, [place]."""
        rows = self.layout.rows
        late = self.staged.cut.phase[rows.item[made.row]] != Phase.F
        dropped = self.staged.dropped[self.old.tensor_storage[made.base]]
        found: NDArray[np.bool_] = rows.again[made.row] | (late & dropped)
        return found

    def _is_persistent(self, places: Places) -> NDArray[np.bool_]:
        persistent = self.old.persistent_storage[self.old.tensor_storage[places.base]]
        return np.asarray(persistent, np.bool_)

    def _divide(self, places: Places, chosen: NDArray[np.bool_]) -> None:
        """Leaves each copy its part of chosen tensors, [place], where the optimizer is sharded."""
        stage = self.layout.rows.stage[places.row]
        chosen = chosen & self.staged.is_sharded[stage]
        tensor, parts = places.tensor[chosen], self.staged.copies[stage[chosen]]
        self.num_bytes[tensor] = -(-self.num_bytes[tensor] // parts)

    # ops

    def _is_first(self) -> NDArray[np.bool_]:
        """Returns which ops are the first of their copy for an op of the graph, [op]."""
        layout = self.layout
        runs = layout.makers.op[0]
        first = np.where(runs == NOWHERE, len(layout.rows.kind), runs).min(axis=1)
        found: NDArray[np.bool_] = self.is_op & (first[self.item] == layout.row)
        return found

    def _own_resident(self) -> NDArray[np.int64]:
        """Returns the bytes that ops of the old graph hold for the whole step, [op]."""
        sizes = np.stack([s.resident for s in self.sized])
        return np.where(self._is_first(), sizes[self.stage, self.item], 0)

    def held(self) -> dict[str, NDArray[np.int64]]:
        """Returns the other bytes that are held for the whole step, by class, [op].

        Buckets; the parts of gradients, where copies share them; older versions of the weights.
        """
        staged, layout, pipeline = self.staged, self.layout, self.staged.pipeline
        found = {name: np.zeros(len(self.item), np.int64) for name in _HELD}
        for stage, versions in enumerate(weight_versions(pipeline.schedule)):
            row = int(np.argmax((layout.rows.stage == stage) & ~layout.runs_once))
            first = slice(*layout.first_op[row : row + 2])
            older = (versions - 1) * int(pipeline.tables[stage].parameter_bytes[stage])
            found["parameters"][first] = older
            mine = [b.num_bytes for b in layout.buckets if b.stage == stage and b.column == 0]
            size = sum(mine)
            if pipeline.optimizer_sharding >= _GRADIENTS_SHARDED:
                size = -(-size // int(staged.copies[stage]))
                found["gradients"][first] = size
            found["buckets"][first] = 0 if pipeline.buckets.as_views else size
        return found

    def _elements(self) -> NDArray[np.int64]:
        """Returns the parameter elements that each update updates, [op]; the state is of these."""
        parts = np.where(self.staged.is_sharded, self.staged.copies, 1)[self.stage]
        return np.where(self._is_first(), -(-self.old.elements[self.item] // parts), 0)

    def _units(self) -> NDArray[np.int32]:
        """Returns a unit for each copy of a stage and each collective, [op]."""
        layout = self.layout
        widest, count = int(self.staged.copies.max()), self.staged.cut.num_stages
        place = self.stage * widest + layout.copy
        place = np.where(layout.runs_once[layout.row], count * widest + layout.row, place)
        _, first, unit = np.unique(place, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[unit].astype(np.int32)

    # names

    def _words(self, old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
        """Returns a text for each op: of the old graph's op, else of the kind."""
        others = np.array(new, object)[self.kind]
        return tuple(np.where(self.is_op, np.array(old, object)[self.item], others).tolist())

    def _suffixes(self) -> NDArray[np.object_]:
        """Returns which copy and microbatch an op is of, [op]."""
        layout, rows = self.layout, self.layout.rows
        schedule = self.staged.pipeline.schedule
        by_update = self.is_op & (self.staged.cut.phase[self.item] == Phase.U)
        once = by_update | np.isin(self.kind, (Kind.HAND_ON, Kind.SUM, Kind.GATHER))
        tells = (schedule.num_microbatches > 1) & (~once | schedule.asynchronous)
        copy = np.where(layout.width[layout.row] > 1, layout.copy + 1, 0)
        microbatch = np.where(tells, rows.microbatch[layout.row] + 1, 0)
        count = schedule.num_microbatches + 1
        key, text = np.unique(
            (copy * count + microbatch) * 2 + rows.again[layout.row], return_inverse=True
        )
        places = [divmod(number // 2, count) for number in key.tolist()]
        texts = [
            _suffix(*place, again=bool(number % 2))
            for place, number in zip(places, key.tolist(), strict=True)
        ]
        return np.array(texts, object)[text]

    def _op_names(self) -> tuple[str, ...]:
        rows, tensors = self.layout.rows, self.old.tensor_names
        fetched = [tensors[tensor] for tensor in self.staged.fetched.tensor.tolist()]
        texts: dict[Kind, Sequence[str]] = {
            Kind.OP: self.old.op_names,
            Kind.ADD: [f"add {tensor}" for tensor in tensors],
            Kind.RECEIVE: [f"receive {tensor}" for tensor in fetched],
            Kind.HAND_ON: [f"hand on {tensor}" for tensor in tensors],
            Kind.SUM: [
                f"sum of bucket {number} of stage {bucket.stage}"
                for number, bucket in enumerate(self.layout.buckets)
            ],
        }
        found = np.empty(len(rows.kind), object)
        for kind, names in texts.items():
            mine = rows.kind == kind
            found[mine] = np.array([*names, ""], object)[rows.item[mine]]
        for row in np.flatnonzero(rows.kind == Kind.GATHER):
            found[row] = f"all-gather of stage {rows.stage[row]}"
        return tuple((found[self.layout.row] + self._suffixes()).tolist())

    def _tensor_names(self, producer: NDArray[np.int64]) -> tuple[str, ...]:
        names = np.array([*self.old.tensor_names, "token"], object)
        found = names[self.base] + np.append(self._suffixes(), "")[producer]
        shared = self.layout.shared()
        copies = np.array([f" (copy {c}, summed)" for c in range(self.staged.copies.max())], object)
        found[shared.tensor] = names[shared.base] + copies[shared.copy]
        return tuple(found.tolist())


def _suffix(copy: int, microbatch: int, *, again: bool) -> str:
    """Says which copy and microbatch, both from 1, 0 where there is one only."""
    words = [f"copy {copy - 1}"] if copy else []
    words += [f"microbatch {microbatch - 1}"] if microbatch else []
    words += ["again"] if again else []
    return f" ({', '.join(words)})" if words else ""


def _constant(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns bytes as pairs that do not grow with the batch, [..., 2]."""
    return np.stack([num_bytes, np.zeros_like(num_bytes)], axis=1).astype(np.int64)
