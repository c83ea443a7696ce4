"""Attention and heads shared by the transformers of the zoo."""

from torch import Tensor, nn
from torch.nn import functional as F


def split_heads(states: Tensor, heads: int) -> Tensor:
    """Turns [batch, length, heads * width] into [batch, heads, length, width]."""
    batch, length, _ = states.shape
    return states.view(batch, length, heads, -1).transpose(1, 2)


def merge_heads(states: Tensor) -> Tensor:
    """Turns [batch, heads, length, width] into [batch, length, heads * width]."""
    return states.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head attention with separate projections (Vaswani et al., 2017, arXiv:1706.03762).

    Args:
        width: features of the states.
        heads: number of heads; each has width / heads features.
        dropout: probability on the attention weights.
        bias: whether the four projections have a bias.
        causal: whether a position sees itself and earlier ones only.
        scale: factor on the scores; None is 1 / sqrt(features of a head).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal, self.scale = heads, dropout, causal, scale
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(
        self, states: Tensor, memory: Tensor | None = None, position_bias: Tensor | None = None
    ) -> Tensor:
        """Attends from `states` to `memory` (itself if None); both are [batch, length, width].

        `position_bias` [1, heads, length, length] is added to the scores; it brings its own mask.
        """
        source = states if memory is None else memory
        mixed = F.scaled_dot_product_attention(
            split_heads(self.query(states), self.heads),
            split_heads(self.key(source), self.heads),
            split_heads(self.value(source), self.heads),
            attn_mask=position_bias,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and position_bias is None,
            scale=self.scale,
        )
        output: Tensor = self.output(merge_heads(mixed))
        return output


class TiedHead(nn.Module):
    """Output layer that borrows the embedding's weight, so the tie is held once."""

    def forward(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns logits [..., vocabulary] of states [..., width]."""
        return F.linear(states, weight, bias)


def token_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns the mean cross entropy of logits [batch, length, vocabulary], a scalar."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing)
