"""Small fixed pieces of work -> what one device can do: arithmetic, memory, the host's launches.

All run on the device of the process that asks, a CPU rank on its one core.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from calibration.collect.call_times import CallTimer

LAYERS = 40  # of the model whose ops are too small to take time of their own
WIDTH = 8
SIDE = 1024  # of the matrices of the arithmetic probe; 4 times that on a GPU
STREAM_BYTES = 64 * 2**20  # read, and written once more, by the memory probe
CACHED_BYTES = 256 * 2**10


class Launch(NamedTuple):
    """What the host takes for an op that is nothing to the device, s."""

    per_op: float  # in a real step: the module's Python, autograd, the dispatcher
    in_call: float  # the part that is inside a timed call
    num_ops: int  # that the first was averaged over


def clock(device: str) -> float:
    """Returns seconds: of the core on a CPU, of the wall after a GPU has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def median_of(run: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Returns median and standard deviation of the seconds of work; its first run is dropped."""
    seconds = []
    for _ in range(repeats + 1):
        begin = clock(device)
        run()
        seconds.append(clock(device) - begin)
    kept = seconds[1:]
    return statistics.median(kept), statistics.stdev(kept) if len(kept) > 1 else 0.0


def product_time(device: str, dtype: torch.dtype, repeats: int = 7) -> tuple[int, float, float]:
    """Returns the side of square matrices, and the seconds of their product with its spread."""
    side = SIDE if device == "cpu" else 4 * SIDE
    a = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    return (side, *median_of(lambda: torch.mm(a, a, out=out), device, repeats))


def copy_time(device: str, num_bytes: int, repeats: int = 15) -> tuple[float, float]:
    """Returns the seconds in which memory of that size is copied, and their spread."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    rounds = max(1, CACHED_BYTES * 16 // num_bytes)

    def run() -> None:
        for _ in range(rounds):
            target.copy_(source)

    seconds, spread = median_of(run, device, repeats)
    return seconds / rounds, spread / rounds


def launch_time(device: str, repeats: int = 15) -> Launch:
    """Returns what an op costs the host, from a model whose tensors are tiny.

    On a CPU the ops run in the host's own time; tiny as they are, that is the call itself.
    """
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(device)
    data = torch.randn(2, WIDTH, device=device)

    # a GPU's backward is issued by a thread of its own, for which this one waits
    now = time.thread_time if device == "cpu" else time.perf_counter

    def issue() -> float:
        model.zero_grad(set_to_none=True)
        begin = now()
        model(data).sum().backward()
        return now() - begin

    times = [issue() for _ in range(repeats + 3)][3:]
    timer = CallTimer("cpu")
    with timer:
        issue()
    calls = timer.calls()
    numbers = [i for i, func in enumerate(calls.targets) if not func.is_view and not _free(func)]
    in_call = statistics.median(calls.seconds[i] for i in numbers)
    per_op = statistics.median(times) / len(numbers)
    return Launch(max(per_op, in_call), in_call, len(numbers))


def _free(func: object) -> bool:
    """Returns whether an op only makes room or another name for memory."""
    return any(word in str(func) for word in ("detach", "empty", "_unsafe_view"))
