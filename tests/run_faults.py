"""Works that go wrong in one rank, for tests of how a run ends."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from calibration.run.work import Place

Fault = Literal["raise", "die", "hang", "memory", "none"]


@dataclass(frozen=True)
class FaultyWork:
    fault: Fault
    rank: int

    def build(self, place: Place) -> Any:
        return FaultyStep(self.fault if place.rank == self.rank else "none", place)

    def describe(self, position: int) -> tuple[str, bool]:
        return ("waiting for the other", True) if position == 1 else ("making trouble", False)


class FaultyStep:
    def __init__(self, fault: Fault, place: Place) -> None:
        self.fault, self.place = fault, place
        self.losses: list[torch.Tensor] = []
        self.slices: list[Any] = []
        self.gradients: dict[str, Any] = {}

    def step(self, watch: Callable[[int], None], *, keeps_gradients: bool = False) -> None:
        watch(0)
        if self.fault == "raise":
            raise ValueError("a shape is wrong")
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "memory":
            raise MemoryError("no more")
        watch(1)
        tensor = torch.zeros(4)
        other = 1 - self.place.rank
        works = [dist.isend(tensor, other), dist.irecv(torch.zeros(4), other)]
        for work in works:
            assert work is not None
            work.wait()


@dataclass(frozen=True)
class BrokenWork:
    """A work of which one rank raises when it comes to a position."""

    work: Any
    rank: int
    position: int

    def build(self, place: Place) -> Any:
        step = self.work.build(place)
        return BrokenStep(step, self.position) if place.rank == self.rank else step

    def describe(self, position: int) -> tuple[str, bool]:
        return self.work.describe(position)


class BrokenStep:
    def __init__(self, step: Any, position: int) -> None:
        self.inner, self.position = step, position
        self.losses, self.slices, self.gradients = step.losses, step.slices, step.gradients

    def step(self, watch: Callable[[int], None], *, keeps_gradients: bool = False) -> None:
        def breaking(position: int) -> None:
            watch(position)
            if position == self.position:
                raise ValueError("it breaks here")

        self.inner.step(breaking, keeps_gradients=keeps_gradients)
