"""Aceso's profiles of 8 x V100-SXM2-32GB: operators, collectives, point to point.

Sailor's tables come from the same profiler, and are read with the same functions.
"""

from pathlib import Path

from calibration.importers import resnet_rows, transformer_rows
from calibration.importers.devices import one_node, several_nodes
from calibration.importers.resnet_rows import Image
from calibration.importers.source import Imported, Importer, Row, from_mib, read_table
from calibration.importers.transformer_rows import Layer
from calibration.records import COLLECTIVES
from simcore.units import MS, US, GiB

DEVICE = "V100-SXM2-32GB"
# GPT: hidden size, heads (upstream model_configs.py); sequence length 2048
GPT = {
    "350M": (1024, 16),
    "1_3B": (2048, 32),
    "2_6B": (2560, 32),
    "6_7B": (4096, 32),
    "13B": (5120, 40),
    "scale-layer": (512, 8),
}
LENGTH = 2048
_COPIES = "gathers and scatters lists of tensors: the copies to and from them are inside"
_OP_COLUMNS = (
    "model micro_batch tp tp_algo op_name forward_us backward_us input_mb output_mb weights_mb "
    "activations_mb fwd_reserved_mb bwd_reserved_mb"
)


def _read_gpt(importer: Importer, path: Path, result: Imported) -> None:
    common = importer.fields(path, device=DEVICE)
    for row in read_table(path, _OP_COLUMNS):
        size = GPT.get(row["model"].removeprefix("gpt_"))
        if size is None:
            result.skip(f"sizes of {row['model']} are not known", 2)
            continue
        layer = Layer(
            row.whole("micro_batch"), LENGTH, *size, row.whole("tp"), "fp16"
        )  # fmt: skip
        seconds = (row.number(f"{way}_us") * US for way in ("forward", "backward"))
        transformer_rows.add_rows(result, layer, row["op_name"], seconds, common)


def _read_resnet(importer: Importer, path: Path, result: Imported) -> None:
    common = importer.fields(path, device=DEVICE)
    rows = list(read_table(path, _OP_COLUMNS))
    widths = {
        row["model"]: resnet_rows.width_of(
            row.number("output_mb"), row.whole("micro_batch"), "fp32"
        )
        for row in rows
        if row["op_name"] == "conv1"
    }
    for row in rows:
        width = widths.get(row["model"])
        if width is None:
            result.skip("width is not known: no row conv1 of the model", 2)
            continue
        image = Image(row.whole("micro_batch"), width, row.whole("tp"), "fp32")
        numbers = {
            "forward": row.number("forward_us") * US,
            "backward": row.number("backward_us") * US,
            "weights_mb": row.number("weights_mb"),
        }
        resnet_rows.add_rows(result, image, row["op_name"], numbers, common)


def _read_t5(_importer: Importer, path: Path, result: Imported) -> None:
    rows = sum(2 for _ in read_table(path, _OP_COLUMNS))
    result.skip("T5: heads and the split of its sequences are not known", rows)


def add_collective(
    result: Imported, row: Row, common: dict[str, object], topology: str, name: str = ""
) -> None:
    """Adds one row of ``collective, gpus, data_size_mb, time_ms``.

    Sizes are of one member's tensor in MiB: of an all-gather that is one n-th of the full buffer
    (bandwidths would be above the links' otherwise, and an eighth of the all-reduce's if not).
    """
    kind, group = name or row["collective"], row.whole("gpus")
    if kind not in COLLECTIVES:
        result.skip(f"unknown collective {kind}", kind="collective")
        return
    size = from_mib(row.number("data_size_mb"))
    if size == 0:
        result.skip("size rounded to 0 MB", kind="collective")
        return
    gathered = kind == "all_gather"
    result.add(
        **common, kind="collective", collective=kind, group=group, algorithm="auto",
        bytes=size * group if gathered else size, topology=topology,
        bytes_are="MiB of one member's tensor" if gathered else "MiB of the full buffer",
        seconds=row.number("time_ms") * MS,
        note="" if kind == "all_reduce" else _COPIES,
    )  # fmt: skip


def link_seconds(row: Row) -> tuple[int, float]:
    """Returns bytes and seconds of a row ``data_size_mb, bandwidth_gib_per_s``."""
    size = from_mib(row.number("data_size_mb"))
    rate = row.number("bandwidth_gib_per_s") * GiB
    return size, size / rate if rate > 0 else 0.0


def _read_collectives(importer: Importer, path: Path, result: Imported) -> None:
    common = importer.fields(path, device=DEVICE)
    for row in read_table(path, "collective gpus data_size_mb time_ms"):
        # two members reach 42 GB/s: a pair with two bricks
        links = "NVLink2-2" if row["gpus"] == "2" else ""
        add_collective(result, row, common, one_node(DEVICE, links, importer.name))


def _read_links(importer: Importer, path: Path, result: Imported) -> None:
    common = importer.fields(path, device=DEVICE)
    topologies = {
        "intra_node": one_node(DEVICE, "NVLink2-2", importer.name),
        "inter_node": several_nodes(2, DEVICE, "InfiniBand", importer.name),
    }
    for row in read_table(path, "scope data_size_mb bandwidth_gib_per_s"):
        size, seconds = link_seconds(row)
        result.add(
            **common, kind="link", bytes=size, seconds=seconds, direction="p2p",
            scope=row["scope"], topology=topologies.get(row["scope"], row["scope"]),
        )  # fmt: skip


IMPORTER = Importer(
    name="aceso_v100",
    contains="kernel+launch+sync",
    how="time.time() around repeated runs with CUDA synchronisation, averaged",
    floor={"F": 40 * US, "B": 75 * US},  # its README; the shortest hundredth of its rows
    patterns={
        "ops_gpt_*.csv": _read_gpt,
        "ops_resnet_*.csv": _read_resnet,
        "ops_t5_*.csv": _read_t5,
        "collectives.csv": _read_collectives,
        "p2p_bandwidth.csv": _read_links,
    },
)
