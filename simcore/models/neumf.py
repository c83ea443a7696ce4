"""Neural collaborative filtering (He et al., 2017, arXiv:1708.05031), for MovieLens-1M.

NeuMF: a product of embeddings of 32 beside three fully connected layers over embeddings of 128, as
the public PyTorch version has it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, ids

USERS, ITEMS = 6_040, 3_706  # MovieLens-1M
FACTORS = 32
DEPTH = 3


class NeuMF(nn.Module):
    """Says whether a user likes an item."""

    def __init__(self) -> None:
        super().__init__()
        wide = FACTORS * 2 ** (DEPTH - 1)
        self.user_factors = nn.Embedding(USERS, FACTORS)
        self.item_factors = nn.Embedding(ITEMS, FACTORS)
        self.user_features = nn.Embedding(USERS, wide)
        self.item_features = nn.Embedding(ITEMS, wide)
        sizes = [2 * wide // 2**number for number in range(DEPTH + 1)]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Dropout(0.0), nn.Linear(size, size // 2), nn.ReLU())
                for size in sizes[:-1]
            )
        )
        self.predict = nn.Linear(2 * FACTORS, 1)

    def forward(self, users: Tensor, items: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of pairs, all [batch], a scalar."""
        product = self.user_factors(users) * self.item_factors(items)
        features = torch.cat([self.user_features(users), self.item_features(items)], -1)
        both = torch.cat([product, self.layers(features)], -1)
        said = self.predict(both).flatten()
        return F.binary_cross_entropy_with_logits(said, labels)


def neumf(_size: int) -> Built:
    """Returns NeuMF, which has one size."""

    def inputs(batch: int) -> dict[str, Tensor]:
        return {"users": ids(batch), "items": ids(batch), "labels": torch.zeros(batch)}

    return Built(NeuMF(), inputs)
