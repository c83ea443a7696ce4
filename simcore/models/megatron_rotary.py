"""GPT as Megatron-LM computes it with rotary positions (Su et al., 2021, arXiv:2104.09864).

Queries and keys are turned by angles that grow with the position; there are no position embeddings.
In one kernel, a turn reads and writes the states once, for which a product with the cosines stands
here; otherwise it is what Megatron writes down for interleaved pairs of features.
"""

import torch
from torch import Tensor, nn

from simcore.models.inputs import Built, next_tokens
from simcore.models.megatron import MegatronAttention, MegatronGPT, MegatronShape

_BASE = 10_000.0


def angles(length: int, size: int) -> Tensor:
    """Returns the angle of each position and feature, [length, 1, 1, size]."""
    rates = _BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    turns = torch.arange(length, dtype=torch.float32)[:, None] * rates
    return turns.repeat_interleave(2, dim=1)[:, None, None]


class Turn(nn.Module):
    """One kernel."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.register_buffer("cosine", angles(length, size).cos(), persistent=False)
        self.cosine: Tensor

    def forward(self, states: Tensor) -> Tensor:
        """Maps [length, batch, heads, size] to the same shape."""
        return states * self.cosine.to(states.dtype)


class PlainTurn(nn.Module):
    """Plain operations, the sines and cosines computed anew."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.plain = Pairs(length, size)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [length, batch, heads, size] to the same shape."""
        turned: Tensor = self.plain(states)
        return turned


class Pairs(nn.Module):
    """The operations of a plain turn."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.register_buffer("angle", angles(length, size), persistent=False)
        self.angle: Tensor

    def forward(self, states: Tensor) -> Tensor:
        """Maps [length, batch, heads, size] to the same shape."""
        cosine, sine = (part.to(states.dtype) for part in (self.angle.cos(), self.angle.sin()))
        pairs = torch.stack((-states[..., 1::2], states[..., ::2]), dim=-1)
        return states * cosine + pairs.flatten(-2) * sine


class RotaryAttention(MegatronAttention):
    """Causal self-attention whose queries and keys are turned."""

    def __init__(self, shape: MegatronShape, *, in_one: bool) -> None:
        super().__init__(shape)
        size = shape.width // shape.heads
        self.turn: nn.Module = (Turn if in_one else PlainTurn)(shape.length, size)

    def _core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super()._core(self.turn(query), self.turn(key), value)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super()._fused(self.turn(query), self.turn(key), value)


class WordEmbeddings(nn.Module):
    """Word embeddings, sequence first."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeds ids [batch, length] as [length, batch, width]."""
        states: Tensor = self.word_embeddings(input_ids).transpose(0, 1).contiguous()
        embedded: Tensor = self.dropout(states)
        return embedded


def rotary(shape: MegatronShape, *, in_one: bool) -> Built:
    """Returns a GPT of any size with rotary positions, on the meta device."""
    with torch.device("meta"):
        model = MegatronGPT(shape)
        model.embedding = WordEmbeddings(shape)  # type: ignore[assignment]
        for layer in model.layers:
            layer.attention = RotaryAttention(shape, in_one=in_one)
        return Built(model, next_tokens(shape.length))
