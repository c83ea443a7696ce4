"""Automatic data parallelism: which dimension of each input is the batch.

Reconstruction, after TePDist's automatic batch dimension. Slot: one input of the model. Action: one
of its factors, or none. The loops linked to the chosen factors are split by samples; an op takes at
most one of them. Reward: the share of inputs and of ops before the update that are split so, less
the share of bytes that are left as partial sums of anything but parameters' gradients. A whole that
no op can follow is worth 0. Small enough for brute force.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agents.automap.problem import Worth
from simcore.graph import OpClass, OpGraph, Phase, Role
from simcore.shard_tables import sums
from simcore.sharding.affine import at
from simcore.sharding.groups import Linkage
from simcore.shards import linkage_of

NOT_BATCHED = 0  # the action; others are factors, from 1


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchParallel:
    """The problem of one graph on a number of devices.

    Attributes:
        graph: a captured graph.
        linkage: its groups.
        inputs: the tensors that the data come in, [slot].
        devices: that share the samples; a factor has to divide by it.
    """

    graph: OpGraph
    linkage: Linkage
    inputs: tuple[int, ...]
    devices: int

    @classmethod
    def build(cls, graph: OpGraph, devices: int) -> "BatchParallel":
        """Returns the problem.

        Args:
            graph: a captured graph.
            devices: that share the samples.

        Raises:
            GraphError: a graph without loops.
        """
        linkage = linkage_of(graph)
        ops = np.flatnonzero(graph.op_class == OpClass.INPUT).tolist()
        tensors = [t for op in ops for t in range(*graph.first_output[op : op + 2].tolist())]
        sized = [t for t in tensors if linkage.factors.sizes[int(graph.tensor_storage[t])]]
        return cls(graph=graph, linkage=linkage, inputs=tuple(sized), devices=devices)

    @property
    def num_slots(self) -> int:
        """Inputs."""
        return len(self.inputs)

    @cached_property
    def num_actions(self) -> int:
        """None, and as many factors as an input has at most."""
        return 1 + max((len(self._groups(slot)) for slot in range(self.num_slots)), default=0)

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """Factors of each input, as a share of the most, [slot, 1]."""
        counts = [len(self._groups(slot)) for slot in range(self.num_slots)]
        most = np.float32(max([1, *counts]))
        return np.array(counts, np.float32).reshape(-1, 1) / most

    def _groups(self, slot: int) -> list[int]:
        """Returns the group of each factor of an input, NO_GROUP where no loop runs over it."""
        storage = int(self.graph.tensor_storage[self.inputs[slot]])
        factors = range(len(self.linkage.factors.sizes[storage]))
        return [self.linkage.group_of.get((storage, factor), -1) for factor in factors]

    def mask(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """None, or a factor that divides and that some op runs over, [episode, action]."""
        legal = np.zeros(self.num_actions, np.bool_)
        legal[NOT_BATCHED] = True
        batch = self.graph.batch or 1
        for factor, group in enumerate(self._groups(chosen.shape[1])):
            if group >= 0:
                size = at(self.linkage.groups[group].size, batch)
                legal[1 + factor] = size % self.devices == 0
        return np.repeat(legal[None], len(chosen), axis=0)

    def evaluate(self, chosen: NDArray[np.int64]) -> Worth:
        """Returns what choices of dimensions are worth, [plan, slot]; a step takes 1 - reward."""
        reward = np.array([self._reward(row.tolist()) for row in chosen])
        return Worth(reward, 1.0 - 0.9 * reward, np.zeros(len(chosen), np.int64))

    def _reward(self, row: list[int]) -> float:
        groups = {self._groups(slot)[action - 1] for slot, action in enumerate(row) if action > 0}
        split = np.zeros(self.graph.num_ops, np.bool_)
        partial = np.zeros(self.graph.num_ops)
        for op, loops in enumerate(self._loops):
            mine = [number for number, group, _ in loops if group in groups]
            if mine:
                split[op] = True
                partial[op] = next(lost for number, _, lost in loops if number == mine[0])
        counts = self._counts
        batched = sum(action > 0 for action in row)
        share = (float(split[counts].sum()) + batched) / max(1, int(counts.sum()) + len(row))
        return max(0.0, share - float(partial.sum() / max(1.0, self._bytes.sum())))

    @cached_property
    def _counts(self) -> NDArray[np.bool_]:
        """Ops that the share is of: not updates, inputs or views, [op]."""
        idle = np.isin(self.graph.op_class, (OpClass.INPUT, OpClass.VIEW))
        counts: NDArray[np.bool_] = (self.graph.phase != Phase.U) & ~idle
        return counts

    @cached_property
    def _bytes(self) -> NDArray[np.float64]:
        """Bytes that each op writes, gradients of parameters not counted, [op]."""
        batch, graph = self.graph.batch or 1, self.graph
        size = (graph.tensor_bytes[:, 0] + graph.tensor_bytes[:, 1] * batch).astype(np.float64)
        size[graph.tensor_role == Role.GRADIENT] = 0.0
        made = graph.tensor_producer >= 0
        total = np.zeros(graph.num_ops)
        np.add.at(total, graph.tensor_producer[made], size[made])
        return total

    @cached_property
    def _loops(self) -> list[list[tuple[int, int, float]]]:
        """Returns (number, group, bytes left as partial sums) of each op's loops, [op][loop]."""
        found = []
        for op, loops in enumerate(self.linkage.factors.loops):
            lost = [float(self._bytes[op]) * sums(self.graph, op, loop) for loop in loops]
            groups = self.linkage.loop_group[op]
            found.append([(n, group, lost[n]) for n, group in enumerate(groups)])
        return found

    def content_hash(self) -> str:
        """Returns the graph and the number of devices."""
        return f"batch {self.graph.content_hash()} {self.devices}"
