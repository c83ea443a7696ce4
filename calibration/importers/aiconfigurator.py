"""NVIDIA aiconfigurator: bf16 GEMM, causal prefill attention, NCCL inside a node."""

import re
from pathlib import Path

from calibration.importers.devices import device_of, one_node
from calibration.importers.source import Imported, Importer, matmul_fields, read_table
from calibration.records import Kind
from simcore.units import MS

_KINDS = {"alltoall": "all_to_all"}


def _device(path: Path, pattern: str, result: Imported, kind: Kind = "op") -> str | None:
    """Returns the device that a file name ends with; without one counts all its rows."""
    found = re.fullmatch(pattern, path.stem)
    device = device_of(found[1]) if found else None
    if device is None:
        with path.open(encoding="utf-8") as lines:
            rows = max(0, sum(1 for _ in lines) - 1)
        result.skip(f"unknown device ({path.name})", rows, kind=kind)
    return device


def _read_gemm(importer: Importer, path: Path, result: Imported) -> None:
    device = _device(path, r"gemm_bf16_(.+)", result)
    if device is None:
        return
    common = importer.fields(path, device=device, phase="F", target="gemm")
    for row in read_table(path, "m n k latency_ms"):
        m, n, k = (row.whole(name) for name in ("m", "n", "k"))
        seconds = row.number("latency_ms") * MS
        result.add(**common, **matmul_fields(m, n, k, "bf16"), seconds=seconds)


def _read_attention(importer: Importer, path: Path, result: Imported) -> None:
    """Dims are those of the whole product; ``causal`` says that a mask leaves half of it."""
    device = _device(path, r"context_attention_bf16_(.+)", result)
    if device is None:
        return
    common = importer.fields(path, device=device, phase="F", target="attention")
    columns = "batch seq_len num_heads num_kv_heads head_dim latency_ms"
    for row in read_table(path, columns):
        b, q, h, kv_heads, d = (row.whole(name) for name in columns.split()[:5])
        dims = {"b": b, "h": h, "q": q, "kv": q, "d": d, "kv_heads": kv_heads, "causal": 1}
        result.add(
            **common, kind="op", op_class="attention", dtype="bf16", dims=dims,
            traffic=2 * b * q * d * (2 * h + 2 * kv_heads),
            seconds=row.number("latency_ms") * MS,
        )  # fmt: skip


def _read_nccl(importer: Importer, path: Path, result: Imported) -> None:
    """The size argument of nccl-tests is the full buffer, of all collectives."""
    device = _device(path, r"nccl_half_(.+)", result, "collective")
    if device is None:
        return
    common = importer.fields(path, device=device, topology=one_node(device, "", importer.name))
    for row in read_table(path, "collective num_gpus elements bytes latency_ms"):
        kind = row["collective"]
        result.add(
            **common, kind="collective", collective=_KINDS.get(kind, kind),
            group=row.whole("num_gpus"), bytes=row.whole("bytes"), algorithm="auto",
            bytes_are="size argument of nccl-tests", seconds=row.number("latency_ms") * MS,
        )  # fmt: skip


IMPORTER = Importer(
    name="aiconfigurator",
    contains="kernel",
    how="locked clocks, repeated kernels; collectives by nccl-tests, one thread a GPU",
    software="vllm 0.14, NCCL 2.27 (B200: 2.29)",
    patterns={
        "gemm_bf16_*.csv": _read_gemm,
        "context_attention_bf16_*.csv": _read_attention,
        "nccl_half_*.csv": _read_nccl,
    },
)
