"""Compiled: what every op and every tensor adds to the cost of a sharded plan.

Plans are lowered by the simulator's own kernel, so the folder of its cache, which is named by the
kernel's sources, is used here too.
"""

import numpy as np
from numpy.typing import NDArray

from simcore.kernel import collective_time, find_states, lower_shards
from simcore.kernel.compiled import compiled, compiled_apart, compiled_entry, keyed_cache
from simcore.kernel.records import NONE
from simcore.kernel.shard_records import Change, Count, ShardScratch, ShardTables

with keyed_cache():
    _SLICE = int(Change.SLICE)
    _LOCALS = int(Count.LOCALS)

    @compiled_apart
    def _lower(t: ShardTables, s: ShardScratch, sample: int) -> None:
        find_states(t, s)
        lower_shards(t, s, sample)

    @compiled
    def _set_plan(t: ShardTables, s: ShardScratch, plan: NDArray[np.int8]) -> int:
        """Sets the axis of each group; returns which axis splits the samples."""
        for group in range(t.decision.shape[0]):
            s.axis_of[group] = plan[t.decision[group]]
        if t.batch_group != NONE and s.axis_of[t.batch_group] >= 0:
            return 1 + int(s.axis_of[t.batch_group])
        return 0

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
        rate: NDArray[np.float64],
        costs: NDArray[np.float64],
    ) -> None:
        """Adds what the local ops take to their op or tensor; see `run_additive`."""
        num_ops = t.ops.shape[0] - 1
        inside, busy, other = 0.0, 0.0, 0.0  # of collectives that belong to the next op
        for local in range(s.counts[_LOCALS]):
            row = s.locals[local]
            if row.change == NONE:
                costs[row.op, 0] += t.variants[sample, row.variant].seconds
                costs[row.op, 1] += inside
                costs[row.op, 2] += busy
                costs[row.op, 4] += t.variants[sample, row.variant].resident
                costs[row.op, 5] += other
                inside, busy, other = 0.0, 0.0, 0.0
            elif row.change != _SLICE:
                latency, duration = collective_time(t, row.axis, row.change, row.num_bytes)
                tensor = owner[row.first_handle]
                if tensor == NONE:
                    inside += latency + duration
                    link = row.num_bytes * rate[row.axis, row.change]
                    busy += link if row.axis == 0 else 0.0
                    other += link if row.axis != 0 else 0.0
                else:
                    costs[num_ops + tensor, 1] += latency + duration
                    link = row.num_bytes * rate[row.axis, row.change]
                    costs[num_ops + tensor, 2 if row.axis == 0 else 5] += link

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
        rate: NDArray[np.float64],
        costs: NDArray[np.float64],
    ) -> None:
        """Fills what each op and tensor adds to each plan.

        Args:
            t: the tables of a space.
            plans: [plan, decision].
            s: room for one plan.
            owner: room, [handle].
            rate: s for which a byte keeps the busiest link busy, [axis, `Change`].
            costs: [plan, op then tensor, quantity], zeros: seconds of computing, seconds of
                collectives, of these of the busiest link along the first axis, bytes of gradients
                that copies sum, bytes that are kept all the time, and seconds of the busiest link
                along the second axis; infinite seconds where the batch does not divide.
        """
        for plan in range(plans.shape[0]):
            sample = _set_plan(t, s, plans[plan])
            if t.divides[sample] == 0:
                costs[plan, 0, 0] = np.inf
                continue
            _lower(t, s, sample)
            _owners(t, s, owner)
            _add_locals(t, s, sample, owner, rate, costs[plan])
            _add_tensors(t, s, sample, owner, costs[plan])

    @compiled_entry
    def run_collectives(
        t: ShardTables, plans: NDArray[np.int8], s: ShardScratch, sums: NDArray[np.float64]
    ) -> None:
        """Counts the collectives of each plan.

        Args:
            t: the tables of a space.
            plans: [plan, decision]; the batch divides.
            s: room for one plan.
            sums: [plan, axis, `Change`, quantity], zeros: how many, their bytes, their seconds.
        """
        for plan in range(plans.shape[0]):
            sample = _set_plan(t, s, plans[plan])
            _lower(t, s, sample)
            for local in range(s.counts[_LOCALS]):
                row = s.locals[local]
                if row.change > _SLICE:  # NONE is below
                    latency, duration = collective_time(t, row.axis, row.change, row.num_bytes)
                    sums[plan, row.axis, row.change, 0] += 1.0
                    sums[plan, row.axis, row.change, 1] += row.num_bytes
                    sums[plan, row.axis, row.change, 2] += latency + duration
