"""A row in the program's words: model, job and layout, or the reason why it has none."""

from typing import Literal, NamedTuple

from calibration.published.cause_kernels import TORCH, Kernels
from calibration.published.models import ModelSize
from calibration.published.plans import Layout
from simcore.job import Job

Timed = Literal["all", "forward and backward", "forward"]
Products = Literal["as measured", "tf32", "sustained"]


class NotExpressible(NamedTuple):
    """Why a run cannot be said in a graph, a cluster and a plan."""

    reason: str


class Described(NamedTuple):
    """A run in the program's words.

    Attributes:
        size: of the model.
        job: what is trained.
        layout: how it is shared out.
        waits: whether the framework's host waits for each op, see `assumptions.HOST_FLOOR`.
        only: what of a step was timed, without the loss if not all.
        floor: s an op of that host; None = `HOST_FLOOR`.
        products: ``tf32``: fp32 products run on TF32 tensor cores; ``sustained``: 16-bit products
            as fast as the GPU's power limit lets it keep up.
        idle: s of a step in which the machine does nothing for it.
        loading: s that the host needs to load the samples of a step, beside everything else.
        splits: each tensor-parallel device sends its part of a message between stages only, and
            both sides stop for it, as in DeepSpeed's pipeline.
        kernels: that its framework has.
        waiting: times as long that devices take, as they wait for the one with most to do.
    """

    size: ModelSize
    job: Job
    layout: Layout
    waits: bool = True
    only: Timed = "all"
    floor: float | None = None
    products: Products = "as measured"
    idle: float = 0.0
    loading: float = 0.0
    splits: bool = False
    kernels: Kernels = TORCH
    waiting: float = 1.0
