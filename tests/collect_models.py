"""Tiny models that a collection measures; found by name from other processes."""

from torch import Tensor, nn, rand, zeros
from torch.nn import functional as F

WIDTH = 32


class Mixed(nn.Module):
    """One of everything that torch takes apart: attention, dropout, a recurrent layer; and more."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.first = nn.Linear(8 * 36, 4 * WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        states = self.first(self.images(images)).view(-1, 4, WIDTH)
        query, key, value = self.qkv(states).view(-1, 4, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        states = self.dropout(self.norm(mixed.transpose(1, 2).flatten(2)))
        states, _ = self.lstm(states)
        return self.gru(states)[0].square().mean()


def mixed() -> tuple[nn.Module, tuple[Tensor]]:
    return Mixed(), (rand(2, 3, 8, 8),)


class Cell(nn.Module):
    """A recurrent cell, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.dropout = nn.LSTMCell(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, steps: Tensor) -> Tensor:
        state = zeros(steps.shape[1], WIDTH), zeros(steps.shape[1], WIDTH)
        for data in steps:
            state = self.cell(self.dropout(data), state)
        return state[0].sum() + state[1].sum()


def cell() -> tuple[nn.Module, tuple[Tensor]]:
    return Cell(), (rand(2, 3, WIDTH),)


def layers(batch: int = 2) -> tuple[nn.Module, tuple[Tensor]]:
    """A model large enough for its products to outweigh all else."""
    parts = [part for _ in range(4) for part in (nn.Linear(384, 384), nn.ReLU())]
    return nn.Sequential(*parts), (rand(64 * batch, 384),)
