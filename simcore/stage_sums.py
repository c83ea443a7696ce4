"""Where pipeline stages add up the gradients of what they share.

The gradient of a tensor that several ops read is a chain of sums, recorded with the op that came
last. A stage adds up its own gradients of what it received before it sends one back, and gradients
of branches are added where the tensor was made, as eager PyTorch does in each stage. So sums are
moved to where the fewest messages are needed, single ones and runs of them.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpGraph
from simcore.signature import Phase

RANK = np.array([0, 1, 1, 1, 2])  # by Phase: forward, backward, update
_GRAPHS = 4  # whose facts are remembered: what a search cuts again and again
_DETOUR = 1e-3  # messages that one along no edge counts more


class Uses(NamedTuple):
    """Uses of produced tensors."""

    producer: NDArray[np.int64]  # [use] op
    consumer: NDArray[np.int64]  # [use] op
    tensor: NDArray[np.int64]  # [use]


@lru_cache(maxsize=_GRAPHS)
def uses_of(graph: OpGraph) -> Uses:
    """Returns who reads what of whom, remembered for the last graphs."""
    producer, consumer, tensor = graph.edges()
    return Uses(producer.astype(np.int64), consumer.astype(np.int64), tensor.astype(np.int64))


def reaches(is_edge: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns which stages lead to which along edges, [stage, stage]; each leads to itself."""
    found = is_edge | np.eye(len(is_edge), dtype=np.bool_)
    for _ in range(len(is_edge).bit_length()):
        found = found @ found
    return found


@lru_cache(maxsize=_GRAPHS)
def find_sums(graph: OpGraph) -> NDArray[np.bool_]:
    """Returns which ops sum gradients, [op]: all they read is of the backward, and one size."""
    uses = uses_of(graph)
    backward = RANK[graph.phase] == RANK[Phase.B]
    result = np.minimum(graph.first_output[uses.consumer], graph.num_tensors - 1)
    alike = (graph.tensor_bytes[uses.tensor] == graph.tensor_bytes[result]).all(axis=1)
    parts = np.bincount(uses.consumer[backward[uses.producer] & alike], minlength=graph.num_ops)
    whole = (parts > 1) & (parts == np.diff(graph.first_input))
    summing: NDArray[np.bool_] = backward & whole & (np.diff(graph.first_output) > 0)
    return summing


def move_sums(
    graph: OpGraph,
    uses: Uses,
    phase: NDArray[np.uint8],
    stage: NDArray[np.int64],
    is_edge: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Returns the stage of each op, [op], sums of input gradients where that saves messages.

    Args:
        graph: the graph.
        uses: of its tensors.
        phase: of each op, [op].
        stage: of each op, [op], by its unit.
        is_edge: who sends activations to whom, [stage, stage], also each stage to itself.
    """
    stage = stage.copy()
    is_sum = find_sums(graph) & (phase == Phase.I)
    crosses = (stage[uses.producer] != stage[uses.consumer]) & (phase[uses.producer] != Phase.F)
    crossing = np.zeros(graph.num_ops, np.bool_)
    crossing[uses.consumer[crosses]] = True
    crossing[uses.producer[crosses]] = True
    price = np.where(is_edge, 1.0, np.where(reaches(is_edge), 1 + _DETOUR, math.inf))
    sums = _Sums(graph, is_sum, stage, price)
    ops = np.flatnonzero(is_sum & crossing).tolist()
    for op in ops:  # parts before sums of sums
        sums.improve(list(sums.runs(op)))
    for op in reversed(ops):
        if math.isinf(sums.messages([op])):
            sums.improve(list(sums.whole(op)))
    return stage


class _Sums(NamedTuple):
    """Sums and where they are; `stage` changes."""

    graph: OpGraph
    is_sum: NDArray[np.bool_]  # [op]
    stage: NDArray[np.int64]  # [op]
    price: NDArray[np.float64]  # [stage, stage] what a gradient counts from the second to the first

    def improve(self, choices: list[tuple[list[int], int]]) -> None:
        """Moves (ops, to a stage) by the choice that saves most messages; none if none does."""
        best, most = None, 0.0
        for ops, place in choices:
            before, here = self.messages(ops), self.stage[ops]
            self.stage[ops] = place
            after = self.messages(ops)
            self.stage[ops] = here
            saved = 0.0 if math.isinf(after) else before - after
            if saved > most:
                best, most = (ops, place), saved
        if best is not None:
            self.stage[best[0]] = best[1]

    def runs(self, op: int) -> Iterator[tuple[list[int], int]]:
        """Yields runs of sums from one on, and a stage for each: where all else they read is made.

        And the one sum alone, where it is needed.
        """
        for place in np.unique(self._made(op, ())).tolist():
            run = [op]
            while (after := self._next(run[-1])) is not None:
                if (self._made(after, run) != place).any():
                    break
                run.append(after)
            yield run, place
        for place in np.unique(self.stage[self._readers(op)]).tolist():
            yield [op], place

    def whole(self, op: int) -> Iterator[tuple[list[int], int]]:
        """Yields ever longer runs of sums from one on, to where the last one is needed."""
        run = [op]
        while True:
            for place in np.unique(self.stage[self._readers(run[-1])]).tolist():
                yield list(run), place
            if (after := self._next(run[-1])) is None:
                return
            run.append(after)

    def messages(self, ops: list[int]) -> float:
        """Returns how many messages what some sums read and make needs; inf: against no path."""
        graph, total = self.graph, 0.0
        read = [graph.inputs[slice(*graph.first_input[op : op + 2])] for op in ops]
        made = [np.arange(*graph.first_output[op : op + 2]) for op in ops]
        for tensor in np.unique(np.concatenate([*read, *made])).tolist():
            source = self.stage[graph.tensor_producer[tensor]]
            readers = graph.consumers[slice(*graph.first_consumer[tensor : tensor + 2])]
            targets = np.unique(self.stage[readers])
            total += float(self.price[targets[targets != source], source].sum())
        return total

    def _readers(self, op: int) -> NDArray[np.int32]:
        span = self.graph.first_consumer[self.graph.first_output[op : op + 2]]
        return np.unique(self.graph.consumers[slice(*span)])

    def _next(self, op: int) -> int | None:
        """Returns the sum that alone reads what one makes."""
        readers = self._readers(op)
        return int(readers[0]) if len(readers) == 1 and self.is_sum[readers[0]] else None

    def _made(self, op: int, but: list[int] | tuple[()]) -> NDArray[np.int64]:
        """Returns the stages that make what a sum reads, of other ops than some."""
        read = self.graph.inputs[slice(*self.graph.first_input[op : op + 2])]
        makers = self.graph.tensor_producer[read]
        return self.stage[makers[~np.isin(makers, but)]]
