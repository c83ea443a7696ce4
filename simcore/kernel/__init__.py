"""All compiled code of the simulator: numbers in, numbers out, no names and no Python objects."""

from simcore.kernel.compiled import keyed_cache

with keyed_cache():
    from simcore.kernel.batch import run_batch
    from simcore.kernel.records import (
        COST,
        NONE,
        OP,
        PAIR,
        SPAN,
        TENSOR,
        TOUCH,
        Contention,
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
    "COST",
    "NONE",
    "OP",
    "PAIR",
    "SPAN",
    "TENSOR",
    "TOUCH",
    "Contention",
    "Host",
    "Mode",
    "Order",
    "Outcome",
    "Records",
    "Scratch",
    "Status",
    "Tables",
    "make_outcome",
    "make_records",
    "make_scratch",
    "run_batch",
]
