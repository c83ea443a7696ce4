"""What the sources leave open, chosen once on the training rows of vTrain, and said here.

- Precision of Megatron-DeepSpeed on vTrain's A100: fp16, with loss scaling; gradients are clipped
  (Megatron's default).
- BLOOM's tuning runs: as the project's own script of the later training says
  (bigscience-workshop/bigscience, tr11-176B-ml.slurm): bf16, with DeepSpeed's bf16 optimizer, which
  adds gradients and sums them over all copies in fp32, and CUDA_LAUNCH_BLOCKING=1. Products
  keep up what those of llm-foundry's long runs do on the same GPU, see
  `calibration.published.sustained`. Nothing is fitted to these rows.
- Rows of vTrain on one node are sums: to the last digit they are linear in layers and in
  microbatches. 900 rows say what a layer and what the rest takes, for 2 widths, 4 numbers of
  tensor-parallel devices and 4 microbatches, and little else. They are taken for traced runs: from
  one kernel to the next the device waits longer, and collectives, whose ranks are not traced in
  step, take longer than where they run alone. The host runs ahead of the device inside a layer.
- Vocabulary there: 50,257 words, as in the source's own model, cut among the tensor-parallel
  devices and not padded; the loss is computed in the precision of the logits. Elsewhere: padded to
  51,200 (Megatron); BLOOM's 250,880, which the stated parameters of its tuning runs confirm
  (181 B = 72 x 12 x 14,336^2 + 250,880 x 14,336).
- Attention of Megatron up to 2022 is two batched products and a softmax, with dropout 0.1. What
  kernels are fused is in `calibration.published.cause_kernels`; of messages between stages, each
  tensor-parallel device sends its part.
- Recompute of vTrain: none on a single node, whole blocks on several nodes: without it, the
  activations of its largest microbatches exceed the memory.
- Schedule: 1F1B. Gradients are summed in one piece after the last backward (DeepSpeed's pipeline
  engine, and Megatron before its distributed optimizer).

The residual factors are fitted on vTrain's rows of one node by `calibration.published.residuals`.
"""

from typing import NamedTuple

from simcore.units import US


class Residual(NamedTuple):
    """A physical constant that op and link measurements do not show.

    Attributes:
        name: what it is.
        value: s, or a ratio.
        relative_error: standard error / value.
        contrast: which rows say it.
    """

    name: str
    value: float
    relative_error: float
    contrast: str


HOST_FLOOR = Residual(
    "host seconds per op",
    70.6 * US,
    0.07,
    "vTrain, one node, pp = 1, one sample at a time: models that differ in layers only",
)
GAP = Residual(
    "device seconds between two traced kernels",
    23.3 * US,
    0.39,
    "vTrain, one node, tp = pp = 1, four and eight samples: models that differ in layers only",
)
COLLECTIVE = Residual(
    "slow-down of collectives beside traced work",
    1.99,
    0.14,
    "vTrain, one node, tp > 1, pp = 1, eight samples: models that differ in layers only",
)
UNALIGNED = Residual(
    "slow-down of a product of 16 bits whose rows are multiples of 8 or 4 bytes, to the third power"
    " where of 2 bytes only: a property of the matrix library, not of the framework",
    1.347,
    0.01,
    "vTrain, one node, tp = pp = 1, eight samples: what a microbatch takes beside its layers",
)


class Factors(NamedTuple):
    """The residual factors; those of traced work are for vTrain's rows of one node only.

    Attributes:
        floor: see `HOST_FLOOR`; None = what the source's host takes.
        gap: see `GAP`.
        collective: see `COLLECTIVE`.
        unaligned: see `UNALIGNED`.
    """

    floor: float | None = None
    gap: float = GAP.value
    collective: float = COLLECTIVE.value
    unaligned: float = UNALIGNED.value


FITTED = Factors()
