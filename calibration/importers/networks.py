"""Sources that measured collectives or links only, each a small table."""

import json
import re
from pathlib import Path
from typing import Any

from calibration.importers.devices import device_of, one_node, several_nodes
from calibration.importers.source import (
    UNKNOWN_DEVICE,
    Imported,
    Importer,
    from_mib,
    matmul_fields,
    read_table,
)
from simcore.errors import MeasurementError
from simcore.units import GB, MS, TERA, US, GiB, KiB, MiB

NS = 1e-9
_SIZES = {"KiB": KiB, "MiB": MiB, "GiB": GiB}
_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "all2all": "all_to_all"}


def _read_vtrain(importer: Importer, path: Path, result: Imported) -> None:
    """nccl-tests; the out-of-place column is taken, as training reads its gradients once."""
    found = re.fullmatch(r"allreduce_([a-z0-9]+)_(\d+)gpu", path.stem)
    device = {"v100": "V100-SXM2-32GB"}.get(found[1], device_of(found[1])) if found else None
    columns = "size_bytes out_of_place_ns out_of_place_busbw_gb_s in_place_ns in_place_busbw_gb_s"
    group = int(found[2]) if found else 0
    # two V100 reach 22.6 GB/s: a pair with one brick
    links = "NVLink2-1" if found and found[1] == "v100" and group == 2 else ""
    for row in read_table(path, columns):
        if device is None:
            result.skip(f"unknown device ({path.name})", kind="collective")
            continue
        result.add(
            **importer.fields(path), device=device, kind="collective", collective="all_reduce",
            group=group, algorithm="auto", bytes=row.whole("size_bytes"),
            bytes_are="size argument of nccl-tests", seconds=row.number("out_of_place_ns") * NS,
            topology=one_node(device, links, importer.name),
        )  # fmt: skip


def _read_nnscaler(importer: Importer, path: Path, result: Imported) -> None:
    """A bandwidth above the links' would follow if the size were one member's part."""
    device = "MI250-64GB"
    for row in read_table(path, "collective n_gpus size_mb time_s"):
        result.add(
            **importer.fields(path), device=device, kind="collective",
            collective=row["collective"].replace(" ", "_"), group=row.whole("n_gpus"),
            algorithm="auto", bytes=from_mib(row.number("size_mb")),
            bytes_are="MiB of the full buffer", seconds=row.number("time_s"),
            topology=one_node(device, "", importer.name),
        )  # fmt: skip


def _read_galvatron_times(importer: Importer, path: Path, result: Imported) -> None:
    for key, value in _object(path).items():
        found = re.fullmatch(r"([a-z0-9]+)_size_(\d+)_(\d+)MB_time", key)
        if found is None or found[1] not in _KINDS:
            result.skip(f"unknown key {key}", kind="collective")
            continue
        result.add(
            **importer.fields(path), device=UNKNOWN_DEVICE, kind="collective",
            collective=_KINDS[found[1]], group=int(found[2]), algorithm="auto",
            bytes=from_mib(int(found[3])), bytes_are="MB", seconds=value * MS,
            topology=one_node(UNKNOWN_DEVICE, "NVLink", importer.name),
        )  # fmt: skip


def _read_galvatron_rates(_importer: Importer, path: Path, result: Imported) -> None:
    result.skip("a bandwidth without its size", len(_object(path)), kind="collective")


def _read_galvatron_layers(_importer: Importer, path: Path, result: Imported) -> None:
    result.skip("layers of an unknown GPU", len(_object(path)))


def _read_taccl(importer: Importer, path: Path, result: Imported) -> None:
    """α and β are us and us/MB; a record is what they say of 1 MB."""
    if not path.stem.endswith("-1MB"):
        result.skip("rescaled, in units that are not documented", kind="link")
        return
    values, device = _object(path), "V100-SXM2-32GB"
    switched = len(values["node_betas_list"]) == 1
    names = ("NVLink2-NVSwitch",) if switched else ("NVLink2-2", "NVLink2-1")
    pairs = [
        ("intra_node", values["alpha"], beta, one_node(device, name, importer.name))
        for name, beta in zip(names, values["node_betas_list"], strict=True)
    ]
    label = several_nodes(2, device, "InfiniBand-100G", importer.name)
    pairs.append(("inter_node", values["remote_alpha"], values["remote_beta"], label))
    for scope, alpha, beta, topology in pairs:
        result.add(
            **importer.fields(path), device=device, kind="link", bytes=10**6, direction="p2p",
            scope=scope, topology=topology, seconds=(alpha + beta) * US,
        )  # fmt: skip


def _read_jean_zay(importer: Importer, path: Path, result: Imported) -> None:
    """Prints of ranks interleave; the first trial, with the start-up, cannot be told apart."""
    columns = "log_file gpu n_nodes gpus_per_node last_trial_marker_seen payload_bytes duration_s"
    for row in read_table(path, columns):
        device, nodes = device_of(row["gpu"]), row.whole("n_nodes")
        if device is None:
            result.skip(f"unknown device {row['gpu']}", kind="collective")
            continue
        label = several_nodes(nodes, device, "OmniPath-100G", importer.name)
        result.add(
            **importer.fields(path), device=device, kind="collective", collective="all_reduce",
            group=nodes * row.whole("gpus_per_node"), algorithm="auto",
            bytes=row.whole("payload_bytes"), bytes_are="bytes of one member's tensor",
            seconds=row.number("duration_s"),
            topology=one_node(device, "", importer.name) if nodes == 1 else label,
        )  # fmt: skip


def _read_p2p_links(importer: Importer, path: Path, result: Imported) -> None:
    """Ranges of bandwidths; a record has the middle. p2pBandwidthLatencyTest copies 160 MB."""
    for row in read_table(path, "machine quantity unit min max source detail"):
        middle = (row.number("min") + row.number("max")) / 2
        common = importer.fields(path, note=row["source"])
        reduced = re.fullmatch(r"nccl all_reduce busbw, (\d) GiB fp32", row["quantity"])
        if row["quantity"].startswith("p2p unidirectional") and "H100 SXM" in row["machine"]:
            device = "H100-SXM5-80GB"
            direct = "P2P enabled" in row["quantity"]
            links = "NVLink4-NVSwitch" if direct else "through host"
            result.add(
                **common, device=device, kind="link", bytes=160 * 10**6, direction="p2p",
                scope="intra_node", topology=one_node(device, links, importer.name),
                seconds=160e6 / (middle * GB),
            )  # fmt: skip
        elif reduced and row["machine"].startswith("2x H100 PCIe"):
            device, size = "H100-PCIE-80GB", int(reduced[1]) * 2**30
            result.add(
                **common, device=device, kind="collective", collective="all_reduce", group=2,
                algorithm="auto", bytes=size, bytes_are="GiB", seconds=size / (middle * GB),
                topology=one_node(device, "NVLink4-bridge", importer.name),
            )  # fmt: skip
        else:
            result.skip("machine or size not stated", kind="link")


def _read_bus_bandwidths(importer: Importer, path: Path, result: Imported) -> None:
    """Bus bandwidth is 2 (n - 1) / n bytes / seconds."""
    for row in read_table(path, "machine n_nodes gpus_per_node_used payload busbw_GB_per_s"):
        found = re.match(r".*8x (H200|B200)\b", row["machine"])
        nodes, payload = row.whole("n_nodes"), re.fullmatch(r"(\d+)([KMG]iB)", row["payload"])
        if found is None or payload is None or row.number("busbw_GB_per_s") == 0:
            result.skip("machine or payload not stated, or rounded to 0", kind="collective")
            continue
        device = device_of(f"{found[1]}_sxm") or UNKNOWN_DEVICE
        group = nodes * row.whole("gpus_per_node_used")
        size = int(payload[1]) * _SIZES[payload[2]]
        machine = f"{importer.name} {row['machine']}"
        label = (
            one_node(device, "", machine)
            if nodes == 1
            else several_nodes(nodes, device, "network", machine)
        )
        result.add(
            **importer.fields(path), device=device, kind="collective", collective="all_reduce",
            group=group, algorithm="auto", bytes=size, bytes_are="payload", topology=label,
            seconds=2 * (group - 1) / group * size / (row.number("busbw_GB_per_s") * GB),
        )  # fmt: skip


def _read_best_products(importer: Importer, path: Path, result: Imported) -> None:
    """The best product of a search over shapes: a bound, not a typical one."""
    columns = "accelerator dtype max_achieved_tflops spec_tflops best_shape_MxNxK"
    for row in read_table(path, columns, "torch_version notes"):
        shape = re.fullmatch(r"(\d+)x(\d+)x(\d+)", row["best_shape_MxNxK"])
        name = row["accelerator"].lower().removeprefix("nvidia ").replace(" ", "_")
        device = device_of(name)
        if shape is None or device is None:
            result.skip("shape or device not known")
            continue
        m, n, k = (int(size) for size in shape.groups())
        seconds = 2 * m * n * k / (row.number("max_achieved_tflops") * TERA)
        result.add(
            **importer.fields(path, software=row.get("torch_version", "")), device=device,
            **matmul_fields(m, n, k, row["dtype"]), phase="F", target="mamf", seconds=seconds,
        )  # fmt: skip


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise MeasurementError(f"{path.parent.name}/{path.name}: {error}") from None
    if not isinstance(content, dict):
        raise MeasurementError(f"{path.parent.name}/{path.name}: must be an object")
    return content


VTRAIN = Importer("vtrain", "kernel", {"allreduce_*.csv": _read_vtrain}, "nccl-tests, fp32")
NNSCALER = Importer(
    "nnscaler_mi200", "kernel+launch+sync", {"comm_intra_*.csv": _read_nnscaler},
    "the authors' profiler",
)  # fmt: skip
GALVATRON = Importer(
    "galvatron",
    "kernel+launch",
    {
        "sp_time_*.json": _read_galvatron_times,
        "allreduce_bandwidth_*.json": _read_galvatron_rates,
        "p2p_bandwidth_*.json": _read_galvatron_rates,
        "computation_profiling_*.json": _read_galvatron_layers,
    },
    "nccl-tests style",
)
TACCL = Importer("taccl", "kernel", {"topo-*.json": _read_taccl}, "the authors' link profiler")
JEAN_ZAY = Importer(
    "bigscience_jeanzay", "kernel+launch+sync", {"allreduce_4GB.csv": _read_jean_zay},
    "torch all_reduce, wall clock of each rank, with synchronisation",
)  # fmt: skip
P2P_LINKS = Importer(
    "p2p_links", "kernel", {"p2p_links.csv": _read_p2p_links}, "quoted in public threads"
)
ML_ENGINEERING = Importer(
    "ml_engineering",
    "kernel+launch",
    {
        "allreduce_busbw.csv": _read_bus_bandwidths,
        "mamf_matmul_tflops.csv": _read_best_products,
    },
    "all_reduce_bench.py, nccl-tests; mamf-finder",
)
