"""One placement to transfers, waiting counts and per-device op lists."""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE, Count, Mode, Order, Scratch, Status, Tables

_OK, _ILLEGAL, _SPLIT = int(Status.OK), int(Status.ILLEGAL_DEVICE), int(Status.SPLIT_UNIT)
_UNREACHABLE = int(Status.UNREACHABLE)
_READY = int(Order.READY)
_TRANSFERS = int(Count.TRANSFERS)


@compiled
def _check(tables: Tables, placement: np.ndarray, s: Scratch) -> tuple[int, int]:
    """Returns (status, culprit op): every op on a device that can run it, units kept together."""
    num_devices = tables.cost.shape[1]
    for op in range(tables.cost.shape[0]):
        device = int(placement[op])
        if device < 0 or device >= num_devices or tables.cost[op, device].duration == np.inf:
            return _ILLEGAL, op
        if placement[tables.ops[op].leader] != device:
            return _SPLIT, op
        s.ops[op].place = device
    return _OK, NONE


@compiled
def list_ops(tables: Tables, placement: np.ndarray, s: Scratch) -> tuple[int, int]:
    """Checks a placement, chains the ops of each device in program order, and counts them.

    Returns:
        (status, culprit op).
    """
    status, culprit = _check(tables, placement, s)
    if status != _OK:
        return status, culprit
    num_devices = tables.cost.shape[1]
    for device in range(num_devices + 1):
        s.devices[device].head = NONE
        s.devices[device].slot = 0
    for op in range(tables.cost.shape[0] - 1, -1, -1):
        device = s.ops[op].place
        s.ops[op].next_op = s.devices[device].head
        s.devices[device].head = op
        s.devices[device + 1].slot += 1
    for device in range(num_devices):
        s.devices[device + 1].slot += s.devices[device].slot
    return _OK, NONE


@compiled
def _add_transfer(s: Scratch, begin: int, tensor: int, source: int, target: int) -> None:
    """Inserts a transfer of a tensor, by target, among those of the tensor since begin."""
    at = s.counts[_TRANSFERS]
    s.counts[_TRANSFERS] = at + 1
    while at > begin and s.transfers[at - 1].target > target:
        s.transfers[at].target = s.transfers[at - 1].target
        at -= 1
    s.transfers[at].target = target
    s.transfers[s.counts[_TRANSFERS] - 1].tensor = tensor
    s.transfers[s.counts[_TRANSFERS] - 1].source = source


@compiled
def make_transfers(tables: Tables, mode: Mode, s: Scratch) -> tuple[int, int]:
    """Makes one transfer per (tensor, device that lacks it) and counts what each op waits for.

    Under program order an op need not wait for its own device's earlier ops: the stream does.
    """
    num_devices = tables.cost.shape[1]
    for op in range(tables.cost.shape[0]):
        s.ops[op].pending = 0
    for device in range(num_devices):
        s.devices[device].stamp = NONE
    s.counts[_TRANSFERS] = 0
    wait_local = 1 if mode.order == _READY else 0
    for op in range(tables.cost.shape[0]):
        source = s.ops[op].place
        s.ops[op].first_transfer = s.counts[_TRANSFERS]
        for tensor in range(tables.ops[op].first_output, tables.ops[op + 1].first_output):
            begin = s.counts[_TRANSFERS]
            for use in range(
                tables.tensors[tensor].first_consumer, tables.tensors[tensor + 1].first_consumer
            ):
                reader = tables.consumers[use]
                target = s.ops[reader].place
                if target == source:
                    s.ops[reader].pending += wait_local
                    continue
                s.ops[reader].pending += 1
                if s.devices[target].stamp != tensor:
                    s.devices[target].stamp = tensor
                    if tables.pairs[source * num_devices + target].reachable == 0:
                        return _UNREACHABLE, op
                    _add_transfer(s, begin, tensor, source, target)
    s.ops[tables.cost.shape[0]].first_transfer = s.counts[_TRANSFERS]
    return _OK, NONE
