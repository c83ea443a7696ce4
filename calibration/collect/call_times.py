"""A training step -> seconds of each torch op it dispatches, in order, while it really runs.

On a CPU the time that the core spent on the thread is read around each op, so that what else runs
on the core is not in it. On a GPU events are put around each op and read
after the step; a spinning kernel ahead of the step lets the host run ahead, so that the device
never waits for it and the time between two events is the op's own.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from calibration.collect.models import Step
from calibration.collect.whole_ops import whole_kernels
from simcore.frontends.torch_private import TorchDispatchMode, composite_kernels

UPDATE = "update"  # of all parameters together
_SPIN_SIDE = 4096  # of the matrices whose product keeps a GPU busy while the host runs ahead


class Calls(NamedTuple):
    """What one step dispatched, in order."""

    targets: list[Any]  # overload of torch, or the name of an op that was timed whole
    seconds: list[float]


class StepTime(NamedTuple):
    """What one whole step took, s."""

    wall: float  # until a GPU has finished
    issued: float  # until the host has issued it
    core: float  # that a core spent on the thread


class CallTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every op that is dispatched while active."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.suspended = False
        self._on_gpu = device == "cuda"
        self._targets: list[Any] = []
        self._marks: list[Any] = []  # two for each op: clock readings, or events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one op and notes when it began and ended."""
        self._targets.append(func)
        begin = self._now()
        result = func(*args, **kwargs) if kwargs else func(*args)
        end = self._now()
        self._marks += (begin, end)
        return result

    @contextmanager
    def whole(self, target: str) -> Iterator[None]:
        """Times what runs inside as one op; ops in it are not noted."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.suspended = True
        self._targets.append(target)
        begin = self._now()
        try:
            yield
        finally:
            self._marks += (begin, self._now())
            self.suspended = False
            self.__enter__()  # type: ignore[no-untyped-call]

    def calls(self) -> Calls:
        """Returns what was timed; waits for a GPU to finish."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if self._on_gpu:
            torch.cuda.synchronize()
            return Calls(self._targets, [a.elapsed_time(b) * 1e-3 for a, b in pairs])
        return Calls(self._targets, [end - begin for begin, end in pairs])

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def timed_step(step: Step, device: str, host_seconds: float = 0.0) -> Calls:
    """Runs one step and times each of its ops.

    Args:
        step: what to run.
        device: ``cpu`` or ``cuda``.
        host_seconds: how long the host needs to issue the step; a GPU is kept busy that long.
    """
    timer = CallTimer(device)
    if device == "cuda":
        keep_busy(2.0 * host_seconds)
    with composite_kernels(whole_kernels(timer)), timer:
        step.forward().backward()  # type: ignore[no-untyped-call]
        with timer.whole(UPDATE):
            step.optimizer.step()
    return timer.calls()


def plain_step(step: Step, device: str) -> StepTime:
    """Runs one step as a user would run it, and waits for a GPU to finish."""
    gc.collect()
    gc.disable()
    try:
        begin, own = time.perf_counter(), time.thread_time()
        step.run()
        issued, used = time.perf_counter() - begin, time.thread_time() - own
        if device == "cuda":
            torch.cuda.synchronize()
        return StepTime(time.perf_counter() - begin, issued, used)
    finally:
        gc.enable()


def keep_busy(seconds: float) -> None:
    """Gives the GPU work for about that long; returns at once."""
    data = torch.randn(_SPIN_SIDE, _SPIN_SIDE, device="cuda")
    torch.mm(data, data)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.mm(data, data)
    torch.cuda.synchronize()
    one = max(time.perf_counter() - begin, 1e-5)
    for _ in range(min(1000, int(seconds / one) + 1)):
        torch.mm(data, data)
