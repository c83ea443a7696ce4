"""What a row means: model sizes, job and layout, or the reason why it cannot be expressed."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

from calibration.published.cause_kernels import BLOOM, FIRST_MEGATRON, MEGATRON, MEGATRON_3, TRACED
from calibration.published.described import Described, NotExpressible, Timed
from calibration.published.fields import filled
from calibration.published.megatron_ci import read_megatron_ci
from calibration.published.megatron_sizes import (
    GPT2_VOCABULARY,
    adam_job,
    gpt_size,
    plain_layout,
)
from calibration.published.models import GPTSize
from calibration.published.other_sources import read_data_parallel, read_foundry, read_torchgpipe
from calibration.published.plans import Layout
from calibration.published.rows import Run

BLOOM_VOCABULARY = 250_880


def describe_run(run: Run) -> Described | NotExpressible:
    """Returns what a row means."""
    reader = _READERS.get(run.source)
    if reader is None:
        return NotExpressible("no model family for this source")
    run = filled(run)
    if why := _lacking(run):
        return NotExpressible(why)
    described = reader(run)
    return described if isinstance(described, NotExpressible) else _checked(described)


def _lacking(run: Run) -> str:
    """Returns why no reader can make anything of a row, "" if nothing keeps it from that."""
    shares = (run.dp, run.tp, run.pp, max(1, run.cp))
    reasons = {
        "no step time can be derived": run.seconds <= 0,
        "batch not stated": run.global_batch < 1 or run.micro_batch < 0,
        "inference on several GPUs": run.task == "inference" and run.num_gpus > 1,
        "expert parallel": run.ep > 1 and run.source not in _WITH_EXPERTS,
        "tp x pp x dp x cp is not the number of GPUs": min(shares) < 1
        or math.prod(shares) != run.num_gpus,
        "the source says that its figures contradict each other": "inconsistent" in run.notes,
        "layers, hidden or heads not stated": run.source in _SIZED and not _complete(run),
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


def _checked(described: Described) -> Described | NotExpressible:
    why = _contradiction(described)
    return NotExpressible(why) if why else described


def _contradiction(described: Described) -> str:
    """Returns why sizes, batch and layout do not go together, "" if they do."""
    size, job, layout = described.size, described.job, described.layout
    if layout.microbatch < 1 or (job.batch or 0) % (layout.dp * layout.microbatch):
        return "the batch does not divide into the stated microbatches"
    if isinstance(size, GPTSize):
        if size.heads % layout.tp or size.width % size.heads:
            return "heads do not divide among the tensor-parallel devices"
        if size.layers + 2 * bool(layout.stage_layers) < layout.num_stages:
            return "fewer layers than stages"
    if size.length % layout.cp:
        return "positions do not divide among the context-parallel devices"
    microbatches = (job.batch or 0) // (layout.dp * layout.microbatch)
    if layout.chunks > 1 and microbatches % max(1, microbatches // layout.pp):
        return "interleaved stages need microbatches in rounds of equal size"
    return ""


def _complete(run: Run) -> bool:
    return min(run.layers, run.hidden, run.heads, run.length) > 0


def _vtrain(run: Run) -> Described:
    job = adam_job(run, "fp16")
    if run.part == "multi":
        return Described(gpt_size(run), job, plain_layout(run, "full"), kernels=MEGATRON)
    words = GPT2_VOCABULARY // run.tp * run.tp  # not padded, as in the source's own model
    size = replace(gpt_size(run), vocabulary=words)
    return Described(size, job, plain_layout(run), kernels=TRACED)


def _bigscience(run: Run) -> Described | NotExpressible:
    if not run.micro_batch:
        return NotExpressible("microbatch not stated")
    if run.part == "v100":
        layout = plain_layout(run, "full")
        return Described(gpt_size(run), adam_job(run, "fp16"), layout, kernels=MEGATRON)
    layout = plain_layout(run, "full", optimizer_sharding=1)
    size = gpt_size(run, BLOOM_VOCABULARY)
    job = adam_job(run, "bf16")
    return Described(size, job, layout, products="sustained", kernels=BLOOM)


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
    return Described(gpt_size(run), adam_job(run, "fp16"), layout, kernels=MEGATRON_3)


def _sailor(run: Run) -> Described | NotExpressible:
    """Returns a run of Sailor: in fp32, as its own profiles of layers say.

    OPT-30B takes an A100 what fp32 does, and a GH200 what TF32 does, in NVIDIA's container, as
    there was no other PyTorch for its Arm hosts.
    """
    return Described(
        gpt_size(run, dropout=0.0),
        adam_job(run, "fp32").replace(clip_norm=None),
        replace(plain_layout(run), stage_layers=_stage_layers(run)),
        products="tf32" if "GH" in run.gpu else "as measured",
        splits=True,
    )


def _stage_layers(run: Run) -> tuple[int, ...]:
    """Returns the layers of each stage that a row of Sailor states, embedding and head counted."""
    found = tuple(int(each) for each in re.findall(r'"layers":\s*(\d+)', run.placement))
    return found if len(found) == run.pp and sum(found) == run.layers + 2 else ()


def _megatron_v1(run: Run) -> Described | NotExpressible:
    layout = plain_layout(run, "full")
    return Described(gpt_size(run), adam_job(run, "fp16"), layout, kernels=FIRST_MEGATRON)


def _neusight(run: Run) -> Described | NotExpressible:
    """PyTorch's own attention in fp32, neither loss nor update timed."""
    if not run.model.startswith(("gpt", "opt")):
        return NotExpressible("no model family for this model")
    job = adam_job(run, "fp32").replace(clip_norm=None)
    only: Timed = "forward" if run.task == "inference" else "forward and backward"
    return Described(gpt_size(run), job, plain_layout(run), waits=False, only=only)


_WITH_EXPERTS = ("NVIDIA/Megatron-LM",)  # sources whose experts are read
_SIZED = (  # sources whose rows say the sizes of a transformer
    "NVIDIA/Megatron-LM",
    "VIA-Research/vTrain",
    "bigscience-workshop/bigscience",
    "calculon-ai/calculon",
    "eth-easl/sailor",
    "nv-adlr.github.io/MegatronLMV1",
    "sitar-lab/NeuSight",
)
_READERS: dict[str, Callable[[Run], Described | NotExpressible]] = {
    "VIA-Research/vTrain": _vtrain,
    "bigscience-workshop/bigscience": _bigscience,
    "calculon-ai/calculon": _korthikanti,
    "eth-easl/sailor": _sailor,
    "nv-adlr.github.io/MegatronLMV1": _megatron_v1,
    "sitar-lab/NeuSight": _neusight,
    "NVIDIA/Megatron-LM": read_megatron_ci,
    "mosaicml/llm-foundry": read_foundry,
    "kakaobrain/torchgpipe": read_torchgpipe,
    "petuum/adaptdl": read_data_parallel,
    "stanford-futuredata/gavel": read_data_parallel,
}
