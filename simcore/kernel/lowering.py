"""One placement to transfers, waiting counts and per-device streams."""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE, P2P, Count, Mode, Order, Scratch, Status, Tables

_OK, _ILLEGAL, _SPLIT = int(Status.OK), int(Status.ILLEGAL_DEVICE), int(Status.SPLIT_UNIT)
_UNREACHABLE = int(Status.UNREACHABLE)
_READY, _INLINE = int(Order.READY), int(P2P.INLINE)
_TRANSFERS, _COMMS = int(Count.TRANSFERS), int(Count.COMMS)


@compiled
def _check(tables: Tables, placement: np.ndarray, s: Scratch) -> tuple[int, int]:
    """Returns (status, culprit op): every op on a device that can run it, units kept together."""
    num_devices = tables.columns.shape[0]
    for op in range(tables.cost.shape[0]):
        device = int(placement[op])
        if tables.ops[op].collective != NONE:
            s.ops[op].place = NONE
            continue
        if device < 0 or device >= num_devices:
            return _ILLEGAL, op
        if tables.cost[op, tables.columns[device]].duration == np.inf:
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
    num_devices = tables.columns.shape[0]
    for device in range(num_devices + 1):
        s.devices[device].head = NONE
        s.devices[device].slot = 0
    for op in range(tables.cost.shape[0] - 1, -1, -1):
        device = s.ops[op].place
        if device != NONE:
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
    while at > begin and s.comms[at - 1].target > target:
        s.comms[at].target = s.comms[at - 1].target
        at -= 1
    s.comms[at].target = target
    s.comms[s.counts[_TRANSFERS] - 1].tensor = tensor
    s.comms[s.counts[_TRANSFERS] - 1].source = source


@compiled
def make_transfers(tables: Tables, mode: Mode, s: Scratch) -> tuple[int, int]:
    """Makes one transfer per (tensor, device that lacks it) and counts what each op waits for.

    Under program order an op need not wait for its own device's earlier ops: the stream does. What
    a collective reads or writes is not sent anywhere.
    """
    num_devices = tables.columns.shape[0]
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
                if target == source and source != NONE:
                    s.ops[reader].pending += wait_local
                    continue
                s.ops[reader].pending += 1
                if target == NONE or source == NONE:
                    continue
                if s.devices[target].stamp != tensor:
                    s.devices[target].stamp = tensor
                    if tables.pairs[source * num_devices + target].reachable == 0:
                        return _UNREACHABLE, op
                    _add_transfer(s, begin, tensor, source, target)
    s.ops[tables.cost.shape[0]].first_transfer = s.counts[_TRANSFERS]
    s.counts[_COMMS] = s.counts[_TRANSFERS] + tables.last_producer.shape[0]
    return _OK, NONE


@compiled
def _first_reader(tables: Tables, s: Scratch, transfer: int) -> int:
    """Returns the first op that reads what a transfer brings."""
    tensor, target = s.comms[transfer].tensor, s.comms[transfer].target
    use = tables.tensors[tensor].first_consumer
    while s.ops[tables.consumers[use]].place != target:
        use += 1
    return tables.consumers[use]


@compiled
def note_messages(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Notes each transfer at its first reader; inline ones take their place in both streams."""
    num_ops, num_devices = tables.cost.shape[0], tables.columns.shape[0]
    for op in range(num_ops):
        s.posts[op].first_inbound = NONE
        s.posts[op].time = np.inf
        s.posts[op].is_posted = 0
    for transfer in range(s.counts[_TRANSFERS] - 1, -1, -1):
        op = _first_reader(tables, s, transfer)
        s.messages[transfer].next_inbound = s.posts[op].first_inbound
        s.posts[op].first_inbound = transfer
        s.messages[transfer].issue = np.inf
        s.messages[transfer].awaited = 2
    if mode.p2p != _INLINE:
        return
    for device in range(num_devices):
        s.devices[device].head = NONE
    for op in range(num_ops - 1, -1, -1):
        device = s.ops[op].place
        if device == NONE:
            continue
        s.ops[op].next_op = s.devices[device].head
        s.devices[device].head = op
        _chain_inbound(s, op, num_ops)


@compiled
def _chain_inbound(s: Scratch, op: int, num_ops: int) -> None:
    """Puts the transfers of which an op is the first reader before it in both their streams."""
    count = 0
    transfer = s.posts[op].first_inbound
    while transfer != NONE:
        s.offers[count] = transfer
        count += 1
        transfer = s.messages[transfer].next_inbound
    while count > 0:
        count -= 1
        transfer = s.offers[count]
        source, target = s.comms[transfer].source, s.comms[transfer].target
        s.messages[transfer].next_at_source = s.devices[source].head
        s.messages[transfer].next_at_target = s.devices[target].head
        s.devices[source].head = num_ops + transfer
        s.devices[target].head = num_ops + transfer
