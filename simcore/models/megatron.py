"""GPT as Megatron-LM computes it (Shoeybi et al., 2019; Narayanan et al., 2021, arXiv:2104.04473).

The sizes are free. States are sequence-first, so that heads are views; attention is two batched
products with a softmax between, as before fused attention kernels, or one fused kernel. The head
is tied to the word embeddings, and its loss is Megatron's for a split vocabulary: logits in fp32,
less their greatest, exponentials, their sum. Modules are named as in Megatron.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.attention import TiedHead
from simcore.models.inputs import Built, next_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShape:
    """Sizes of one GPT.

    Attributes:
        layers: decoder blocks.
        width: features of the states.
        heads: of attention; each has width / heads features.
        length: tokens of a sequence, and positions.
        vocabulary: rows of the embedding, padding included.
        dropout: probability on embeddings, attention weights and sub-layer outputs.
        is_fused: whether attention is one kernel.
    """

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int = 51_200
    dropout: float = 0.1
    is_fused: bool = False


class MegatronAttention(nn.Module):
    """Causal self-attention over sequence-first states."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.shape = shape
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.dense = nn.Linear(shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [length, batch, width] to the same shape."""
        length, batch, width = states.shape
        heads = self.shape.heads
        parts = self.query_key_value(states).view(length, batch, heads, 3 * width // heads)
        query, key, value = parts.chunk(3, dim=3)
        attend = self._fused if self.shape.is_fused else self._core
        mixed = attend(query, key, value)
        output: Tensor = self.dropout(self.dense(mixed.reshape(length, batch, width)))
        return output

    def _core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Two products and a softmax, which also scales and masks, of [length, batch, heads, d]."""
        length, batch, heads, size = query.shape
        query, key, value = (
            part.reshape(length, batch * heads, size).transpose(0, 1)
            for part in (query, key, value)
        )
        scores = torch.bmm(query, key.transpose(1, 2))
        weights = F.dropout(torch.softmax(scores, -1), self.shape.dropout, self.training)
        mixed = torch.bmm(weights, value).view(batch, heads, length, size)
        return mixed.permute(2, 0, 1, 3)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One kernel, of [length, batch, heads, d]."""
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        dropout = self.shape.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.permute(2, 0, 1, 3)


class MegatronFeedForward(nn.Module):
    """Feed-forward network of 4 x width."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(shape.width, 4 * shape.width)
        self.dense_4h_to_h = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [..., width] to the same shape."""
        hidden = F.gelu(self.dense_h_to_4h(states), approximate="tanh")
        output: Tensor = self.dropout(self.dense_4h_to_h(hidden))
        return output


class MegatronBlock(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(shape.width)
        self.attention = MegatronAttention(shape)
        self.post_attention_layernorm = nn.LayerNorm(shape.width)
        self.mlp = MegatronFeedForward(shape)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [length, batch, width] to the same shape."""
        states = states + self.attention(self.input_layernorm(states))
        mixed: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return mixed


class MegatronEmbeddings(nn.Module):
    """Sum of word and position embeddings, sequence first."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.length, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeds ids [batch, length] as [length, batch, width]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        embedded: Tensor = self.dropout(states.transpose(0, 1).contiguous())
        return embedded


class MegatronGPT(nn.Module):
    """Decoder-only language model."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.embedding = MegatronEmbeddings(shape)
        self.layers = nn.Sequential(*(MegatronBlock(shape) for _ in range(shape.layers)))
        self.final_layernorm = nn.LayerNorm(shape.width)
        self.head = TiedHead()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of predicting labels [batch, length], a scalar."""
        states = self.final_layernorm(self.layers(self.embedding(input_ids)))
        logits = self.head(states.transpose(0, 1), self.embedding.word_embeddings.weight)
        return split_vocabulary_loss(logits, labels)


def split_vocabulary_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [batch, length, vocabulary], a scalar."""
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True).detach()
    missed = F.nll_loss(logits.flatten(0, 1), labels.flatten())  # what the right words lack
    return logits.exp().sum(-1).log().mean() + missed


def sized(shape: MegatronShape) -> Built:
    """Returns a GPT of any size, on the meta device."""
    with torch.device("meta"):
        return Built(MegatronGPT(shape), next_tokens(shape.length))
