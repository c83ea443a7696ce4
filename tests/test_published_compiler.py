"""Fused code: what lies between products moves less, and nothing else changes."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calibration.published.cause_compiler import (
    NONE,
    fused_groups,
    shares,
    uses_of,
    with_compiler,
)
from simcore.cost import cost_table
from simcore.frontends.torch_capture import capture
from simcore.graph import OpClass, OpGraph
from simcore.job import Job
from simcore.models.inputs import Built
from simcore.signature import Phase

WIDTH = 64
KIND = "A100-SXM4-80GB"


class Chain(nn.Module):
    """Product, three ops in a row, product, and an addition of what came before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Returns a scalar."""
        hidden = (self.first(states) * 2.0).tanh() + 1.0
        loss: Tensor = (self.second(hidden) + hidden).sum()
        return loss


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    with torch.device("meta"):
        built = Built(Chain(), lambda batch: {"states": torch.zeros(batch, WIDTH)})
    return capture(built.module, built.inputs, Job(batch=4), name="chain")


def test_ops_in_a_row_are_one_kernel_and_none_reaches_across_a_product(graph: OpGraph) -> None:
    group = fused_groups(graph, uses_of(graph))
    forward = graph.phase == Phase.F
    pointwise = np.flatnonzero(forward & (graph.op_class == OpClass.POINTWISE))
    times, tanh, one, added = pointwise[:4]
    assert group[times] == group[tanh] == group[one] != NONE
    assert group[added] != group[one]
    products = graph.op_class == OpClass.MATMUL
    assert (group[products] == NONE).all()
    assert (group[graph.phase == Phase.B] != group[times]).all()


def test_what_only_passes_between_them_is_not_moved(graph: OpGraph) -> None:
    uses = uses_of(graph)
    group = fused_groups(graph, uses)
    share = shares(graph, uses, group, 4)
    first = np.flatnonzero((graph.phase == Phase.F) & (graph.op_class == OpClass.POINTWISE))[0]
    # three ops read and write one tensor each; fused they read one and write two: the last, and
    # what tanh made, which its backward reads
    assert share[first] == pytest.approx(3 / 6)


def test_products_cost_as_before_and_no_op_costs_more(graph: OpGraph) -> None:
    before = cost_table(graph, Job(batch=4), (KIND,), (4,))
    after = with_compiler(before, graph, (4,))
    products = graph.op_class == OpClass.MATMUL
    assert (after.seconds[products] == before.seconds[products]).all()
    assert (after.seconds <= before.seconds).all()
    assert after.seconds.sum() < before.seconds.sum()
    assert (after.launch > 0).sum() < (before.launch > 0).sum()
    updates = graph.phase == Phase.U
    assert (after.launch[updates] == before.launch[updates]).all()
