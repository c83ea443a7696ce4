"""Deep Graph Infomax: its loss by hand, that it learns, and what it tells of graphs unseen."""

import math

import pytest
import torch
from numpy.testing import assert_allclose

from agents.contrastive import Infomax, Sample, accuracy, infomax_loss, pretrain
from agents.families import family, tasks_of
from agents.networks.encoders import GraphEncoder
from agents.networks.inputs import Inputs
from agents.observe import EDGE_FEATURES, OP_FEATURES, observe
from agents.torch_state import torch_threads
from simcore import Cluster

WIDTH = 32


@pytest.fixture(autouse=True)
def _one_thread():
    with torch_threads(1):
        yield


def samples(count: int, seed: int = 0) -> list[Sample]:
    tasks = tasks_of(
        family([f"generated:{count}"], seed), [Cluster.preset("4xV100-NVLink")], num_groups=32
    )
    inputs = [Inputs.of(observe(task.grouping)) for task in tasks]
    return [Sample(features=one.ops, edges=one.edges) for one in inputs]


def encoder(seed: int = 0) -> GraphEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GraphEncoder(OP_FEATURES, EDGE_FEATURES, WIDTH, 2)


def trained(graphs: list[Sample], steps: int) -> Infomax:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return pretrain(encoder(), WIDTH, graphs, steps)


def order(sample: Sample, seed: int = 1) -> torch.Tensor:
    return torch.randperm(len(sample.features), generator=torch.Generator().manual_seed(seed))


def test_the_loss_is_the_cross_entropy_worked_by_hand():
    logits = torch.tensor([[0.0, 2.0], [-1.0, 0.0]])
    expected = (math.log(2) + math.log1p(math.exp(-2)) + math.log1p(math.exp(-1)) + math.log(2)) / 4
    assert infomax_loss(logits).item() == pytest.approx(expected)


def test_an_identity_permutation_cannot_be_told_from_the_graph():
    sample = samples(1)[0]
    model = Infomax(encoder(), WIDTH)
    logits = model(sample, torch.arange(len(sample.features)))
    assert torch.equal(logits[0], logits[1])
    assert accuracy(model, sample, torch.arange(len(sample.features))) == 0.5


def test_the_summary_is_the_sigmoid_of_the_mean_of_the_real_graph():
    sample, model = samples(1)[0], Infomax(encoder(), WIDTH)
    nodes = model.encoder(sample.features, sample.edges)
    summary = torch.sigmoid(nodes.mean(0))
    by_hand = nodes @ model.bilinear.weight[0] @ summary + model.bilinear.bias
    logits = model(sample, order(sample))
    assert_allclose(logits[0].detach(), by_hand.detach(), rtol=1e-4, atol=1e-5)


def test_training_is_decided_by_the_seed_and_lowers_the_loss():
    graphs, curves = samples(2), []
    for _ in range(2):
        losses: list[float] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pretrain(encoder(), WIDTH, graphs, 20, listener=lambda _, loss: losses.append(loss))  # noqa: B023
        curves.append(losses)
    assert curves[0] == curves[1]
    assert sum(curves[0][-4:]) < 0.8 * sum(curves[0][:4])


@pytest.mark.slow
def test_real_ops_are_told_from_permuted_ones_on_graphs_unseen():
    model = trained(samples(8), 240)
    unseen = samples(5, seed=1000)
    found = [accuracy(model, sample, order(sample)) for sample in unseen]
    assert sum(found) / len(found) >= 0.95
    assert min(found) >= 0.9
