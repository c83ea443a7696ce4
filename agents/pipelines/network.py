"""The network of the pipeline agent: encoder, recurrent partitioner, scheduler; see its module."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents import losses, ppo
from agents.command_line import option
from agents.networks.encoders import DeviceEncoder, GraphEncoder
from agents.networks.inputs import Edges
from agents.observe import DEVICE_FEATURES, PAIR_FEATURES
from agents.pipelines.env import Freedom, PipelineTask, Walk
from agents.pipelines.estimate import Estimator
from agents.pipelines.observe import (
    EDGE_FEATURES,
    NODE_FEATURES,
    RHYTHM_FEATURES,
    PipelineObservation,
    observe_pipeline,
)
from agents.pipelines.plans import RECOMPUTES
from agents.policy import Actor, Choose, Decided

LABEL_FEATURES = 7
STAGE_FEATURES = 6
COUNT_FEATURES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ppo.Config):
    """All that decides a run beside the task. Every constant is ours (a reconstruction)."""

    NAME: ClassVar[str] = "pipeline"

    placements: int = option(32, "plans sampled per iteration, K", least=1)
    learning_rate: float = option(3e-3, "of Adam", least=0, above=True)
    entropy_weight: float = option(0.01, "of the entropy bonus, per nat and decision", least=0)
    baseline: Literal["ema"] = option("ema", "what a reward is compared with")
    elite_every: int = option(4, "iterations between fits to the best, as Post; 0: none", least=0)
    start_weight: float = option(
        0.96, "probability of a given start, at first", least=0, most=0.999
    )
    width: int = option(48, "of all vectors", least=4)
    layers: int = option(3, "rounds of messages in the graph encoder", least=1)
    noise: float = option(0.02, "weight of the uniform distribution", least=0, most=0.5)
    direction: Literal["directed", "symmetrised"] = option("directed", "of edges in the encoder")
    stages: int = option(0, "number of stages; 0: chosen", least=0)
    copies: bool = option(True, "whether several devices may share a stage")
    wide: int = option(16, "plans drawn for each that is simulated, the likeliest", least=1)
    teachers: bool = option(True, "begin with the plans of classical planners")
    teaching: int = option(20, "steps that imitate the best of them", least=0)
    policy: bool = option(True, "whether the policy proposes plans; false: only changes of plans")
    refining: float = option(
        0.7, "part of the budget that changes the best plans step by step", least=0, most=1
    )


def freedom_of(config: Config) -> Freedom:
    """Returns what plans may decide under a configuration."""
    return Freedom(stages=config.stages or None, least=1, copies=config.copies)


def edges_of(seen: PipelineObservation, direction: str) -> Edges:
    """Returns the edges of the nodes as the encoder sees them, both ways where symmetrised."""
    source, target = torch.from_numpy(seen.source), torch.from_numpy(seen.target)
    features = torch.from_numpy(seen.edges)
    if direction == "symmetrised":
        source, target = torch.cat([source, target]), torch.cat([target, source])
        features = torch.cat([features, features])
    size = len(seen.nodes)
    leaving = source.bincount(minlength=size).clamp_min(1)[source]
    arriving = target.bincount(minlength=size).clamp_min(1)[target]
    weight = (leaving * arriving).to(torch.float32).rsqrt()
    return Edges(source, target, weight, features)


def _scorer(width: int, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, outputs))


class Network(nn.Module):
    """What is learned; goes from task to task."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.encoder = GraphEncoder(NODE_FEATURES, EDGE_FEATURES, width, config.layers)
        self.devices = DeviceEncoder(DEVICE_FEATURES, PAIR_FEATURES, width)
        self.rhythm = _scorer(2 * width + RHYTHM_FEATURES)
        self.count = _scorer(2 * width + RHYTHM_FEATURES + COUNT_FEATURES)
        self.partitioner = nn.LSTMCell(2 * width, width)
        self.label = _scorer(width + LABEL_FEATURES)
        self.in_step = nn.Parameter(torch.tensor(2.0))  # weight of stages of equal work
        self.stage = _scorer(2 * width + STAGE_FEATURES)
        self.idle = _scorer(width)
        self.again = _scorer(width + STAGE_FEATURES, len(RECOMPUTES))


class Policy(Actor):
    """The network on one task."""

    def __init__(self, config: Config, network: Network, task: PipelineTask) -> None:
        super().__init__()
        self.network, self.task, self.noise = network, task, config.noise
        self.wide, self.estimate = config.wide, Estimator(task)
        self.met: set[int] = set()  # plans that were drawn and kept
        self.seen = observe_pipeline(task)
        self.edges = edges_of(self.seen, config.direction)
        self.start: Tensor
        self.register_buffer("start", torch.full((len(task.widths),), -1))
        self.probability: Tensor
        self.register_buffer("probability", torch.zeros(()))

    def lean(self, actions: Tensor, probability: float) -> None:
        """Begins near a plan's decisions, [decision]."""
        self.start.copy_(actions)
        self.probability.fill_(probability)

    def decide(self, choose: Choose) -> Decided:
        """Decides one thing after another, for all K plans at once.

        Where plans are drawn (no gradients are asked for), `wide` times as many are, and those are
        kept that were not before and take least by the estimate.
        """
        if self.wide == 1 or torch.is_grad_enabled():
            return _Episode(self, choose).run()
        drawn = _Episode(self, _widened(choose, self.wide)).run()
        assert drawn.sequence is not None
        kept = self._likeliest(drawn.actions.numpy(), len(drawn.actions) // self.wide)
        return Decided(drawn.actions[kept], (), drawn.sequence[kept], drawn.entropy)

    def _likeliest(self, actions: NDArray[np.int64], most: int) -> list[int]:
        marks = [hash(tuple(row)) for row in actions.tolist()]
        first = {mark: number for number, mark in reversed(list(enumerate(marks)))}
        keys = {
            number: (marks[number] in self.met, self.estimate(self.task.plan(actions[number])))
            for number in sorted(first.values())
        }
        order = sorted(keys, key=keys.__getitem__)
        kept = (order * most)[:most]  # again, where there are too few
        self.met.update(marks[number] for number in kept)
        return kept

    def get_extra_state(self) -> list[int]:
        """Returns what a checkpoint keeps beside the parameters."""
        return sorted(self.met)

    def set_extra_state(self, state: list[int]) -> None:
        """Takes up what a checkpoint kept."""
        self.met = set(state)


def _widened(choose: Choose, times: int) -> Choose:
    """Returns a choice for so many times as many plans."""

    def wide(table: Tensor) -> Tensor:
        parts = [table] * times if table.ndim == 2 else list(table.chunk(times))
        return torch.cat([choose(part) for part in parts])

    return wide


class _Episode:
    """One way through all decisions."""

    def __init__(self, policy: Policy, choose: Choose) -> None:
        self.policy, self.choose, self.task = policy, choose, policy.task
        self.network, self.seen = policy.network, policy.seen
        self.nodes = self.network.encoder(torch.from_numpy(self.seen.nodes), policy.edges)
        pairs = torch.from_numpy(self.seen.pairs)
        self.devices = self.network.devices(torch.from_numpy(self.seen.devices), pairs)
        self.whole = torch.cat([self.nodes.mean(0), self.devices.mean(0)])  # [2 width]
        self.actions: list[Tensor] = []
        self.log_probability: list[Tensor] = []
        self.entropy: list[Tensor] = []
        self.walk = Walk(self.task, 1)

    def run(self) -> Decided:
        self._rhythm()
        self._count()
        self._nodes()
        self._devices()
        return Decided(
            torch.cat(self.actions, 1), (), torch.cat(self.log_probability, 1),
            torch.stack(self.entropy).mean(),
        )  # fmt: skip

    def _take(self, logits: Tensor, legal: NDArray[np.bool_]) -> Tensor:
        """Decides from logits, [K or 1, choice]; returns the choices, [K]."""
        at = len(self.actions)
        mask = torch.from_numpy(legal)
        if self.policy.probability:
            logits = logits + self._lean(at, mask)
        table = losses.masked_log_softmax(logits, mask.expand(logits.shape))
        table = losses.mix_uniform(table, self.policy.noise)
        actions = self.choose(table[None][0] if len(table) == 1 and at == 0 else table[:, None])
        wide = table.expand(len(actions), -1)
        self.actions.append(actions)
        self.log_probability.append(wide.gather(1, actions))
        self.entropy.append(losses.categorical_entropy(table).mean())
        if at == 0:
            self.walk = Walk(self.task, len(actions))
        self.walk.take(actions[:, 0].numpy())
        return actions[:, 0]

    def _lean(self, at: int, mask: Tensor) -> Tensor:
        chance = float(self.policy.probability)
        bias = torch.zeros(mask.shape)
        size = mask.sum(1).to(bias.dtype)
        bias[:, int(self.policy.start[at])] = torch.log1p(chance * size / (1.0 - chance))
        return bias

    def _rhythm(self) -> None:
        rhythms = torch.from_numpy(self.seen.rhythms)
        wide = torch.cat([self.whole.expand(len(rhythms), -1), rhythms], 1)
        chosen = self._take(self.network.rhythm(wide).T, self.walk.mask())
        self.chosen = rhythms[chosen]  # [K, feature]

    def _count(self) -> None:
        counts = torch.tensor(self.task.counts, dtype=torch.float32)
        features = torch.stack([counts / self.task.num_devices, counts.log2() / 4.0], 1)
        rows, size = len(self.chosen), len(counts)
        wide = torch.cat([
            self.whole.expand(rows, size, -1),
            self.chosen[:, None].expand(-1, size, -1),
            features.expand(rows, -1, -1),
        ], 2)  # fmt: skip
        self._take(self.network.count(wide).squeeze(2), self.walk.mask())

    def _nodes(self) -> None:
        walk, seen = self.walk, self.seen
        rows, stages = walk.load.shape
        width = self.nodes.shape[1]
        state, cell = torch.zeros(rows, width), torch.zeros(rows, width)
        last = torch.zeros(rows, width)
        work = np.zeros((rows, stages), np.float32)
        for node in range(self.task.num_nodes):
            entering = torch.cat([self.nodes[node].expand(rows, -1), last], 1)
            state, cell = self.network.partitioner(entering, (state, cell))
            features = torch.from_numpy(self._labels(node, work))  # [K, stage, feature]
            wide = torch.cat([state[:, None].expand(-1, stages, -1), features], 2)
            logits = self.network.label(wide).squeeze(2) - self.network.in_step * features[:, :, 0]
            chosen = self._take(logits, walk.mask())
            work[np.arange(rows), chosen.numpy()] += seen.work[node]
            inside = torch.from_numpy(walk.stage[:, : node + 1]) == chosen[:, None]
            last = inside.to(torch.float32) @ self.nodes[: node + 1]
            last = last / inside.sum(1, keepdim=True)
        inside = torch.from_numpy(walk.stage[:, None] == np.arange(stages)[:, None])
        total = inside.to(torch.float32) @ self.nodes  # [K, stage, width]
        self.stages = total / inside.sum(2, keepdim=True).clamp_min(1)
        self.work = work

    def _labels(self, node: int, work: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns features of a node in each stage, [K, stage, feature]."""
        walk, seen = self.walk, self.seen
        rows, stages = work.shape
        count = walk.count[:, None].astype(np.float32)
        place = np.arange(stages, dtype=np.float32)[None]
        done = float(seen.work[:node].sum() + seen.work[node] / 2)
        cut = np.zeros((rows, stages), np.float32)
        for edge in np.flatnonzero(seen.target == node):
            apart = walk.stage[:, seen.source[edge], None] != place
            cut += apart * seen.sent[edge]
        whole = np.ones((rows, stages), np.float32)
        columns = (
            np.abs(done * count - 0.5 - place),
            (place - walk.floor[:, node, None]) / count,
            work * count,
            walk.used,
            np.sqrt(cut),
            (walk.load + self.task.held[node]) / max(float(self.task.rooms.mean()), 1.0),
            whole * done,
        )
        return np.stack(np.broadcast_arrays(*columns), axis=2).astype(np.float32)

    def _devices(self) -> None:
        rows, stages = self.work.shape
        for device in range(self.task.num_devices):
            features = torch.from_numpy(self._stages(device))
            own = self.devices[device].expand(rows, stages, -1)
            scores = self.network.stage(torch.cat([own, self.stages, features], 2)).squeeze(2)
            idle = self.network.idle(self.devices[device]).expand(rows, 1)
            self._take(torch.cat([idle - 1.0, scores + features[:, :, 1]], 1), self.walk.mask())
        features = torch.from_numpy(self._stages(None))
        scores = self.network.again(torch.cat([self.stages, features], 2))  # [K, stage, choice]
        prior = torch.tensor([2.0, 0.0, 0.0])  # most stages need not
        for stage in range(stages):
            self._take(scores[:, stage] + prior, self.walk.mask())

    def _stages(self, device: int | None) -> NDArray[np.float32]:
        """Returns features of each stage, for a device or for none, [K, stage, feature]."""
        walk, task = self.walk, self.task
        count = walk.count[:, None].astype(np.float32)
        place = np.arange(self.work.shape[1], dtype=np.float32)[None]
        room = task.rooms[device] if device is not None else task.rooms.mean()
        share = self.work * count
        seat = 0.0 if device is None else (device + 0.5) / task.num_devices
        columns = (
            share,
            share / (1.0 + walk.copies),
            walk.copies / 4.0,
            walk.load / max(float(room), 1.0),
            np.abs(seat * count - 0.5 - place) / count,
            self.chosen[:, 0].numpy()[:, None] * np.ones_like(share),
        )
        return np.stack(np.broadcast_arrays(*columns), axis=2).astype(np.float32)
