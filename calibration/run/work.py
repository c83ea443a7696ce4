"""What a process does, as a value that is sent to it, and how it is asked to do it."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from calibration.run.executor import Executor, Slice
from calibration.run.links import Links
from calibration.run.process import peak_memory, resident_memory, start_peak
from calibration.run.recording import Recording
from calibration.run.script import Do, Script
from calibration.run.source import cut_samples, real_model
from calibration.run.yardstick import time_yardstick
from simcore.job import Job

BETWEEN = -1  # the position of who is in no step


class Place(NamedTuple):
    """Where a rank runs."""

    rank: int
    num_ranks: int
    device: str  # torch's name
    backend: str  # gloo or nccl


class StepReport(NamedTuple):
    """One step of one rank."""

    start: float  # s on the clock of the machine
    end: float  # s
    losses: tuple[float, ...]  # of microbatches whose loss is made here, or of the whole batch
    slices: tuple[Slice, ...]
    gradients: dict[str, NDArray[np.float64]]  # [...] of the loss's mean; empty unless asked for


class Step(Protocol):
    """One training step of one rank."""

    losses: list[torch.Tensor]
    slices: list[Slice]
    gradients: dict[str, NDArray[np.float64]]  # [...]

    def step(self, watch: Callable[[int], None], *, keeps_gradients: bool = False) -> None:
        """Runs it; `watch` is told how far it is."""


class Work(Protocol):
    """What is sent to a process."""

    def build(self, place: Place) -> Any:
        """Makes ready what answers: a `Step`, or anything with methods to be asked for."""

    def describe(self, position: int) -> tuple[str, bool]:
        """Returns in words what a step does at a position, and whether that is to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWork:
    """Ops of a placement or a pipeline; one process's share."""

    script: Script
    recording: Recording = field(repr=False)
    job: Job
    source: str
    num_microbatches: int
    seed: int
    copy: tuple[int, int] = (0, 1)  # which of how many copies of the pipeline

    def build(self, place: Place) -> Step:
        """Builds the model, keeps what this rank uses, and opens its links."""
        device = torch.device(place.device)
        links = Links(place.rank, self.script.messages, place.backend)
        executor = Executor(self.script, self.recording, self.job, links, device)
        batch = self.job.batch or 1
        model = real_model(self.source, self.job, batch, self.seed)
        number, copies = self.copy
        share = batch // copies
        if copies > 1:
            given = model.args, model.kwargs
            args, kwargs = cut_samples(given, batch, number * share, (number + 1) * share)
            model = model._replace(args=args, kwargs=kwargs)
        executor.load(model, share, self.num_microbatches)
        return executor

    def describe(self, position: int) -> tuple[str, bool]:
        """Names the instruction."""
        each = self.script.instructions[position]
        where = f" of microbatch {each.microbatch}" if each.microbatch >= 0 else ""
        what = "waiting for" if each.do == Do.TAKE else each.do.name.lower()
        return f"{what} {each.name}{where}", each.do in {Do.TAKE, Do.SUM}


class Station:
    """A process's side of the talk with the one that started it: what it can be asked."""

    def __init__(self, place: Place, watch: Callable[[int], None]) -> None:
        self.place, self.watch = place, watch
        self.device = torch.device(place.device)
        self.bare = resident_memory()
        self.loaded: dict[int, Any] = {}

    def load(self, number: int, work: Work) -> None:
        """Makes a work ready; there may be several."""
        self.loaded[number] = work.build(self.place)

    def drop(self, number: int) -> None:
        """Lets go of a work."""
        close = getattr(self.loaded.pop(number), "close", None)
        if close is not None:
            close()
        gc.collect()

    def yardstick(self) -> float:
        """Times the yardstick."""
        return time_yardstick()

    def start_peak(self) -> None:
        """Begins to watch the peak of memory."""
        start_peak(self.device)

    def peak(self) -> tuple[int, int]:
        """Returns the peak, and what the process had before there was a model, in bytes."""
        return peak_memory(self.device), 0 if self.device.type == "cuda" else self.bare

    def step(
        self, number: int, *, keeps_gradients: bool = False, keeps_slices: bool = False
    ) -> StepReport:
        """Runs one step of a work together with the others."""
        work: Step = self.loaded[number]
        if self.place.num_ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        work.step(self.watch, keeps_gradients=keeps_gradients)
        end = time.perf_counter()
        self.watch(BETWEEN)
        losses = tuple(float(loss) for loss in work.losses)
        slices = tuple(work.slices) if keeps_slices else ()
        return StepReport(start, end, losses, slices, work.gradients if keeps_gradients else {})

    def ask(self, question: str, options: dict[str, Any]) -> Any:
        """Answers a question by its name; what only the work loaded last can answer, that does."""
        newest = self.loaded.get(max(self.loaded, default=-1))
        return getattr(self if hasattr(self, question) else newest, question)(**options)
