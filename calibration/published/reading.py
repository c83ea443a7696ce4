"""What a row means: model sizes, job and layout, or the reason why it cannot be expressed."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

from calibration.published.assumptions import Residual
from calibration.published.cause_kernels import BLOOM, FIRST_MEGATRON, MEGATRON, MEGATRON_3, TRACED
from calibration.published.deep_learning_examples import read_examples
from calibration.published.described import Described, NotExpressible, Timed
from calibration.published.fields import filled
from calibration.published.megatron_bridge import read_bridge
from calibration.published.megatron_ci import read_megatron_ci
from calibration.published.megatron_sizes import (
    GPT2_VOCABULARY,
    adam_job,
    gpt_size,
    plain_layout,
)
from calibration.published.models import EagerFamily, EagerSize, GPTSize
from calibration.published.other_sources import read_data_parallel, read_foundry, read_torchgpipe
from calibration.published.plans import Layout
from calibration.published.rows import Run
from calibration.published.torchtitan import read_titan
from simcore.units import US

BLOOM_VOCABULARY = 250_880
MOST_GPUS, MOST_LAYERS, MOST_WIDE = 2**14, 2**10, 2**20  # beyond, a number is taken for a slip
MOST_MICROBATCHES = 2**16
SAILOR_HOST = Residual(
    "host seconds per op",
    25.7 * US,
    0.04,
    "Sailor, four GH200, pp = 1, one sample at a time: one microbatch and 32",
)


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
        "more GPUs, layers or width than any model": run.num_gpus > MOST_GPUS
        or run.layers > MOST_LAYERS
        or max(run.hidden, run.heads, run.length) > MOST_WIDE,
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
    return _uneven(layout, (job.batch or 0) // (layout.dp * layout.microbatch))


def _uneven(layout: Layout, microbatches: int) -> str:
    """Returns why so many microbatches do not go with a layout, "" if they do."""
    if microbatches > MOST_MICROBATCHES:
        return "more microbatches than can be simulated"
    if layout.chunks > 1 and microbatches % max(1, microbatches // layout.pp):
        return "interleaved stages need microbatches in rounds of equal size"
    return ""


def _complete(run: Run) -> bool:
    return min(run.layers, run.hidden, run.heads, run.length) > 0


def _vtrain(run: Run) -> Described:
    job = adam_job(run, "fp16")
    if run.part == "multi":
        return Described(gpt_size(run), job, plain_layout(run, "full"), kernels=MEGATRON)
    job = job.replace(clip_norm=None, loss_scaling=False)
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
    """Returns a run of Sailor: Hugging Face's OPT, in fp32, as its own profiles of layers say.

    What they take forward and back is this model's to 3 to 13 % on six GPUs, those that have TF32
    using it; Megatron's is 24 to 40 % faster (scores are cut off by a maximum here, whose backward
    is several kernels). OPT-30B takes an A100 what fp32 does, and a GH200 what TF32 does, in
    NVIDIA's container, as there was no other PyTorch for its Arm hosts. Its host's time for an op
    is from the two runs that `SAILOR_HOST` names.
    """
    size = EagerSize(
        layers=run.layers, width=run.hidden, heads=run.heads, length=run.length,
        vocabulary=_EAGER_VOCABULARY["opt"], dropout=0.0, family="opt",
    )  # fmt: skip
    return Described(
        size,
        adam_job(run, "fp32").replace(clip_norm=None),
        replace(plain_layout(run), stage_layers=_stage_layers(run)),
        floor=SAILOR_HOST.value,
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
    """Returns a run of NeuSight: in fp32, eager PyTorch 2.1, neither loss nor update timed.

    Runs of one GPU are Hugging Face's models, as the traced graphs of the source list their ops;
    what was only inferred drops nothing.
    """
    only: Timed = "forward" if run.task == "inference" else "forward and backward"
    family = _eager_family(run)
    if family is None:
        return NotExpressible("no model family for this model")
    if "fusion" in run.framework:
        return NotExpressible("kernels fused by torch.compile")
    job = adam_job(run, "fp32").replace(clip_norm=None)
    size = gpt_size(run)
    if run.num_gpus == 1:
        size = EagerSize(
            layers=run.layers, width=run.hidden, heads=run.heads, length=run.length,
            vocabulary=_EAGER_VOCABULARY[family.partition("-")[0]],
            dropout=0.0 if only == "forward" else 0.1, family=family,
        )  # fmt: skip
    return Described(size, job, plain_layout(run), waits=False, only=only)


def _eager_family(run: Run) -> EagerFamily | None:
    """Returns which of Hugging Face's models NeuSight ran, None = another or not on so many GPUs.

    Its BERT predicts words where it is trained and classes where it is not.
    """
    if run.model.startswith(("gpt", "opt")):
        return "gpt2" if run.model.startswith("gpt") else "opt"
    if not run.model.startswith("bert") or run.num_gpus > 1:
        return None
    return "bert-words" if run.task == "train" else "bert-classes"


_EAGER_VOCABULARY = {"gpt2": GPT2_VOCABULARY, "opt": 50_272, "bert": 30_522}
_WITH_EXPERTS = (  # sources whose readers look at experts themselves
    "NVIDIA/Megatron-LM",
    "NVIDIA-NeMo/Megatron-Bridge",
)
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
    "NVIDIA/DeepLearningExamples": read_examples,
    "NVIDIA/Megatron-LM": read_megatron_ci,
    "NVIDIA-NeMo/Megatron-Bridge": read_bridge,
    "mosaicml/llm-foundry": read_foundry,
    "kakaobrain/torchgpipe": read_torchgpipe,
    "pytorch/torchtitan": read_titan,
    "petuum/adaptdl": read_data_parallel,
    "stanford-futuredata/gavel": read_data_parallel,
}
