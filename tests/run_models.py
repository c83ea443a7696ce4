"""Small models that are trained for real in tests; no dropout, and inputs with values."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=2)
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Two or more blocks, and a head tied to the embedding."""

    def __init__(self, layers: int, *, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(16, 2, causal=causal) for _ in range(layers))
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Skip(nn.Module):
    """A chain whose last part reads two tensors of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side = nn.Linear(12, 24), nn.Linear(12, 24)
        self.middle = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        self.last = nn.Linear(24, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        a, b = torch.relu(self.first(x)), torch.sigmoid(self.side(x))
        return F.cross_entropy(self.last(self.middle(a) + a * b), target)


class TwoBranch(nn.Module):
    """Two convolutional branches that meet in a classifier, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = self._branch(3), self._branch(5)
        self.head = nn.Linear(16, 4)

    @staticmethod
    def _branch(kernel: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 8, kernel, padding=kernel // 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        both = torch.cat([self.left(images), self.right(images)], dim=1)
        return F.cross_entropy(self.head(both), labels)


class SmallVGG(nn.Module):
    """Convolutions, pooling and wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(16 * 4 * 4, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)


class Mixture(nn.Module):
    """A block of attention and a mixture of experts, as batched products, with a head of its own.

    Each token goes to its best expert, each expert takes as many as there are (GShard's einsums).
    """

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = experts
        self.tokens, self.block = nn.Embedding(32, 16), Block(16, 2, causal=True)
        self.gate = nn.Linear(16, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(experts, 32, 16) / 6)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.block(self.tokens(ids))
        gates = self.gate(x).softmax(dim=-1)
        best = gates.argmax(dim=-1, keepdim=True)
        chosen = (best == torch.arange(self.experts, device=ids.device)).float() * gates
        sent = torch.einsum("ble,blw->eblw", (chosen > 0).float(), x)
        rows = sent.reshape(self.experts, -1, x.shape[-1])
        done = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down).reshape(sent.shape)
        x = x + torch.einsum("ble,eblw->blw", chosen, done)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(x)[0][:, -1]), target)


def tiny_gpt(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return TinyGPT(2), _tokens(batch)


def long_gpt(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return TinyGPT(4), _tokens(batch)


def deep_gpt(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return TinyGPT(8), _tokens(batch)


def tiny_bert(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return TinyGPT(2, causal=False), _tokens(batch)


def skip(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return Skip(), {"x": torch.randn(batch, 12), "target": torch.arange(batch) % 5}


def two_branch(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    images = torch.randn(batch, 3, 12, 12)
    return TwoBranch(), {"images": images, "labels": torch.arange(batch) % 4}


def small_vgg(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return SmallVGG(), {"images": torch.randn(batch, 3, 16, 16), "labels": torch.arange(batch) % 8}


def mixture(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return Mixture(), _tokens(batch)


def recurrent(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return Recurrent(), {"x": torch.randn(batch, 5, 6), "target": torch.arange(batch) % 3}


def _tokens(batch: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (batch, 8))
    return {"ids": ids, "labels": ids.roll(1, 1)}
