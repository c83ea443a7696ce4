"""Networks of the policies: by hand where simple, by what they promise where they are not."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from agents.losses import approximate_kl, clip_fraction, clipped_surrogate, mix_uniform
from agents.networks.attention import AdditiveAttention
from agents.networks.encoders import DeviceEncoder, GraphEncoder, gather
from agents.networks.grouper import BridgeRnn, FeedForwardGrouper, Flow
from agents.networks.inputs import Edges, mean_by
from agents.networks.placers import (
    GraphPlacer,
    Ground,
    SegmentPlacer,
    SequencePlacer,
    TransformerPlacer,
    leaning,
)
from agents.policy import Worth, compare, drawing, likeliest, repeating, sample
from agents.torch_state import torch_threads

WIDTH, FEATURES = 16, 3
PLACERS = {
    "segment": lambda f: SegmentPlacer(WIDTH, FEATURES, segment=4, is_factorised=f),
    "before": lambda f: SequencePlacer(WIDTH, FEATURES, attention="before", is_factorised=f),
    "after": lambda f: SequencePlacer(WIDTH, FEATURES, attention="after", is_factorised=f),
}
AT_ONCE = {
    "transformer": lambda: TransformerPlacer(WIDTH, FEATURES, segment=4),
    "graph": lambda: GraphPlacer(WIDTH, FEATURES),
}


@pytest.fixture(autouse=True)
def _seed():
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def chain(size: int) -> Edges:
    source = torch.arange(size - 1)
    return Edges(source, source + 1, torch.ones(size - 1), torch.ones(size - 1, 1))


def ground(groups: int = 10, devices: int = 3, noise: float = 0.0) -> Ground:
    allowed = torch.ones(groups, devices, dtype=torch.bool)
    allowed[1, 0] = False
    allowed[:, -1] = False
    return Ground(
        torch.randn(groups, WIDTH), torch.randn(devices, WIDTH),
        torch.rand(groups, devices, FEATURES), allowed, torch.zeros(groups, devices), noise,
        chain(groups),
    )  # fmt: skip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# encoders


def test_messages_are_summed_along_edges():
    nodes = torch.tensor([[1.0], [10.0], [100.0]])
    source, target = torch.tensor([0, 1, 0]), torch.tensor([2, 2, 1])
    found = gather(nodes, source, target, torch.tensor([[1.0], [2.0], [3.0]]))
    assert found.tolist() == [[0.0], [3.0], [21.0]]


def test_an_encoder_does_not_depend_on_the_ids_of_ops():
    encoder = GraphEncoder(5, 1, WIDTH, 3)
    features, edges, order = torch.randn(6, 5), chain(6), torch.randperm(6)
    place = torch.argsort(order)
    moved = edges._replace(source=place[edges.source], target=place[edges.target])
    assert_allclose(
        encoder(features[order], moved).detach(), encoder(features, edges).detach()[order],
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_an_encoder_knows_the_direction_of_edges():
    encoder, features, edges = GraphEncoder(5, 1, WIDTH, 1), torch.randn(6, 5), chain(6)
    reverse = edges._replace(source=edges.target, target=edges.source)
    assert not torch.allclose(encoder(features, edges), encoder(features, reverse))


def test_a_device_encoder_takes_any_number_of_devices_in_any_order():
    encoder = DeviceEncoder(4, 2, WIDTH)
    for size in (1, 4, 8):
        features, pairs, order = (
            torch.randn(size, 4),
            torch.randn(size, size, 2),
            torch.randperm(size),
        )
        moved = encoder(features[order], pairs[order][:, order])
        assert_allclose(moved.detach(), encoder(features, pairs).detach()[order], atol=1e-5)


def test_means_by_label_are_zero_where_there_is_nothing():
    found = mean_by(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [5.0]]), 4)
    assert found.tolist() == [[2.0], [0.0], [3.0], [0.0]]


def test_attention_is_a_mean_of_the_memory():
    attention, memory = AdditiveAttention(WIDTH), torch.randn(1, WIDTH).expand(5, -1)
    found = attention(torch.randn(2, WIDTH), attention.keys(memory), memory)
    assert_allclose(found.detach(), memory[:2], rtol=1e-5)


# the grouper


def test_a_new_grouper_has_the_groups_of_its_prior():
    prior = torch.eye(3)[torch.tensor([0, 2, 1, 1])] * 5
    table = FeedForwardGrouper(4, 8, 7)(torch.randn(4, 4), prior)
    assert_allclose(table.detach(), prior.log_softmax(1), rtol=1e-6)


def test_gradients_of_what_the_placer_reads_reach_the_grouper():
    grouper, bridge = FeedForwardGrouper(4, 8, 3), BridgeRnn(WIDTH)
    table = grouper(torch.randn(5, 4), torch.zeros(5, 3))
    flow = Flow(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), torch.ones(3))
    groups, between = bridge(torch.randn(5, WIDTH), table.exp(), flow)
    (groups.sum() + between.square().sum()).backward()
    assert grouper.leave.weight.grad is not None
    assert float(grouper.leave.weight.grad.abs().sum()) > 0


def test_what_flows_between_groups_is_what_their_units_send():
    member = torch.eye(2)[torch.tensor([0, 0, 1])]
    flow = Flow(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), torch.tensor([1.0, 2.0, 4.0]))
    _, between = BridgeRnn(WIDTH)(torch.randn(3, WIDTH), member, flow)
    assert between.tolist() == [[1.0, 2.0], [4.0, 0.0]]


# the placers


@pytest.mark.parametrize("is_factorised", [True, False])
@pytest.mark.parametrize("make", PLACERS.values(), ids=PLACERS.keys())
@pytest.mark.parametrize("groups", [1, 4, 10])
def test_a_placer_judges_what_it_drew_as_it_drew_it(make, is_factorised, groups):
    placer, where = make(is_factorised), ground(max(2, groups))
    drawn = placer(where, drawing(7, generator()))
    again = placer(where, repeating(drawn.actions))
    assert drawn.actions.shape == (7, max(2, groups))
    assert torch.equal(again.actions, drawn.actions)
    for a, b in zip((*drawn.tables, drawn.sequence), (*again.tables, again.sequence), strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-5)
    assert where.allowed[torch.arange(drawn.actions.shape[1]), drawn.actions].all()


@pytest.mark.parametrize("make", PLACERS.values(), ids=PLACERS.keys())
def test_probabilities_of_a_sequence_add_up_to_one(make):
    where = ground(3)
    grid = torch.cartesian_prod(*[torch.arange(2)] * 3)
    legal = grid[grid[:, 1] == 1]
    decided = make(False)(where, repeating(legal))
    assert decided.sequence is not None
    assert float(decided.sequence.detach().sum(1).exp().sum()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("make", PLACERS.values(), ids=PLACERS.keys())
def test_later_groups_know_what_was_decided_before_them(make):
    where = ground(8)
    actions = torch.ones(2, 8, dtype=torch.int64)
    actions[1, 0] = 0
    sequence = make(False)(where, repeating(actions)).sequence
    assert sequence is not None
    assert not torch.allclose(sequence[0, 4:], sequence[1, 4:])


@pytest.mark.parametrize("make", AT_ONCE.values(), ids=AT_ONCE.keys())
def test_a_placer_of_all_groups_at_once_has_one_table(make):
    where = ground(10)
    decided = make()(where, drawing(5, generator()))
    assert decided.sequence is None
    assert decided.tables[0].shape == (10, 3)
    assert_allclose(decided.tables[0].exp().sum(1).detach(), 1.0, rtol=1e-5)
    assert (decided.actions != 2).all()


@pytest.mark.parametrize("devices", [2, 4, 9])
def test_the_same_placer_takes_any_number_of_devices(devices):
    placer = PLACERS["segment"](True)
    assert placer(ground(5, devices), likeliest).tables[0].shape == (5, devices)


def test_a_graph_placer_says_what_it_misses():
    with pytest.raises(ValueError, match="edges"):
        AT_ONCE["graph"]()(ground()._replace(edges=None), likeliest)


def test_a_placement_that_is_leaned_to_has_its_probability():
    allowed = torch.tensor([[True, True, True], [True, True, False]])
    table = leaning(allowed, torch.tensor([2, 0]), 0.7).masked_fill(~allowed, -np.inf).softmax(1)
    assert_allclose(table, [[0.1, 0.1, 0.8], [0.85, 0.15, 0.0]], rtol=1e-5)


def test_noise_leaves_every_choice_a_part_of_the_uniform():
    table = torch.tensor([[0.0, -np.inf, -40.0]])
    mixed = mix_uniform(table.log_softmax(1), 0.2).exp()
    assert_allclose(mixed, [[0.9, 0.0, 0.1]], rtol=1e-5)
    assert mix_uniform(table, 0.0) is table


# samples and their comparison


def test_sequences_are_sampled_as_often_as_they_are_probable():
    probabilities = torch.tensor([[[0.2, 0.8]], [[0.7, 0.3]]]).repeat(5000, 1, 1)
    allowed = torch.ones_like(probabilities, dtype=torch.bool)
    drawn = sample(probabilities.log(), allowed, 10_000, generator()).reshape(5000, 2)
    assert_allclose(drawn.to(torch.float64).mean(0), [0.8, 0.3], atol=0.02)


def test_a_comparison_by_tallies_is_that_of_every_sample():
    placer, where = PLACERS["segment"](True), ground(6, noise=0.1)
    old = placer(where, drawing(50, generator()))
    advantage = torch.randn(50, 6)
    with torch.no_grad():
        for weights in placer.parameters():
            weights.add_(0.1 * torch.randn(weights.shape))
    now = placer(where, repeating(old.actions))
    found = compare(now, old, Worth.of(old, advantage), clip=0.2)
    at = (torch.arange(6), old.actions)
    log_ratio = (now.tables[0][at] - old.tables[0][at]).detach()
    by_hand = clipped_surrogate(log_ratio, advantage, clip=0.2)
    assert float(found.loss.detach()) == pytest.approx(float(by_hand), rel=1e-4)
    assert found.approx_kl == pytest.approx(float(approximate_kl(log_ratio)), rel=1e-3)
    assert found.clip_fraction == pytest.approx(float(clip_fraction(log_ratio, clip=0.2)))
