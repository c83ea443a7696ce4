"""One pipeline through the simulator, just as `simcore.simulate` plays it, without the details."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.kernel import Status
from simcore.lower import Problem
from simcore.pipeline import Pipeline
from simcore.pipeline_fold import folded
from simcore.pipeline_tasks import pipeline_program
from simcore.plan import Settings
from simcore.run import simulate_batch


class Played(NamedTuple):
    """What a pipeline takes."""

    is_legal: bool  # it ends, whether it fits or not
    step_time: float  # s
    reserved: NDArray[np.int64]  # [dev] bytes


def play(
    problem: Problem, pipeline: Pipeline, settings: Settings, *, reserve_memory: int = 0
) -> Played:
    """Simulates a synchronous pipeline task by task; equal places of a stage are folded.

    Args:
        problem: gives the graph, the cluster and the job.
        pipeline: the pipeline.
        settings: how to simulate; every device has a host of its own.
        reserve_memory: bytes to leave free on every GPU.

    Raises:
        PlanError: a route that is missing.
    """
    pipeline = folded(pipeline, problem.cluster)
    program = pipeline_program(problem.graph.name, problem.cluster, pipeline, problem.job.batch)
    tasks = Problem.build(
        program.graph,
        problem.cluster,
        problem.job,
        settings,
        cost=program.cost,
        reserve_memory=reserve_memory,
        collectives=program.collectives,
    )
    outcome = simulate_batch(tasks, program.placement[None])
    reserved = outcome.reserved[0].astype(np.int64)
    if pipeline.is_folded:
        for rank in pipeline.devices:
            reserved[list(rank)] = reserved[rank[0]]
    is_legal = outcome.status[0] in {Status.OK, Status.OUT_OF_MEMORY}
    return Played(is_legal, float(outcome.step_time[0]), reserved)
