"""Vidur: ops of language models on one GPU (fp16, forward), all-reduce and send/recv.

Two things that the tables do not say follow from the rates. phi-2 runs attention and MLP side by
side, and its ``add`` sums both with the residual: two additions, else they would have half the
bandwidth of other models'. And the serving kernels of the rotary embedding and of the gated
activation move single 2-byte elements: an A100 would reach 0.9 and 1.0 TB/s with them, an H100 1.5
and 1.9, half of what their additions do. Their bytes are counted as those of 4-byte elements.
"""

import re
from pathlib import Path
from typing import Any

from calibration.importers.devices import device_of, one_node, several_nodes
from calibration.importers.source import (
    Imported,
    Importer,
    Row,
    elements_fields,
    matmul_fields,
    read_table,
)
from calibration.records import Kind
from simcore.units import MS

_OPS = (
    "emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
    "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
_PARALLEL = ("phi-2",)  # models whose attention and MLP are side by side
_ONE_BY_ONE = 2  # what moving single 2-byte elements costs over moving several at once
_SIZES = (
    "n_head n_kv_head n_embd n_expanded_embd vocab_size use_gated_mlp num_tokens "
    "num_tensor_parallel_workers"
)
# network -> device, links inside a node of that many members
_MACHINES = {
    "a100_dgx": ("A100-SXM4-80GB", {}),
    "h100_dgx": ("H100-SXM5-80GB", {}),
    "a100_pairwise_nvlink": ("A100-PCIE-80GB", {2: "NVLink3-bridge", 4: "NVLink3-bridge+PCIe4x16"}),
    "h100_pairwise_nvlink": ("H100-NVL-94GB", {2: "NVLink4-bridge", 4: "NVLink4-bridge+PCIe5x16"}),
    "a40_pairwise_nvlink": ("A40-48GB", {2: "NVLink3-bridge", 4: "NVLink3-bridge+PCIe4x16"}),
}


def _fields(row: Row, op: str, *, parallel: bool) -> dict[str, Any]:
    """Returns what one op of a row is; heads and inner width are split over the workers."""
    tokens, shards = row.whole("num_tokens"), row.whole("num_tensor_parallel_workers")
    heads, kv_heads = row.whole("n_head"), row.whole("n_kv_head")
    hidden, gated = row.whole("n_embd"), row["use_gated_mlp"] == "True"
    inner, width = row.whole("n_expanded_embd") // shards, hidden // heads
    queries, keys = heads // shards * width, max(1, kv_heads // shards) * width
    products = {
        "attn_pre_proj": (queries + 2 * keys, hidden),
        "attn_post_proj": (hidden, queries),
        "mlp_up_proj": (inner * (2 if gated else 1), hidden),
        "mlp_down_proj": (hidden, inner),
    }
    if op in products:
        return matmul_fields(tokens, *products[op], "fp16")
    others = {  # class, tensors read and written, width
        "mlp_act": ("pointwise", 3 * _ONE_BY_ONE if gated else 2, inner),
        "attn_rope": ("pointwise", 2 * _ONE_BY_ONE, queries + keys),
        "add": ("pointwise", 6 if parallel else 3, hidden),
        "emb": ("embedding", 2, hidden),
    }
    op_class, passes, cols = others.get(op, ("normalisation", 2, hidden))
    return elements_fields(op_class, "fp16", passes, tokens, cols)


def _read_compute(importer: Importer, path: Path, result: Imported) -> None:
    found = re.fullmatch(r"compute_([a-z0-9]+)_.+", path.stem)
    device = device_of(found[1]) if found else None
    optional = " ".join(f"{op}_{kind}_ms" for op in _OPS for kind in ("median", "std"))
    common = importer.fields(path, device=device, phase="F")
    parallel = path.stem.endswith(_PARALLEL)
    for row in read_table(path, _SIZES, optional):
        present = [op for op in _OPS if row.get(f"{op}_median_ms")]
        if device is None:
            result.skip(f"unknown device ({path.name})", len(present))
            continue
        for op in present:
            spread = row.number(f"{op}_std_ms") * MS if row.get(f"{op}_std_ms") else None
            seconds = row.number(f"{op}_median_ms") * MS
            fields = _fields(row, op, parallel=parallel)
            result.add(**common, **fields, target=op, seconds=seconds, spread=spread)


def _topology(row: Row, source: str) -> tuple[str, str] | None:
    """Returns device and topology of a row, None of an unknown machine."""
    machine = _MACHINES.get(row["network"])
    if machine is None:
        return None
    device, links = machine
    workers, per_node = row.whole("num_workers"), row.whole("devices_per_node")
    if workers <= per_node:
        return device, one_node(device, links.get(workers, ""), source)
    return device, several_nodes(
        workers // per_node, device, "network", f"{source} {row['network']}"
    )


def _read_network(importer: Importer, path: Path, result: Imported) -> None:
    columns = (
        "network collective num_workers devices_per_node max_devices_per_node size_bytes median_ms "
        "min_ms max_ms n_ranks_averaged"
    )
    for row in read_table(path, columns):
        known = _topology(row, importer.name)
        link = row["collective"] == "send_recv"
        if known is None:
            kind: Kind = "link" if link else "collective"
            result.skip(f"unknown machine {row['network']}", kind=kind)
            continue
        common = importer.fields(
            path, device=known[0], topology=known[1], bytes=row.whole("size_bytes"),
            seconds=row.number("median_ms") * MS,
        )  # fmt: skip
        group = row.whole("num_workers")
        if link:
            inside = group <= row.whole("devices_per_node")
            scope = "intra_node" if inside else "inter_node"
            result.add(**common, kind="link", direction="p2p", scope=scope)
        else:
            result.add(
                **common, kind="collective", collective=row["collective"], group=group,
                algorithm="auto", bytes_are="fp16 buffer of one member",
            )  # fmt: skip


IMPORTER = Importer(
    name="vidur",
    contains="kernel",
    how="CUDA time of each op or collective by the torch profiler, median",
    patterns={"compute_*.csv": _read_compute, "network_*.csv": _read_network},
)
