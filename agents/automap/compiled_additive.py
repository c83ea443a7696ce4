"""Compiled: what every op and every tensor adds to the cost of a sharded plan.

Plans are lowered by the simulator's own kernel, so the folder of its cache, which is named by the
kernel's sources, is used here too.
"""

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.compiled import compiled, compiled_apart, compiled_entry, keyed_cache
from simcore.kernel.records import NONE
from simcore.kernel.shard_play import _timing
from simcore.kernel.shard_records import Change, Count, ShardScratch, ShardTables

with keyed_cache():
    from simcore.kernel.shard_states import find_states
    from simcore.kernel.shards import lower_shards

    _SLICE = int(Change.SLICE)
    _LOCALS = int(Count.LOCALS)

    @compiled_apart
    def _lower(t: ShardTables, s: ShardScratch, sample: int) -> None:
        find_states(t, s)
        lower_shards(t, s, sample)

    @compiled
    def _owners(t: ShardTables, s: ShardScratch, owner: NDArray[np.int64]) -> None:
        """Notes the tensor that each handle is a state of."""
        owner[:] = NONE
        for tensor in range(s.first_handle.shape[0]):
            handle = s.first_handle[tensor]
            while handle != NONE:
                owner[handle] = tensor
                handle = s.handles[handle].next

    @compiled_apart
    def _add_locals(
        t: ShardTables,
        s: ShardScratch,
        sample: int,
        owner: NDArray[np.int64],
        costs: NDArray[np.float64],
    ) -> None:
        """Adds what the local ops take to their op or tensor; see `run_additive`."""
        num_ops = t.ops.shape[0] - 1
        inside, busy = 0.0, 0.0  # of collectives that belong to the next op
        for local in range(s.counts[_LOCALS]):
            row = s.locals[local]
            if row.change == NONE:
                costs[row.op, 0] += t.variants[sample, row.variant].seconds
                costs[row.op, 1] += inside
                costs[row.op, 2] += busy
                costs[row.op, 4] += t.variants[sample, row.variant].resident
                inside, busy = 0.0, 0.0
            elif row.change != _SLICE:
                latency, duration = _timing(t, row.axis, row.change, row.num_bytes)
                tensor = owner[row.first_handle]
                if tensor == NONE:
                    inside += latency + duration
                    busy += duration
                else:
                    costs[num_ops + tensor, 1] += latency + duration
                    costs[num_ops + tensor, 2] += duration

    @compiled_apart
    def _add_tensors(
        t: ShardTables, s: ShardScratch, sample: int, owner: NDArray[np.int64], costs: np.ndarray
    ) -> None:
        """Adds gradients that copies sum, and parameters that are kept; see `run_additive`."""
        num_ops = t.ops.shape[0] - 1
        for handle in range(s.handles.shape[0]):
            tensor = owner[handle]
            if tensor != NONE and s.handles[handle].bucket != NONE and t.copies > 1:
                costs[num_ops + tensor, 3] += s.handles[handle].num_bytes
        for tensor in range(t.ops[0].first_tensor):
            if t.tensors[tensor].is_held == 1 and t.home[t.tensors[tensor].storage] == tensor:
                mask = (1 if s.made[tensor, 0] >= 0 else 0) + (2 if s.made[tensor, 1] >= 0 else 0)
                costs[num_ops + tensor, 4] += t.num_bytes[sample, tensor, mask]

    @compiled_entry
    def run_additive(
        t: ShardTables,
        plans: NDArray[np.int8],
        s: ShardScratch,
        owner: NDArray[np.int64],
        costs: NDArray[np.float64],
    ) -> None:
        """Fills what each op and tensor adds to each plan.

        Args:
            t: the tables of a space.
            plans: [plan, decision].
            s: room for one plan.
            owner: room, [handle].
            costs: [plan, op then tensor, quantity], zeros: seconds of computing, seconds of
                collectives, of these without latency, bytes of gradients that copies sum, bytes
                that are kept all the time; infinite seconds where the batch does not divide.
        """
        for plan in range(plans.shape[0]):
            for group in range(t.decision.shape[0]):
                s.axis_of[group] = plans[plan, t.decision[group]]
            sample = 0
            if t.batch_group != NONE and s.axis_of[t.batch_group] >= 0:
                sample = 1 + s.axis_of[t.batch_group]
            if t.divides[sample] == 0:
                costs[plan, 0, 0] = np.inf
                continue
            _lower(t, s, sample)
            _owners(t, s, owner)
            _add_locals(t, s, sample, owner, costs[plan])
            _add_tensors(t, s, sample, owner, costs[plan])
