"""What the tests of real runs share: one device as torch runs it, and a fleet held against it."""

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibration.run.fleet import Fleet
from calibration.run.launch import Launch, ranks_of
from calibration.run.source import cut_samples, real_model
from calibration.run.work import StepReport
from simcore.cluster import Cluster
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Plan
from simcore.sources import load_graph

BATCH, SEED, TOLERANCE = 8, 5, 2e-5
FACTORIES = "tests.run_models"


@functools.lru_cache(maxsize=16)
def graph_of(factory: str, optimizer: str = "sgd") -> tuple[OpGraph, Job]:
    graph, job, _ = load_graph(f"{FACTORIES}:{factory}", {"batch": BATCH, "optimizer": optimizer})
    return graph, job


def eager(source: str, job: Job, microbatches: int) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Returns loss and gradients of one device that sees the microbatches one after the other."""
    model = real_model(source, job, BATCH, SEED)
    size, losses = BATCH // microbatches, []
    for begin in range(0, BATCH, size):
        args, kwargs = cut_samples((model.args, model.kwargs), BATCH, begin, begin + size)
        loss = model.module(*args, **kwargs)
        loss.backward(torch.tensor(1 / microbatches))
        losses.append(loss.item())
    found = {n: p.grad.double().numpy() for n, p in model.module.named_parameters()}
    return sum(losses) / microbatches, found


def check(
    fleet: Fleet,
    plan: Plan,
    graph: OpGraph,
    cluster: Cluster,
    microbatches: int,
    repeats: int = 1,
) -> None:
    """Runs steps of a plan and holds the first against one device."""
    source = graph.name
    ranks = ranks_of(plan, graph, cluster, source, Launch(device="cpu", seed=SEED))
    number = fleet.load(ranks.works)
    reports = fleet.step(number, keeps_gradients=True)
    loss, expected = eager(source, plan.job, microbatches)
    assert mean_loss(reports) == pytest.approx(loss, rel=1e-5)
    assert {name for report in reports for name in report.gradients} == expected.keys()
    for report in reports:  # every rank that has a gradient has the same
        for name, found in report.gradients.items():
            np.testing.assert_allclose(
                found, expected[name], rtol=TOLERANCE, atol=1e-6, err_msg=name
            )
    for _ in range(repeats):
        reports = fleet.step(number)
    assert mean_loss(reports) < loss  # the update arrives where it is used
    fleet.ask("drop", number=number)


def mean_loss(reports: Sequence[StepReport]) -> float:
    losses = [loss for report in reports for loss in report.losses]
    return sum(losses) / len(losses)
