"""Rows of torchtitan: Llama 3.1 on H100, under FSDP, with tensor parallelism or without.

- The blocks are FSDP's units: parameters are fetched for the forward and again for the backward
  (ZeRO's third stage), in bf16, with AdamW and one norm of all gradients.
- Selective recompute runs every second product again, and all that is no product. There is no such
  recompute here: of the units every second one runs again whole, which is a little more work.
- Its H100 have slower memory (2.4 TB/s) and less power (500 W) than the profile's.

- What is compiled is fused as `cause_compiler` says. The commands of the runs with tensor parallel
  devices compile; those devices split states by position between the layers.

Refused are products in 8 bits, pipelines, and products in pieces beside their collectives (async
tensor parallelism).
"""

from calibration.published.cause_kernels import COMPILED, TORCH
from calibration.published.described import Described, NotExpressible
from calibration.published.models import FamilySize
from calibration.published.plans import Layout
from calibration.published.rows import Run
from simcore.job import Job

KEY_HEADS = 8  # of both sizes
UNITS = 16  # of two blocks each
_SIZES = {"Llama-3.1-8B": "llama:llama_3_8b", "Llama-3.1-70B": "llama:llama_3_70b"}


def read_titan(run: Run) -> Described | NotExpressible:
    """Returns a run of torchtitan."""
    if "8" in run.precision:
        return NotExpressible("products in 8 bits")
    if "async TP" in run.notes:
        return NotExpressible("products in pieces beside their collectives")
    if run.pp > 1:
        return NotExpressible("pipelines of FSDP's units")
    if KEY_HEADS % run.tp:
        return NotExpressible("heads do not divide among the tensor-parallel devices")
    if run.model not in _SIZES or run.precision != "bf16":
        return NotExpressible("no model family for this model")
    job = Job(
        batch=run.global_batch, sequence_length=run.length, optimizer="adamw", precision="bf16",
        clip_norm=1.0,
    )  # fmt: skip
    layout = Layout(
        tp=run.tp,
        dp=run.dp,
        sequence=run.tp > 1,
        microbatch=run.micro_batch,
        optimizer_sharding=3,
        recompute="none" if run.recompute == "none" else "full",
        recompute_every=2 if run.recompute == "selective" else 1,
        blocks=UNITS,
    )
    size = FamilySize(factory=_SIZES[run.model], length=run.length)
    is_compiled = "compile" in run.notes or run.tp > 1
    kernels = COMPILED if is_compiled else TORCH
    return Described(size, job, layout, waits=False, products="sustained", kernels=kernels)
