"""Models of `bench.run_study`: about half a second a step on one core, so that noise is small."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, Tensor]]


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=2)
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Six blocks of width 256 and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, 256), nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(Block(256, 4) for _ in range(6))
        self.head = nn.Linear(256, 1000)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Chain(nn.Module):
    """Eight layers, 512 to 2048 and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(8)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


class Branches(nn.Module):
    """Two convolutional branches, one twice as heavy as the other, that meet in a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = self._branch(48), self._branch(32)
        self.head = nn.Linear(80, 10)

    @staticmethod
    def _branch(width: int) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
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
    ids = torch.randint(0, 1000, (batch, 64))
    return SmallGPT(), {"ids": ids, "labels": ids.roll(1, 1)}


def chain(batch: int = 16) -> Made:
    """Each sample is 16 rows."""
    return Chain(), {"x": torch.randn(batch, 16, 512), "target": torch.randn(batch, 16, 512)}


def branches(batch: int = 16) -> Made:
    return Branches(), {"images": torch.randn(batch, 3, 32, 32), "labels": torch.arange(batch) % 10}


def flows_small(batch: int = 16) -> Made:
    return _flows(batch, 1024)


def flows_large(batch: int = 16) -> Made:
    return _flows(batch, 4096)


def _flows(batch: int, width: int) -> Made:
    return Flows(width), {"x": torch.randn(batch, 64, 128), "target": torch.randn(batch, 64, 64)}
