"""What the processes of a collection do when asked: one times ops, several talk to each other.

Each is a `Work` of `calibration.run`: it is sent to a spawned process, which is pinned to its core
with one torch thread, as the ranks of a run are.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from calibration.collect.call_times import Calls, StepTime, plain_step, timed_step
from calibration.collect.copies import BesideCompute, CopyTime, beside_compute, copy_times
from calibration.collect.matching import OpTimes, expected_calls, match
from calibration.collect.models import Step, Workload, real_step
from calibration.collect.probes import (
    CACHED_BYTES,
    STREAM_BYTES,
    Launch,
    copy_time,
    launch_time,
    product_time,
)
from calibration.run.process import resident_memory
from calibration.run.work import Place

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWork:
    """Times ops on one device."""

    def build(self, place: Place) -> Any:
        """Returns what answers."""
        return OpsStation(place)

    def describe(self, position: int) -> tuple[str, bool]:
        """Says what the process does."""
        return "while it timed ops", False


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkWork:
    """Times messages and collectives among several processes."""

    def build(self, place: Place) -> Any:
        """Returns what answers."""
        return TalkStation(place)

    def describe(self, position: int) -> tuple[str, bool]:
        """Says what the process does."""
        return "while it timed communication", False


class Timing(NamedTuple):
    """Repeats of one thing."""

    wall: float  # median, s
    spread: float  # standard deviation, s
    core: float  # median time of this process' threads on the core, s
    repeats: int


class Beside(NamedTuple):
    """Medians of compute and a message, s."""

    alone: float  # the compute, with no message
    both: float  # from posting the message until compute and message are done
    posted: float  # until the host is free again after posting


class OpsStation:
    """Times ops of models, and probes."""

    def __init__(self, place: Place) -> None:
        self.device = place.device.partition(":")[0]
        self._step: Step | None = None
        self._work: Workload | None = None
        self._passes: list[Calls] = []
        self._plain: list[StepTime] = []

    def prepare(self, work: Workload) -> None:
        """Builds a model and runs both kinds of step once, for warm-up."""
        self._step, self._work = None, None  # free the last one first
        self._passes, self._plain = [], []
        step = real_step(work, self.device)
        plain_step(step, self.device)
        timed_step(step, self.device)
        self._step, self._work = step, work

    def one_pass(self) -> StepTime:
        """Runs a plain step, then one whose ops are timed."""
        assert self._step is not None, "prepare comes first"
        self._plain.append(plain_step(self._step, self.device))
        self._passes.append(timed_step(self._step, self.device, self._plain[-1].issued))
        return self._plain[-1]

    def result(self) -> tuple[OpTimes, list[StepTime]]:
        """Returns the times of the ops of the graph, and those of the plain steps."""
        assert self._step is not None, "prepare comes first"
        assert self._work is not None, "prepare comes first"
        job = self._work.job
        expected = expected_calls(self._step.source, job.batch or 1)
        return match(expected, self._passes, job.update_traffic_per_element()), self._plain

    def product(self, dtype: str) -> tuple[int, float, float]:
        """Times a product of square matrices."""
        return product_time(self.device, _DTYPES[dtype])

    def copies(self) -> dict[int, tuple[float, float]]:
        """Times copies within memory, of bytes that a cache holds and of more."""
        return {size: copy_time(self.device, size) for size in (CACHED_BYTES, STREAM_BYTES)}

    def launch(self) -> Launch:
        """Times the host's part of an op."""
        return launch_time(self.device)

    def gpu_copies(self) -> tuple[list[CopyTime], BesideCompute]:
        """Times copies from and to a GPU, and what they and compute cost each other."""
        return copy_times(), beside_compute()

    def memory(self) -> dict[str, float]:
        """Returns the bytes that a process takes and a GPU has; reserved / allocated - 1."""
        if self.device != "cuda":
            return {"context": resident_memory(), "fragmentation": 0.0}
        free, total = torch.cuda.mem_get_info()
        peak = max(torch.cuda.max_memory_allocated(), 1)
        reserved = torch.cuda.max_memory_reserved()
        context = total - free - torch.cuda.memory_reserved()
        return {"context": context, "total": total, "fragmentation": max(0.0, reserved / peak - 1)}


class TalkStation:
    """Times what several ranks send each other; all ranks are asked the same at the same time."""

    def __init__(self, place: Place) -> None:
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self.device = torch.device(place.device)
        self.peer = 1 - self.rank
        self._groups: dict[int, Any] = {}

    def ping_pong(self, num_bytes: int, repeats: int) -> Timing | None:
        """Times a message from rank 0 to rank 1 as half of a round trip."""
        if self.rank > 1:
            return None
        data = self._room(num_bytes)

        def run() -> None:
            if self.rank == 0:
                dist.send(data, 1)
                dist.recv(data, 1)
            else:
                dist.recv(data, 0)
                dist.send(data, 0)

        found = self._timed(run, repeats, together=False)
        return found._replace(wall=found.wall / 2, spread=found.spread / 2, core=found.core / 2)

    def both_ways(self, num_bytes: int, repeats: int) -> Timing | None:
        """Times two messages that cross each other between ranks 0 and 1."""
        if self.rank > 1:
            self._idle(repeats)
            return None
        mine, theirs = self._room(num_bytes), self._room(num_bytes)

        def run() -> None:
            work = [
                dist.P2POp(dist.isend, mine, self.peer),
                dist.P2POp(dist.irecv, theirs, self.peer),
            ]
            for handle in dist.batch_isend_irecv(work):
                handle.wait()

        return self._timed(run, repeats, together=True)

    def beside_compute(
        self, num_bytes: int, busy: float, computing: tuple[int, ...], repeats: int
    ) -> Beside | None:
        """Times compute on some ranks beside a message from rank 0 to rank 1.

        Args:
            num_bytes: of the message.
            busy: seconds of compute.
            computing: the ranks that compute; the others only wait for the message.
            repeats: how often.
        """
        if self.rank > 1:
            self._idle(2 * repeats + 1)
            return None
        compute = self._compute(busy) if self.rank in computing else _nothing
        data = self._room(num_bytes)
        times: list[Beside] = []
        for _ in range(repeats + 1):
            dist.barrier()
            begin = time.perf_counter()
            compute()
            alone = time.perf_counter() - begin
            dist.barrier()
            begin = time.perf_counter()
            handle = dist.isend(data, 1) if self.rank == 0 else dist.irecv(data, 0)
            posted = time.perf_counter() - begin
            compute()
            if handle is not None:
                handle.wait()
            self._settle()
            times.append(Beside(alone, time.perf_counter() - begin, posted))
        return Beside(*(statistics.median(column) for column in zip(*times[1:], strict=True)))

    def collective(self, kind: str, num_bytes: int, members: int, repeats: int) -> Timing | None:
        """Times a collective of the first ranks; the buffer is as in `simcore.collectives`."""
        group = self._group(members)
        if self.rank >= members:
            self._idle(repeats)
            return None
        run = _collective(kind, self._room(num_bytes), members, group)
        return self._timed(run, repeats, together=True)

    def _group(self, members: int) -> Any:
        if members not in self._groups:
            self._groups[members] = dist.new_group(list(range(members)))
        return self._groups[members]

    def _room(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(max(1, num_bytes // 4), device=self.device)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _idle(self, repeats: int) -> None:
        """Keeps step with ranks that are timed."""
        for _ in range(repeats + 1):
            dist.barrier()

    def _timed(self, run: Callable[[], object], repeats: int, *, together: bool) -> Timing:
        """Times a piece of communication, the first time dropped."""
        walls, cores = [], []
        for _ in range(repeats + 1):
            if together:
                dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            run()
            self._settle()
            walls.append(time.perf_counter() - begin)
            cores.append(time.process_time() - used)
        spread = statistics.stdev(walls[1:]) if repeats > 1 else 0.0
        return Timing(statistics.median(walls[1:]), spread, statistics.median(cores[1:]), repeats)

    def _compute(self, seconds: float) -> Callable[[], None]:
        """Returns a piece of compute that takes about that long."""
        side = 96 if self.device.type == "cpu" else 4096
        matrix = torch.randn(side, side, device=self.device)

        def run(count: int) -> None:
            for _ in range(count):
                torch.mm(matrix, matrix)
            self._settle()

        run(20)
        begin = time.perf_counter()
        run(20)
        count = max(1, round(20 * seconds / max(time.perf_counter() - begin, 1e-9)))
        return lambda: run(count)


def _nothing() -> None:
    """Computes nothing."""


def _collective(kind: str, full: torch.Tensor, members: int, group: Any) -> Callable[[], object]:
    """Returns what runs one collective on a full buffer."""
    length = max(1, full.numel() // members)
    part = torch.zeros(length, device=full.device)
    parts = [torch.zeros(length, device=full.device) for _ in range(members)]
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "broadcast": lambda: dist.broadcast(full, 0, group=group),
        "all_gather": lambda: dist.all_gather(parts, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts, group=group),
        "all_to_all": lambda: dist.all_to_all_single(
            torch.empty(length * members, device=full.device),
            full.new_zeros(length * members),
            group=group,
        ),
    }
    return runs[kind]
