"""Mixture of experts as Megatron-LM computes it, without dropped tokens: what one device does.

A device holds `local` of the experts. Tokens are taken as spread evenly: as many come to it as it
sends, so that its experts get the choices of its own tokens. Sending them, and sending them back,
is a copy of them here. Experts run one after the other, or all at once as batched products
(grouped GEMM). The router gives each token to its `choices` best experts, balanced by a loss of its
own, or by Sinkhorn's iteration where there is one choice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, next_tokens
from simcore.models.megatron import MegatronAttention, MegatronGPT, MegatronShape

SINKHORN_ROUNDS = 3  # until columns change by less than 1e-4, where logits hardly differ
SMALL = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts of each layer.

    Attributes:
        count: in all.
        local: of one device.
        choices: experts of a token.
        width: inside an expert.
        shared: width of the expert that all tokens go to; 0 = none.
        is_grouped: whether those of a device are one batched product.
    """

    count: int
    local: int
    choices: int
    width: int
    shared: int = 0
    is_grouped: bool = False


class ExpertRouter(nn.Module):
    """Says where each token goes, and with which weight its experts count."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(width, experts.count, bias=False)
        self.sinkhorn = Sinkhorn()
        self.order = Order()

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens by expert [token * choice], their weights, and the loss of balance.

        Args:
            rows: tokens, [token, width].
        """
        logits = self.gate(rows).float()
        if self.experts.choices == 1:
            chosen, balance = self.sinkhorn(logits), logits.new_zeros(())
            weights = logits.sigmoid() * torch.zeros_like(logits).scatter(1, chosen, 1)
        else:
            best, chosen = logits.topk(self.experts.choices, dim=1)
            weights = torch.zeros_like(logits).scatter(1, chosen, best.softmax(dim=-1))
            balance = _balance_loss(logits, self.experts.choices)
        order, token = self.order(logits, chosen)
        share = weights.t().contiguous().reshape(-1)[order]
        return token, share, balance


class Order(nn.Module):
    """Puts the choices of all tokens in the order of their experts; no gradients."""

    def forward(self, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Returns places in [expert, token], flattened, and their tokens, both [choice].

        Args:
            logits: [token, expert].
            chosen: experts, [token, choice].
        """
        with torch.no_grad():
            mask = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool().t().contiguous()
            order = mask.reshape(-1).int().argsort(descending=True, stable=True)
            order = order[: chosen.numel()]
            return order, order % logits.shape[0]


class Sinkhorn(nn.Module):
    """Chooses an expert for each token, so that all experts have about as many; no gradients."""

    def forward(self, logits: Tensor) -> Tensor:
        """Maps [token, expert] to the chosen expert, [token, 1]."""
        with torch.no_grad():
            cost = logits.exp()
            row = torch.ones_like(cost[:, 0])
            column = torch.ones_like(cost[0])
            for _ in range(SINKHORN_ROUNDS):
                before = column
                row = 1 / cost.shape[0] / ((column * cost).sum(1) + SMALL)
                column = 1 / cost.shape[1] / ((row.unsqueeze(1) * cost).sum(0) + SMALL)
                (before - column).abs().mean()
            return (column * cost * row.unsqueeze(1)).topk(1, dim=1)[1]


def _balance_loss(logits: Tensor, choices: int) -> Tensor:
    """Returns the loss of Switch Transformers (Fedus et al., 2021)."""
    scores = logits.softmax(dim=-1)
    chosen = scores.topk(choices, dim=1)[1]
    counts = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool().sum(dim=0)
    return (scores.sum(dim=0) * counts).sum() * 1e-2


class OneByOne(nn.Module):
    """The experts of a device, one after the other."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(width, experts.width) for _ in range(experts.local)])

    def forward(self, rows: Tensor) -> Tensor:
        """Maps tokens by expert, [token, width], to the same shape."""
        parts = rows.chunk(len(self.experts), dim=0)
        done = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return torch.cat(done, dim=0)


class Expert(nn.Module):
    """A feed-forward network without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(width, inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [..., width] to the same shape."""
        hidden: Tensor = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(states), approximate="tanh"))
        return hidden


class Stacked(nn.Module):
    """Weights of all experts of a device, [expert, in, out]."""

    def __init__(self, count: int, entering: int, leaving: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, entering, leaving))

    def forward(self, states: Tensor) -> Tensor:
        """Maps [expert, token, in] to [expert, token, out]."""
        return torch.bmm(states, self.weight)


class Grouped(nn.Module):
    """The experts of a device, all at once."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.local = experts.local
        self.dense_h_to_4h = Stacked(experts.local, width, experts.width)
        self.dense_4h_to_h = Stacked(experts.local, experts.width, width)

    def forward(self, rows: Tensor) -> Tensor:
        """Maps tokens by expert, [token, width], to the same shape."""
        states = rows.view(self.local, rows.shape[0] // self.local, rows.shape[1])
        states = F.gelu(self.dense_h_to_4h(states), approximate="tanh")
        done: Tensor = self.dense_4h_to_h(states).reshape(rows.shape)
        return done


class ExpertFeedForward(nn.Module):
    """Router, dispatch, experts and combination."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.router = ExpertRouter(width, experts)
        self.experts = (Grouped if experts.is_grouped else OneByOne)(width, experts)
        self.shared = Expert(width, experts.shared) if experts.shared else None

    def forward(self, states: Tensor) -> Tensor:
        """Maps [length, batch, width] to the same shape."""
        rows = states.flatten(0, 1)
        order, share, balance = self.router(rows)
        sent = rows.index_select(0, order).clone()
        done = self.experts(sent).clone() * share.unsqueeze(1).to(rows.dtype)
        mixed = torch.zeros_like(rows).index_add(0, order, done)
        if self.shared is not None:
            mixed = mixed + self.shared(rows)
        output: Tensor = (mixed + balance.to(mixed.dtype)).view(states.shape)
        return output


class ExpertMegatronBlock(nn.Module):
    """One pre-norm decoder layer whose feed-forward network is a mixture."""

    def __init__(self, shape: MegatronShape, experts: Experts) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(shape.width)
        self.attention = MegatronAttention(shape)
        self.post_attention_layernorm = nn.LayerNorm(shape.width)
        self.mlp = ExpertFeedForward(shape.width, experts)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [length, batch, width] to the same shape."""
        states = states + self.attention(self.input_layernorm(states))
        mixed: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return mixed


def mixture(shape: MegatronShape, experts: Experts) -> Built:
    """Returns a GPT of any size all of whose layers have experts, on the meta device."""
    with torch.device("meta"):
        model = MegatronGPT(shape)
        model.layers = nn.Sequential(
            *(ExpertMegatronBlock(shape, experts) for _ in range(shape.layers))
        )
        return Built(model, next_tokens(shape.length))
