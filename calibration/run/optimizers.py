"""Optimizers of a job, as torch runs them: one fused step per parameter."""

from collections.abc import Iterable
from typing import Any

import torch

from simcore.job import Job

LEARNING_RATE = 1e-3
MOMENTUM = 0.9


def make_optimizer(job: Job, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Returns the optimizer of a job; its state is made with the first step.

    Args:
        job: what is trained.
        parameters: to be updated.
    """
    rate: dict[str, Any] = {"lr": LEARNING_RATE, "fused": True}
    if job.optimizer == "adam":
        return torch.optim.Adam(parameters, **rate)
    if job.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **rate)
    momentum = MOMENTUM if job.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, momentum=momentum, **rate)
