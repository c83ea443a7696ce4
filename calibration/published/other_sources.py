"""Rows of sources beside Megatron's: FSDP of llm-foundry, and models under plain data parallel.

- llm-foundry: MPT is a GPT with 50,368 words, no dropout and fused attention; its layers, width and
  heads are those of the project's benchmark files, which the stated parameters confirm. FSDP's
  units are the blocks.
- Pollux (adaptdl): its four models train in fp32 under torch's DistributedDataParallel.
- Gavel: likewise; only rows of several GPUs say how a model scales, and only its ResNet-18 and
  Transformer have any.
- torchgpipe: U-Net and AmoebaNet-D in fp32, with plain SGD, as chains of as many modules a stage as
  the row says; whole stages run forward again before their backward, but for one microbatch.
"""

import re
from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from calibration.published.described import Described, NotExpressible
from calibration.published.models import FamilySize, GPTSize
from calibration.published.plans import Layout
from calibration.published.rows import Run
from simcore.job import Job, Optimizer

MPT_VOCABULARY = 50_368
MPT = {  # layers, width, heads
    "MPT-125m": (12, 768, 12),
    "MPT-350m": (24, 1024, 16),
    "MPT-760m": (24, 1536, 12),
    "MPT-1b": (24, 2048, 16),
    "MPT-3b": (32, 2560, 20),
    "MPT-7b": (32, 4096, 32),
    "MPT-13b": (40, 5120, 40),
    "MPT-30b": (48, 7168, 56),
    "MPT-70b": (80, 8192, 64),
}
_OVERLAPS = ("petuum/adaptdl",)  # sources whose gradients are summed beside the backward
_RINGS = ("petuum/adaptdl",)  # sources whose rows with as many GPUs on each node say that no sums
# are made inside nodes first
UNEVEN = 0.13  # standard deviation / mean of the time of a batch of sentences, each as long as its
# longest one: workers wait for each other. A residual factor of Gavel's Transformer, fitted on K80.
# Each further GPU of a node adds this to a step of Pollux's YOLOv3, s: a residual factor, fitted on
# its rows on one node. The cause is taken to be the host: eight processes a GPU load its images.
CROWDED = 0.052
MOST_BLOCKS = 16  # parts that FSDP's units are put together to; more change nothing measurable


class _Model(NamedTuple):
    """A model of a source, and how it is optimised."""

    size: FamilySize
    optimizer: Optimizer
    uneven: float = 0.0  # standard deviation / mean of the time of a worker's batches
    crowded: float = 0.0  # s of a step for each further GPU of a node


_MODELS = {
    ("petuum/adaptdl", "bert"): _Model(FamilySize(factory="bert:bert_answers", length=384), "adam"),
    ("petuum/adaptdl", "cifar10"): _Model(
        FamilySize(factory="resnet_cifar:resnet_18", length=32), "momentum"
    ),
    ("petuum/adaptdl", "ncf"): _Model(FamilySize(factory="neumf:neumf", length=1), "adam"),
    ("petuum/adaptdl", "yolov3"): _Model(
        FamilySize(factory="yolo:yolov3_voc", length=416), "momentum", crowded=CROWDED
    ),
    ("stanford-futuredata/gavel", "ResNet-18"): _Model(
        FamilySize(factory="resnet_cifar:resnet_18", length=32), "momentum"
    ),
    ("stanford-futuredata/gavel", "Transformer"): _Model(
        FamilySize(factory="transformer:transformer_multi30k", length=32), "adam", UNEVEN
    ),
}
_CHAINS = {
    "U-Net (5, 64)": FamilySize(factory="unet:unet", length=192),
    "AmoebaNet-D (18, 256)": FamilySize(factory="amoebanet:amoebanet_d", length=224),
}


def read_foundry(run: Run) -> Described | NotExpressible:
    """Returns a run of llm-foundry."""
    if run.model not in MPT:
        return NotExpressible("no model family for this model")
    if min(run.length, run.micro_batch) < 1:
        return NotExpressible("batch or length not stated")
    if "fp8" in run.precision:
        return NotExpressible("products in 8 bits")
    layers, width, heads = MPT[run.model]
    size = GPTSize(
        layers=layers, width=width, heads=heads, length=run.length, vocabulary=MPT_VOCABULARY,
        dropout=0.0, is_fused=True, file="mpt",
    )  # fmt: skip
    job = Job(
        batch=run.global_batch, sequence_length=run.length, optimizer="adamw", precision="bf16",
        clip_norm=1.0,
    )  # fmt: skip
    layout = Layout(
        dp=run.num_gpus,
        microbatch=run.micro_batch,
        recompute="full" if run.recompute == "True" else "none",
        optimizer_sharding=3 if run.sharding == "FULL_SHARD" else 2,
        blocks=_blocks(layers) if run.num_gpus > 1 else 1,
    )
    return Described(size, job, layout, waits=False, products="sustained")


def _blocks(layers: int) -> int:
    return max(count for count in range(1, MOST_BLOCKS + 1) if layers % count == 0)


def read_data_parallel(run: Run) -> Described | NotExpressible:
    """Returns a run of Pollux or Gavel."""
    model = _MODELS.get((run.source, run.model))
    if model is None:
        return NotExpressible("no model family for this model")
    if run.micro_batch < 1 or run.micro_batch * run.num_gpus != run.global_batch:
        return NotExpressible("batch of a GPU not stated")
    job = Job(batch=run.global_batch, sequence_length=model.size.length, optimizer=model.optimizer)
    layout = Layout(
        dp=run.num_gpus,
        microbatch=run.micro_batch,
        overlap=run.source in _OVERLAPS,
        algorithm="ring" if run.source in _RINGS else "auto",
    )
    waiting = 1 + model.uneven * largest_of(run.num_gpus)
    idle = model.crowded * (_of_one_node(run) - 1)
    return Described(model.size, job, layout, waits=False, waiting=waiting, idle=idle)


def _of_one_node(run: Run) -> int:
    """Returns the GPUs of the node that has most of them, 1 where the row does not say."""
    return max([1, *map(int, re.findall(r"\d+", run.placement))])


def largest_of(count: int) -> float:
    """Returns the mean of the greatest of so many standard normal numbers."""
    grid = np.linspace(-8.0, 8.0, 4001)
    return float(np.trapezoid(grid * count * norm.pdf(grid) * norm.cdf(grid) ** (count - 1), grid))


def read_torchgpipe(run: Run) -> Described | NotExpressible:
    """Returns a run of torchgpipe."""
    size = _CHAINS.get(run.model)
    if size is None:
        return NotExpressible("no model family for this model")
    if run.micro_batch < 1:
        return NotExpressible("microbatch not stated")
    layers = re.search(r"layers per stage \[([\d, ]+)\]", run.placement)
    stages = tuple(map(int, re.findall(r"\d+", layers[1]))) if layers else ()
    if len(stages or (0,)) != run.pp:
        return NotExpressible("modules of each stage not stated")
    job = Job(batch=run.global_batch, sequence_length=size.length, optimizer="sgd")
    layout = Layout(
        pp=run.pp, dp=run.dp, microbatch=run.micro_batch, schedule="gpipe",
        recompute="full" if run.recompute else "none",
        spares=run.recompute.startswith("except_last"),
        stage_layers=stages if run.pp > 1 else (),
    )  # fmt: skip
    return Described(size, job, layout, waits=False)
