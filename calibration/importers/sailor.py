"""Sailor: operators, layers, collectives and links of seven GPU kinds.

Ops that were too large to run have a time of exactly 10 s, and are no measurement.

Two things that the tables do not say follow from rates above the peaks. The backward of a product
with weights has one gradient, not two: an A100 would do 481 TFLOP/s in fp16 otherwise, 2.02 times
its forward, and all GPUs show the same 2 (the products of attention do not). And the fp32 products
of GPUs that have TF32 use it: an A100 does 118 TFLOP/s.
"""

import json
import math
from pathlib import Path
from typing import Any

from calibration.importers import transformer_rows
from calibration.importers.aceso import LENGTH, add_collective, link_seconds
from calibration.importers.devices import device_of, one_node, several_nodes
from calibration.importers.source import Imported, Importer, Row, read_table
from calibration.importers.transformer_rows import Layer
from calibration.records import Kind
from simcore.errors import MeasurementError
from simcore.units import US, GiB, MiB

# hidden size, heads; the weights of the logits' row give a vocabulary of 50272
MODELS = {"OPT-350": (1024, 16), "OPT-30": (7168, 56)}
_TF32 = frozenset({"A100-SXM4-40GB", "A100-SXM4-80GB", "GH200-96GB", "RTX-3090-24GB"})
# two RTX 3090 reach 49 GB/s, more than PCIe carries: a bridge of four bricks; four GPUs do not
_PAIRS = {"RTX-3090-24GB": "NVLink3-bridge-4"}
_PLACEHOLDER_US = 1e7
_FITTED_MIB = tuple(2**power for power in range(11))  # range of the measured links


def _device(row: Row, result: Imported, kind: Kind, rows: int = 1) -> str | None:
    device = device_of(row["gpu"])
    if device is None:
        result.skip(f"unknown device {row['gpu']}", rows, kind=kind)
    return device


def _read_ops(importer: Importer, path: Path, result: Imported) -> None:
    columns = (
        "model gpu precision micro_batch tp op_name forward_us backward_us input_mb output_mb "
        "weights_mb activations_mb"
    )
    for row in read_table(path, columns):
        device, sizes = _device(row, result, "op", 2), MODELS.get(row["model"])
        if device is None:
            continue
        if sizes is None:
            result.skip(f"sizes of {row['model']} are not known", 2)
            continue
        dtype = row["precision"]
        layer = Layer(
            row.whole("micro_batch"), LENGTH, *sizes, row.whole("tp"), dtype,
            product_dtype="tf32" if dtype == "fp32" and device in _TF32 else dtype,
            input_gradient_only=True,
        )  # fmt: skip
        seconds = (_seconds(row, f"{way}_us") for way in ("forward", "backward"))
        common = importer.fields(path, device=device)
        transformer_rows.add_rows(result, layer, row["op_name"], seconds, common)


def _seconds(row: Row, column: str) -> float | None:
    microseconds = row.number(column)
    return None if microseconds == _PLACEHOLDER_US else microseconds * US


def _read_layers(importer: Importer, path: Path, result: Imported) -> None:
    """Whole layers: their ops are not named, so class ``other``."""
    columns = "model gpu micro_batch tp layer forward_s backward_s update_s"
    for row in read_table(path, columns):
        device = _device(row, result, "op", 3)
        if device is None:
            continue
        target = "{model} layer {layer}, micro-batch {micro_batch}, tensor parallel {tp}"
        common = importer.fields(
            path, device=device, kind="op", op_class="other", dtype="fp16",
            target=target.format(**row), note="a whole layer, by CUDA events",
        )  # fmt: skip
        for phase, column in (("F", "forward_s"), ("B", "backward_s"), ("U", "update_s")):
            result.add(**common, phase=phase, seconds=row.number(column))


def _read_collectives(importer: Importer, path: Path, result: Imported) -> None:
    for row in read_table(path, "gpu precision collective gpus data_size_mb time_ms"):
        device = _device(row, result, "collective")
        if device is not None:
            common = importer.fields(path, device=device)
            links = _PAIRS.get(device, "") if row["gpus"] == "2" else ""
            add_collective(result, row, common, one_node(device, links, importer.name))


def _scope(device: str, scope: str, machine: str) -> str:
    if scope == "intra_node":
        return one_node(device, _PAIRS.get(device, ""), machine)
    return several_nodes(2, device, "network", machine)


def _read_links(importer: Importer, path: Path, result: Imported) -> None:
    for row in read_table(path, "gpu scope data_size_mb bandwidth_gib_per_s"):
        device = _device(row, result, "link")
        if device is None:
            continue
        size, seconds = link_seconds(row)
        result.add(
            **importer.fields(path), device=device, kind="link", bytes=size, seconds=seconds,
            direction="p2p", scope=row["scope"],
            topology=_scope(device, row["scope"], importer.name),
        )  # fmt: skip


def _read_fits(importer: Importer, path: Path, result: Imported) -> None:
    """The authors' parabola of GiB/s over log2 of MiB, at the sizes that they measured.

    That this is its form, the measured points of one GPU a node show (they are on it). With more
    GPUs a node it is what all of them reach together.
    """
    tables = _load(path).get("inter", {})
    for gpu, by_count in tables.items():
        device = device_of(gpu)
        if device is None:
            result.skip(f"unknown device {gpu}", len(by_count), kind="link")
            continue
        for count, (coefficients, _) in by_count.items():
            if int(count) > 1:
                result.skip("bandwidth of several pairs together", len(_FITTED_MIB), kind="link")
                continue
            for size in _FITTED_MIB:
                _add_fit(importer, path, result, (device, size, coefficients))


def _add_fit(
    importer: Importer, path: Path, result: Imported, point: tuple[str, int, list[float]]
) -> None:
    device, size, (c2, c1, c0) = point
    x = math.log2(size)
    rate = (c2 * x * x + c1 * x + c0) * GiB
    result.add(
        **importer.fields(path, how="the authors' fit of bandwidth against size"), device=device,
        kind="link", bytes=size * MiB, seconds=size * MiB / rate, direction="p2p",
        scope="inter_node", topology=_scope(device, "inter_node", importer.name),
    )  # fmt: skip


def _read_unstated_fits(_importer: Importer, path: Path, result: Imported) -> None:
    rows = sum(len(by_count) for by_count in _load(path).values())
    result.skip("coefficients of a fit whose form the data do not show", rows, kind="link")


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise MeasurementError(f"{path.parent.name}/{path.name}: {error}") from None
    if not isinstance(content, dict):
        raise MeasurementError(f"{path.parent.name}/{path.name}: must be an object")
    return content


IMPORTER = Importer(
    name="sailor",
    contains="kernel+launch+sync",
    floor={"F": 50 * US, "B": 95 * US},  # about the shortest hundredth of each GPU's rows
    how="Aceso's profiler; layers by CUDA events; links by send and receive of torch (NCCL)",
    patterns={
        "ops_*.csv": _read_ops,
        "layers_*.csv": _read_layers,
        "collectives.csv": _read_collectives,
        "p2p_bandwidth.csv": _read_links,
        "network_coeffs_all_homo.json": _read_fits,
        "intra_node_bandwidths.json": _read_unstated_fits,
    },
)
