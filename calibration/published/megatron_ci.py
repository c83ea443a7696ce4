"""Rows of Megatron-LM's own tests: very small models, whose steps are the host's time.

Their host is slower than in training runs: tests run in deterministic mode, with checks. Three
residual factors are fitted, each on every other row of its kind, the others held out:

- seconds of an op: one value for A100 and GB200, a smaller one for H100, whose nodes have newer
  processors (the GPT of twelve layers);
- seconds of a step beside its microbatches, where norms and zeros of gradients are counted,
  parameters updated and each step is logged (the same rows: what is left where microbatches go to
  0);
- seconds to load a sample in tests that GB200 runs on one node. Such a step takes what the samples
  of a copy need, whether six layers or twelve, pipelined or not: 16 samples 0.99 s, 32 samples 1.6
  to 2.1 s, while the same tests on two nodes take 0.06 to 0.45 s.

What a test does to freeze, save or load a model is not seen in its later steps. Rows with the same
arguments on the same GPUs are 7 % (mean) from the constant that fits them best, and 13 % from the
median of the others: containers and days differ.
"""

import json
import re
from dataclasses import replace
from typing import Any

from calibration.published import mixtures
from calibration.published.described import Described, NotExpressible
from calibration.published.megatron_sizes import (
    RotarySize,
    adam_job,
    gpt_size,
    plain_layout,
    shape_fields,
)
from calibration.published.rows import Run
from simcore.job import Precision
from simcore.units import US

BERT_VOCABULARY = 30_522
HOST_FLOOR = 102 * US  # s an op; standard error 5 %
HOST_ERROR = 0.15  # standard error of these for one test, fitted on every other of 17
_HOST_FLOORS = {"H100": 74 * US}  # of machines with another one; standard error 5 %
STEP_SECONDS = 0.025  # s of a step beside its microbatches; standard error 30 %
SAMPLE_SECONDS = 0.0575  # s to load a sample where one node of GB200 runs; standard error 3 %
_FAMILIES = {
    "gpt": ("megatron", 50_257),
    "bert": ("megatron_bert", BERT_VOCABULARY),
    "moe": ("megatron_moe", 50_257),
}
_PRECISIONS: dict[str, Precision] = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}


def read_megatron_ci(run: Run) -> Described | NotExpressible:
    """Returns a run of Megatron-LM's tests."""
    family = _FAMILIES.get(run.model.partition(":")[0])
    if family is None:
        return NotExpressible("no model family for this model")
    stated = arguments(run)
    if why := mixtures.lacking(run, stated):
        return NotExpressible(why)
    if run.micro_batch < 1:
        return NotExpressible("microbatch not stated")
    file, vocabulary = family
    size = replace(gpt_size(run, vocabulary), file=file, is_fused=has_fused_attention(stated))
    if "num-experts" in stated:
        size = mixtures.mixture_size(run, size, stated)
    elif stated.get("position-embedding-type") == "rope":
        fields = shape_fields(size)
        size = RotarySize(**fields, in_one="no_fusion" not in run.model)
    layout = replace(
        plain_layout(run),
        cp=max(1, run.cp),
        chunks=chunks(run, stated),
        stage_layers=stage_layers(run, stated),
        sequence="sequence-parallel" in stated,
        optimizer_sharding=int("use-distributed-optimizer" in stated),
        overlap="overlap-grad-reduce" in stated,
    )
    job = adam_job(run, _PRECISIONS.get(run.precision, "bf16"))
    return Described(
        size,
        job,
        layout,
        floor=host_floor(run),
        idle=STEP_SECONDS,
        loading=loading_seconds(run),
    )


def host_floor(run: Run) -> float:
    """Returns the host's seconds of an op."""
    return _HOST_FLOORS.get(run.gpu, HOST_FLOOR)


def loading_seconds(run: Run) -> float:
    """Returns the seconds that the samples of a step of one copy need, 0 where it is hidden."""
    is_alone = run.gpu == "GB200" and 1 < run.num_gpus <= (run.per_node or run.num_gpus)
    return SAMPLE_SECONDS * run.global_batch / run.dp if is_alone else 0.0


def has_fused_attention(stated: dict[str, Any]) -> bool:
    """Whether attention is one kernel: Transformer Engine's choice where nothing else is asked."""
    is_engine = stated.get("transformer-impl") == "transformer_engine"
    return is_engine and stated.get("attention-backend", "flash") == "flash"


def arguments(run: Run) -> dict[str, Any]:
    """Returns the arguments that a row's notes state; {} where they are no list of them."""
    found = re.search(r"args (\{.*\})", run.notes)
    if found is None:
        return {}
    try:
        stated = json.loads(found[1])
    except ValueError:
        return {}
    return {key: value for key, value in stated.items() if value != "false"}


def chunks(run: Run, stated: dict[str, Any]) -> int:
    """Returns the stages of a rank: stated themselves, or by their layers."""
    if run.pp < 2 or not run.vpp:
        return 1
    if "num-virtual-stages-per-pipeline-rank" in stated:
        return run.vpp
    return max(1, run.layers // (run.pp * run.vpp))


def stage_layers(run: Run, stated: dict[str, Any]) -> tuple[int, ...]:
    """Returns the layers of each stage where embedding and loss count as one each, else ()."""
    count = run.pp * chunks(run, stated)
    places = run.layers + 2
    if "account-for-embedding-in-pipeline-split" in stated and places % count == 0:
        return (places // count,) * count
    return ()
