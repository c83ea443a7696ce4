"""PipeDream's layer profiles: forward and backward of every layer of a model."""

import re
from pathlib import Path

from calibration.importers.source import UNKNOWN_DEVICE, Imported, Importer
from simcore.errors import MeasurementError
from simcore.units import MS

_NODE = re.compile(
    r"(?P<id>\w+) -- (?P<layer>.+) -- forward_compute_time=(?P<F>[\d.]+), "
    r"backward_compute_time=(?P<B>[\d.]+), activation_size=.+, parameter_size=[\d.]+"
)
_NOTE = "a layer of a minibatch; the GPU is not stated (a V100 by its speed)"


def _read(importer: Importer, path: Path, result: Imported) -> None:
    where = f"{path.parent.name}/{path.name}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise MeasurementError(f"{where}: {error}") from None
    model = path.name.removesuffix(".graph.txt").removesuffix(".txt")
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("\t"):
            continue
        found = _NODE.fullmatch(line.strip())
        if found is None:
            raise MeasurementError(f"{where}:{number}: not a node: {line[:60]!r}")
        if found["layer"].startswith("Input"):
            result.skip("the input: its time is of loading data", 2)
            continue
        for phase in ("F", "B"):
            result.add(
                **importer.fields(path), device=UNKNOWN_DEVICE, kind="op", op_class="other",
                dtype="fp32", target=f"{model} {found['id']} {found['layer']}", phase=phase,
                seconds=float(found[phase]) * MS, note=_NOTE,
            )  # fmt: skip


IMPORTER = Importer(
    name="pipedream",
    contains="kernel+launch+sync",
    how="hooks around every layer, CUDA synchronised, mean over minibatches",
    patterns={"*graph.txt": _read},
)
