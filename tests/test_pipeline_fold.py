"""Hundreds of equal devices as one of each stage: when that is the same, and when not."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.describe import describe
from simcore.graph import Phase
from simcore.mesh import Mesh
from simcore.pipeline import Cost, Part, Pipeline, Tie
from simcore.pipeline_fold import folded, unfolded
from simcore.pipeline_tasks import pipeline_program
from simcore.plan import Settings
from simcore.schedule_names import make_schedule
from tests.networks import star, two_sides
from tests.pipelines import V100, play, tables_of

quick = settings(deadline=None, max_examples=40)
ZERO = np.zeros(1)


class Shape(NamedTuple):
    """How a pipeline is laid out."""

    schedule: str
    ranks: int
    copies: int
    shards: int
    microbatches: int
    optimizer_sharding: int
    message: int
    seconds: tuple[float, ...]


shapes = st.builds(
    Shape,
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    ranks=st.integers(1, 3),
    copies=st.integers(1, 3),
    shards=st.integers(1, 2),
    microbatches=st.sampled_from([3, 4]),
    optimizer_sharding=st.integers(0, 3),
    message=st.sampled_from([0, 10**8, 10**9]),
    seconds=st.tuples(*[st.floats(0.1, 1.0)] * 6),
)


def build(shape: Shape) -> Pipeline:
    schedule = make_schedule(shape.schedule, shape.ranks, shape.microbatches)
    times = {
        Phase.F: shape.seconds[: shape.ranks],
        Phase.B: shape.seconds[3 : 3 + shape.ranks],
        Phase.U: 0.1,
    }
    tables = tables_of(schedule, times, message=shape.message)
    count = shape.copies * shape.shards
    half = [Cost(tables.seconds[stage, Phase.B] / 2, ZERO, ZERO) for stage in range(shape.ranks)]
    parts = [(Part(10**8, cost), Part(10**9, cost)) for cost in half]
    tie = [Tie(shape.ranks - 1, 0, 10**8, is_updated=False)] if shape.ranks > 1 else []
    return Pipeline(
        schedule=schedule,
        devices=tuple(tuple(range(r * count, (r + 1) * count)) for r in range(shape.ranks)),
        meshes=(Mesh.of({"dp": shape.copies, "tp": shape.shards}),) * shape.ranks,
        tables=(tables,) * shape.ranks,
        parts=tuple(parts) if shape.copies > 1 else ((),) * shape.ranks,
        ties=tuple(tie),
        microbatch=shape.copies,
        kinds=(V100,),
        optimizer_sharding=shape.optimizer_sharding,
    )


@quick
@given(shapes, st.sampled_from(["none", "fifo", "fair"]))
def test_a_folded_pipeline_takes_as_long_as_the_whole_one(shape, contention):
    pipeline = build(shape)
    cluster = star(shape.ranks * shape.copies * shape.shards, latency=0.01)
    how = Settings(host="per_rank", contention=contention)
    fold = folded(pipeline, cluster)
    assert fold.is_folded == (shape.copies * shape.shards > 1)
    whole, part = play(pipeline, cluster, how)[1], play(fold, cluster, how)[1]
    assert part.step_time == pytest.approx(whole.step_time, rel=1e-9)


def test_the_other_places_are_told_as_the_first():
    shape = Shape("1f1b", 2, 2, 2, 4, 1, 10**8, (0.5,) * 6)
    pipeline, cluster = build(shape), star(8)
    how = Settings(host="per_rank", contention="fair")
    fold = folded(pipeline, cluster)
    results = []
    for each in (pipeline, fold):
        problem, run = play(each, cluster, how)
        held = pipeline_program("toy", cluster, each).held
        results.append(unfolded(describe(problem, run, held), each, cluster))
    whole, told = results
    assert [use.name for use in told.devices] == [use.name for use in whole.devices]
    assert [use.allocated for use in told.devices] == [use.allocated for use in whole.devices]
    assert [use.busy for use in told.devices] == pytest.approx([u.busy for u in whole.devices])
    assert told.feasible == whole.feasible


@pytest.mark.parametrize("copies", [2, 4])
def test_places_that_share_a_channel_are_not_folded(copies):
    shape = Shape("gpipe", 2, copies, 1, 4, 0, 10**8, (0.5,) * 6)
    cluster = two_sides(copies)
    assert not folded(build(shape), cluster).is_folded


def test_one_device_a_stage_needs_no_fold():
    shape = Shape("gpipe", 3, 1, 1, 4, 0, 10**8, (0.5,) * 6)
    assert not folded(build(shape), star(3)).is_folded
