"""Peak allocated bytes per device and lane, in program order."""

from simcore.kernel.compiled import compiled
from simcore.kernel.lanes import LANES, LaneScratch
from simcore.kernel.records import Tables


@compiled
def _hold(tables: Tables, s: LaneScratch) -> None:
    """Counts what each device holds for the whole step."""
    s.current[:] = 0
    for op in range(tables.cost.shape[0]):
        resident = tables.ops[op].resident
        if resident > 0:
            for lane in range(LANES):
                s.current[s.place[op, lane], lane] += resident
    for held in range(tables.held_bytes.shape[0]):
        for use in range(tables.first_holder[held], tables.first_holder[held + 1]):
            for lane in range(LANES):
                device = s.place[tables.holders[use], lane]
                is_first = True
                for other in range(tables.first_holder[held], use):
                    is_first &= s.place[tables.holders[other], lane] != device
                s.current[device, lane] += tables.held_bytes[held] if is_first else 0


@compiled
def _note_storage(tables: Tables, s: LaneScratch, shared: int) -> None:
    """Finds where a storage of several units is allocated and freed on each device."""
    begin, end = tables.first_span[shared], tables.first_span[shared + 1]
    for index in range(begin, end):
        span = tables.spans[index]
        span_first, span_last, span_bytes = span.first, span.last, span.num_bytes
        for lane in range(LANES):
            device = s.place[span_first, lane]
            is_new = s.stamp[device, lane] != shared
            s.stamp[device, lane] = shared
            first, size = s.first[device, lane], s.largest[device, lane]
            last = s.last[device, lane]
            s.first[device, lane] = span_first if is_new else first
            s.largest[device, lane] = max(0 if is_new else size, span_bytes)
            s.last[device, lane] = max(0 if is_new else last, span_last)
    for index in range(begin, end):
        first = tables.spans[index].first
        for lane in range(LANES):
            device = s.place[first, lane]
            largest = s.largest[device, lane]
            size = largest if s.first[device, lane] == first else 0
            s.allocate[first, lane] += size
            s.release[s.last[device, lane], lane] += size


@compiled
def _add_cases(tables: Tables, s: LaneScratch, op: int, begin: int, end: int) -> None:
    """Adds to `change` the bytes of the cases in whose way no rival is."""
    for case in range(begin, end):
        num_bytes = tables.cases[case].num_bytes
        first, last = tables.cases[case].first_rival, tables.cases[case + 1].first_rival
        rival, second = tables.rivals[first], tables.rivals[last - 1]
        if last - first <= 2:  # the usual number; one rival is looked at twice
            for lane in range(LANES):
                device = s.place[op, lane]
                is_alone = (s.place[rival, lane] != device) & (s.place[second, lane] != device)
                s.change[lane] += num_bytes if is_alone else 0
            continue
        for lane in range(LANES):
            is_alone = True
            for index in range(first, last):
                is_alone &= s.place[tables.rivals[index], lane] != s.place[op, lane]
            s.change[lane] += num_bytes if is_alone else 0


@compiled
def walk_lanes(tables: Tables, s: LaneScratch) -> None:
    """Leaves peak bytes per device and lane in `peak`."""
    _hold(tables, s)
    for device in range(tables.columns.shape[0]):
        for lane in range(LANES):
            s.peak[device, lane] = s.current[device, lane]
    has_uneven = tables.uneven.shape[0] > 0
    if has_uneven:
        s.allocate[:] = 0
        s.release[:] = 0
        s.stamp[:] = -1
        for index in range(tables.uneven.shape[0]):
            _note_storage(tables, s, tables.uneven[index])
    for op in range(tables.cost.shape[0]):
        record = tables.ops[op]
        for lane in range(LANES):
            s.change[lane] = record.sure_allocate + (s.allocate[op, lane] if has_uneven else 0)
        _add_cases(tables, s, op, record.first_start, record.first_end)
        for lane in range(LANES):
            device = s.place[op, lane]
            current, peak = s.current[device, lane] + s.change[lane], s.peak[device, lane]
            s.current[device, lane] = current
            s.peak[device, lane] = max(peak, current + record.workspace)
            s.change[lane] = record.sure_release + (s.release[op, lane] if has_uneven else 0)
        _add_cases(tables, s, op, record.first_end, tables.ops[op + 1].first_start)
        for lane in range(LANES):
            s.current[s.place[op, lane], lane] -= s.change[lane]
