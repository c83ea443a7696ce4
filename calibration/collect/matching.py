"""Timed calls of a real step + the recorded ops of the same step -> seconds of each graph op.

The recorder runs the model on fake tensors; it and the real run see the same ops in the same order,
save for what torch decides by device or memory. Calls are therefore aligned by name; the time of
calls that have no partner is reported, not lost.
"""

import statistics
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from calibration.collect.call_times import UPDATE, Calls
from simcore.frontends.torch_capture import record
from simcore.frontends.torch_graph import Trainable
from simcore.frontends.torch_recorder import Recorder
from simcore.frontends.torch_source import Source
from simcore.frontends.torch_tape import TapeOp
from simcore.signature import OpClass, Phase


class Expected(NamedTuple):
    """What a step dispatches, from its record on fake tensors."""

    targets: list[str]  # one for each call
    ops: list[TapeOp | None]  # what the call is in the graph; None = a view, an allocation
    trainables: tuple[Trainable, ...]  # with a gradient


class OpTime(NamedTuple):
    """The time of one executed op of the graph."""

    target: str
    op_class: str
    dtype: str
    dims: tuple[tuple[str, int], ...]
    factor: float
    traffic: int  # bytes
    phase: str
    kernels: int
    seconds: float  # median of the passes
    spread: float  # standard deviation between passes, s


class OpTimes(NamedTuple):
    """The times of one step."""

    ops: list[OpTime]
    free: float  # s of views and allocations, which the graph does not charge
    unmatched: float  # s of calls that the graph does not have
    missing: int  # ops of the graph that were not seen


class _Noting(Recorder):  # type: ignore[no-untyped-call]
    """Remembers, for each call, the op it became."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.made: list[int] = []  # index on the tape, -1 = none

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = len(self.tape.ops)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._note(name_of(func), before)
        return result

    def emit(self, target: str, *args: Any, **options: Any) -> None:
        before = len(self.tape.ops)
        super().emit(target, *args, **options)
        self._note(target, before)

    def _note(self, target: str, before: int) -> None:
        if target.startswith("prim."):  # questions to a fake tensor
            return
        after = len(self.tape.ops)
        made = after > before and self.tape.ops[-1].kind.op_class is not OpClass.INPUT
        self.targets.append(target)
        self.made.append(after - 1 if made else -1)


def name_of(func: Any) -> str:
    """Returns how an op is called here: its own name if it was timed whole, else its overload."""
    return func if isinstance(func, str) else str(func)


def expected_calls(source: Source, batch: int) -> Expected:
    """Returns what a step dispatches at a batch.

    Raises:
        CaptureError: the model cannot be captured.
    """
    recorder = _Noting()
    run = record(source, batch, recorder)
    ops = [run.tape.ops[index] if index >= 0 else None for index in recorder.made]
    updated = tuple(t for t in run.trainables if t.gradient is not None)
    return Expected(recorder.targets, ops, updated)


def match(expected: Expected, passes: Sequence[Calls], update_traffic: int) -> OpTimes:
    """Returns the times of the graph's ops, medians over passes.

    Args:
        expected: what the graph has.
        passes: one or more timed steps of the same model at the same batch.
        update_traffic: bytes per parameter element that the optimizer moves.
    """
    names = [name_of(func) for func in passes[0].targets]
    alike = [calls for calls in passes if len(calls.seconds) == len(names)]
    columns = list(zip(*(calls.seconds for calls in alike), strict=True))
    median = [statistics.median(column) for column in columns]
    spread = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
    partner = _aligned(names, expected)
    known = set(expected.targets)
    ops: list[OpTime] = []
    free = unmatched = 0.0
    for call, name in enumerate(names):
        if name == UPDATE:
            ops += _updates(expected.trainables, median[call], spread[call], update_traffic)
        elif (op := partner.get(call)) is not None:
            ops.append(_op_time(op, median[call], spread[call]))
        elif name in known:
            free += median[call]
        else:
            unmatched += median[call]
    missing = sum(op is not None for op in expected.ops) - len(partner)
    return OpTimes(ops, free, unmatched, missing)


def _aligned(names: Sequence[str], expected: Expected) -> dict[int, TapeOp]:
    """Returns the op of each real call that is one."""
    pairs = zip(expected.targets, expected.ops, strict=True)
    wanted = [(name, op) for name, op in pairs if op is not None]
    known = {name for name, _ in wanted}
    calls = [call for call, name in enumerate(names) if name in known]
    matcher = SequenceMatcher(
        None, [names[call] for call in calls], [name for name, _ in wanted], autojunk=False
    )
    return {
        calls[block.a + offset]: wanted[block.b + offset][1]
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _op_time(op: TapeOp, seconds: float, spread: float) -> OpTime:
    return OpTime(
        target=op.target,
        op_class=op.kind.op_class.name.lower(),
        dtype=op.dtype,
        dims=op.kind.dims,
        factor=op.kind.factor,
        traffic=op.traffic,
        phase=Phase(op.phase).name,
        kernels=op.kernels,
        seconds=seconds,
        spread=spread,
    )


def _updates(
    trainables: Sequence[Trainable], seconds: float, spread: float, traffic: int
) -> list[OpTime]:
    """Returns the updates of single parameters, which share the optimizer's time by elements."""
    total = sum(trainable.elements for trainable in trainables)
    return [
        OpTime(
            target=UPDATE,
            op_class="update",
            dtype=trainable.dtype,
            dims=(("elements", trainable.elements),),
            factor=1.0,
            traffic=traffic * trainable.elements,
            phase="U",
            kernels=1,
            seconds=seconds * trainable.elements / total,
            spread=spread * trainable.elements / total,
        )
        for trainable in trainables
    ]
