"""Condensed GPU timelines of public traces: copies are links, kernels carry no shapes."""

import re
from pathlib import Path

from calibration.importers.devices import one_node
from calibration.importers.source import Imported, Importer, read_table
from simcore.units import US

_WAYS = {"HtoD": "h2d", "DtoH": "d2h"}
# part of the file name -> device, link to the host
_MACHINES = {
    "V100-SXM2-32GB": ("V100-SXM2-32GB", "PCIe3x16"),
    "xA100": ("A100-SXM4-80GB", "PCIe4x16"),
}


def _read(importer: Importer, path: Path, result: Imported) -> None:
    machine = next((known for part, known in _MACHINES.items() if part in path.stem), None)
    for row in read_table(path, "kind name start_us dur_us stream bytes grid block"):
        copy = re.match(r"Memcpy (HtoD|DtoH|DtoD) \((.+)\)", row["name"])
        if machine is None:
            result.skip(f"unknown device ({path.name})")
        elif row["kind"] != "memcpy" or copy is None or not row["bytes"]:
            what = "collective" if "nccl" in row["name"].lower() else row["kind"]
            result.skip(f"a {what} without its shape")
        elif row.whole("bytes") == 0:
            result.skip("a copy of 0 bytes")
        elif copy[1] == "DtoD":
            result.add(
                **importer.fields(path), device=machine[0], kind="op", op_class="copy",
                dtype="fp32", dims={"elements": -(-row.whole("bytes") // 4)}, target="memcpy",
                traffic=2 * row.whole("bytes"), seconds=row.number("dur_us") * US,
            )  # fmt: skip
        else:
            result.add(
                **importer.fields(path), device=machine[0], kind="link",
                bytes=row.whole("bytes"), direction=_WAYS[copy[1]], scope="host",
                seconds=row.number("dur_us") * US, note=copy[2],
                topology=one_node(machine[0], f"{machine[1]} {_memory(copy[2])}", importer.name),
            )  # fmt: skip


def _memory(ends: str) -> str:
    """Returns whether the host's memory is pinned; else a copy goes through a buffer."""
    return "pinned" if "Pinned" in ends else "pageable"


IMPORTER = Importer(
    name="traces",
    contains="kernel",
    how="torch profiler (Kineto), events of the GPU only",
    patterns={"*.csv": _read},
)
