"""Sharding on cases from the issue trackers of other planners."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from simcore.errors import PlanError
from simcore.frontends.torch_capture import capture
from simcore.job import Job
from simcore.shard_batch import simulate_shardings
from simcore.shard_space import WHOLE, ShardSpace
from simcore.sharding.local import local_graph
from simcore.sharding.reshape import Layout, Step, price_reshape
from simcore.sharding.states import Axis
from tests.sharded_models import GPUS, SWITCH

# a reshape priced at nothing although an all-gather follows (openxla/xla#12392)

MESH = {"a": 2, "b": 4}
SOURCE = Layout((32, 16, 1000, 256), {"a": 0, "b": 1})
HALF = 2  # bytes of an fp16 element


def test_a_reshape_that_needs_an_all_gather_costs_what_it_brings() -> None:
    wanted = Layout((512, 1000, 256), {"a": 0})
    total = math.prod(SOURCE.shape) * HALF
    assert total == 262_144_000
    assert price_reshape(SOURCE, wanted, MESH, HALF) == [
        Step("all_gather", "b", num_bytes=131_072_000, received=98_304_000)
    ]


def test_a_reshape_that_keeps_the_sharded_axes_aligned_costs_nothing() -> None:
    for shape, split in (
        ((512, 1000, 256), {"a": 0, "b": 0}),  # not aligned: b would be next to a
        ((2, 16, 4, 4, 1000, 256), {"a": 0, "b": 2}),
        ((32, 16000, 256), {"a": 0, "b": 1}),
        ((32, 16, 256000), {"a": 0, "b": 1}),
    ):
        steps = price_reshape(SOURCE, Layout(shape, split), MESH, HALF)
        assert (steps == []) == (shape != (512, 1000, 256))


def test_an_axis_that_changes_its_dimension_is_an_all_to_all_and_a_new_one_a_slice() -> None:
    other = Layout(SOURCE.shape, {"a": 2, "b": 1})
    local = math.prod(SOURCE.shape) * HALF // 8
    assert price_reshape(SOURCE, other, MESH, HALF) == [
        Step("all_to_all", "a", num_bytes=local, received=local // 2)
    ]
    whole = Layout(SOURCE.shape, {})
    assert [step.kind for step in price_reshape(whole, SOURCE, MESH, HALF)] == ["slice", "slice"]
    assert sum(step.received for step in price_reshape(whole, SOURCE, MESH, HALF)) == 0


@given(st.permutations(["a", "b", "c"]), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_what_is_received_is_what_a_device_lacks(axes: list[str], places: list[int]) -> None:
    mesh, shape = {"a": 2, "b": 2, "c": 2}, (8, 8, 8)
    split = {axis: dim for axis, dim in zip(axes, places, strict=True) if dim < 3}
    gathered = price_reshape(Layout(shape, split), Layout(shape, {}), mesh, 1)
    assert sum(step.received for step in gathered) == 512 - 512 // 2 ** len(split)
    assert price_reshape(Layout(shape, split), Layout(shape, split), mesh, 1) == []


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (SOURCE, Layout((512, 1000), {}), "cannot be reshaped"),
        (SOURCE, Layout((512, 1000, 256), {"x": 0}), "no axis 'x'"),
        (SOURCE, Layout((512, 1000, 256), {"a": 3}), "has no dimension 3"),
        (Layout((3,), {"a": 0}), Layout((3,), {}), "2 devices do not divide 3"),
    ],
)
def test_layouts_that_cannot_be_are_refused(source: Layout, target: Layout, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        price_reshape(source, target, MESH, HALF)


# cheap to gather, dear to keep (meta-pytorch/autoparallel#22)

VOCABULARY, WIDTH, LENGTH, BATCH, RANKS = 128_256, 4096, 4096, 32, 8
OUTPUT = BATCH * LENGTH * WIDTH * HALF


class LookUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids)).square().mean()


def look_up() -> Any:
    with torch.device("meta"):
        model = LookUp()
    return model, lambda batch: {"ids": torch.zeros(batch, LENGTH, dtype=torch.long)}


def test_the_output_of_an_embedding_stays_sharded() -> None:
    job = Job(batch=BATCH, precision="bf16")
    model, inputs = look_up()
    graph = capture(model, inputs, job, name="look-up")
    space = ShardSpace.build(graph, SWITCH, job, GPUS[:RANKS], {"data": RANKS})
    rows = np.array(list(itertools.product((WHOLE, 0), repeat=space.num_decisions)), np.int8)
    found = simulate_shardings(space, rows)
    best = rows[found.step_time.argmin()]
    made = {"best": best, "none": np.full_like(best, WHOLE)}
    sizes = {}
    for name, row in made.items():
        groups = [g for g, axis in enumerate(space.axis_of(row)) if axis == 0]
        order = tuple(sorted(groups, key=lambda g: space.ranks.place[g]))
        axes = [[Axis("data", RANKS, order)]]
        local = local_graph(graph, space.linkage, axes, np.zeros(graph.num_units, np.int64))
        tensor = local.graph.tensor_names.index("table.embedding:0")
        size = local.graph.tensor_bytes[tensor]
        sizes[name] = int(size[0] + size[1] * (BATCH // local.samples))
    assert sizes == {"best": OUTPUT // RANKS, "none": OUTPUT}
    assert sizes["best"] == 134_217_728
    # and nothing that keeps it whole is as fast, or as small
    assert found.step_time.min() < found.step_time[0] / 2
    assert found.allocated[found.step_time.argmin()] < found.allocated[0] - OUTPUT // 2
