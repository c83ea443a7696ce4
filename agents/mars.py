"""Mars: a pre-trained graph encoder and a placer of segments, trained together by PPO.

Lan, Chen and Li, Accelerated device placement optimization with contrastive learning, ICPP 2021.
Public are its abstract and pipeline: a graph neural network gives a vector per op; it is trained
first without rewards, by contrast; a sequence-to-sequence placer goes from segment to segment; both
are then trained by PPO. All else is a reconstruction with our own constants: the encoder and its
sizes, Deep Graph Infomax as the contrast, the length of a segment, the factorised mode (one encode
gives all placements of an iteration), vectors of devices from their features, and that decisions
are of groups of neighbouring ops (as many as ops, if asked for). On one task alone pre-training is
off unless asked for: on the toy of `agents.task` it made the search less reliable.

    python -m agents.mars gnmt-4 --cluster 4xP100-PCIe --evaluations 2000 --folder run
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents import contrastive, ppo
from agents.command_line import option, run
from agents.diagnostics import Diagnostics
from agents.networks.encoders import DeviceEncoder, GraphEncoder
from agents.networks.inputs import Inputs, mean_by
from agents.networks.placers import (
    Ground,
    Placer,
    SegmentPlacer,
    SequencePlacer,
    TransformerPlacer,
    leaning,
)
from agents.observe import (
    CHOICE_FEATURES,
    DEVICE_FEATURES,
    EDGE_FEATURES,
    GROUP_FEATURES,
    OP_FEATURES,
    PAIR_FEATURES,
    observe,
)
from agents.policy import Actor, Choose, Decided
from agents.task import PlacementTask
from agents.teachers import annealed
from agents.torch_state import torch_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ppo.Config):
    """All that decides a run beside the task. Every constant is ours (a reconstruction)."""

    NAME: ClassVar[str] = "mars"

    learning_rate: float = option(1e-3, "of Adam", least=0, above=True)
    start_weight: float = option(0.9, "probability of a given start, at first", least=0, most=0.999)
    entropy_weight: float = option(0.1, "of the entropy bonus, per nat and decision", least=0)
    noise: float = option(1.0, "decisions of a placement drawn uniformly, as Post mixes", least=0)
    patience: int = option(40, "iterations without a better placement that end a life", least=1)
    baseline: Literal["ema"] = option("ema", "what a reward is compared with")
    width: int = option(64, "of all vectors; even, a multiple of 4", least=4)
    layers: int = option(3, "rounds of messages in the graph encoder", least=1)
    placer: Literal["segment", "whole", "transformer"] = option(
        "segment", "segment: carries a state; whole: one sequence; transformer: no state"
    )
    segment: int = option(16, "groups that are decided at once", least=1)
    mode: Literal["factorised", "sequential"] = option(
        "factorised", "factorised: one encode for all placements; else a segment knows the last"
    )
    pretrain: int = option(0, "steps of Deep Graph Infomax, per graph; 0: none", least=0)
    freeze: bool = option(False, "keep the encoder as pre-trained")
    imitate: int = option(0, "evaluations of annealing whose best plans are imitated", least=0)
    imitate_steps: int = option(100, "steps of imitation", least=1)


class Network(nn.Module):
    """What is learned, and goes from task to task."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.encoder = GraphEncoder(OP_FEATURES, EDGE_FEATURES, width, config.layers)
        self.devices = DeviceEncoder(DEVICE_FEATURES, PAIR_FEATURES, width)
        self.groups = nn.Linear(width + GROUP_FEATURES, width)
        self.placer: Placer = _placer(config)
        self.noise = config.noise
        self.encoder.requires_grad_(not config.freeze)

    def forward(self, inputs: Inputs, bias: Tensor, choose: Choose) -> Decided:
        """Decides a device for each group.

        Args:
            inputs: what is seen of a task.
            bias: [group, dev] added to the logits.
            choose: what chooses.
        """
        nodes = self.encoder(inputs.ops, inputs.edges)
        pooled = mean_by(inputs.group, nodes, len(inputs.groups))
        groups = self.groups(torch.cat([pooled, inputs.groups], 1))
        devices = self.devices(inputs.devices, inputs.pairs)
        noise = min(0.5, self.noise / max(1, len(groups)))
        ground = Ground(groups, devices, inputs.choices, inputs.allowed, bias, noise)
        return self.placer(ground, choose)


def _placer(config: Config) -> Placer:
    width, is_factorised = config.width, config.mode == "factorised"
    if config.placer == "whole":
        return SequencePlacer(
            width, CHOICE_FEATURES, attention="after", is_factorised=is_factorised
        )
    if config.placer == "transformer":
        return TransformerPlacer(width, CHOICE_FEATURES, segment=config.segment)
    return SegmentPlacer(
        width, CHOICE_FEATURES, segment=config.segment, is_factorised=is_factorised
    )


class Policy(Actor):
    """The network on one task."""

    def __init__(self, network: Network, inputs: Inputs) -> None:
        super().__init__()
        self.network = network
        self.inputs = inputs
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(inputs.allowed.shape))

    def decide(self, choose: Choose) -> Decided:
        """Decides a device for each group."""
        decided: Decided = self.network(self.inputs, self.bias, choose)
        return decided

    def lean(self, actions: Tensor, probability: float) -> None:
        """Begins near a placement, [group]."""
        self.bias.copy_(leaning(self.inputs.allowed, actions, probability))


def on_task(config: Config, network: Network, task: PlacementTask) -> Policy:
    """Returns the policy of a network on a task."""
    del config  # the network has all of it
    return Policy(network, Inputs.of(observe(task.grouping)))


def new_policy(config: Config, inputs: Inputs, network: Network | None) -> Policy:
    """Returns a policy that begins with a network, or with one pre-trained on the task's graph."""
    if network is not None:
        network = copy.deepcopy(network)
        network.encoder.requires_grad_(not config.freeze)
        return Policy(network, inputs)
    network = Network(config)
    if config.pretrain:
        graph = contrastive.Sample(features=inputs.ops, edges=inputs.edges)
        network.encoder.requires_grad_(True)
        contrastive.pretrain(network.encoder, config.width, [graph], config.pretrain)
        network.encoder.requires_grad_(not config.freeze)
    return Policy(network, inputs)


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
        start: devices to begin near, [group]; None = from nothing.
        folder: where checkpoints and diagnostics go; None = nowhere.
        resume: go on from the checkpoint in the folder.
        listener: called after each iteration.
        network: trained before on other tasks; each life begins with it.

    Raises:
        PlacewrightError: there is no checkpoint to resume from, or it is of another run.
    """
    inputs = Inputs.of(observe(task.grouping))
    with torch_threads(config.threads):
        learner = ppo.Learner.new(config, task, start, lambda: new_policy(config, inputs, network))
        if config.imitate and not resume:
            plans, found = annealed(task, min(config.imitate, config.evaluations), config.seed)
            learner.finalists.note(plans, found, 0)
            learner.evaluations += min(config.imitate, config.evaluations)
            ppo.imitate(config, learner, torch.from_numpy(plans), config.imitate_steps)
    return ppo.train(config, task, folder=folder, resume=resume, listener=listener, learner=learner)


if __name__ == "__main__":
    sys.exit(run(Config, train))
