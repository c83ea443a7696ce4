"""Deep Graph Infomax: a graph encoder learns, without any reward, what real graphs look like.

Veličković et al., Deep Graph Infomax, 2019. The encoder sees a graph and the same graph with the
features of its ops permuted; a bilinear discriminator, given the mean of the real graph's vectors,
tells real ops from permuted ones. The published text of Mars says contrastive pre-training and no
more; that it is this objective is a reconstruction. From the reference code of Deep Graph Infomax:
a new permutation for each step, mean and sigmoid as read-out, Adam at 1e-3 without weight decay.
Ours: many graphs in turn, an encoder that keeps the direction of edges, and the numbers of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agents.networks.encoders import GraphEncoder
from agents.networks.inputs import Edges

LEARNING_RATE = 1e-3  # of the reference code


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A graph to learn from."""

    features: Tensor  # [op, feature]
    edges: Edges


class Infomax(nn.Module):
    """An encoder with its discriminator."""

    def __init__(self, encoder: GraphEncoder, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.bilinear = nn.Bilinear(width, width, 1)
        nn.init.xavier_uniform_(self.bilinear.weight)
        nn.init.zeros_(self.bilinear.bias)

    def forward(self, sample: Sample, order: Tensor) -> Tensor:
        """Returns logits that ops are real, [2, op]: of the graph and of a permutation of it.

        Args:
            sample: the graph.
            order: int64 [op], a permutation.
        """
        real = self.encoder(sample.features, sample.edges)
        corrupted = self.encoder(sample.features[order], sample.edges)
        summary = real.mean(0).sigmoid().expand_as(real)
        both = [self.bilinear(nodes, summary).squeeze(1) for nodes in (real, corrupted)]
        return torch.stack(both)


def infomax_loss(logits: Tensor) -> Tensor:
    """Returns the binary cross-entropy of logits, [2, op], whose first row should be positive."""
    truth = torch.zeros_like(logits)
    truth[0] = 1.0
    return nn.functional.binary_cross_entropy_with_logits(logits, truth)


def pretrain(
    encoder: GraphEncoder,
    width: int,
    graphs: Sequence[Sample],
    steps: int,
    *,
    listener: Callable[[int, float], None] | None = None,
) -> Infomax:
    """Trains an encoder on graphs in turn; torch's own generator decides the permutations.

    Args:
        encoder: trained in place.
        width: of its vectors.
        graphs: at least one.
        steps: graphs seen, each once a turn.
        listener: called with (step, loss) after each.

    Returns:
        The encoder with the discriminator that it was trained against.
    """
    model = Infomax(encoder, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for number in range(steps):
        sample = graphs[number % len(graphs)]
        loss = infomax_loss(model(sample, torch.randperm(len(sample.features))))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if listener is not None:
            listener(number + 1, float(loss.detach()))
    return model


@torch.no_grad()
def accuracy(model: Infomax, sample: Sample, order: Tensor) -> float:
    """Returns the fraction of ops that are told right: real as real, permuted as permuted.

    Args:
        model: trained.
        sample: a graph.
        order: int64 [op], a permutation. Ops that it puts where their features were look the same
            on both sides and count as wrong once.
    """
    logits = model(sample, order)
    return float(torch.cat([logits[0] > 0, logits[1] <= 0]).to(torch.float64).mean())
