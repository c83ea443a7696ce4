"""Stages x replicas of a published planner -> a Plan, so that the simulator can rate it too.

The planners here name layers; a layer's placement unit holds its forward, backward and update. What
no stage names (inputs, whose loading time the planners leave out) goes to the first stage. Devices
are taken in the cluster's order, GPUs only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import RANK_HOSTS, Plan, Ref, Stage
from simcore.steady_state import SEMANTICS_ASYNC


class NamedStage(NamedTuple):
    """One stage."""

    layers: tuple[str, ...]  # names of ops of the graph
    replicas: int


def make_stage_plan(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    stages: Sequence[NamedStage],
    *,
    microbatches: int | None = None,
) -> Plan:
    """Returns the plan of a pipeline.

    Args:
        graph: the graph whose ops the stages name.
        cluster: has a GPU for every replica.
        job: the job; its batch is divided into the microbatches.
        stages: first to last.
        microbatches: of a synchronous 1F1B pipeline; None is PipeDream's asynchronous one, where
            each minibatch is one.

    Raises:
        PlanError: too few GPUs, or a layer that the graph does not have.
    """
    gpus = [cluster.device_names[index] for index in cluster.gpu_indices]
    wanted = sum(stage.replicas for stage in stages)
    if wanted > len(gpus):
        raise PlanError(f"the stages need {wanted} GPUs, cluster {cluster.name!r} has {len(gpus)}")
    owner = _unit_stages(graph, stages)
    ends = np.cumsum([0, *(stage.replicas for stage in stages)])
    made = tuple(
        Stage(
            name=f"stage{number}",
            devices=tuple(gpus[ends[number] : ends[number + 1]]),
            ops=tuple(
                name for name, at in zip(graph.unit_names, owner, strict=True) if at == number
            ),
            mesh={"dp": stage.replicas},
        )
        for number, stage in enumerate(stages)
    )
    is_async = microbatches is None
    return Plan(
        graph=Ref(name=graph.name, hash=graph.content_hash()),
        cluster=Ref(name=cluster.name, hash=cluster.content_hash()),
        job=job,
        job_hash=job.content_hash(),
        stages=made,
        settings=RANK_HOSTS,
        microbatches=microbatches or len(stages),
        schedule="pipedream" if is_async else "1f1b",
        semantics=(SEMANTICS_ASYNC,) if is_async else (),
    )


def _unit_stages(graph: OpGraph, stages: Sequence[NamedStage]) -> list[int]:
    """Returns the stage of each unit, [unit]: that of its first layer."""
    number = {name: op for op, name in enumerate(graph.op_names)}
    owner = [-1] * graph.num_units
    for index, stage in reversed(list(enumerate(stages))):
        for layer in stage.layers:
            if layer not in number:
                raise PlanError(f"{graph.name} has no layer {layer!r}")
            owner[int(graph.unit[number[layer]])] = index
    return [max(stage, 0) for stage in owner]
