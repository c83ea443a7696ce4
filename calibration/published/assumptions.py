"""What the sources leave open, chosen once on the training rows of vTrain, and said here.

- Precision of Megatron-DeepSpeed on vTrain's and BLOOM's A100: fp16, with loss scaling; gradients
  are clipped (Megatron's default).
- Vocabulary: GPT-2's 50,257 words padded to 51,200 (Megatron); BLOOM's 250,880, which the stated
  parameters of its tuning runs confirm (181 B = 72 x 12 x 14,336^2 + 250,880 x 14,336).
- Attention of Megatron up to 2022 is two batched products and a softmax, with dropout 0.1.
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
        value: s.
        relative_error: standard error / value.
        contrast: which rows say it.
    """

    name: str
    value: float
    relative_error: float
    contrast: str


HOST_FLOOR = Residual(
    "host seconds per op",
    63.5 * US,
    0.098,
    "vTrain, one node, tp = pp = 1, one sample at a time: models that differ in layers only",
)
