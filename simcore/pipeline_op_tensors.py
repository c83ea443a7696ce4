"""The ops and tensors that rows stand for: one of each copy, numbered, with what each op reads.

Ops stand by row, then copy. The outputs of an op are those of the op it stands for, then what it
sends to copies of another number: for each of them the slice of the samples that it needs.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpClass, Sized
from simcore.pipeline import slices
from simcore.pipeline_op_rows import NOWHERE, Bucket, Kind, Makers, Rows, Staged
from simcore.sizes import GROWING


class Slices(NamedTuple):
    """What copies send where the other stage has another number of them."""

    op: NDArray[np.int64]  # [slice] that makes the tensor
    message: NDArray[np.int64]  # [slice] of `Staged.fetched`
    source: NDArray[np.int64]  # [slice] copy
    target: NDArray[np.int64]  # [slice] copy
    num_bytes: NDArray[np.int64]  # [slice]
    place: NDArray[np.int64]  # [slice] behind the outputs that the op has anyway


class Places(NamedTuple):
    """Tensors of a new op."""

    tensor: NDArray[np.int64]  # [place] new tensor
    row: NDArray[np.int64]  # [place]
    copy: NDArray[np.int64]  # [place]
    base: NDArray[np.int64]  # [place] tensor of the graph, NOWHERE = a token


def spans(begin: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Returns the numbers of several ranges one after the other: (range, number), each [...]."""
    counts = end - begin
    owner = np.repeat(np.arange(len(begin)), counts)
    before = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - before[owner] + begin[owner]


def cut_slices(staged: Staged, sized: tuple[Sized, ...]) -> Slices:
    """Returns who sends what share of which message.

    Args:
        staged: the graph on its stages.
        sized: the graph's sizes on each stage, [stage].
    """
    graph, found = staged.graph, []
    has_slope = bool(graph.tensor_bytes[:, 1].any())
    for message, (tensor, i, j) in enumerate(zip(*staged.fetched, strict=True)):
        size, sources = int(sized[i].tensor_bytes[tensor]), int(staged.copies[i])
        constant = int(graph.tensor_bytes[tensor, 0])
        if not has_slope:  # measured at one batch
            constant = 0 if graph.tensor_role[tensor] in GROWING else size
        for source, target, share in slices(sources, int(staged.copies[j])):
            num_bytes = constant + round((size - constant) * sources * share)
            op = int(graph.tensor_producer[tensor])
            found.append((op, message, source, target, num_bytes))
    table = np.array(found, np.int64).reshape(-1, 5)
    table = table[np.lexsort((table[:, 3], table[:, 1], table[:, 2], table[:, 0]))]
    maker, sender = table[:, 0], table[:, 2]
    new = (np.diff(maker, prepend=-1) != 0) | (np.diff(sender, prepend=-1) != 0)
    first = np.flatnonzero(new)[np.cumsum(new) - 1] if len(maker) else maker
    place = np.arange(len(maker)) - first
    return Slices(maker, table[:, 1], sender, table[:, 3], table[:, 4], place)


class Layout:
    """Numbers of new ops and tensors."""

    def __init__(
        self, staged: Staged, rows: Rows, makers: Makers, buckets: list[Bucket], cut: Slices
    ) -> None:
        self.staged, self.rows, self.makers, self.buckets = staged, rows, makers, buckets
        self.slices, graph = cut, staged.graph
        self.runs_once = rows.kind >= Kind.SUM  # [row] a collective
        self.width = np.where(self.runs_once, 1, staged.copies[rows.stage])  # [row] new ops
        self.first_op = np.concatenate([[0], np.cumsum(self.width)])  # [row + 1]
        self.row, self.copy = spans(np.zeros_like(self.width), self.width)  # [op]
        counts = np.ones(len(self.row), np.int64)
        kind, item = rows.kind[self.row], rows.item[self.row]
        is_op = kind == Kind.OP
        counts[is_op] = np.diff(graph.first_output)[item[is_op]]
        sent = np.zeros((graph.num_ops, int(staged.copies.max())), np.int64)
        np.add.at(sent, (cut.op, cut.source), 1)
        sends = is_op & ~rows.again[self.row]
        counts[sends] += sent[item[sends], self.copy[sends]]
        of_bucket = np.array([len(b.gradients) * staged.copies[b.stage] for b in buckets], np.int64)
        counts[kind == Kind.SUM] += of_bucket[item[kind == Kind.SUM]]
        self.num_held = int((graph.tensor_producer < 0).sum())
        self.first_output = self.num_held + np.concatenate([[0], np.cumsum(counts)])  # [op + 1]
        self.sum_row = np.full_like(makers.settled, NOWHERE)  # [gradient, column]
        self.sum_place = np.zeros_like(makers.settled)  # [gradient, column] within its bucket
        for row in np.flatnonzero(rows.kind == Kind.SUM):
            bucket = buckets[rows.item[row]]
            self.sum_row[bucket.gradients, bucket.column] = row
            self.sum_place[bucket.gradients, bucket.column] = np.arange(len(bucket.gradients))

    @property
    def num_tensors(self) -> int:
        """Number of new tensors."""
        return int(self.first_output[-1])

    def at(
        self, row: NDArray[np.int64], copy: NDArray[np.int64], offset: NDArray[np.int64] | int = 0
    ) -> NDArray[np.int64]:
        """Returns the new tensor that a row's copy makes."""
        made = self.first_output[self.first_op[row] + copy] + np.asarray(offset, np.int64)
        return np.asarray(made, np.int64)

    def offset(self, tensor: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where a tensor of the graph is among the outputs of its op."""
        graph = self.staged.graph
        return tensor - graph.first_output[graph.tensor_producer[tensor]]

    def settled(
        self, gradient: NDArray[np.int64], column: NDArray[np.int64], copy: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Returns the new tensors that are sums over microbatches, of one copy."""
        row = self.makers.settled[gradient, column]
        is_op = self.rows.kind[row] == Kind.OP
        offset = np.where(is_op, self.offset(self.staged.gradients[gradient]), 0)
        return self.at(row, copy, offset)

    def summed(
        self, gradient: NDArray[np.int64], column: NDArray[np.int64], copy: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Returns the new tensors that are sums over copies too, as one copy has them."""
        row = self.sum_row[gradient, column]
        place = self.sum_place[gradient, column] * self.staged.copies[self.rows.stage[row]]
        return self.at(row, np.zeros_like(row), 1 + place + copy)

    def complete(
        self, gradient: NDArray[np.int64], column: NDArray[np.int64], copy: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Returns the new tensors that updates read: sums over all that there is of a gradient."""
        tensor = self.settled(gradient, column, copy)
        summed = self.sum_row[gradient, column] != NOWHERE
        tensor[summed] = self.summed(gradient[summed], column[summed], copy[summed])
        return tensor

    def made(self) -> Places:
        """Returns what ops make that are ops of the graph, slices left out."""
        graph, rows = self.staged.graph, self.rows
        mine = np.flatnonzero(rows.kind[self.row] == Kind.OP)
        item = rows.item[self.row[mine]]
        owner, base = spans(graph.first_output[item], graph.first_output[item + 1])
        op = mine[owner]
        return Places(self.first_output[op] + self.offset(base), self.row[op], self.copy[op], base)

    def sent(self) -> tuple[Places, NDArray[np.int64]]:
        """Returns the slices, and the bytes of each."""
        rows, cut = self.rows, self.slices
        index = np.arange(len(cut.op))
        row = self.makers.op[0, cut.op]  # [slice, microbatch]
        count = row.shape[1]
        index, row = np.repeat(index, count), row.ravel()
        base = self.staged.fetched.tensor[cut.message[index]]
        made = np.diff(self.staged.graph.first_output)[rows.item[row]]
        tensor = self.at(row, cut.source[index], made + cut.place[index])
        return Places(tensor, row, cut.source[index], base), cut.num_bytes[index]

    def extra(self, kind: Kind) -> Places:
        """Returns the one output of ops of a kind that the graph does not have."""
        mine = np.flatnonzero(self.rows.kind[self.row] == kind)
        row = self.row[mine]
        item = self.rows.item[row]
        if kind == Kind.RECEIVE:
            item = self.staged.fetched.tensor[item]
        if kind in {Kind.SUM, Kind.GATHER}:
            item = np.full(len(mine), NOWHERE)
        return Places(self.first_output[mine], row, self.copy[mine], item)

    def shared(self) -> Places:
        """Returns the gradients that collectives have summed."""
        parts = []
        for row in np.flatnonzero(self.rows.kind == Kind.SUM):
            bucket = self.buckets[self.rows.item[row]]
            gradient, copy = (
                grid.ravel()
                for grid in np.meshgrid(
                    bucket.gradients, np.arange(self.staged.copies[bucket.stage]), indexing="ij"
                )
            )
            column = np.full(len(gradient), bucket.column)
            tensor = self.summed(gradient, column, copy)
            parts.append((tensor, np.full(len(tensor), row), copy, self.staged.gradients[gradient]))
        columns = zip(*parts, strict=True) if parts else [[np.zeros(0, np.int64)]] * 4
        return Places(*(np.concatenate(column) for column in columns))

    def updated(self, gather: int) -> list[NDArray[np.int64]]:
        """Returns the parameters that each copy of a stage has updated before a GATHER, [copy]."""
        graph, rows = self.staged.graph, self.rows
        row = np.flatnonzero((rows.kind == Kind.OP) & (rows.stage == rows.stage[gather]))
        row = row[(row < gather) & (rows.microbatch[row] == rows.microbatch[gather])]
        row = row[graph.op_class[rows.item[row]] == OpClass.UPDATE]
        found = []
        for copy in range(int(self.staged.copies[rows.stage[gather]])):
            op = self.first_op[row] + copy
            found.append(spans(self.first_output[op], self.first_output[op + 1])[1])
        return found
