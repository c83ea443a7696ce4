"""Mixture of experts with static capacity: GPT-2 small, every second feed-forward network replaced.

Top-2 routing among 8 experts as GShard (Lepikhin et al., 2021, arXiv:2006.16668): each sequence is
a group, each expert takes a fixed number of its tokens, the rest pass by the residual connection.
Dispatch and combination are dense einsums, so no shape depends on the data. Each expert is a module
of its own, a branch that can be placed (`moe`), or all are one batched product, which can be split
by expert (`moe_stacked`).
"""

import math

import torch
from torch import Tensor, nn

from simcore.models.attention import TiedHead, token_loss
from simcore.models.gpt import GPTAttention, GPTBlock, GPTEmbeddings, GPTFeedForward, Shape
from simcore.models.inputs import Built, next_tokens

SHAPE = Shape(layers=12, width=768, heads=12)
EXPERTS = 8
CHOICES = 2
CAPACITY_FACTOR = 1.25
BALANCE_WEIGHT = 0.01


def one_hot(index: Tensor, count: int) -> Tensor:
    """Returns float32 [..., count]; an index outside 0..count-1 gives zeros."""
    return (index.unsqueeze(-1) == torch.arange(count, device=index.device)).float()


class Router(nn.Module):
    """Gives each token its two experts and a slot in each, while there are slots."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the combination weights [batch, length, expert, slot] and the balance loss."""
        gates = self.gate(states).float().softmax(dim=-1)  # [batch, length, expert]
        slots = math.ceil(CHOICES * states.shape[1] * CAPACITY_FACTOR / EXPERTS)
        chosen = _choices(gates)
        share = torch.stack([(gates * mask).sum(dim=-1) for mask in chosen]).sum(dim=0)
        parts: list[Tensor] = []
        taken: Tensor | float = 0.0  # slots of earlier choices, [batch, 1, expert]
        for mask in chosen:
            slot = mask.cumsum(dim=1) - mask + taken  # [batch, length, expert]
            taken = taken + mask.sum(dim=1, keepdim=True)
            weight = gates * mask / share.unsqueeze(-1)
            own_slot = one_hot((slot * mask).sum(dim=-1), slots)  # [batch, length, slot]
            parts.append(weight.unsqueeze(-1) * own_slot.unsqueeze(2))
        balance = (chosen[0].mean(dim=1) * gates.mean(dim=1)).sum(dim=-1).mean() * EXPERTS
        return sum(parts[1:], start=parts[0]), balance


def _choices(gates: Tensor) -> list[Tensor]:
    """Returns the masks [batch, length, expert] of the best expert, the second best, ..."""
    masks: list[Tensor] = []
    open_gates = gates.detach()
    for _ in range(CHOICES):
        mask = one_hot(open_gates.argmax(dim=-1), EXPERTS)
        masks.append(mask)
        open_gates = open_gates * (1 - mask)
    return masks


class ExpertLayer(nn.Module):
    """Feed-forward experts between a dispatching and a combining einsum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = Router(shape.width)
        self.experts = nn.ModuleList(
            [GPTFeedForward(shape.width, shape.dropout) for _ in range(EXPERTS)]
        )

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixed states [batch, length, width] and the balance loss."""
        combine, balance = self.router(states)
        combine = combine.to(states.dtype)
        dispatch = (combine > 0).to(states.dtype)
        sent = torch.einsum("blec,blw->ebcw", dispatch, states).unbind(0)
        done = [expert(part) for expert, part in zip(self.experts, sent, strict=True)]
        return torch.einsum("blec,ebcw->blw", combine, torch.stack(done)), balance


class StackedExpertLayer(nn.Module):
    """The same with the weights of all experts in one tensor: expert, in, out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = Router(shape.width)
        self.inner = nn.Parameter(torch.empty(EXPERTS, shape.width, 4 * shape.width))
        self.inner_bias = nn.Parameter(torch.zeros(EXPERTS, 1, 4 * shape.width))
        self.outer = nn.Parameter(torch.empty(EXPERTS, 4 * shape.width, shape.width))
        self.outer_bias = nn.Parameter(torch.zeros(EXPERTS, 1, shape.width))
        self.dropout = nn.Dropout(shape.dropout)
        for weight in (self.inner, self.outer):
            nn.init.normal_(weight, std=0.02)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixed states [batch, length, width] and the balance loss."""
        combine, balance = self.router(states)
        combine = combine.to(states.dtype)
        dispatch = (combine > 0).to(states.dtype)
        sent = torch.einsum("blec,blw->ebcw", dispatch, states)
        rows = sent.reshape(EXPERTS, -1, states.shape[-1])
        inner = nn.functional.gelu(
            torch.bmm(rows, self.inner) + self.inner_bias, approximate="tanh"
        )
        done = self.dropout(torch.bmm(inner, self.outer) + self.outer_bias).reshape(sent.shape)
        return torch.einsum("blec,ebcw->blw", combine, done), balance


class ExpertBlock(nn.Module):
    """One pre-norm decoder layer whose feed-forward network is a mixture."""

    def __init__(self, shape: Shape, layer: type[nn.Module] = ExpertLayer) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = GPTAttention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.moe = layer(shape)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns states [batch, length, width] and the balance loss."""
        states = states + self.attn(self.ln_1(states))
        mixed, balance = self.moe(self.ln_2(states))
        return states + mixed, balance


class MixtureOfExperts(nn.Module):
    """Decoder-only language model with dense and expert layers in turn."""

    def __init__(self, shape: Shape, layer: type[nn.Module] = ExpertLayer) -> None:
        super().__init__()
        self.embeddings = GPTEmbeddings(shape)
        pairs = range(shape.layers // 2)
        self.dense = nn.ModuleList([GPTBlock(shape) for _ in pairs])
        self.sparse = nn.ModuleList([ExpertBlock(shape, layer) for _ in pairs])
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = TiedHead()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of predicting labels [batch, length], balance included."""
        states = self.embeddings(input_ids)
        balances = []
        for dense, sparse in zip(self.dense, self.sparse, strict=True):
            states, balance = sparse(dense(states))
            balances.append(balance)
        logits = self.lm_head(self.ln_f(states), self.embeddings.wte.weight)
        return token_loss(logits, labels) + BALANCE_WEIGHT * torch.stack(balances).mean()


def moe(length: int) -> Built:
    """Returns the mixture of experts; `length` in tokens."""
    return Built(MixtureOfExperts(SHAPE), next_tokens(length))


def moe_stacked(length: int) -> Built:
    """Returns the mixture of experts whose experts are one tensor; `length` in tokens."""
    return Built(MixtureOfExperts(SHAPE, StackedExpertLayer), next_tokens(length))
