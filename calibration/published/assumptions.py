"""What the sources leave open, chosen once on the training rows of vTrain, and said here.

- Precision of Megatron-DeepSpeed on vTrain's A100: fp16, with loss scaling; gradients are clipped
  (Megatron's default).
- BLOOM's tuning runs: as the project's own script of the later training says
  (bigscience-workshop/bigscience, tr11-176B-ml.slurm): bf16, with DeepSpeed's bf16 optimizer, which
  adds gradients and sums them over all copies in fp32, and CUDA_LAUNCH_BLOCKING=1. That optimizer
  casts gradients before it adds them (18 bytes each), and DeepSpeed's pipeline sends and receives
  in the order of its instructions: neither stage works while their message is on its way. Products
  keep up what those of llm-foundry's long runs do on the same GPU, see
  `calibration.published.sustained`. Nothing is fitted to these rows.
- Rows of vTrain on one node are not measured steps. They are what the source's own program
  (src/predictor.py of VIA-Research/vTrain) puts together: kernels of one layer, of the embeddings
  and of the head, traced on one GPU, one trace for each of 2 widths, 4 numbers of tensor-parallel
  devices and 4 microbatches, in the order of 1F1B; all-reduces from its table, which is in
  ``../shared/data/vtrain``. Its rules give all 900 rows to the nanosecond with five figures a
  trace, and copies add what the table says. So here: collectives are not launched in the trace and
  come on top; a message takes its sender twice its bytes at 25 GiB/s; gradients are never added to
  earlier ones; there is no clipping, no loss scaling and no fp32 copy of the parameters (its
  trainer). Not modelled: its loss normalises over positions, the loss' backward is not counted, its
  head is not tied, and above 1 GiB it takes all-reduces for less than they are.
- Its GPU's memory is not stated: 40 GB, because then what a step takes beside its microbatches, the
  update and the sum over copies, is right to 5 % (on one and two devices a layer), with the profile
  of 80 GB 15 to 22 % too short.
  Nothing is fitted to that part.
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
    72.2 * US,
    0.07,
    "vTrain, one node, pp = 1, one sample at a time: models that differ in layers only",
)
GAP = Residual(
    "device seconds between two traced kernels",
    19.0 * US,
    0.29,
    "vTrain, one node, pp = 1, eight samples: models that differ in layers only",
)
SENDING = 12.5 * 2**30  # bytes/s of a message between stages, in vTrain's program
UNALIGNED = Residual(
    "slow-down of a product of 16 bits whose rows are multiples of 8 or 4 bytes, to the third power"
    " where of 2 bytes only: a property of the matrix library, not of the framework",
    1.435,
    0.01,
    "vTrain, one node, tp = pp = 1, eight samples: what a microbatch takes beside its layers",
)


class Factors(NamedTuple):
    """The residual factors.

    Attributes:
        floor: see `HOST_FLOOR`; None = what the source's host takes.
        gap: see `GAP`; of traced work only.
        unaligned: see `UNALIGNED`.
    """

    floor: float | None = None
    gap: float = GAP.value
    unaligned: float = UNALIGNED.value


FITTED = Factors()
