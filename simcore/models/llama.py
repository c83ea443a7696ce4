"""Llama 3 (Grattafiori et al., 2024, arXiv:2407.21783).

Pre-norm blocks with root-mean-square norms, rotated queries and keys, fewer heads of keys and
values than of queries, one kernel for attention, and a gated feed-forward network. The head is not
tied to the word embeddings. Modules are named as in `simcore.models.megatron`, so that blocks can
be told.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.attention import token_loss
from simcore.models.inputs import Built, next_tokens

EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of one Llama.

    Attributes:
        layers: blocks.
        width: features of the states.
        heads: of queries.
        groups: heads of keys and values; each serves as many heads of queries.
        inner: features inside the feed-forward network.
        length: tokens of a sequence.
        vocabulary: words.
    """

    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    length: int
    vocabulary: int = 128_256


def rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates pairs of features [batch, length, heads, d] by angles [length, 1, d / 2], in fp32."""
    first, second = states.float().chunk(2, -1)
    turned = torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)
    return turned.to(states.dtype)


class LlamaAttention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.groups * self.head, bias=False)
        self.value = nn.Linear(shape.width, shape.groups * self.head, bias=False)
        self.dense = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        query = self.query(states).unflatten(-1, (self.shape.heads, self.head))
        key = self.key(states).unflatten(-1, (self.shape.groups, self.head))
        value = self.value(states).unflatten(-1, (self.shape.groups, self.head))
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        times = self.shape.heads // self.shape.groups
        key, value = (part.repeat_interleave(times, 2) for part in (key, value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.dense(mixed.transpose(1, 2).flatten(2))
        return output


class LlamaFeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.rise = nn.Linear(shape.width, shape.inner, bias=False)
        self.fall = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [..., width] to the same shape."""
        output: Tensor = self.fall(F.silu(self.gate(states)) * self.rise(states))
        return output


class LlamaBlock(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.attention = LlamaAttention(shape)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.mlp = LlamaFeedForward(shape)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        states = states + self.attention(self.attention_norm(states), cosine, sine)
        mixed: Tensor = states + self.mlp(self.ffn_norm(states))
        return mixed


class LlamaEmbeddings(nn.Module):
    """Embeddings of words, and the angles that positions turn features by."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        angles = torch.zeros(shape.length, 1, shape.width // shape.heads // 2)
        self.register_buffer("cosine", angles)
        self.register_buffer("sine", angles.clone())


class Llama(nn.Module):
    """Decoder-only language model."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = LlamaEmbeddings(shape)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.final_layernorm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of predicting labels [batch, length], a scalar."""
        states = self.embedding.word_embeddings(input_ids)
        for layer in self.layers:
            states = layer(states, self.embedding.cosine, self.embedding.sine)
        return token_loss(self.head(self.final_layernorm(states)).float(), labels)


def llama_3_8b(length: int) -> Built:
    """Returns Llama 3 with 8 billion parameters; `length` in tokens."""
    shape = LlamaShape(layers=32, width=4096, heads=32, groups=8, inner=14_336, length=length)
    return Built(Llama(shape), next_tokens(length))


def llama_3_70b(length: int) -> Built:
    """Returns Llama 3 with 70 billion parameters; `length` in tokens."""
    shape = LlamaShape(layers=80, width=8192, heads=64, groups=8, inner=28_672, length=length)
    return Built(Llama(shape), next_tokens(length))
