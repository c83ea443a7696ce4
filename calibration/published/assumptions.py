"""What the sources leave open, chosen once on the training rows of vTrain, and said here.

- Precision of Megatron-DeepSpeed on vTrain's and BLOOM's A100: fp16, with loss scaling; gradients
  are clipped (Megatron's default).
- Rows of vTrain on one node are sums: to the last digit they are linear in layers and in
  microbatches. 900 rows say what a layer and what the rest takes, for 2 widths, 4 numbers of
  tensor-parallel devices and 4 microbatches, and little else. Their host waits for each op, as
  where ops are traced; elsewhere it runs ahead.
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
    68.5 * US,
    0.12,
    "vTrain, one node, pp = 1, one sample at a time: models that differ in layers only",
)
UNALIGNED = Residual(
    "slow-down of a product with each halving of the 16 bytes that its rows should be aligned to",
    1.347,
    0.01,
    "vTrain, one node, tp = pp = 1, eight samples: what a microbatch takes beside its layers",
)
