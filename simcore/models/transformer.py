"""The original encoder-decoder Transformer (Vaswani et al., 2017, arXiv:1706.03762).

Post-layer-norm, sinusoidal positions, one embedding of 37,000 tokens shared by encoder, decoder and
output, label smoothing 0.1. Sentences are full length, so there is no padding mask.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from simcore.models.attention import Attention, TiedHead, token_loss
from simcore.models.inputs import Built, ids

VOCABULARY = 37_000
MULTI30K_VOCABULARY = 9_521
LAYERS = 6
LABEL_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one Transformer."""

    width: int
    heads: int
    dropout: float
    vocabulary: int = VOCABULARY


def sinusoids(length: int, width: int) -> Tensor:
    """Returns the position encodings [length, width]: sines, then cosines."""
    positions = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    steps = torch.arange(0, width, 2, dtype=torch.float32)
    angles = positions * torch.exp(steps * (-math.log(10_000.0) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class FeedForward(nn.Module):
    """Feed-forward network of 4 x width with ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, 4 * width)
        self.linear2 = nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [..., width] to the same shape."""
        output: Tensor = self.linear2(self.linear1(states).relu())
        return output


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with dropout, residual and layer norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape.width, shape.heads)
        self.norm1 = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, source, width] to the same shape."""
        states = self.norm1(states + self.dropout(self.self_attn(states)))
        mixed: Tensor = self.norm2(states + self.dropout(self.feed_forward(states)))
        return mixed


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder, feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape.width, shape.heads, causal=True)
        self.norm1 = nn.LayerNorm(shape.width)
        self.cross_attn = Attention(shape.width, shape.heads)
        self.norm2 = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape.width)
        self.norm3 = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, states: Tensor, memory: Tensor) -> Tensor:
        """Maps [batch, target, width] to the same shape, given memory [batch, source, width]."""
        states = self.norm1(states + self.dropout(self.self_attn(states)))
        states = self.norm2(states + self.dropout(self.cross_attn(states, memory)))
        mixed: Tensor = self.norm3(states + self.dropout(self.feed_forward(states)))
        return mixed


class Transformer(nn.Module):
    """Translation model; the target is fed as given (teacher forcing)."""

    positions: Tensor

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.width = shape.width
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.register_buffer("positions", sinusoids(length, shape.width), persistent=False)
        self.dropout = nn.Dropout(shape.dropout)
        self.encoder = nn.ModuleList([EncoderLayer(shape) for _ in range(LAYERS)])
        self.decoder = nn.ModuleList([DecoderLayer(shape) for _ in range(LAYERS)])
        self.generator = TiedHead()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds ids [batch, length] as [batch, length, width]."""
        embedded: Tensor = self.embedding(tokens) * math.sqrt(self.width) + self.positions
        dropped: Tensor = self.dropout(embedded)
        return dropped

    def forward(self, source_ids: Tensor, target_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean smoothed loss of predicting labels [batch, target], a scalar."""
        memory = self.embed(source_ids)
        for layer in self.encoder:
            memory = layer(memory)
        states = self.embed(target_ids)
        for layer in self.decoder:
            states = layer(states, memory)
        logits = self.generator(states, self.embedding.weight)
        return token_loss(logits, labels, LABEL_SMOOTHING)


def _transformer(length: int, shape: Shape) -> Built:
    def inputs(batch: int) -> dict[str, Tensor]:
        names = ("source_ids", "target_ids", "labels")
        return {name: ids(batch, length) for name in names}

    return Built(Transformer(shape, length), inputs)


def transformer_base(length: int) -> Built:
    """Returns the base size; `length` in tokens of source and of target."""
    return _transformer(length, Shape(width=512, heads=8, dropout=0.1))


def transformer_big(length: int) -> Built:
    """Returns the big size; `length` in tokens of source and of target."""
    return _transformer(length, Shape(width=1024, heads=16, dropout=0.3))


def transformer_multi30k(length: int) -> Built:
    """Returns the base size with the 9,521 tokens of Multi30k's shared English and German words.

    Args:
        length: tokens of source and of target.
    """
    shape = Shape(width=512, heads=8, dropout=0.1, vocabulary=MULTI30K_VOCABULARY)
    return _transformer(length, shape)
