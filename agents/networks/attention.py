"""Attention: what of a memory answers a question."""

import torch
from torch import Tensor, nn


class AdditiveAttention(nn.Module):
    """Scores v^T tanh(W q + U m) of Bahdanau, Cho and Bengio, 2015."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.question = nn.Linear(width, width)
        self.memory = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """Returns the part of the scores that no question changes, [place, width]."""
        keys: Tensor = self.memory(memory)
        return keys

    def forward(self, question: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        """Returns means of the memory, [K, width], weighted by how well it answers [K, width]."""
        match = torch.tanh(self.question(question)[:, None] + keys)  # [K, place, width]
        weight = self.score(match).squeeze(2).softmax(1)  # [K, place]
        answer: Tensor = weight @ memory
        return answer
