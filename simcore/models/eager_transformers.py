"""GPT-2, OPT and BERT as Hugging Face's transformers 4.2x and 4.3x compute them, op by op.

Their attention is not fused: scores are scaled, masked, normalised and dropped by a kernel each,
and GPT-2's GELU is eight. The sizes are free. Of OPT's mask, which is made once a step, only its
addition is there. Published steps of these versions are held against this (NeuSight's, whose
traced graphs list the ops); the models by name have today's attention.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, next_tokens
from simcore.models.megatron import MegatronShape, split_vocabulary_loss

Family = Literal["gpt2", "opt", "bert-words", "bert-classes"]
_CLASSES = 2


class _GPT2Attention(nn.Module):
    """Causal self-attention: one product for queries, keys and values; scores are divided."""

    seen: Tensor  # [length, length] which keys a query sees

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.attn_dropout, self.resid_dropout = (_dropout(shape) for _ in range(2))
        ones = torch.ones(shape.length, shape.length, dtype=torch.bool)
        self.register_buffer("seen", ones.tril(), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        query, key, value = (_by_head(p, self.heads) for p in self.c_attn(states).chunk(3, dim=2))
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[3])
        least = torch.full((), torch.finfo(scores.dtype).min, device=states.device)
        weights = self.attn_dropout(torch.softmax(torch.where(self.seen, scores, least), dim=3))
        mixed: Tensor = self.resid_dropout(self.c_proj(_together(torch.matmul(weights, value))))
        return mixed


class _GPT2Block(nn.Module):
    """One pre-norm layer, with GELU in eight ops."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(shape.width) for _ in range(2))
        self.attn = _GPT2Attention(shape)
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)
        self.dropout = _dropout(shape)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        states = states + self.attn(self.ln_1(states))
        inner = self.c_fc(self.ln_2(states))
        root = math.sqrt(2.0 / math.pi)
        bent = torch.tanh(root * (inner + 0.044715 * torch.pow(inner, 3.0)))
        mixed: Tensor = states + self.dropout(self.c_proj(0.5 * inner * (1.0 + bent)))
        return mixed


class _OPTBlock(nn.Module):
    """One pre-norm layer: queries are scaled, a mask is added, what overflows is cut off."""

    mask: Tensor  # [1, 1, length, length]

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.heads = shape.heads
        width = shape.width
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.self_attn_layer_norm, self.final_layer_norm = (nn.LayerNorm(width) for _ in range(2))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = _dropout(shape)
        mask = torch.zeros(1, 1, shape.length, shape.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        states = states + self.dropout(self._attend(self.self_attn_layer_norm(states)))
        inner = torch.relu(self.fc1(self.final_layer_norm(states)))
        mixed: Tensor = states + self.dropout(self.fc2(inner))
        return mixed

    def _attend(self, states: Tensor) -> Tensor:
        batch, length, width = states.shape
        query = self.q_proj(states) * (width // self.heads) ** -0.5
        parts = (query, self.k_proj(states), self.v_proj(states))
        query, key, value = (_by_head(p, self.heads).contiguous().flatten(0, 1) for p in parts)
        scores = torch.bmm(query, key.transpose(1, 2)).view(batch, self.heads, length, length)
        least = torch.full((), torch.finfo(scores.dtype).min, device=states.device)
        weights = torch.softmax(torch.max(scores + self.mask, least).flatten(0, 1), dim=2)
        mixed = torch.bmm(weights, value).view(batch, self.heads, length, width // self.heads)
        attended: Tensor = self.out_proj(_together(mixed))
        return attended


class _BERTLayer(nn.Module):
    """One post-norm layer: three products for queries, keys and values, a mask that is added."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.heads = shape.heads
        width = shape.width
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm, self.output_norm = (nn.LayerNorm(width) for _ in range(2))
        self.intermediate, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = _dropout(shape)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        parts = (self.query(states), self.key(states), self.value(states))
        query, key, value = (_by_head(part, self.heads) for part in parts)
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[3])
        mask = torch.zeros(len(states), 1, 1, states.shape[1], device=states.device)
        weights = self.dropout(torch.softmax(scores + mask, dim=3))
        mixed = self.dropout(self.dense(_together(torch.matmul(weights, value))))
        states = self.attention_norm(mixed + states)
        inner = self.output(F.gelu(self.intermediate(states)))
        output: Tensor = self.output_norm(self.dropout(inner) + states)
        return output


def _dropout(shape: MegatronShape) -> nn.Module:
    """Returns a dropout; nothing where nothing is dropped, as in models that only infer."""
    return nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()


def _by_head(part: Tensor, heads: int) -> Tensor:
    """Returns [batch, heads, length, d] of [batch, length, width], a view."""
    batch, length, width = part.shape
    return part.view(batch, length, heads, width // heads).permute(0, 2, 1, 3)


def _together(mixed: Tensor) -> Tensor:
    """Returns [batch, length, width] of [batch, heads, length, d], a copy."""
    return mixed.permute(0, 2, 1, 3).contiguous().flatten(2)


class _Embeddings(nn.Module):
    """Sum of word and position embeddings; BERT's also of segments, normalised."""

    def __init__(self, shape: MegatronShape, *, is_bert: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.segments = nn.Embedding(2, shape.width) if is_bert else None
        self.norm = nn.LayerNorm(shape.width) if is_bert else nn.Identity()
        self.dropout = _dropout(shape)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeds ids [batch, length] as [batch, length, width]."""
        states = self.words(input_ids)
        if self.segments is not None:
            states = states + self.segments(torch.zeros_like(input_ids))
        states = states + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        embedded: Tensor = self.dropout(self.norm(states))
        return embedded


class _BERTHead(nn.Module):
    """Of every position the words, or of the first one a class."""

    def __init__(self, shape: MegatronShape, *, words: bool) -> None:
        super().__init__()
        self.transform = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width) if words else None
        self.decoder = nn.Linear(shape.width, shape.vocabulary if words else _CLASSES)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to logits of words, or to [batch, 1, classes]."""
        if self.norm is None:
            states = torch.tanh(self.transform(states[:, :1]))
        else:
            states = self.norm(F.gelu(self.transform(states)))
        logits: Tensor = self.decoder(states)
        return logits


class EagerTransformer(nn.Module):
    """One of the three, with a loss; its parts have the names of `simcore.models.megatron`."""

    def __init__(self, shape: MegatronShape, family: Family) -> None:
        super().__init__()
        is_bert = family.startswith("bert")
        block = _BLOCKS[family]
        self.embedding = _Embeddings(shape, is_bert=is_bert)
        self.layers = nn.Sequential(*(block(shape) for _ in range(shape.layers)))
        self.final_layernorm = nn.Identity() if is_bert else nn.LayerNorm(shape.width)
        words = family == "bert-words"
        self.head = (
            _BERTHead(shape, words=words)
            if is_bert
            else nn.Linear(shape.width, shape.vocabulary, bias=False)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of ids and labels [batch, length], a scalar."""
        logits = self.head(self.final_layernorm(self.layers(self.embedding(input_ids))))
        chosen = labels[:, : logits.shape[1]] % logits.shape[2]
        return split_vocabulary_loss(logits, chosen)


_BLOCKS: Mapping[Family, Callable[[MegatronShape], nn.Module]] = {
    "gpt2": _GPT2Block,
    "opt": _OPTBlock,
    "bert-words": _BERTLayer,
    "bert-classes": _BERTLayer,
}


def sized(shape: MegatronShape, family: Family) -> Built:
    """Returns one of the three of any size, on the meta device."""
    with torch.device("meta"):
        return Built(EagerTransformer(shape, family), next_tokens(shape.length))
