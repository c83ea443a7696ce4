"""EAGLE: a grouper and a placer, linked by a recurrent network and trained together by PPO.

Lan, Chen and Li, EAGLE: expedited device placement with automatic grouping for large models, IPDPS
2021. Public are its title and family: groups of ops are learned together with the devices of the
groups, as in the Hierarchical Planner (Mirhoseini et al., 2018), whose code is public. All else is
a reconstruction with our own constants: a feed-forward grouper, a recurrent network that links it
to the placer so that gradients reach it, a sequence-to-sequence placer with attention before or
after the decoder or a graph convolution, and REINFORCE, PPO or PPO with cross-entropy.

    python -m agents.eagle gnmt-4 --cluster 4xP100-PCIe --evaluations 2000 --folder run
"""

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents import ppo
from agents.command_line import option, run
from agents.diagnostics import Diagnostics
from agents.networks.encoders import DeviceEncoder
from agents.networks.grouper import BridgeRnn, FeedForwardGrouper, Flow
from agents.networks.inputs import Edges, Inputs, mean_by
from agents.networks.placers import GraphPlacer, Ground, Placer, SequencePlacer, leaning
from agents.observe import (
    CHOICE_FEATURES,
    DEVICE_FEATURES,
    GROUP_FEATURES,
    OP_FEATURES,
    PAIR_FEATURES,
    observe,
)
from agents.planners.partition import Method, partition
from agents.policy import Actor, Choose, Decided
from agents.task import PlacementTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ppo.Config):
    """All that decides a run beside the task. Every constant is ours (a reconstruction)."""

    NAME: ClassVar[str] = "eagle"
    GROUPS: ClassVar[int] = 512  # units that the grouper groups, at most

    learning_rate: float = option(5e-3, "of Adam", least=0, above=True)
    start_weight: float = option(0.9, "probability of a given start, at first", least=0, most=0.999)
    entropy_weight: float = option(0.1, "of the entropy bonus, per nat and decision", least=0)
    noise: float = option(2.0, "groups of a placement placed uniformly, as Post mixes", least=0)
    patience: int = option(40, "iterations without a better placement that end a life", least=1)
    baseline: Literal["ema"] = option("ema", "what a reward is compared with")
    algorithm: Literal["reinforce", "ppo", "ppo+ce"] = option(
        "ppo", "reinforce: one step per iteration; ppo+ce: with a fit to the best, as Post"
    )
    width: int = option(64, "of all vectors; even", least=2)
    parts: int = option(40, "groups that are placed", least=1)
    grouper: Literal["learned", "coarse", "metis", "fluid"] = option(
        "learned", "learned: from coarse groups on; or fixed: coarse, METIS, fluid communities"
    )
    grouper_width: int = option(64, "of the grouper's hidden layer (Hierarchical Planner)", least=1)
    strays: float = option(
        1.0, "units of a placement outside of their first group, at first", least=0, above=True
    )
    placer: Literal["sequence", "graph"] = option("sequence", "LSTMs, or a graph convolution")
    attention: Literal["before", "after"] = option("after", "the decoder of the sequence")
    mode: Literal["factorised", "sequential"] = option(
        "factorised", "factorised: one encode for all placements; else a group knows the last"
    )


def effective(config: Config) -> Config:
    """Returns the configuration with what its algorithm sets.

    One step from the samples of the policy itself is REINFORCE: all ratios are 1.
    """
    if config.algorithm == "reinforce":
        return replace(config, epochs=1, elite_every=0)
    if config.algorithm == "ppo+ce":
        return replace(config, elite_every=config.elite_every or 5)
    return config


class Network(nn.Module):
    """What is learned, and goes from task to task."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, features = config.width, OP_FEATURES + GROUP_FEATURES
        self.units = nn.Sequential(nn.Linear(features, width), nn.PReLU(), nn.Linear(width, width))
        self.grouper = FeedForwardGrouper(features, config.grouper_width, config.parts)
        self.bridge = BridgeRnn(width)
        self.devices = DeviceEncoder(DEVICE_FEATURES, PAIR_FEATURES, width)
        self.placer: Placer = (
            GraphPlacer(width, CHOICE_FEATURES)
            if config.placer == "graph"
            else SequencePlacer(
                width,
                CHOICE_FEATURES,
                attention=config.attention,
                is_factorised=config.mode == "factorised",
            )
        )


class Policy(Actor):
    """The network on one task. Decisions: the group of each unit, then the device of each group.

    The task's groups are EAGLE's units; there are as many groups as the configuration has parts,
    or as there are units.
    """

    def __init__(self, config: Config, network: Network, task: PlacementTask) -> None:
        super().__init__()
        self.config, self.network, self.grouping = config, network, task.grouping
        self.inputs = inputs = Inputs.of(observe(task.grouping))
        pooled = mean_by(inputs.group, inputs.ops, len(inputs.groups))
        self.features = torch.cat([pooled, inputs.groups], 1)  # [unit, feature]
        self.flow = unit_flow(inputs)
        usual = task.grouping.summarise(task.grouping.space.default)
        self.usual = torch.from_numpy(usual.astype(np.int64))  # [unit]
        self.parts = min(config.parts, task.num_groups)
        self.first: Tensor  # int64 [unit] the group that each unit begins in
        self.bias: Tensor  # [group, dev]
        method: Method = "coarse" if config.grouper == "learned" else config.grouper
        first = partition(task.grouping, self.parts, method)
        self.register_buffer("first", torch.from_numpy(first))
        self.register_buffer("bias", torch.zeros(self.parts, task.num_devices))

    def decide(self, choose: Choose) -> Decided:
        """Decides groups, unless they are fixed, and their devices."""
        member = nn.functional.one_hot(self.first, self.parts).to(torch.float32)
        if self.config.grouper != "learned":
            return self._place(member, choose)
        odds = len(self.first) * (self.parts - 1) / self.config.strays
        prior = member * math.log(max(2.0, odds))
        table = self.network.grouper(self.features, prior)  # [unit, group]
        chosen = choose(table)
        placed = self._place(table.exp(), choose)
        actions = torch.cat([chosen.expand(len(placed.actions), -1), placed.actions], 1)
        return placed._replace(actions=actions, tables=(table, *placed.tables))

    def _place(self, member: Tensor, choose: Choose) -> Decided:
        """Decides devices of groups from probabilities, [unit, group]."""
        net, inputs = self.network, self.inputs
        groups, between = net.bridge(net.units(self.features), member, self.flow)
        size = member.sum(0).clamp_min(1e-6)[:, None, None]
        ground = Ground(
            groups,
            net.devices(inputs.devices, inputs.pairs),
            torch.einsum("ug,udc->gdc", member, inputs.choices) / size,
            inputs.allowed.any(0).expand(self.parts, -1),
            self.bias,
            min(0.5, self.config.noise / max(1, self.parts)),
            dense_edges(between),
        )
        placed: Decided = net.placer(ground, choose)
        return placed

    def place(self, actions: Tensor) -> Tensor:
        """Returns the devices of units, [K, unit]; where one may not be, its default."""
        if self.config.grouper == "learned":
            group, devices = actions[:, : -self.parts], actions[:, -self.parts :]
        else:
            group, devices = self.first.expand(len(actions), -1), actions
        devices = devices.gather(1, group)  # [K, unit]
        fits = self.inputs.allowed[torch.arange(devices.shape[1]), devices]
        return torch.where(fits, devices, self.usual)

    def lean(self, actions: Tensor, probability: float) -> None:
        """Begins near a placement, [unit]: learned groups begin cut where it changes device."""
        if self.config.grouper == "learned":
            self.first.copy_(self._cut(actions))
        grouping, weight = self.grouping, np.zeros(self.bias.shape)
        work = np.bincount(grouping.group, grouping.weight, grouping.num_groups)
        np.add.at(weight, (self.first.numpy(), actions.numpy()), work)
        allowed = self.inputs.allowed.any(0).expand(self.bias.shape)
        best = torch.from_numpy(weight).masked_fill(~allowed, -1.0).argmax(1)
        self.bias.copy_(leaning(allowed, best, probability))

    def _cut(self, actions: Tensor) -> Tensor:
        """Returns groups, [unit], that are each on one device only, if so many parts allow it."""
        for number in range(self.parts, 0, -max(1, self.parts // 8)):
            coarse = partition(self.grouping, number, "coarse")
            kind = coarse * self.bias.shape[1] + actions.numpy()
            kinds, group = np.unique(kind, return_inverse=True)
            if len(kinds) <= self.parts:
                return torch.from_numpy(group.astype(np.int64))
        return self.first


def on_task(config: Config, network: Network, task: PlacementTask) -> Policy:
    """Returns the policy of a network on a task."""
    return Policy(config, network, task)


def unit_flow(inputs: Inputs) -> Flow:
    """Returns what units send to each other, weighted by bytes; a tie counts a little anyway."""
    source, target = inputs.group[inputs.edges.source], inputs.group[inputs.edges.target]
    apart = source != target
    weight = inputs.edges.features[apart, 0] + 1e-3
    return Flow(source[apart], target[apart], weight)


def dense_edges(between: Tensor) -> Edges:
    """Returns edges between all groups, weighted by what flows, [group, group]."""
    size = len(between)
    scale = between.sum(1).clamp_min(1e-6)[:, None] * between.sum(0).clamp_min(1e-6)
    grid = torch.arange(size)
    source, target = grid.repeat_interleave(size), grid.repeat(size)
    weight = (between / scale.sqrt()).reshape(-1)
    return Edges(source, target, weight, torch.ones(size * size, 1))


def train(  # noqa: PLR0913 - what a run is made of
    config: Config,
    task: PlacementTask,
    *,
    start: NDArray[np.integer] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
    network: Network | None = None,
) -> ppo.TrainResult:
    """Trains on one task; arguments and result as `ppo.train`.

    Args:
        config: what decides the run.
        task: the task.
        start: devices to begin near, [unit]; None = from nothing.
        folder: where checkpoints and diagnostics go; None = nowhere.
        resume: go on from the checkpoint in the folder.
        listener: called after each iteration.
        network: trained before on other tasks; each life begins with it.

    Raises:
        PlacewrightError: there is no checkpoint to resume from, or it is of another run.
    """
    config = effective(config)

    def make() -> Policy:
        return Policy(config, copy.deepcopy(network) or Network(config), task)

    learner = ppo.Learner.new(config, task, start, make)
    return ppo.train(config, task, folder=folder, resume=resume, listener=listener, learner=learner)


if __name__ == "__main__":
    sys.exit(run(Config, train))
