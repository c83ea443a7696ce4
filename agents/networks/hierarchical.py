"""The networks of the Hierarchical Planner: a grouper of two layers and a placer of LSTMs."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from agents.networks.attention import AdditiveAttention


class Squash(NamedTuple):
    """How scores become logits: limit tanh(score / temperature), then noise where there is some."""

    limit: float
    temperature: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Returns logits, of the shape of the scores."""
        return self.limit * torch.tanh(scores / self.temperature)


class Grouper(nn.Module):
    """Two products without biases and with nothing between them, as in the released code."""

    def __init__(self, features: int, hidden: int, groups: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, hidden, bias=False)
        self.leave = nn.Linear(hidden, groups, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Returns log probabilities, [unit, group], from [unit, feature]."""
        table: Tensor = self.leave(self.enter(features)).log_softmax(1)
        return table


class Placer(nn.Module):
    """A two-way LSTM reads the groups; another decides them in order, with attention to them."""

    def __init__(self, features: int, width: int, num_devices: int, squash: Squash) -> None:
        super().__init__()
        self.squash = squash
        self.reader = nn.LSTM(features, width // 2, batch_first=True, bidirectional=True)
        self.attention = AdditiveAttention(width)
        self.decoder = nn.LSTMCell(width, width)
        self.devices = nn.Embedding(num_devices + 1, width)  # the last one: nothing yet
        self.leave = nn.Linear(2 * width, num_devices)

    def read(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what is attended to, [group, width], and its keys, from [group, feature]."""
        memory: Tensor = self.reader(groups[None])[0][0]
        return memory, self.attention.keys(memory)

    def begin(self, memory: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the first state, cell [K, width] and last devices [K] of so many placements."""
        state = memory[-1].expand(num, -1)
        last = torch.full((num,), self.devices.num_embeddings - 1)
        return state, torch.zeros_like(state), last

    def forward(
        self, carried: tuple[Tensor, Tensor, Tensor], memory: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits of the next group, [K, dev], and the new state and cell, [K, width]."""
        state, cell, last = carried
        state, cell = self.decoder(self.devices(last), (state, cell))
        context = self.attention(state, keys, memory)
        logits = self.squash(self.leave(torch.cat([state, context], 1)))
        return logits, state, cell
