"""Steps of rows that state a rate alone: what their source's own text says beside the table.

- BERT in NVIDIA's examples: sequences (or sentences) a second over all GPUs. Pre-training sums
  gradients over as many microbatches as the row says. PyTorch's table for V100 gives what a GPU
  takes in a whole step; the others the microbatch. BioBERT's script and text set 65,536 sequences a
  step in the first phase and 32,768 in the second. Fine-tuning takes one batch a step: questions of
  384 tokens, sentences of 128 for names.
- Transformer in NVIDIA's examples: tokens of the target a second over all GPUs. A GPU's batch is
  stated in tokens, "mixed precision / FP32" where both differ; it is taken for full sentences of 32
  tokens, as WMT 14's English and German have 30 on average.
- torchtitan: tokens a second and GPU. Its two tables without a length are of 8,192 tokens: only
  with that length do the rates lead to the 33 to 39 % of peak that the same text states, by the
  FLOPs that torchtitan counts.
"""

import re
from typing import NamedTuple

from calibration.importers.source import Row

TITAN, EXAMPLES = "pytorch/torchtitan", "NVIDIA/DeepLearningExamples"
TITAN_LENGTH = 8192
ANSWER_LENGTH, ENTITY_LENGTH = 384, 128
SENTENCE_LENGTH = 32
BIOBERT_BATCHES = {128: 65_536, 512: 32_768}  # by the length of each phase
_TRANSFORMER = "PyTorch/Translation/Transformer"
_TOKENS = re.compile(r'batch cell "(\d+)(?:/(\d+))?"$')
_BERT = re.compile(r"LanguageModeling/BERT(/biobert)?$")


class Stated(NamedTuple):
    """What a row means: samples of a step, of a microbatch, tokens of a sample, s of a step."""

    global_batch: int
    micro_batch: int
    length: int
    seconds: float


def stated_by(row: Row) -> Stated | None:
    """Returns what a row means, None where its own columns say it, or nothing does."""
    if row["source_repo"] == TITAN and not row["step_time_ms"]:
        return _titan(row)
    if row["source_repo"] == EXAMPLES and _BERT.search(row["model"]):
        return _bert(row)
    if row["source_repo"] == EXAMPLES and row["model"] == _TRANSFORMER:
        return _transformer(row)
    return None


def _titan(row: Row) -> Stated:
    batch, length = row.whole("global_batch"), TITAN_LENGTH
    if row["seq_len"]:
        length = row.whole("seq_len")
    rate = row.number("value") * row.whole("n_gpus")
    seconds = _seconds(batch * length, rate)
    return Stated(batch, row.whole("micro_batch_per_gpu"), length, seconds)


def _bert(row: Row) -> Stated | None:
    """Returns what a row of BERT means, None without a batch."""
    if not re.fullmatch(r"\d+", row["micro_batch_per_gpu"]):
        return None
    micro, gpus = row.whole("micro_batch_per_gpu"), row.whole("n_gpus")
    trains_words = "pre-training" in row["notes"].lower()
    if not trains_words:
        length, count = _fine_tuned(row), 1
    else:
        length = row.whole("seq_len")
        if row["model"].endswith("biobert"):
            count = BIOBERT_BATCHES.get(length, 0) // max(1, micro * gpus)
            count = max(1, count) if length in BIOBERT_BATCHES else 0
        else:
            count = row.whole("grad_accum")
        if count < 1:
            return None
        if row["model"].startswith("PyTorch") and "V100" in row["gpu"]:
            micro //= count
    batch = micro * count * gpus
    return Stated(batch, micro, length, _seconds(batch, row.number("value")))


def _seconds(amount: int, rate: float) -> float:
    """Returns s of a step, 0 where its rate is none."""
    return amount / rate if rate > 0 else 0.0


def _fine_tuned(row: Row) -> int:
    return ENTITY_LENGTH if row["model"].endswith("biobert") else ANSWER_LENGTH


def _transformer(row: Row) -> Stated | None:
    """Returns what a row of the Transformer means, None without a batch."""
    found = _TOKENS.search(row["notes"])
    if found is None:
        return None
    mixed, plain = found[1], found[2] or found[1]
    micro = int(mixed if row["precision"] == "mixed" else plain) // SENTENCE_LENGTH
    batch = micro * row.whole("n_gpus")
    seconds = _seconds(batch * SENTENCE_LENGTH, row.number("value"))
    return Stated(batch, micro, SENTENCE_LENGTH, seconds)
