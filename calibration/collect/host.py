"""This machine -> the devices that can be measured here, their names, cores and memory.

Nothing that names the machine or its user is kept.
"""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from simcore.errors import UsageError

CPU_KIND = "local-CPU-core"
MOST_RANKS = 16  # processes that talk to each other in a collection
_SYSTEM = Path("/", "sys")
_MEMORY_USED = 0.95  # of what is available; the rest is for the processes themselves


class Host(NamedTuple):
    """The devices to measure."""

    device: str  # torch's name: cpu or cuda
    kind: str  # as profiles name it
    num_devices: int  # cores, one rank each, or GPUs
    description: str
    memory: int  # bytes that one device can have; 0 = asked of the device

    @property
    def software(self) -> str:
        """Returns the versions that the measurements hold for."""
        return f"torch {version('torch')}"


def find_host(device: str) -> Host:
    """Returns what there is to measure.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for GPUs where there are any.

    Raises:
        UsageError: a GPU is asked for where there is none.
    """
    import torch  # noqa: PLC0415 - takes a second

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not num_gpus:
        raise UsageError("--device cuda: torch finds no CUDA device here")
    if num_gpus and device != "cpu":
        name = torch.cuda.get_device_name(0)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", name.removeprefix("NVIDIA ")).strip("-")
        return Host("cuda", f"local-{slug}", num_gpus, name, 0)
    ranks = min(count_cores(), MOST_RANKS)
    words = f"one core of {processor_name()}, one torch thread"
    return Host("cpu", CPU_KIND, ranks, words, int(free_memory() * _MEMORY_USED) // ranks)


def count_cores() -> int:
    """Returns the number of physical cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 2) // 2)
    allowed = os.sched_getaffinity(0)
    return len({_core_of(cpu) for cpu in allowed})


def _core_of(cpu: int) -> tuple[str, str]:
    folder = _SYSTEM / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
    try:
        return (folder / "physical_package_id").read_text(), (folder / "core_id").read_text()
    except OSError:
        return "", str(cpu)


def processor_name() -> str:
    """Returns the model of the processor, or its architecture where that is not told."""
    try:
        lines = Path("/", "proc", "cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def free_memory() -> int:
    """Returns the bytes that processes can still get: of the machine, or of a container's limit."""
    limits = [_meminfo("MemAvailable")]
    group = _SYSTEM / "fs" / "cgroup"
    try:
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        limits.append(max(most - used, 0))
    except (OSError, ValueError):
        pass  # no container, or no limit
    known = [limit for limit in limits if limit > 0]
    return min(known) if known else 2**30


def _meminfo(key: str) -> int:
    try:
        lines = Path("/", "proc", "meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{key}:")]
    return int(found[0]) * 1024 if found else 0
