"""Answers of the measuring processes -> records.

Beside the records of ops, links and collectives there are those of the host's launch and of whole
steps; they are ops of class ``other`` without dims, known by their target.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibration.collect.call_times import StepTime
from calibration.collect.ledger import SOURCE
from calibration.collect.matching import OpTimes
from calibration.collect.probes import Launch
from calibration.collect.stations import Beside, Timing
from calibration.records import Contents, Record

LAUNCH, IN_CALL = "launch", "launch in call"
STEP, STEP_WALL, ISSUED, FREE = "step", "wall of step", "issue of step", "views of step"
CORE_TIME = "core time"
TINY = 1e-9  # seconds of a record must be positive


COMPUTING = {"sender": (0,), "receiver": (1,), "both": (0, 1)}  # ends of a message -> ranks


def beside_topology(backend: str, computing: str, end: str, part: str) -> str:
    """Returns the topology of a record of a message beside compute.

    Args:
        backend: gloo or nccl.
        computing: which ends compute, see `COMPUTING`.
        end: of the message: sender or receiver.
        part: field of `Beside`.
    """
    return f"{backend}, {computing} computing, {part} of {end}"


class Rows:
    """Makes the records of one kind of device."""

    def __init__(self, device: str, software: str, *, on_gpu: bool) -> None:
        self.device, self.software = device, software
        self.inside: Contents = "kernel" if on_gpu else "kernel+launch"
        self.clock = "CUDA events" if on_gpu else "time of the core"

    def ops(self, label: str, times: OpTimes, passes: int) -> list[Record]:
        """Returns the records of a model's ops, one for each distinct op."""
        how = f"in situ, {self.clock}, median of {passes} passes"
        merged: dict[tuple[Any, ...], list[Any]] = {}
        for op in times.ops:
            merged.setdefault(op[:8], []).append(op)
        return [
            self._op(
                seconds=sum(op.seconds for op in same) / len(same),
                spread=sum(op.spread for op in same) / len(same),
                count=len(same),
                how=how,
                note=label,
                target=same[0].target,
                op_class=same[0].op_class,
                dtype=same[0].dtype,
                dims=dict(same[0].dims),
                factor=same[0].factor,
                traffic=same[0].traffic,
                phase=same[0].phase,
            )
            for same in merged.values()
        ]

    def step(self, label: str, steps: Sequence[StepTime], free: float) -> list[Record]:
        """Returns the records of whole steps.

        Args:
            label: of the workload.
            steps: plain ones.
            free: s of views and allocations in one of them.
        """
        how = f"plain training step, median of {len(steps)}"
        medians = {
            STEP_WALL: statistics.median(step.wall for step in steps),
            ISSUED: statistics.median(step.issued for step in steps),
            FREE: max(free, TINY),
            STEP: statistics.median(step.core for step in steps),
        }
        return [self.other(f"{name} {label}", value, how) for name, value in medians.items()]

    def product(self, dtype: str, side: int, seconds: float, spread: float) -> Record:
        """Returns the record of the product of two square matrices."""
        return self._op(
            seconds=seconds,
            spread=spread,
            how="alone, again and again",
            note="probe",
            target="aten.mm",
            op_class="matmul",
            dtype=dtype,
            dims={"m": side, "n": side, "k": side},
            traffic=3 * side * side * (4 if dtype == "fp32" else 2),
        )

    def copies(self, times: Mapping[int, tuple[float, float]]) -> list[Record]:
        """Returns the records of copies within memory, by their bytes."""
        return [
            self._op(
                seconds=seconds,
                spread=spread,
                how="alone, again and again",
                note="probe",
                target="aten.copy_",
                op_class="copy",
                dtype="fp32",
                dims={"elements": size // 4},
                traffic=2 * size,
            )
            for size, (seconds, spread) in times.items()
        ]

    def launch(self, found: Launch) -> list[Record]:
        """Returns the records of the host's part of an op."""
        how = f"a model of tiny tensors, forward and backward, {found.num_ops} ops"
        return [self.other(IN_CALL, found.in_call, how), self.other(LAUNCH, found.per_op, how)]

    def messages(
        self, num_bytes: int, direction: str, timings: Iterable[Timing | None], backend: str
    ) -> list[Record]:
        """Returns the records of a message: its time, and that of the cores at its ends."""
        known = [timing for timing in timings if timing is not None]
        slowest = max(known, key=lambda timing: timing.wall)
        core = sum(timing.core for timing in known) / len(known)
        shared = {"bytes": num_bytes, "direction": direction, "count": slowest.repeats}
        return [
            self._link(slowest.wall, backend, spread=slowest.spread, **shared),
            self._link(max(core, TINY), f"{backend}, {CORE_TIME}", **shared),
        ]

    def beside(
        self, num_bytes: int, computing: str, found: Sequence[Beside], backend: str
    ) -> list[Record]:
        """Returns the records of a message beside compute.

        Args:
            num_bytes: of the message.
            computing: which of the two ends compute, see `COMPUTING`.
            found: of the sender and the receiver.
            backend: gloo or nccl.
        """
        return [
            self._link(
                max(seconds, TINY),
                beside_topology(backend, computing, end, part),
                bytes=num_bytes,
                direction="one",
            )
            for end, times in zip(("sender", "receiver"), found, strict=True)
            for part, seconds in times._asdict().items()
        ]

    def collective(
        self, kind: str, num_bytes: int, timings: Sequence[Timing], backend: str
    ) -> list[Record]:
        """Returns the records of a collective: its time, and that of the cores of its members."""
        slowest = max(timings, key=lambda timing: timing.wall)
        core = sum(timing.core for timing in timings) / len(timings)
        return [
            self._record(
                kind="collective",
                seconds=max(seconds, TINY),
                spread=spread,
                contains="kernel+launch+sync",
                how="after a barrier, slowest member, median",
                topology=topology,
                scope="intra_node",
                bytes=num_bytes,
                bytes_are="full buffer",
                collective=kind,
                group=len(timings),
                algorithm="auto",
                count=slowest.repeats,
            )
            for seconds, spread, topology in (
                (slowest.wall, slowest.spread, backend),
                (core, None, f"{backend}, {CORE_TIME}"),
            )
        ]

    def copy(self, num_bytes: int, direction: str, seconds: float, spread: float) -> Record:
        """Returns the record of a copy between the memories of devices."""
        return self._link(seconds, "copy", bytes=num_bytes, direction=direction, spread=spread)

    def other(self, target: str, seconds: float, how: str) -> Record:
        """Returns the record of something that is no op of a graph."""
        return self._op(seconds=seconds, how=how, target=target, op_class="other", dtype="fp32")

    def _op(self, **fields: Any) -> Record:
        return self._record(kind="op", contains=self.inside, **fields)

    def _link(self, seconds: float, topology: str, **fields: Any) -> Record:
        return self._record(
            kind="link",
            seconds=seconds,
            contains="kernel+launch+sync",
            how="median of repeats",
            topology=topology,
            scope="intra_node",
            **fields,
        )

    def _record(self, **fields: Any) -> Record:
        return Record(device=self.device, software=self.software, source=SOURCE, **fields)
