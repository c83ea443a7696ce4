"""A pipeline op by op: what runs for which microbatch, in which order.

A row is one op that all copies of a stage do, or one collective among them. An action of the
schedule is the ops of its stage and phase in program order, and between them what only a pipeline
does: a gradient is added to those of earlier microbatches as soon as it is there; what comes from
copies that divide the samples in another way is put together before its first use; and once a
bucket of gradients is complete, the copies of a stage sum it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.buckets import close_buckets
from simcore.graph import OpClass, OpGraph, Role, Sized
from simcore.pipeline import Pipeline, action_order
from simcore.recompute import (
    BACKWARD,
    FORWARD,
    PARTS,
    WEIGHTS,
    Order,
    find_reruns,
    find_segments,
    order_of,
    touches_of,
)
from simcore.schedule import Action
from simcore.signature import Phase
from simcore.stage_cut import Cut, Messages

_PARTS = {Phase.F: FORWARD, Phase.B: BACKWARD, Phase.I: BACKWARD, Phase.W: WEIGHTS}
_SPLIT = (Phase.I, Phase.W)
NOWHERE = -1  # no such row


class Kind(IntEnum):
    """What a row is."""

    OP = 0  # an op of the graph
    ADD = 1  # adds a gradient to those of earlier microbatches
    RECEIVE = 2  # puts together what copies of another number have sent
    HAND_ON = 3  # has what another stage's update reads, once the backward has ended
    SUM = 4  # collective: sums a bucket over the copies of a stage
    GATHER = 5  # collective: the copies of a stage get each other's updated parameters


class Rows(NamedTuple):
    """What runs, in order."""

    kind: NDArray[np.int64]  # [row] Kind
    item: NDArray[np.int64]  # [row] op; ADD, HAND_ON: tensor; RECEIVE: message; SUM: bucket
    stage: NDArray[np.int64]  # [row]
    microbatch: NDArray[np.int64]  # [row] 0 where it runs once a step
    again: NDArray[np.bool_]  # [row] a forward op that runs again

    def take(self, index: NDArray[np.int64]) -> "Rows":
        """Returns chosen rows."""
        return Rows(
            kind=self.kind[index],
            item=self.item[index],
            stage=self.stage[index],
            microbatch=self.microbatch[index],
            again=self.again[index],
        )


def make_rows(
    kind: Kind, item: NDArray[np.int64], stage: int | NDArray[np.int64], microbatch: int = 0
) -> Rows:
    """Returns rows of one kind."""
    count = len(item)
    return Rows(
        kind=np.full(count, kind, np.int64),
        item=item,
        stage=np.broadcast_to(np.asarray(stage, np.int64), (count,)),
        microbatch=np.full(count, microbatch, np.int64),
        again=np.zeros(count, np.bool_),
    )


def join_rows(parts: Sequence[Rows], keys: Sequence[NDArray[np.int64]] | None = None) -> Rows:
    """Returns rows one after the other, or in the order of their keys, [part][row]."""
    rows = Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return rows if keys is None else rows.take(np.argsort(np.concatenate(keys), kind="stable"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A graph on the stages of a pipeline, and what follows for its ops."""

    graph: OpGraph
    pipeline: Pipeline
    cut: Cut
    whole: Order  # the backward in one
    split: Order  # input gradients, then weight gradients
    dropped: NDArray[np.bool_]  # [storage] made again where the backward needs it
    copies: NDArray[np.int64]  # [stage]
    gradients: NDArray[np.int64]  # [gradient] tensors that microbatches add up, ascending
    fetched: Messages  # those between stages whose copies are not as many

    @classmethod
    def build(cls, graph: OpGraph, pipeline: Pipeline) -> "Staged":
        """Puts a graph on the stages of a pipeline.

        Args:
            graph: the graph.
            pipeline: made of it.
        """
        tables = pipeline.tables[0]
        cut = tables.cut
        reruns = find_reruns(
            graph, cut, touches_of(graph), find_segments(graph, cut, tables.recompute)
        )
        copies = np.array([len(pipeline.places(stage)) for stage in range(cut.num_stages)])
        both = Messages(*(np.concatenate(c) for c in zip(cut.forward, cut.backward, strict=True)))
        differ = copies[both.source] != copies[both.target]
        return cls(
            graph=graph,
            pipeline=pipeline,
            cut=cut,
            whole=order_of(cut, reruns, split=False),
            split=order_of(cut, reruns, split=True),
            dropped=reruns.dropped,
            copies=copies,
            gradients=_added_up(graph, cut),
            fetched=Messages(*(column[differ] for column in both)),
        )

    @property
    def is_sharded(self) -> NDArray[np.bool_]:
        """Whether the copies of a stage update a part of its parameters each, [stage]."""
        return (self.copies > 1) & (self.pipeline.optimizer_sharding > 0)

    @property
    def maker(self) -> NDArray[np.int64]:
        """The op that makes each gradient, [gradient]."""
        return self.graph.tensor_producer[self.gradients].astype(np.int64)

    def first_readers(self, order: Order) -> NDArray[np.int64]:
        """Returns the run in which each fetched message is read first, [message].

        A backward that runs a forward again begins once its gradients have come.
        """
        first = np.full(len(self.fetched.tensor), np.iinfo(np.int64).max)
        for message, (tensor, _, target) in enumerate(zip(*self.fetched, strict=True)):
            readers = self.graph.consumers[slice(*self.graph.first_consumer[tensor : tensor + 2])]
            mine = self.cut.stage[readers] == target
            mine &= self.cut.phase[readers] != Phase.U
            first[message] = order.run[readers[mine]].min()
            if self.cut.phase[self.graph.tensor_producer[tensor]] != Phase.F:
                part = int(target) * PARTS + BACKWARD
                begin, end = order.first[part : part + 2]
                again = begin + np.flatnonzero(order.again[begin:end])
                first[message] = again.min(initial=int(first[message]))
        return first


def _added_up(graph: OpGraph, cut: Cut) -> NDArray[np.int64]:
    """Returns the tensors that the backward of each microbatch makes and the update reads once."""
    producer, consumer, tensor = graph.edges()
    late = (cut.phase[consumer] == Phase.U) & np.isin(cut.phase[producer], _SPLIT)
    found = np.unique(tensor[late]).astype(np.int64)
    is_token = ~graph.tensor_bytes[found].any(axis=1) & (graph.tensor_role[found] != Role.GRADIENT)
    made: NDArray[np.int64] = found[~is_token]
    return made


def list_rows(staged: Staged) -> Rows:
    """Returns all rows but those of the collectives that sum gradients."""
    writer, schedule = _Writer(staged), staged.pipeline.schedule
    for action in action_order(schedule):
        writer.act(action)
        if schedule.asynchronous and action.phase in {Phase.B, Phase.W}:
            writer.update(staged.cut.stage == action.stage, action.microbatch)
    if not schedule.asynchronous:
        writer.update(np.ones(staged.graph.num_ops, np.bool_), 0)
    return join_rows(writer.parts)


class _Writer:
    """Appends rows; remembers of which gradients there are some."""

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self.parts: list[Rows] = []
        self.has_some = np.zeros(len(staged.gradients), np.bool_)
        self.readers = [staged.first_readers(order) for order in (staged.whole, staged.split)]
        self.levels = _update_levels(staged)

    def act(self, action: Action) -> None:
        """Writes what an action runs."""
        staged, (stage, phase, microbatch) = self.staged, action
        is_split = phase in _SPLIT
        order = staged.split if is_split else staged.whole
        part = stage * PARTS + _PARTS[phase]
        begin, end = (int(offset) for offset in order.first[part : part + 2])
        ops = make_rows(Kind.OP, order.op[begin:end], stage, microbatch)
        ops = ops._replace(again=order.again[begin:end])
        run = self.readers[is_split]
        mine = (staged.fetched.target == stage) & (begin <= run) & (run < end)
        received = np.flatnonzero(mine)
        parts = [ops, make_rows(Kind.RECEIVE, received, stage, microbatch)]
        keys = [3 * np.arange(begin, end) + 1, 3 * run[received]]
        if phase != Phase.F:
            run = order.run[staged.maker]
            made = (begin <= run) & (run < end)
            added = np.flatnonzero(made & self.has_some)
            if not staged.pipeline.schedule.asynchronous:
                self.has_some |= made
            parts.append(make_rows(Kind.ADD, staged.gradients[added], stage, microbatch))
            keys.append(3 * run[added] + 2)
        self.parts.append(join_rows(parts, keys))

    def update(self, chosen: NDArray[np.bool_], microbatch: int) -> None:
        """Writes the updates of chosen ops, [op].

        What waits for other stages goes last; what they wait for, first.
        """
        staged = self.staged
        cut, graph = staged.cut, staged.graph
        op = np.flatnonzero(chosen & (cut.phase == Phase.U))
        parts, keys = [make_rows(Kind.OP, op, cut.stage[op], microbatch)], [4 * self.levels[op]]
        gathered_at: dict[int, int] = {}
        for stage in np.unique(cut.stage[op[staged.is_sharded[cut.stage[op]]]]).tolist():
            updates = op[(cut.stage[op] == stage) & (graph.op_class[op] == OpClass.UPDATE)]
            gathered_at[stage] = 4 * int(self.levels[updates].max(initial=0)) + 1
            parts.append(make_rows(Kind.GATHER, np.zeros(1, np.int64), stage, microbatch))
            keys.append(np.array([gathered_at[stage]]))
        for tensor, stage in sorted(set(zip(*(c.tolist() for c in cut.update[:2]), strict=True))):
            is_update = cut.phase[graph.tensor_producer[tensor]] == Phase.U
            if (is_update and stage in gathered_at) or tensor in staged.gradients:
                parts.append(make_rows(Kind.HAND_ON, np.array([tensor]), stage, microbatch))
                keys.append(np.array([gathered_at[stage] + 1 if is_update else -1]))
        self.parts.append(join_rows(parts, keys))


def _update_levels(staged: Staged) -> NDArray[np.int64]:
    """Returns how often what an update reads has gone from stage to stage, [op]; 0 for others."""
    producer, consumer, _ = staged.graph.edges()
    late = staged.cut.phase[consumer] == Phase.U
    producer, consumer = producer[late], consumer[late]
    hops = (staged.cut.stage[producer] != staged.cut.stage[consumer]).astype(np.int64)
    level = np.zeros(staged.graph.num_ops, np.int64)
    while True:
        before = level.copy()
        np.maximum.at(level, consumer, before[producer] + hops)
        if np.array_equal(level, before):
            return level


class Makers(NamedTuple):
    """Rows that make tensors; a column is a microbatch, or the one column of a step."""

    op: NDArray[np.int64]  # [first run or again, op, microbatch] row of an op
    settled: NDArray[np.int64]  # [gradient, column] row that makes the sum over microbatches
    received: NDArray[np.int64]  # [message, microbatch] row of a RECEIVE
    handed: dict[int, int]  # tensor -> row of its HAND_ON


class Bucket(NamedTuple):
    """Gradients that the copies of a stage sum at once."""

    stage: int
    column: int  # of `Makers.settled`
    gradients: NDArray[np.int64]  # [...] indices of `Staged.gradients`
    num_bytes: int


def find_makers(staged: Staged, rows: Rows) -> Makers:
    """Returns which rows make what."""
    schedule = staged.pipeline.schedule
    count, row = schedule.num_microbatches, np.arange(len(rows.kind))
    op = np.full((2, staged.graph.num_ops, count), NOWHERE)
    is_op = rows.kind == Kind.OP
    op[rows.again[is_op].astype(np.int64), rows.item[is_op], rows.microbatch[is_op]] = row[is_op]
    if schedule.asynchronous:
        settled = op[0, staged.maker]
    else:
        late = staged.cut.phase == Phase.U
        op[0, late] = op[0, late, :1]
        settled = op[0, staged.maker].max(axis=1, keepdims=True)
        adds = np.flatnonzero(rows.kind == Kind.ADD)
        gradient = np.searchsorted(staged.gradients, rows.item[adds])
        np.maximum.at(settled[:, 0], gradient, adds)
    received = np.full((len(staged.fetched.tensor), count), NOWHERE)
    fetches = rows.kind == Kind.RECEIVE
    received[rows.item[fetches], rows.microbatch[fetches]] = row[fetches]
    hands = rows.kind == Kind.HAND_ON
    handed = dict(zip(rows.item[hands].tolist(), row[hands].tolist(), strict=True))
    return Makers(op, settled, received, handed)


def fill_stage_buckets(
    staged: Staged, rows: Rows, sized: tuple[Sized, ...]
) -> tuple[Rows, list[Bucket]]:
    """Returns the rows with those that sum gradients over copies, and what each sums.

    Buckets are filled in the order in which gradients are complete; each is summed right behind
    the last one that is in it. A SUM's item is the number of its bucket.

    Args:
        staged: the graph on its stages.
        rows: all other rows.
        sized: the graph's sizes on each stage, [stage].
    """
    settled = find_makers(staged, rows).settled
    found: list[Bucket] = []
    behind: list[int] = []
    stage_of = staged.cut.stage[staged.maker]
    for stage in np.flatnonzero(staged.copies > 1).tolist():
        sizes = sized[stage].tensor_bytes[staged.gradients]
        mine = np.flatnonzero(stage_of == stage)
        for column in range(settled.shape[1]):
            ready = mine[np.argsort(settled[mine, column], kind="stable")]
            for bucket in close_buckets(ready, sizes, staged.pipeline.buckets):
                found.append(Bucket(stage, column, bucket, int(sizes[bucket].sum())))
                behind.append(int(settled[bucket, column].max()))
    stages = np.array([bucket.stage for bucket in found], np.int64)
    columns = np.array([bucket.column for bucket in found], np.int64)
    sums = make_rows(Kind.SUM, np.arange(len(found)), stages)._replace(microbatch=columns)
    keys = [2 * np.arange(len(rows.kind)), 2 * np.array(behind, np.int64) + 1]
    return join_rows([rows, sums], keys), found
