"""What rows of Megatron's family have in common: sizes, job and layout."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibration.published.models import GPTSize
from calibration.published.plans import Layout
from calibration.published.rows import Run
from simcore.job import Job, Precision
from simcore.recompute import Recompute

if TYPE_CHECKING:
    from simcore.models.inputs import Built

GPT2_VOCABULARY = 50_257
MEGATRON_MULTIPLE = 128  # the vocabulary is padded to so many times the tensor-parallel size
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySize(GPTSize):
    """Sizes of a GPT with rotary positions, see `simcore.models.megatron_rotary`."""

    in_one: bool = True  # whether a turn is one kernel
    file: str = "megatron_rotary"

    def build(self) -> "Built":
        """Returns the model on the meta device."""
        from simcore.models import megatron, megatron_rotary  # noqa: PLC0415 - imports torch

        return megatron_rotary.rotary(
            megatron.MegatronShape(**shape_fields(self)), in_one=self.in_one
        )

    @property
    def name(self) -> str:
        """Of its graph."""
        return f"rotary-{self.layers}x{self.width}"


def shape_fields(size: GPTSize) -> dict[str, Any]:
    """Returns what the shape of Megatron's GPT is made of."""
    return {name: getattr(size, name) for name in GPTSize.__slots__ if name != "file"}


def gpt_size(run: Run, vocabulary: int = GPT2_VOCABULARY, dropout: float = 0.1) -> GPTSize:
    """Returns the sizes of a row's GPT, its vocabulary padded as Megatron does."""
    multiple = MEGATRON_MULTIPLE * math.lcm(run.tp, 8)  # one graph for tp up to 8
    return GPTSize(
        layers=run.layers,
        width=run.hidden,
        heads=run.heads,
        length=run.length,
        vocabulary=-(-vocabulary // multiple) * multiple,
        dropout=dropout,
    )


def adam_job(run: Run, precision: Precision) -> Job:
    """Returns the job of a row under Megatron's defaults."""
    return Job(
        batch=run.global_batch,
        sequence_length=run.length,
        optimizer="adam",
        precision=precision,
        clip_norm=CLIP_NORM,
        loss_scaling=precision == "fp16",
    )


def plain_layout(run: Run, recompute: Recompute = "none", optimizer_sharding: int = 0) -> Layout:
    """Returns the layout that a row states."""
    micro = run.micro_batch or run.global_batch // run.dp
    return Layout(
        tp=run.tp, pp=run.pp, dp=run.dp, microbatch=micro, recompute=recompute,
        optimizer_sharding=optimizer_sharding,
    )  # fmt: skip
