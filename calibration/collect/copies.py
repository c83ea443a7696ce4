"""Copies between the memory of a GPU, of the host and of a second GPU -> seconds by size.

Written for CUDA; host memory is page-locked, as copies beside compute need it. Each way is timed
alone, then with the other way at once, then beside compute. Events of the copying stream are read.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

SIZES = tuple(1024 * 4**power for power in range(9))  # 1 kB to 64 MB
_SIDE = 4096  # of the matrices multiplied beside copies
_PRODUCTS = 20


class CopyTime(NamedTuple):
    """One way of one size."""

    direction: str  # h2d, d2h, p2p; "+" joins two at once; "beside compute" is added
    num_bytes: int
    seconds: float
    spread: float


class BesideCompute(NamedTuple):
    """How much longer compute takes while copies run, and copies while compute runs."""

    compute: float  # factor
    copy: float  # factor


def copy_times(repeats: int = 9, sizes: Sequence[int] = SIZES) -> list[CopyTime]:
    """Returns the times of all copies that this machine's first GPU can make."""
    found = []
    for size in sizes:
        ways = _ways(size)
        for name, run in ways.items():
            found.append(CopyTime(name, size, *_timed([run], repeats)))
        if "p2p" in ways:
            found.append(CopyTime("p2p+p2p", size, *_timed([ways["p2p"], _back(size)], repeats)))
        both = [ways["h2d"], ways["d2h"]]
        found.append(CopyTime("h2d+d2h", size, *_timed(both, repeats)))
    return found


def beside_compute(num_bytes: int = SIZES[-1], repeats: int = 7) -> BesideCompute:
    """Returns what a copy from the host and matrix products on the GPU cost each other."""
    copy = _ways(num_bytes)["h2d"]
    matrix = torch.randn(_SIDE, _SIDE, device="cuda")

    def compute() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix)

    compute_alone = _timed([compute], repeats)[0]
    copy_alone = _timed([copy], repeats)[0]
    copies = max(1, int(1.5 * compute_alone / copy_alone))

    def copy_on() -> None:
        for _ in range(copies):
            copy()

    with_copies = _streams([compute, copy_on], repeats)
    return BesideCompute(
        compute=max(1.0, with_copies[0] / compute_alone),
        copy=max(1.0, with_copies[1] / (copies * copy_alone)),
    )


def _ways(num_bytes: int) -> dict[str, Callable[[], object]]:
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    back = torch.empty_like(on_host, pin_memory=True)
    source = torch.empty_like(on_gpu)
    ways: dict[str, Callable[[], object]] = {
        "h2d": lambda: on_gpu.copy_(on_host, non_blocking=True),
        "d2h": lambda: back.copy_(source, non_blocking=True),
    }
    if torch.cuda.device_count() > 1:
        other = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
        ways["p2p"] = lambda: other.copy_(on_gpu, non_blocking=True)
    return ways


def _back(num_bytes: int) -> Callable[[], object]:
    """Returns the copy from the second GPU to the first."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    return lambda: target.copy_(source, non_blocking=True)


def _timed(runs: Sequence[Callable[[], object]], repeats: int) -> tuple[float, float]:
    """Returns median and spread of the seconds until all of some work is done, started at once."""
    totals = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin, ends = _launch(runs)
        torch.cuda.synchronize()
        totals.append(max(begin.elapsed_time(end) for end in ends) * 1e-3)
    kept = totals[1:]
    return statistics.median(kept), statistics.stdev(kept) if len(kept) > 1 else 0.0


def _streams(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Returns the median seconds of each of some pieces of work that run at once."""
    rows = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin, ends = _launch(runs)
        torch.cuda.synchronize()
        rows.append([begin.elapsed_time(end) * 1e-3 for end in ends])
    return [statistics.median(column) for column in zip(*rows[1:], strict=True)]


def _launch(
    runs: Sequence[Callable[[], object]],
) -> tuple["torch.cuda.Event", list["torch.cuda.Event"]]:
    """Starts each piece of work on a stream of its own; returns the events around them."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    ends = []
    for run in runs:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_event(begin)
        with torch.cuda.stream(stream):
            run()
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
        ends.append(end)
    return begin, ends
