"""Pipelines of stages with given seconds and bytes, to be worked by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from simcore.cluster import Cluster, Device, Link
from simcore.job import Job
from simcore.lower import Problem
from simcore.mesh import Mesh
from simcore.pipeline import Part, Pipeline, Tie
from simcore.pipeline_batch import blank_tables
from simcore.pipeline_tasks import pipeline_program
from simcore.plan import Settings
from simcore.result import RawRun
from simcore.run import run_placement
from simcore.schedule import Schedule
from simcore.signature import Phase
from simcore.stages import StageTables

V100 = "V100-SXM2-16GB"
RANKS = Settings(host="per_rank", contention="fifo")


def chain_of(count: int, bandwidth: float = 1e9, latency: float = 0.0) -> Cluster:
    """Returns V100s, all pairs joined."""
    devices = [Device.of_kind(f"d{i}", V100) for i in range(count)]
    links = [
        Link(a.name, b.name, "", bandwidth, latency)
        for i, a in enumerate(devices)
        for b in devices[i + 1 :]
    ]
    return Cluster(name=f"mesh-{count}", devices=tuple(devices), links=tuple(links))


def tables_of(
    schedule: Schedule,
    seconds: Mapping[Phase, float | Sequence[float]],
    message: int = 0,
    **sizes: int | Sequence[int],
) -> StageTables:
    """Returns tables of stages with given seconds per phase, and bytes on every edge."""
    blank = blank_tables(schedule, (V100,))
    times = np.zeros(blank.seconds.shape)
    for phase, value in seconds.items():
        times[:, phase, 0] = value
    if Phase.B not in seconds:
        times[:, Phase.B] = times[:, Phase.I] + times[:, Phase.W]
    sent = np.array([[message, 0]] * len(schedule.edges), np.int64).reshape(-1, 2)
    fields = {
        name: np.broadcast_to(np.array(value, np.int64), getattr(blank, name).shape)
        for name, value in sizes.items()
    }
    return replace(blank, seconds=times, forward_bytes=sent, backward_bytes=sent, **fields)


def pipeline_of(
    schedule: Schedule,
    tables: StageTables,
    *,
    copies: int = 1,
    parts: Sequence[tuple[Part, ...]] | None = None,
    ties: Sequence[Tie] = (),
    **fields: int,
) -> Pipeline:
    """Returns a pipeline whose ranks are consecutive devices, `copies` of each."""
    ranks = range(schedule.num_ranks)
    return Pipeline(
        schedule=schedule,
        devices=tuple(tuple(rank * copies + c for c in range(copies)) for rank in ranks),
        meshes=(Mesh.of({"dp": copies}),) * schedule.num_ranks,
        tables=(tables,) * schedule.num_stages,
        parts=tuple(parts or ((),) * schedule.num_stages),
        ties=tuple(ties),
        microbatch=copies,
        kinds=(V100,),
        **fields,
    )


def play(
    pipeline: Pipeline, cluster: Cluster | None = None, settings: Settings = RANKS
) -> tuple[Problem, RawRun]:
    """Simulates a pipeline and returns its problem and timeline."""
    if cluster is None:
        cluster = chain_of(sum(len(rank) for rank in pipeline.devices))
    program = pipeline_program("toy", cluster, pipeline)
    problem = Problem.build(
        program.graph,
        cluster,
        Job(),
        settings,
        cost=program.cost,
        collectives=program.collectives,
    )
    return problem, run_placement(problem, program.placement)
