"""Placers: vectors of groups and of devices -> a device for each group.

All share a head that compares a query of a group with the vector of each device, so that they work
for any number of devices. Where `is_factorised`, no decision hangs on another: one pass gives the
table of all log probabilities. Otherwise groups (`SequencePlacer`) or segments (`SegmentPlacer`)
are decided one after another, each knowing what was decided before it, for all K placements at
once.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from agents import losses
from agents.networks.attention import AdditiveAttention
from agents.networks.encoders import GraphEncoder
from agents.networks.inputs import Edges
from agents.policy import Choose, Decided


class Ground(NamedTuple):
    """What a placer decides on. Axes: group, dev."""

    groups: Tensor  # [group, width]
    devices: Tensor  # [dev, width]
    choices: Tensor  # [group, dev, feature]
    allowed: Tensor  # bool [group, dev]
    bias: Tensor  # [group, dev] added to the logits: where a search begins
    noise: float = 0.0  # weight of the uniform distribution in every choice
    edges: Edges | None = None  # between groups; None = not known


class Placer(Protocol):
    """Decides a device for each group."""

    def __call__(self, ground: Ground, choose: Choose) -> Decided:
        """Goes through the groups in their order."""


class DeviceHead(nn.Module):
    """How well a group goes with each device."""

    def __init__(self, width: int, choice_features: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.choice = nn.Linear(choice_features, 1, bias=False)
        self.scale = width**-0.5

    def forward(self, queries: Tensor, ground: Ground, rows: slice = slice(None)) -> Tensor:
        """Returns log probabilities, [..., group, dev], of some groups from [..., group, width]."""
        match = self.query(queries) @ self.key(ground.devices).T * self.scale
        logits = match + self.choice(ground.choices[rows]).squeeze(2) + ground.bias[rows]
        allowed = ground.allowed[rows].expand(logits.shape)
        return losses.mix_uniform(losses.masked_log_softmax(logits, allowed), ground.noise)


def at_once(table: Tensor, choose: Choose) -> Decided:
    """Decides all groups from one table of log probabilities, [group, dev]."""
    return Decided(choose(table), (table,), None, losses.categorical_entropy(table).mean())


class _Sequence:
    """Collects decisions that are made one part after another."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.actions: list[Tensor] = []
        self.log_probability: list[Tensor] = []
        self.entropy: list[Tensor] = []

    def decide(self, log_probabilities: Tensor) -> Tensor:
        """Decides some groups, [K, group], from [K, group, dev] or, the same for all, [1, ...]."""
        shared = len(log_probabilities) == 1
        actions = self.choose(log_probabilities[0] if shared else log_probabilities)
        wide = log_probabilities.expand(len(actions), -1, -1)
        self.actions.append(actions)
        self.log_probability.append(wide.gather(2, actions[:, :, None]).squeeze(2))
        self.entropy.append(losses.categorical_entropy(log_probabilities).mean(0))
        return actions

    def decided(self) -> Decided:
        """Returns all of them."""
        return Decided(
            torch.cat(self.actions, 1), (), torch.cat(self.log_probability, 1),
            torch.cat(self.entropy).mean(),
        )  # fmt: skip


class SequencePlacer(nn.Module):
    """Sequence to sequence: a two-way LSTM reads the groups, another decides them in order.

    Attention (Bahdanau et al., 2015) comes ``before`` the decoder, whose input then has what the
    last state asked for, or ``after`` it, where the new state asks and the head sees the answer.
    """

    def __init__(
        self, width: int, choice_features: int, *, attention: str, is_factorised: bool
    ) -> None:
        super().__init__()
        self.is_before, self.is_factorised = attention == "before", is_factorised
        self.reader = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.attention = AdditiveAttention(width)
        entering = (3 if self.is_before else 2) * width
        self.decoder = nn.LSTM(entering, width, batch_first=True)
        self.leave = nn.Linear((1 if self.is_before else 2) * width, width)
        self.head = DeviceHead(width, choice_features)

    def forward(self, ground: Ground, choose: Choose) -> Decided:
        """Decides group after group."""
        memory = self.reader(ground.groups[None])[0][0] + ground.groups  # [group, width]
        if self.is_factorised and not self.is_before:
            return self._all(memory, ground, choose)
        return self._one_by_one(memory, ground, choose)

    def _all(self, memory: Tensor, ground: Ground, choose: Choose) -> Decided:
        """Decodes in one call: nothing that goes into the decoder hangs on what it gave before."""
        first = memory.mean(0)[None, None]
        entering = torch.cat([memory, torch.zeros_like(memory)], 1)[None]
        states = self.decoder(entering, (first, torch.zeros_like(first)))[0][0]  # [group, width]
        answer = self.attention(states, self.attention.keys(memory), memory)
        queries = self.leave(torch.cat([states, answer], 1)) + memory
        return at_once(self.head(queries, ground), choose)

    def _one_by_one(self, memory: Tensor, ground: Ground, choose: Choose) -> Decided:
        keys = self.attention.keys(memory)
        state = memory.mean(0, keepdim=True)
        cell, last = torch.zeros_like(state), torch.zeros_like(state)
        sequence, queries = _Sequence(choose), list[Tensor]()
        for group in range(len(memory)):
            own = memory[group].expand(len(state), -1)
            asked = (self.attention(state, keys, memory),) if self.is_before else ()
            entering = torch.cat([own, last, *asked], 1)[:, None]
            _, (hidden, cells) = self.decoder(entering, (state[None], cell[None]))
            state, cell = hidden[0], cells[0]  # [K, width]
            query = state
            if not self.is_before:
                query = torch.cat([state, self.attention(state, keys, memory)], 1)
            queries.append(self.leave(query) + own)
            if not self.is_factorised:
                rows = slice(group, group + 1)
                actions = sequence.decide(self.head(queries[-1][:, None], ground, rows))
                last = ground.devices[actions[:, 0]]  # [K, width]
                state, cell = (x.expand(len(actions), -1).contiguous() for x in (state, cell))
        if self.is_factorised:
            return at_once(self.head(torch.cat(queries), ground), choose)
        return sequence.decided()


class SegmentPlacer(nn.Module):
    """Decides a segment of neighbouring groups at once and carries a state to the next.

    A two-way LSTM reads all segments side by side; another goes from segment to segment, so the
    time grows with their number and the memory with one of them. Unless factorised, the state also
    carries where the last segment went.
    """

    def __init__(
        self, width: int, choice_features: int, *, segment: int, is_factorised: bool
    ) -> None:
        super().__init__()
        self.segment, self.is_factorised = segment, is_factorised
        self.reader = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.carry = nn.LSTM(2 * width, width, batch_first=True)
        self.leave = nn.Linear(2 * width, width)
        self.head = DeviceHead(width, choice_features)

    def forward(self, ground: Ground, choose: Choose) -> Decided:
        """Decides segment after segment."""
        size, width = ground.groups.shape
        count = -(-size // self.segment)
        padded = nn.functional.pad(ground.groups, (0, 0, 0, count * self.segment - size))
        read = self.reader(padded.view(count, self.segment, width))[0]  # [segment, place, width]
        summary = read.mean(1)  # [segment, width]
        nodes = (read.reshape(-1, width) + padded)[:size]
        if self.is_factorised:
            past = torch.cat([summary, torch.zeros_like(summary)], 1)
            state = self.carry(past[None])[0][0].repeat_interleave(self.segment, 0)[:size]
            query = nodes + self.leave(torch.cat([nodes, state], 1))
            return at_once(self.head(query, ground), choose)
        return self._one_by_one(ground, nodes, summary, choose)

    def _one_by_one(
        self, ground: Ground, nodes: Tensor, summary: Tensor, choose: Choose
    ) -> Decided:
        sequence = _Sequence(choose)
        last, carried = torch.zeros_like(summary[:1]), None
        for number, own in enumerate(summary):
            rows = slice(number * self.segment, min((number + 1) * self.segment, len(nodes)))
            entering = torch.cat([own.expand(len(last), -1), last], 1)[:, None]
            state, carried = self.carry(entering, carried)  # [K, 1, width]
            wide = nodes[rows].expand(len(state), -1, -1)
            query = wide + self.leave(torch.cat([wide, state.expand_as(wide)], 2))
            actions = sequence.decide(self.head(query, ground, rows))  # [K, place]
            last = ground.devices[actions].mean(1)
            if len(state) < len(actions):
                carried = tuple(x.expand(-1, len(actions), -1).contiguous() for x in carried)
        return sequence.decided()


class TransformerPlacer(nn.Module):
    """Self-attention within a segment and to the one before it; all decided at once.

    After Transformer-XL (Dai et al., 2019), which GDP places with, without its recurrence over
    layers' gradients: here they flow.
    """

    def __init__(self, width: int, choice_features: int, *, segment: int, heads: int = 4) -> None:
        super().__init__()
        self.segment = segment
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mix = nn.Sequential(
            nn.Linear(width, 2 * width), nn.PReLU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = DeviceHead(width, choice_features)

    def forward(self, ground: Ground, choose: Choose) -> Decided:
        """Decides all segments side by side."""
        size, width = ground.groups.shape
        count = -(-size // self.segment)
        padded = nn.functional.pad(ground.groups, (0, 0, 0, count * self.segment - size))
        nodes = padded.view(count, self.segment, width)
        before = torch.cat([torch.zeros_like(nodes[:1]), nodes[:-1]])
        seen = torch.cat([before, nodes], 1)  # [segment, 2 place, width]
        is_nothing = torch.zeros(seen.shape[:2], dtype=torch.bool)
        is_nothing[0, : self.segment] = True
        is_nothing[-1, self.segment + size - (count - 1) * self.segment :] = True
        answer = self.attend(nodes, seen, seen, key_padding_mask=is_nothing, need_weights=False)[0]
        nodes = nodes + self.norms[0](answer)
        nodes = nodes + self.norms[1](self.mix(nodes))
        return at_once(self.head(nodes.reshape(-1, width)[:size], ground), choose)


class GraphPlacer(nn.Module):
    """A graph convolution over groups, then the head; all decided at once."""

    def __init__(self, width: int, choice_features: int, *, layers: int = 2) -> None:
        super().__init__()
        self.encoder = GraphEncoder(width, 1, width, layers)
        self.head = DeviceHead(width, choice_features)

    def forward(self, ground: Ground, choose: Choose) -> Decided:
        """Decides all groups at once.

        Raises:
            ValueError: the edges between groups are not known.
        """
        if ground.edges is None:
            raise ValueError("a graph placer needs the edges between groups")
        nodes = self.encoder(ground.groups, ground.edges) + ground.groups
        return at_once(self.head(nodes, ground), choose)


def leaning(allowed: Tensor, actions: Tensor, probability: float) -> Tensor:
    """Returns logits, [group, dev], of a placement: what it does not choose is uniform.

    Args:
        allowed: bool [group, dev].
        actions: the placement, [group].
        probability: of each of its choices, below 1; its share of the uniform rest comes on top.
    """
    logits = torch.zeros(allowed.shape)
    choices = allowed.sum(1).to(logits.dtype)
    logits[torch.arange(len(actions)), actions] = torch.log1p(
        probability * choices / (1.0 - probability)
    )
    return logits
