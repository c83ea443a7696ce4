"""The Hierarchical Planner: a grouper and a placer, trained together by REINFORCE.

Mirhoseini et al., A hierarchical model for device placement, ICLR 2018, with the constants of the
paper or of its released code (TensorFlow's `hierarchical_controller.py`), which differ: the code
squashes logits less, takes one sample for four, and adds noise to logits. From the code are also
the grouper, the widths, the number of groups, features of groups, the reward -sqrt(seconds), a step
time of 100 s for what fails, the moving average as the baseline, and the schedule of Adam. With
either, the policy is certain after some ten steps: the baseline begins at a failure, so that at
first whatever was drawn is reinforced, and a rate of 0.1 of Adam follows at once. The third set is
ours: advantages in deviations from the mean of a step, a bonus for entropy, a mixture with the
uniform distribution, a lower rate, sixteen samples, fewer groups and narrower networks.

Not copied are three defects of the code: neighbours are not wiped, counts of op classes and sizes
have columns of their own, and no output is dropped. Ours: units of `agents.task` in place of single
ops, bytes in place of shapes, features scaled to at most 1, masks for devices that are not allowed.

    python -m agents.hierarchical gnmt-4 --cluster 4xP100-PCIe --evaluations 2000
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents import losses
from agents.command_line import check_options, option, run
from agents.diagnostics import Diagnostics
from agents.finalists import Finalists, Searched, refuse_folder
from agents.networks.hierarchical import Grouper, Placer, Squash
from agents.observe import group_classes
from agents.planners.grouping import Grouping
from agents.planners.partition import flow_between
from agents.policy import sample
from agents.task import Evaluation, PlacementTask
from agents.torch_state import seeded, torch_threads

OUTPUTS = 5  # of a unit that the grouper sees
NEIGHBOURS = 10  # of a unit: (index, +1 to it or -1 from it)
MOST_GROUPS = 256
GROUPS_PER_DEVICE = 20
TUNED_GROUPS = 40  # at most; ours
LIMIT = 5.0  # deviations that a reward counts, at most; ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All that decides a run beside the task."""

    NAME: ClassVar[str] = "hierarchical"
    GROUPS: ClassVar[int] = 512  # units that the grouper groups, at most; ours
    evaluations: int = option(20_000, "placements to simulate", least=1)
    seed: int = option(0, "of all that is drawn", least=0)
    constants: Literal["tuned", "paper", "code"] = option(
        "tuned",
        "paper: 4 samples, tanh 5, temperature 10; code: 1 sample, tanh 1, 1, noise; tuned: ours",
    )
    width: int = option(0, "of the placer; 0: 512 (code), tuned 64", least=0)
    hidden: int = option(64, "of the grouper (code)", least=1)
    learning_rate: float = option(0.0, "of Adam; 0: 0.1 (paper, code), tuned 0.003", least=0)
    entropy_weight: float = option(0.03, "of the entropy, per nat, tuned only", least=0)
    stray: float = option(1.0, "units grouped at random, on average, tuned only", least=0)
    fall: float = option(0.95, "of the rate, every 50 steps from step 400 (code)", least=0, most=1)
    gradient_limit: float = option(1.0, "norm of a gradient (paper)", least=0, above=True)
    decay: float = option(0.9, "of the moving average of rewards (code)", least=0, most=1)
    failure: float = option(100.0, "s that a placement counts that fails (code)", least=0)
    forgiving: int = option(1000, "steps before what fails is left out (code)", least=0)
    noise: float = option(0.5, "of logits, in their mean norm, with the code's", least=0)
    noisy: int = option(750, "steps with noise, with the code's", least=0)
    threads: int = option(1, "of torch", least=1)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def samples(self) -> int:
        """Placements of one grouping."""
        return {"tuned": 16, "paper": 4, "code": 1}[self.constants]

    @property
    def squash(self) -> Squash:
        """What makes logits of scores."""
        return Squash(1.0, 1.0) if self.constants == "code" else Squash(5.0, 10.0)

    @property
    def is_tuned(self) -> bool:
        """Whether the constants are ours."""
        return self.constants == "tuned"

    @property
    def size(self) -> int:
        """Width of the placer."""
        return self.width or (64 if self.is_tuned else 512)

    @property
    def rate(self) -> float:
        """Rate of Adam, at first."""
        return self.learning_rate or (0.003 if self.is_tuned else 0.1)


class Network(nn.Module):
    """Grouper and placer."""

    def __init__(self, config: Config, features: int, groups: int, columns: int, devs: int) -> None:
        super().__init__()
        self.grouper = Grouper(features, config.hidden, groups)
        self.placer = Placer(columns, config.size, devs, config.squash)


class Drawn(NamedTuple):
    """Placements of one grouping and how probable they were."""

    placements: NDArray[np.int64]  # [K, unit]
    log_probability: Tensor  # [K] of the groups and the devices
    entropy: Tensor  # nats per device
    grouping: Tensor  # nats per unit, of its group


def unit_features(grouping: Grouping) -> NDArray[np.float32]:
    """Returns what the grouper sees of units, [unit, 1 + outputs + 2 neighbours], -1 to 1."""
    size, flow = grouping.num_groups, flow_between(grouping)
    classes = group_classes(grouping)
    largest = -np.sort(-flow, axis=1)[:, :OUTPUTS]
    outputs = np.full((size, OUTPUTS), -1.0)
    outputs[:, : largest.shape[1]] = np.where(largest > 0, largest / max(flow.max(), 1.0), -1.0)
    near = np.full((size, NEIGHBOURS, 2), -1.0)
    for unit in range(size):
        ends = [(u, 1.0) for u in np.flatnonzero(flow[unit])]
        ends += [(u, -1.0) for u in np.flatnonzero(flow[:, unit])]
        for place, (other, way) in enumerate(ends[:NEIGHBOURS]):
            near[unit, place] = other / size, way
    kind = classes.argmax(axis=1)[:, None] / classes.shape[1]
    features = np.concatenate([kind, outputs, near.reshape(size, -1)], axis=1)
    return features.astype(np.float32)


@dataclass(slots=True, kw_only=True)
class Planner:
    """All that changes in a run."""

    config: Config
    task: PlacementTask
    features: Tensor  # [unit, feature]
    flow: Tensor  # [unit, unit] bytes
    kinds: Tensor  # [unit, column] classes of its ops and bytes that it sends
    usual: NDArray[np.int64]  # [unit]
    network: Network
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    baseline: float
    groups: int
    finalists: Finalists = field(default_factory=Finalists)
    evaluations: int = 0
    steps: int = 0

    @classmethod
    def new(cls, config: Config, task: PlacementTask) -> "Planner":
        """Returns a planner that knows nothing."""
        grouping = task.grouping
        features = torch.from_numpy(unit_features(grouping))
        flow = torch.from_numpy(flow_between(grouping).astype(np.float32))
        sent = flow.sum(1, keepdim=True) / flow.sum().clamp_min(1.0)
        kinds = torch.cat([torch.from_numpy(group_classes(grouping)), sent], 1)
        devices = task.num_devices
        groups = min(MOST_GROUPS, GROUPS_PER_DEVICE * len(grouping.space.devices))
        if config.is_tuned:
            groups = min(groups, TUNED_GROUPS, grouping.num_groups)
        columns = 2 * groups + kinds.shape[1]
        network = seeded(
            lambda: Network(config, features.shape[1], groups, columns, devices), config.seed
        )
        usual = grouping.summarise(grouping.space.default).astype(np.int64)
        return cls(
            config=config, task=task, features=features, flow=flow, kinds=kinds, usual=usual,
            network=network, groups=groups,
            optimizer=torch.optim.Adam(network.parameters(), lr=config.rate),
            generator=torch.Generator().manual_seed(config.seed),
            baseline=-math.sqrt(config.failure),
        )  # fmt: skip

    @property
    def stray(self) -> float:
        """Weight of the uniform distribution, with which nothing is ever given up (as Post)."""
        config = self.config
        return min(0.5, config.stray / max(1, len(self.usual))) if config.is_tuned else 0.0

    def draw(self) -> Drawn:
        """Draws one grouping and placements of it."""
        table = losses.mix_uniform(self.network.grouper(self.features), self.stray)
        exists = torch.ones(table.shape, dtype=torch.bool)
        group = sample(table.detach(), exists, 1, self.generator)[0]  # [unit]
        devices, logs, entropy = self._devices(self._group_features(group))
        chosen = devices[:, group].numpy()
        is_allowed = self.task.allowed[np.arange(len(self.usual)), chosen]
        grouped = table.gather(1, group[:, None]).sum()
        placements = np.where(is_allowed, chosen, self.usual)
        spread = losses.categorical_entropy(table).mean()
        return Drawn(placements, grouped + logs, entropy, spread)

    def _group_features(self, group: Tensor) -> Tensor:
        """Returns what the placer sees, [group, column], rows by their maximum and 1."""
        member = nn.functional.one_hot(group, self.groups).to(torch.float32)
        tied = member.T @ (self.flow > 0).to(torch.float32) @ member
        rows = torch.cat([tied, tied.T, member.T @ self.kinds], 1)
        scaled: Tensor = rows / (rows.amax(1, keepdim=True) + 1.0)
        return scaled

    def _devices(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns devices of groups, [K, group], their log probability, [K], and the entropy."""
        placer, num = self.network.placer, self.config.samples
        memory, keys = placer.read(features)
        carried = placer.begin(memory, num)
        allowed = torch.from_numpy(self.task.allowed.any(axis=0)).expand(num, -1)
        devices, logs, entropy = list[Tensor](), torch.zeros(num), torch.zeros(())
        for _ in range(self.groups):
            logits, state, cell = placer(carried, memory, keys)
            table = losses.masked_log_softmax(logits + self._noise(logits), allowed)
            table = losses.mix_uniform(table, self.stray)
            last = sample(table.detach()[:, None], allowed[:, None], num, self.generator)
            logs = logs + table.gather(1, last)[:, 0]
            entropy = entropy + losses.categorical_entropy(table).mean()
            devices.append(last[:, 0])
            carried = (state, cell, last[:, 0])
        return torch.stack(devices, 1), logs, entropy / self.groups

    def _noise(self, logits: Tensor) -> Tensor:
        """Returns the noise of the released code, [K, dev]."""
        config = self.config
        if config.constants != "code" or self.steps >= config.noisy:
            return torch.zeros(())
        scale = config.noise * logits.detach().norm(dim=1).mean()
        noise: Tensor = torch.randn(logits.shape, generator=self.generator) * scale
        return noise

    def learn(self, drawn: Drawn, found: Evaluation) -> tuple[float, float]:
        """Makes a step of REINFORCE; returns the loss and the norm of its gradient."""
        config = self.config
        counts = found.fits | (self.steps < config.forgiving) | config.is_tuned
        if not counts.any():
            return math.nan, math.nan
        gain = self._tuned_gain(found) if config.is_tuned else self._gain(found, counts)
        worth = torch.from_numpy((gain * counts).astype(np.float32))
        loss = -(worth * drawn.log_probability).sum() / int(counts.sum())
        if config.is_tuned:
            loss = loss / (len(self.usual) + self.groups)  # per decision, as the entropies are
            loss = loss - config.entropy_weight * (drawn.entropy + drawn.grouping)
        for group in self.optimizer.param_groups:
            falls = max(0, self.steps - 400) // 50
            group["lr"] = config.rate * config.fall**falls
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), config.gradient_limit)
        self.optimizer.step()
        return float(loss.detach()), float(norm)

    def _gain(self, found: Evaluation, counts: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Returns rewards less their average before, [K], as published."""
        reward = -np.sqrt(np.where(found.fits, found.step_time, self.config.failure))
        gain: NDArray[np.float64] = reward - self.baseline
        self.baseline = losses.ema(self.baseline, reward[counts], decay=self.config.decay)
        return gain

    def _tuned_gain(self, found: Evaluation) -> NDArray[np.float64]:
        """Returns rewards of the task in deviations from their average, [K]."""
        reward = found.reward
        if self.steps == 0:
            self.baseline = float(reward.mean())
        self.baseline = losses.ema(self.baseline, reward, decay=self.config.decay)
        gain: NDArray[np.float64] = (reward - self.baseline) / max(1e-8, float(reward.std()))
        return np.clip(gain, -LIMIT, LIMIT)

    def iterate(self) -> Diagnostics | None:
        """Draws, simulates and learns; returns None where the budget ended within it."""
        begin, room = time.perf_counter(), self.config.evaluations - self.evaluations
        drawn = self.draw()
        found = self.task.evaluate(drawn.placements[:room])
        self.finalists.note(drawn.placements, found, self.evaluations)
        self.evaluations += len(found.reward)
        if len(found.reward) < len(drawn.placements):
            return None
        loss, norm = self.learn(drawn, found)
        self.steps += 1
        best, fits = self.finalists.best, found.fits
        return Diagnostics(
            iteration=self.steps,
            life=1,
            evaluations=self.evaluations,
            evaluations_per_second=len(fits) / (time.perf_counter() - begin),
            best_step_time=best.step_time if best is not None and best.fits else math.inf,
            mean_step_time=float(found.step_time[fits].mean()) if fits.any() else math.nan,
            mean_reward=float(found.reward[fits].mean()) if fits.any() else math.nan,
            fits=float(fits.mean()),
            entropy=float(drawn.entropy.detach()),
            approx_kl=math.nan,
            clip_fraction=math.nan,
            explained_variance=math.nan,
            policy_loss=loss,
            value_loss=math.nan,
            gradient_norm=norm,
            epochs=1,
        )


def train(
    config: Config,
    task: PlacementTask,
    *,
    start: NDArray[np.integer] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
) -> Searched:
    """Trains on one task; it begins from nothing, as published.

    Args:
        config: what decides the run.
        task: the task; one that returns fewer placements than it is given ends the run.
        start: is not used: there is nothing in this planner that could lean to it.
        folder: refused: these runs keep no checkpoints.
        resume: likewise.
        listener: called after each step.

    Returns:
        What was found; after Ctrl-C too.

    Raises:
        UsageError: a folder is given.
    """
    del start
    refuse_folder(config.NAME, folder, resume=resume)
    planner, interrupted = Planner.new(config, task), False
    try:
        with torch_threads(config.threads):
            while planner.evaluations < config.evaluations:
                row = planner.iterate()
                if row is None:
                    break
                if listener is not None:
                    listener(row)
    except KeyboardInterrupt:
        interrupted = True
    ranked = planner.finalists.ranked
    return Searched(ranked, planner.steps, planner.evaluations, interrupted)


if __name__ == "__main__":
    sys.exit(run(Config, train))
