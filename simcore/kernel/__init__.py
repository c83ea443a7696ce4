"""All compiled code of the simulator: numbers in, numbers out, no names and no Python objects."""

from simcore.kernel.compiled import keyed_cache

with keyed_cache():
    from simcore.kernel.batch import Plans, run_events, run_lanes, run_sweep
    from simcore.kernel.lanes import MAX_LANE_DEVICES, make_lanes
    from simcore.kernel.records import (
        CASE,
        COST,
        NONE,
        OP,
        PAIR,
        SPAN,
        TENSOR,
        TOUCH,
        Contention,
        Engine,
        Host,
        Mode,
        Order,
        Outcome,
        Records,
        Scratch,
        Status,
        Tables,
        make_outcome,
        make_records,
        make_scratch,
    )

__all__ = [
    "CASE",
    "COST",
    "MAX_LANE_DEVICES",
    "NONE",
    "OP",
    "PAIR",
    "SPAN",
    "TENSOR",
    "TOUCH",
    "Contention",
    "Engine",
    "Host",
    "Mode",
    "Order",
    "Outcome",
    "Plans",
    "Records",
    "Scratch",
    "Status",
    "Tables",
    "make_lanes",
    "make_outcome",
    "make_records",
    "make_scratch",
    "run_events",
    "run_lanes",
    "run_sweep",
]
