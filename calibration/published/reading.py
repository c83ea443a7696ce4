"""What a row means: model sizes, job and layout, or the reason why it cannot be expressed."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from calibration.published.models import GPTSize
from calibration.published.plans import Layout
from calibration.published.rows import Run
from simcore.job import Job, Precision
from simcore.recompute import Recompute

GPT2_VOCABULARY = 50_257
MEGATRON_MULTIPLE = 128  # the vocabulary is padded to so many times the tensor-parallel size
BLOOM_VOCABULARY = 250_880
CLIP_NORM = 1.0
_PRECISIONS: dict[str, Precision] = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}


Timed = Literal["all", "forward and backward", "forward"]


class NotExpressible(NamedTuple):
    """Why a run cannot be said in a graph, a cluster and a plan."""

    reason: str


class Described(NamedTuple):
    """A run in the program's words."""

    size: GPTSize
    job: Job
    layout: Layout
    waits: bool = True  # whether the framework's host waits for each op, see `HOST_FLOOR`
    only: Timed = "all"  # what of a step was timed, without the loss if not all


def describe_run(run: Run) -> Described | NotExpressible:
    """Returns what a row means."""
    reader = _READERS.get(run.source)
    if reader is None:
        return NotExpressible("no model family for this source")
    if not run.seconds:
        return NotExpressible("no step time can be derived")
    if run.task == "inference" and run.num_gpus > 1:
        return NotExpressible("inference on several GPUs")
    if run.cp > 1 or run.ep > 1:
        return NotExpressible("context or expert parallel")
    if run.dp * run.tp * run.pp != run.num_gpus:
        return NotExpressible("tp x pp x dp is not the number of GPUs")
    described = reader(run)
    return described if isinstance(described, NotExpressible) else _checked(described)


def _checked(described: Described) -> Described | NotExpressible:
    size, job, layout = described.size, described.job, described.layout
    if size.heads % layout.tp or size.width % size.heads:
        return NotExpressible("heads do not divide among the tensor-parallel devices")
    if (job.batch or 0) % (layout.dp * layout.microbatch):
        return NotExpressible("the batch does not divide into the stated microbatches")
    if size.layers < layout.pp * layout.chunks:
        return NotExpressible("fewer layers than stages")
    microbatches = (job.batch or 0) // (layout.dp * layout.microbatch)
    if layout.chunks > 1 and microbatches % layout.pp:
        return NotExpressible("interleaved stages need a multiple of the ranks as microbatches")
    return described


def _complete(run: Run) -> bool:
    return bool(run.layers and run.hidden and run.heads and run.length and run.global_batch)


def _gpt(run: Run, vocabulary: int = GPT2_VOCABULARY, dropout: float = 0.1) -> GPTSize:
    multiple = MEGATRON_MULTIPLE * math.lcm(run.tp, 8)  # one graph for tp up to 8
    return GPTSize(
        layers=run.layers,
        width=run.hidden,
        heads=run.heads,
        length=run.length,
        vocabulary=-(-vocabulary // multiple) * multiple,
        dropout=dropout,
    )


def _job(run: Run, precision: Precision) -> Job:
    return Job(
        batch=run.global_batch,
        sequence_length=run.length,
        optimizer="adam",
        precision=precision,
        clip_norm=CLIP_NORM,
        loss_scaling=precision == "fp16",
    )


def _layout(run: Run, recompute: Recompute = "none", optimizer_sharding: int = 0) -> Layout:
    micro = run.micro_batch or run.global_batch // run.dp
    return Layout(
        tp=run.tp, pp=run.pp, dp=run.dp, microbatch=micro, recompute=recompute,
        optimizer_sharding=optimizer_sharding,
    )  # fmt: skip


def _vtrain(run: Run) -> Described:
    recompute: Recompute = "none" if run.part == "single" else "full"
    return Described(_gpt(run), _job(run, "fp16"), _layout(run, recompute))


def _bigscience(run: Run) -> Described | NotExpressible:
    if not _complete(run):
        return NotExpressible("layers, hidden or heads not stated")
    if not run.micro_batch:
        return NotExpressible("microbatch not stated")
    if run.part == "v100":
        layout = _layout(run, "full")
        return Described(_gpt(run), _job(run, "fp16"), layout)
    layout = _layout(run, "full", optimizer_sharding=1)
    return Described(_gpt(run, BLOOM_VOCABULARY), _job(run, "fp16"), layout)


def _korthikanti(run: Run) -> Described | NotExpressible:
    selective = "selective" in run.recompute
    layout = Layout(
        tp=run.tp,
        pp=run.pp,
        dp=run.dp,
        chunks=max(1, run.vpp),
        microbatch=run.micro_batch,
        sequence="sequence parallel" in run.recompute,
        recompute="selective" if selective else "full",
    )
    return Described(_gpt(run), _job(run, "fp16"), layout)


def _sailor(run: Run) -> Described | NotExpressible:
    if re.search(r"\+", run.gpu):
        return NotExpressible("stages of unlike GPUs")
    return Described(_gpt(run, dropout=0.0), _job(run, "fp16"), _layout(run))


def _megatron_v1(run: Run) -> Described | NotExpressible:
    """Its smallest model is in the paper's table (Shoeybi et al., 2019); the largest is not."""
    if run.model != "GPT-2 1.2B":
        return NotExpressible("layers, hidden or heads not stated")
    run = replace(run, layers=40, hidden=1536, heads=16, length=1024)
    return Described(_gpt(run), _job(run, "fp16"), _layout(run, "full"))


def _neusight(run: Run) -> Described | NotExpressible:
    """PyTorch's own attention in fp32, neither loss nor update timed."""
    if not run.model.startswith(("gpt", "opt")):
        return NotExpressible("no model family for this model")
    job = _job(run, "fp32").replace(clip_norm=None)
    only: Timed = "forward" if run.task == "inference" else "forward and backward"
    return Described(_gpt(run), job, _layout(run), waits=False, only=only)


def _megatron_ci(run: Run) -> Described | NotExpressible:
    if not run.model.startswith("gpt:"):
        return NotExpressible("no model family for this model")
    if '"num-experts"' in run.notes:
        return NotExpressible("context or expert parallel")
    precision = _PRECISIONS.get(run.precision, "bf16")
    size = _gpt(run)
    layout = Layout(
        tp=run.tp, pp=run.pp, dp=run.dp, microbatch=run.micro_batch,
        chunks=max(1, run.layers // (run.pp * run.vpp)) if run.vpp else 1,
        sequence='"sequence-parallel":"true"' in run.notes,
    )  # fmt: skip
    return Described(size, _job(run, precision), layout)


_READERS: dict[str, Callable[[Run], Described | NotExpressible]] = {
    "VIA-Research/vTrain": _vtrain,
    "bigscience-workshop/bigscience": _bigscience,
    "calculon-ai/calculon": _korthikanti,
    "eth-easl/sailor": _sailor,
    "nv-adlr.github.io/MegatronLMV1": _megatron_v1,
    "sitar-lab/NeuSight": _neusight,
    "NVIDIA/Megatron-LM": _megatron_ci,
}
