"""Rows of ``e2e/train.csv``: what was trained, where, how, and the seconds of a step."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibration.importers.source import Row, read_table
from calibration.published.rates import stated_by

FOLDER = "e2e"
FILES = ("train.csv",)
_COLUMNS = """
id split_group source_repo source_commit source_file source_ref license task model params_b layers
hidden heads seq_len gpu n_gpus n_nodes gpus_per_node intra_node_link inter_node_link precision
global_batch micro_batch_per_gpu grad_accum tp pp dp vpp cp ep sharding recompute schedule placement
framework metric value unit step_time_ms step_time_derivation peak_mem_gib notes
"""
_TEXTS = (
    "id", "task", "model", "gpu", "precision", "sharding", "recompute", "schedule", "placement",
    "framework", "notes",
)  # fmt: skip
_PARTS = {  # source -> (what tells its parts apart: column, pattern, part)
    "VIA-Research/vTrain": (("source_file", "single", "single"), ("source_file", "", "multi")),
    "bigscience-workshop/bigscience": (("gpu", "A100", "a100"), ("gpu", "", "v100")),
    "sitar-lab/NeuSight": (("n_gpus", "^1$", "single-gpu"), ("n_gpus", "", "distributed")),
    "NVIDIA/DeepLearningExamples": (
        ("model", "^PyTorch/LanguageModeling/BERT$", "bert-pytorch"),
        ("model", "/biobert$", "biobert"), ("model", "/BERT$", "bert-tensorflow"),
        ("model", "/Translation/Transformer$", "transformer"),
        ("model", "/ConvNets/", "convnets"), ("model", "/UNet_", "unets"), ("model", "", "other"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run. Numbers that the source does not state are 0, texts are empty.

    Attributes:
        id: of the row.
        source: repository.
        part: of the source; what is scored apart.
        task: ``train`` or ``inference``.
        model: name, as the source gives it.
        parameters: 10^9.
        layers: blocks.
        hidden: width.
        heads: of attention.
        length: tokens of a sequence.
        gpu: kind, as the source gives it.
        num_gpus: GPUs, all of them.
        per_node: GPUs of one node.
        precision: as the source gives it.
        global_batch: samples of a step.
        micro_batch: samples of a microbatch, of one data-parallel copy.
        tp: tensor-parallel devices.
        pp: pipeline ranks.
        dp: data-parallel copies.
        vpp: stages of a pipeline rank.
        cp: context-parallel devices.
        ep: expert-parallel devices.
        sharding: of the optimizer.
        recompute: as the source gives it.
        schedule: likewise.
        placement: likewise.
        framework: as the source gives it.
        seconds: of one step; 0 = not derivable.
        notes: of the row.
    """

    id: str
    source: str
    part: str
    task: str
    model: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    length: int
    gpu: str
    num_gpus: int
    per_node: int
    precision: str
    global_batch: int
    micro_batch: int
    tp: int
    pp: int
    dp: int
    vpp: int
    cp: int
    ep: int
    sharding: str
    recompute: str
    schedule: str
    placement: str
    framework: str = ""
    seconds: float
    notes: str

    @property
    def key(self) -> str:
        """What it is scored under."""
        return f"{FOLDER}/{self.source}/{self.part}"

    @property
    def cell(self) -> tuple[object, ...]:
        """What plans must have in common to be ranked: model, GPUs, batch."""
        model = (self.model, self.layers, self.hidden, self.heads, self.length)
        return (self.key, self.task, *model, self.gpu, self.num_gpus, self.global_batch)


def read_runs(folder: Path) -> Iterator[Run]:
    """Yields the runs of the folder ``e2e``.

    Raises:
        MeasurementError: a malformed file.
    """
    for name in FILES:
        if (folder / name).is_file():
            yield from map(_run, read_table(folder / name, _COLUMNS))


def _run(row: Row) -> Run:
    whole: dict[str, Any] = {
        field: row.whole(column) if row[column] else 0
        for field, column in (
            ("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("length", "seq_len"),
            ("num_gpus", "n_gpus"), ("per_node", "gpus_per_node"), ("tp", "tp"), ("pp", "pp"),
            ("global_batch", "global_batch"), ("dp", "dp"), ("vpp", "vpp"), ("cp", "cp"),
            ("ep", "ep"),
        )
    }  # fmt: skip
    micro = row["micro_batch_per_gpu"]
    texts: dict[str, Any] = {name: row[name] for name in _TEXTS}
    run = Run(
        source=row["source_repo"],
        part=_part(row),
        parameters=row.number("params_b") if row["params_b"] else 0.0,
        micro_batch=row.whole("micro_batch_per_gpu") if re.fullmatch(r"\d+", micro) else 0,
        seconds=row.number("step_time_ms") / 1e3 if row["step_time_ms"] else 0.0,
        **texts,
        **whole,
    )
    stated = stated_by(row)
    return run if stated is None else replace(run, **stated._asdict())


def _part(row: Row) -> str:
    for column, pattern, part in _PARTS.get(row["source_repo"], ()):
        if re.search(pattern, row[column]):
            return part
    return "all"
