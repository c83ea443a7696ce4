"""Models of `bench.run_study`: about half a second a step on one core, so that noise is small."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, Tensor]]


class Block(nn.Module):
    """One transformer block, or what one of `parts` devices does of it."""

    def __init__(self, width: int, heads: int, parts: int) -> None:
        super().__init__()
        inside = width // parts
        self.heads = heads // parts
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * inside), nn.Linear(inside, width)
        self.up, self.down = nn.Linear(width, 4 * inside), nn.Linear(4 * inside, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=2)
        inside = self.out.in_features
        shape = (batch, length, self.heads, inside // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, inside))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Six blocks of width 256 and a head of its own."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        words = 1000 // parts
        self.tokens, self.positions = nn.Embedding(words, 256), nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(Block(256, 4, parts) for _ in range(6))
        self.head = nn.Linear(256, words)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Chain(nn.Module):
    """Eight layers, 512 to 2048 and back."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        inside = 2048 // parts
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, inside), nn.ReLU(), nn.Linear(inside, 512))
            for _ in range(8)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


class Branches(nn.Module):
    """Two convolutional branches, one twice as heavy as the other, that meet in a classifier."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.left, self.right = self._branch(48, parts), self._branch(32, parts)
        self.head = nn.Linear(80, 10)

    @staticmethod
    def _branch(width: int, parts: int) -> nn.Sequential:
        inside = width // parts
        channels = (3, inside, width, inside, width, width)
        layers: list[nn.Module] = []
        for a, b in pairwise(channels):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        both = torch.cat([self.left(images), self.right(images)], dim=1)
        return F.cross_entropy(self.head(both), labels)


class Flows(nn.Module):
    """Two tensors that are ready at about the same time and wanted elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(128, width), nn.Linear(128, width)
        self.near, self.far = nn.Linear(width, 64), nn.Linear(width, 64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        a, b = self.one(x), self.other(x)
        return F.mse_loss(self.near(a) + self.far(b), target)


def gpt(batch: int = 16) -> Made:
    return SmallGPT(), _tokens(batch, 1000)


def chain(batch: int = 16) -> Made:
    """Each sample is 16 rows."""
    return Chain(), _rows(batch)


def branches(batch: int = 16) -> Made:
    return Branches(), _images(batch)


def gpt_half(batch: int = 16) -> Made:
    """What one of two devices computes of `gpt`, its products sharded as in Megatron-LM."""
    return SmallGPT(2), _tokens(batch, 500)


def chain_half(batch: int = 16) -> Made:
    """What one of two devices computes of `chain`."""
    return Chain(2), _rows(batch)


def branches_half(batch: int = 16) -> Made:
    """What one of two devices computes of `branches`, every other convolution's channels split."""
    return Branches(2), _images(batch)


def _tokens(batch: int, words: int) -> dict[str, Tensor]:
    ids = torch.randint(0, words, (batch, 64))
    return {"ids": ids, "labels": ids.roll(1, 1)}


def _rows(batch: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 16, 512), "target": torch.randn(batch, 16, 512)}


def _images(batch: int) -> dict[str, Tensor]:
    return {"images": torch.randn(batch, 3, 32, 32), "labels": torch.arange(batch) % 10}


def flows_small(batch: int = 16) -> Made:
    return _flows(batch, 1024)


def flows_large(batch: int = 16) -> Made:
    return _flows(batch, 4096)


def _flows(batch: int, width: int) -> Made:
    return Flows(width), {"x": torch.randn(batch, 64, 128), "target": torch.randn(batch, 64, 64)}
