"""GPT-2 (Radford et al., 2019) and the GPT-3 sizes (Brown et al., 2020, arXiv:2005.14165).

Pre-layer-norm decoder with one fused projection for query, key and value, tanh GELU, learned
positions and a head tied to the word embeddings. GPT-2 has dropout 0.1 on embeddings, attention
weights and sub-layer outputs; GPT-3 states none. GPT-3 alternates dense and locally banded sparse
attention; here every layer is dense.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.attention import TiedHead, merge_heads, split_heads, token_loss
from simcore.models.inputs import Built, next_tokens

VOCABULARY = 50_257


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one GPT."""

    layers: int
    width: int
    heads: int
    positions: int = 1024
    dropout: float = 0.1


class GPTAttention(nn.Module):
    """Causal self-attention with a fused projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.resid_dropout = nn.Dropout(shape.dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        query, key, value = self.c_attn(states).chunk(3, dim=2)
        mixed = F.scaled_dot_product_attention(
            split_heads(query, self.heads),
            split_heads(key, self.heads),
            split_heads(value, self.heads),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        output: Tensor = self.resid_dropout(self.c_proj(merge_heads(mixed)))
        return output


class GPTFeedForward(nn.Module):
    """Feed-forward network of 4 x width."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [..., width] to the same shape."""
        hidden = F.gelu(self.c_fc(states), approximate="tanh")
        output: Tensor = self.dropout(self.c_proj(hidden))
        return output


class GPTBlock(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = GPTAttention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = GPTFeedForward(shape.width, shape.dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        states = states + self.attn(self.ln_1(states))
        mixed: Tensor = states + self.mlp(self.ln_2(states))
        return mixed


class GPTEmbeddings(nn.Module):
    """Sum of word and position embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, shape.width)
        self.wpe = nn.Embedding(shape.positions, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeds ids [batch, length] as [batch, length, width]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded: Tensor = self.drop(self.wte(input_ids) + self.wpe(positions))
        return embedded


class GPT(nn.Module):
    """Decoder-only language model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = GPTEmbeddings(shape)
        self.h = nn.Sequential(*(GPTBlock(shape) for _ in range(shape.layers)))
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = TiedHead()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of predicting labels [batch, length], a scalar."""
        states = self.ln_f(self.h(self.embeddings(input_ids)))
        return token_loss(self.lm_head(states, self.embeddings.wte.weight), labels)


def _gpt(length: int, shape: Shape) -> Built:
    return Built(GPT(shape), next_tokens(length))


def gpt2(length: int) -> Built:
    """Returns GPT-2 small; `length` in tokens."""
    return _gpt(length, Shape(layers=12, width=768, heads=12))


def gpt2_medium(length: int) -> Built:
    """Returns GPT-2 medium; `length` in tokens."""
    return _gpt(length, Shape(layers=24, width=1024, heads=16))


def gpt2_large(length: int) -> Built:
    """Returns GPT-2 large; `length` in tokens."""
    return _gpt(length, Shape(layers=36, width=1280, heads=20))


def gpt2_xl(length: int) -> Built:
    """Returns GPT-2 XL; `length` in tokens."""
    return _gpt(length, Shape(layers=48, width=1600, heads=25))


def gpt3_2_7b(length: int) -> Built:
    """Returns GPT-3 2.7B; `length` in tokens."""
    return _gpt(length, Shape(layers=32, width=2560, heads=32, positions=2048, dropout=0.0))


def gpt3_6_7b(length: int) -> Built:
    """Returns GPT-3 6.7B; `length` in tokens."""
    return _gpt(length, Shape(layers=32, width=4096, heads=32, positions=2048, dropout=0.0))


def gpt3_175b(length: int) -> Built:
    """Returns GPT-3 175B; `length` in tokens."""
    return _gpt(length, Shape(layers=96, width=12_288, heads=96, positions=2048, dropout=0.0))
