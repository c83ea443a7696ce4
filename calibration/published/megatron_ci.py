"""Rows of Megatron-LM's own tests: very small models, whose steps are the host's time.

Their host is slower than in training runs: tests run in deterministic mode, with checks. Its
seconds per op are residual factors, fitted on every other row of the GPT of twelve layers: medians
of 117 us +- 4 % with A100 and 121 us +- 17 % with GB200, for which one value is taken, and of 96 us
+- 8 % with H100, whose nodes have newer processors. The tests that a GB200 machine runs on one node
alone take as many seconds a step longer than the same ones on two, whatever they are: a state of
that machine, the other residual factor. What a test does to freeze, save or load a model is not
seen in its later steps.
"""

import json
import re
from dataclasses import replace
from typing import Any

from calibration.published import mixtures
from calibration.published.described import Described, NotExpressible
from calibration.published.megatron_sizes import adam_job, gpt_size, plain_layout
from calibration.published.rows import Run
from simcore.job import Precision
from simcore.units import US

BERT_VOCABULARY = 30_522
HOST_FLOOR = 122 * US  # s an op
HOST_ERROR = 0.15  # standard error of these for one test, fitted on every other of 17
_HOST_FLOORS = {"H100": 96 * US}  # of machines with another one
ONE_NODE_IDLE = 1.3  # s a step of tests on one node of GB200; 23 rows, standard error 7 %
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
    size = replace(gpt_size(run, vocabulary), file=file, is_fused=run.cp > 1)
    if "num-experts" in stated:
        size = mixtures.mixture_size(run, size, stated)
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
    return Described(size, job, layout, floor=host_floor(run), idle=idle_seconds(run))


def host_floor(run: Run) -> float:
    """Returns the host's seconds of an op."""
    return _HOST_FLOORS.get(run.gpu, HOST_FLOOR)


def idle_seconds(run: Run) -> float:
    """Returns the seconds of a step that the state of the machine takes, whatever it runs."""
    is_alone = run.gpu == "GB200" and 1 < run.num_gpus <= (run.per_node or run.num_gpus)
    return ONE_NODE_IDLE if is_alone else 0.0


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
