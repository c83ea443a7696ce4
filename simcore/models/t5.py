"""T5-base (Raffel et al., 2020, arXiv:1910.10683), version 1.0.

Pre-RMS-norm encoder and decoder without biases, unscaled attention with learned relative position
biases shared by the layers of a stack, ReLU feed-forward, one embedding tied to the output, dropout
0.1 including the attention weights.
"""

import math

import torch
from torch import Tensor, nn

from simcore.models.attention import Attention, TiedHead, token_loss
from simcore.models.inputs import Built, ids

VOCABULARY = 32_128
WIDTH = 768
HIDDEN = 3072
HEADS = 12
LAYERS = 12
DROPOUT = 0.1
NORM_EPSILON = 1e-6
BUCKETS = 32
MAX_DISTANCE = 128


def relative_buckets(length: int, *, bidirectional: bool) -> Tensor:
    """Returns the bucket of each key seen from each query, int64 [length, length].

    Half the buckets are exact distances, half grow logarithmically up to 128; looking both ways
    halves them again, once for each side.
    """
    positions = torch.arange(length)
    distance = positions.unsqueeze(1) - positions.unsqueeze(0)  # positive: the key is earlier
    buckets = BUCKETS // 2 if bidirectional else BUCKETS
    side = (distance < 0) * buckets if bidirectional else torch.zeros_like(distance)
    distance = distance.abs() if bidirectional else distance.clamp(min=0)
    exact = buckets // 2
    ratio = (distance.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return side + torch.where(distance < exact, distance, far)


class PositionBias(nn.Module):
    """Learned bias of every head on the scores; in a decoder it masks the future too."""

    buckets: Tensor

    def __init__(self, length: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(BUCKETS, HEADS)
        buckets = relative_buckets(length, bidirectional=not causal)
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self) -> Tensor:
        """Returns the bias [1, heads, query, key]."""
        bias: Tensor = self.embedding(self.buckets).permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            future = torch.ones_like(self.buckets, dtype=torch.bool).triu(1)
            bias = bias.masked_fill(future, -math.inf)
        return bias.contiguous()


class FeedForward(nn.Module):
    """Feed-forward network with ReLU and dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wo = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        output: Tensor = self.wo(self.dropout(self.wi(states).relu()))
        return output


def _norm() -> nn.RMSNorm:
    return nn.RMSNorm(WIDTH, eps=NORM_EPSILON)


def _attention() -> Attention:
    return Attention(WIDTH, HEADS, dropout=DROPOUT, bias=False, scale=1.0)


class Block(nn.Module):
    """Self-attention, attention to a memory if there is one, feed-forward."""

    def __init__(self, *, crossed: bool) -> None:
        super().__init__()
        self.self_norm, self.self_attention = _norm(), _attention()
        if crossed:
            self.cross_norm, self.cross_attention = _norm(), _attention()
        self.norm, self.feed_forward = _norm(), FeedForward()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, states: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        mixed = self.self_attention(self.self_norm(states), position_bias=bias)
        states = states + self.dropout(mixed)
        if memory is not None:
            mixed = self.cross_attention(self.cross_norm(states), memory)
            states = states + self.dropout(mixed)
        output: Tensor = states + self.dropout(self.feed_forward(self.norm(states)))
        return output


class Stack(nn.Module):
    """The encoder, or the decoder if it attends to a memory."""

    def __init__(self, length: int, *, decoder: bool) -> None:
        super().__init__()
        self.position_bias = PositionBias(length, causal=decoder)
        self.block = nn.ModuleList([Block(crossed=decoder) for _ in range(LAYERS)])
        self.final_norm = _norm()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, embedded: Tensor, memory: Tensor | None = None) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        bias = self.position_bias()
        states = self.dropout(embedded)
        for block in self.block:
            states = block(states, bias, memory)
        output: Tensor = self.dropout(self.final_norm(states))
        return output


class T5(nn.Module):
    """Text-to-text model; the target is fed as given (teacher forcing)."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = Stack(length, decoder=False)
        self.decoder = Stack(length, decoder=True)
        self.lm_head = TiedHead()

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of predicting labels [batch, target], a scalar."""
        memory = self.encoder(self.shared(input_ids))
        states = self.decoder(self.shared(decoder_input_ids), memory)
        return token_loss(self.lm_head(states * WIDTH**-0.5, self.shared.weight), labels)


def t5_base(length: int) -> Built:
    """Returns T5-base; `length` in tokens of source and of target."""

    def inputs(batch: int) -> dict[str, Tensor]:
        names = ("input_ids", "decoder_input_ids", "labels")
        return {name: ids(batch, length) for name in names}

    return Built(T5(length), inputs)
