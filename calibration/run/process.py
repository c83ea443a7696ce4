"""What a process of a run sets up for itself: its core, its end with its parent, its memory."""

import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import torch

_PROCESS = Path("/", "proc", "self")
_SET_PARENT_DEATH_SIGNAL = 1  # prctl
_CLEAR_PEAK = "5"


def end_with_parent(parent: int) -> None:
    """Lets the kernel end this process when its parent ends, however that does (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def take_core(rank: int, num_ranks: int) -> None:
    """Pins this process to one core where there are enough, and torch to one thread."""
    torch.set_num_threads(1)
    if not hasattr(os, "sched_getaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def use_loopback() -> None:
    """Lets gloo connect over the loopback interface; it asks C's environment, not Python's."""
    names = {name for _, name in socket.if_nameindex()}
    if "lo" in names:
        os.putenv("GLOO_SOCKET_IFNAME", "lo")


def start_peak(device: torch.device) -> None:
    """Begins to watch the peak of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (_PROCESS / "clear_refs").write_text(_CLEAR_PEAK)
    except OSError:
        return  # the peak since the start is all there is


def peak_memory(device: torch.device) -> int:
    """Returns the peak since `start_peak`: of the allocator on a GPU, else of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory() -> int:
    """Returns the bytes that this process has in memory now, 0 where that is not known."""
    return _status("VmRSS")


def _status(key: str) -> int:
    try:
        lines = (_PROCESS / "status").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{key}:")]
    return int(found[0]) * 1024 if found else 0
