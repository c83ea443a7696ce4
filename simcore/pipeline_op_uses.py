"""What the ops of a pipeline read."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.pipeline_op_rows import NOWHERE, Kind
from simcore.pipeline_op_tensors import Layout, spans
from simcore.signature import Phase


class Uses(NamedTuple):
    """Who reads what."""

    op: NDArray[np.int64]  # [use] new op
    tensor: NDArray[np.int64]  # [use] new tensor


class _Reads(NamedTuple):
    """Inputs of ops of the graph, of each copy."""

    row: NDArray[np.int64]  # [read]
    copy: NDArray[np.int64]  # [read]
    base: NDArray[np.int64]  # [read] tensor of the graph

    def take(self, index: NDArray[np.int64]) -> "_Reads":
        return _Reads(*(column[index] for column in self))


def list_uses(layout: Layout) -> Uses:
    """Returns all uses, by op, then tensor, none twice."""
    found = [_of_ops(layout), _of_adds(layout), _of_receives(layout), *_of_collectives(layout)]
    found.append(_of_hands(layout))
    op, tensor = (np.concatenate(column) for column in zip(*found, strict=True))
    both = np.unique(op * layout.num_tensors + tensor)
    return Uses(*np.divmod(both, layout.num_tensors))


def _of_ops(layout: Layout) -> Uses:
    """Returns what ops of the graph read."""
    graph, rows = layout.staged.graph, layout.rows
    row = np.flatnonzero(rows.kind == Kind.OP)
    item = rows.item[row]
    owner, use = spans(graph.first_input[item], graph.first_input[item + 1])
    row, base = row[owner], graph.inputs[use].astype(np.int64)
    awaited = _awaited(layout)
    row, base = np.concatenate([row, awaited.row]), np.concatenate([base, awaited.base])
    owner, copy = spans(np.zeros_like(row), layout.width[row])
    reads = _Reads(row[owner], copy, base[owner])
    return Uses(layout.first_op[reads.row] + copy, _resolve(layout, reads))


def _awaited(layout: Layout) -> _Reads:
    """Returns the gradients that have to be there before a forward runs again, of no copy yet."""
    rows, sent = layout.rows, layout.staged.cut.backward
    again = np.flatnonzero(rows.again)
    count = layout.makers.op.shape[2]
    place, first = np.unique(rows.stage[again] * count + rows.microbatch[again], return_index=True)
    owner, message = np.nonzero((place // count)[:, None] == sent.target)
    row = again[first][owner]
    return _Reads(row, np.zeros_like(row), sent.tensor[message])


def _resolve(layout: Layout, reads: _Reads) -> NDArray[np.int64]:
    """Returns the new tensors that are read, [read]."""
    staged, rows = layout.staged, layout.rows
    tensor = reads.base.copy()  # what no op makes is one tensor for all
    made = staged.graph.tensor_producer[reads.base] >= 0
    by_update = staged.cut.phase[rows.item[reads.row]] == Phase.U
    sought = reads.base * staged.cut.num_stages + rows.stage[reads.row]
    known = staged.fetched.tensor * staged.cut.num_stages + staged.fetched.target
    is_fetched = made & ~by_update & np.isin(sought, known)
    is_gradient = made & by_update & np.isin(reads.base, staged.gradients)
    plain = made & ~is_fetched & ~is_gradient
    if is_fetched.any():
        order = np.argsort(known)
        message = order[np.searchsorted(known, sought[is_fetched], sorter=order)]
        chosen = reads.take(np.flatnonzero(is_fetched))
        row = layout.makers.received[message, rows.microbatch[chosen.row]]
        tensor[is_fetched] = layout.at(row, chosen.copy)
    tensor[is_gradient] = _gradients(layout, reads.take(np.flatnonzero(is_gradient)))
    tensor[plain] = _plain(layout, reads.take(np.flatnonzero(plain)))
    return tensor


def _plain(layout: Layout, reads: _Reads) -> NDArray[np.int64]:
    """Returns tensors of the same microbatch, of the copy with the same share of the samples."""
    staged, rows, makers = layout.staged, layout.rows, layout.makers
    graph, cut = staged.graph, staged.cut
    maker = graph.tensor_producer[reads.base]
    item, microbatch = rows.item[reads.row], rows.microbatch[reads.row]
    late = (cut.phase[item] != Phase.F) | rows.again[reads.row]
    again = late & staged.dropped[graph.tensor_storage[reads.base]]
    again &= makers.op[1, maker, microbatch] != NOWHERE
    row = makers.op[again.astype(np.int64), maker, microbatch]
    if not staged.pipeline.schedule.asynchronous:
        last = (cut.phase[item] == Phase.U) & (cut.phase[maker] != Phase.U)
        row = np.where(last, makers.op[0, maker].max(axis=1), row)
    tensor = layout.at(row, _copy_of(layout, reads), layout.offset(reads.base))
    crosses = cut.stage[maker] != rows.stage[reads.row]
    for index in np.flatnonzero(crosses & np.isin(reads.base, list(makers.handed))):
        handed = makers.handed[int(reads.base[index])]
        tensor[index] = layout.at(np.array(handed), _copy_of(layout, reads)[index])
    return tensor


def _gradients(layout: Layout, reads: _Reads) -> NDArray[np.int64]:
    """Returns gradients that microbatches and copies have added up."""
    staged, rows, makers = layout.staged, layout.rows, layout.makers
    gradient = np.searchsorted(staged.gradients, reads.base)
    source = staged.cut.stage[staged.maker[gradient]]
    column, copy = rows.microbatch[reads.row], _copy_of(layout, reads)
    crosses = source != rows.stage[reads.row]
    tensor = layout.complete(gradient, column, copy)
    row = np.array([makers.handed[base] for base in reads.base[crosses].tolist()], np.int64)
    tensor[crosses] = layout.at(row, copy[crosses])
    return tensor


def _copy_of(layout: Layout, reads: _Reads) -> NDArray[np.int64]:
    """Returns which copy of the stage that makes a tensor is asked for it."""
    staged = layout.staged
    source = staged.cut.stage[staged.graph.tensor_producer[reads.base]]
    return reads.copy * staged.copies[source] // layout.width[reads.row]


def _of_adds(layout: Layout) -> Uses:
    """Returns what additions read: the gradient of their microbatch, and the sum before."""
    staged, rows, makers = layout.staged, layout.rows, layout.makers
    row = np.flatnonzero(rows.kind == Kind.ADD)
    gradient = np.searchsorted(staged.gradients, rows.item[row])
    row = row[np.argsort(gradient, kind="stable")]
    gradient = np.sort(gradient)
    runs = makers.op[0, staged.maker]
    first = np.where(runs == NOWHERE, len(rows.kind), runs).min(axis=1, initial=len(rows.kind))
    is_second = np.diff(gradient, prepend=-1) != 0
    before = np.where(is_second, first[gradient], np.roll(row, 1))
    offset = layout.offset(staged.gradients[gradient])
    owner, copy = spans(np.zeros_like(row), layout.width[row])
    op = layout.first_op[row[owner]] + copy
    new = layout.at(runs[gradient, rows.microbatch[row]][owner], copy, offset[owner])
    old = layout.at(before[owner], copy, np.where(is_second, offset, 0)[owner])
    return Uses(np.concatenate([op, op]), np.concatenate([new, old]))


def _of_receives(layout: Layout) -> Uses:
    """Returns the slices that each copy puts together."""
    rows, cut = layout.rows, layout.slices
    row = np.flatnonzero(rows.kind == Kind.RECEIVE)
    by_message = np.argsort(cut.message, kind="stable")
    known, item = cut.message[by_message], rows.item[row]
    owner, place = spans(np.searchsorted(known, item), np.searchsorted(known, item, "right"))
    index, row = by_message[place], row[owner]
    sender = layout.makers.op[0, cut.op[index], rows.microbatch[row]]
    made = np.diff(layout.staged.graph.first_output)[cut.op[index]]
    tensor = layout.at(sender, cut.source[index], made + cut.place[index])
    return Uses(layout.first_op[row] + cut.target[index], tensor)


def _of_collectives(layout: Layout) -> list[Uses]:
    """Returns what collectives read: what they move, and the token of the one before."""
    staged, rows = layout.staged, layout.rows
    found = [Uses(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    token: dict[int, int] = {}  # stage -> of its latest collective
    for row in np.flatnonzero(rows.kind >= Kind.SUM).tolist():
        stage = int(rows.stage[row])
        if rows.kind[row] == Kind.SUM:
            bucket = layout.buckets[rows.item[row]]
            copy, gradient = (
                grid.ravel() for grid in np.meshgrid(range(staged.copies[stage]), bucket.gradients)
            )
            read = layout.settled(gradient, np.full(len(gradient), bucket.column), copy)
        else:
            read = np.concatenate(layout.updated(row))
        read = np.append(read, token[stage]) if stage in token else read
        token[stage] = int(layout.at(np.array(row), np.array(0)))
        found.append(Uses(np.full(len(read), layout.first_op[row]), read))
    return found


def _of_hands(layout: Layout) -> Uses:
    """Returns what copies hand on: a summed gradient, or a parameter once all have it."""
    staged, rows = layout.staged, layout.rows
    found = [Uses(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for row in np.flatnonzero(rows.kind == Kind.HAND_ON).tolist():
        base, copy = int(rows.item[row]), np.arange(layout.width[row])
        op = layout.first_op[row] + copy
        if staged.cut.phase[staged.graph.tensor_producer[base]] == Phase.U:
            maker = layout.makers.op[0, staged.graph.tensor_producer[base], 0]
            offset = int(layout.offset(np.array(base)))
            found.append(Uses(op, layout.at(np.full(len(copy), maker), copy, offset)))
            gathers = (rows.kind == Kind.GATHER) & (rows.stage == rows.stage[row])
            gather = np.full(len(copy), np.flatnonzero(gathers)[0])
            found.append(Uses(op, layout.at(gather, np.zeros_like(copy))))
            continue
        gradient = np.full(len(copy), np.searchsorted(staged.gradients, base))
        found.append(Uses(op, layout.complete(gradient, np.zeros_like(copy), copy)))
    op, tensor = (np.concatenate(column) for column in zip(*found, strict=True))
    return Uses(op, tensor)
