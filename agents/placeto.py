"""Placeto: a policy that goes over the groups once and moves each, learning from every change.

Addanki et al., Placeto: learning generalizable device placement algorithms for distributed machine
learning, NeurIPS 2019. Known from the paper and its code: each group is visited once a pass; the
reward of a step is how much faster the step time became; features, eight rounds of messages along
and against the edges, means over what comes before, after and beside the visited group, then a
small network; REINFORCE against the mean return of the same step in the last ten rounds; a bonus
for entropy; gradients up to 1.25; Adam down to 1e-4; eight workers. Ours: the width, a first rate
of 5e-3 (with the code's 1e-3 little is learned in some hundred passes), rewards as `agents.reward`
has them (logarithms, with its penalty for memory), passes that begin at the best placement met and
mostly stay at first, lives that begin anew where nothing better comes, the rank in place of the
start time, and the weight of the entropy.

    python -m agents.placeto gnmt-4 --cluster 4xP100-PCIe --evaluations 10000
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents import losses
from agents.command_line import check_options, option, run
from agents.diagnostics import Diagnostics
from agents.finalists import Finalists, Searched, refuse_folder
from agents.networks.placers import leaning
from agents.networks.placeto import Relations, Visitor
from agents.observe import group_features
from agents.planners.partition import flow_between
from agents.policy import sample
from agents.task import Evaluation, PlacementTask
from agents.torch_state import seeded, torch_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All that decides a run beside the task."""

    NAME: ClassVar[str] = "placeto"
    GROUPS: ClassVar[int] = 64  # steps of a pass, at most; ours
    evaluations: int = option(20_000, "placements to simulate", least=1)
    seed: int = option(0, "of all that is drawn", least=0)
    workers: int = option(8, "passes side by side (code)", least=1)
    width: int = option(16, "of all vectors (ours)", least=1)
    rounds: int = option(8, "of messages (code)", least=1)
    learning_rate: float = option(5e-3, "of Adam, at first (ours; code 1e-3)", least=0, above=True)
    last_rate: float = option(1e-4, "of Adam, in the end (code)", least=0, above=True)
    falls: int = option(400, "passes until the last rate (ours)", least=1)
    entropy_weight: float = option(0.01, "per nat (ours)", least=0)
    stay: float = option(0.6, "probability that a group stays, at first (ours)", least=0, most=0.99)
    patience: int = option(25, "passes without a better placement that end a life (ours)", least=1)
    history: int = option(10, "passes whose mean return is the baseline (code)", least=1)
    gradient_limit: float = option(1.25, "norm of a gradient, at most (code)", least=0, above=True)
    threads: int = option(1, "of torch", least=1)

    def __post_init__(self) -> None:
        check_options(self)


class Pass(NamedTuple):
    """What the workers did in one pass. Axes: step, worker."""

    log_probability: Tensor  # [step, worker]
    entropy: Tensor  # [step] nats
    gain: NDArray[np.float64]  # [step, worker] of the reward
    step_time: NDArray[np.float64]  # [step, worker] s
    fits: NDArray[np.bool_]  # [step, worker]


@dataclass(slots=True, kw_only=True)
class Improver:
    """All that changes in a run."""

    config: Config
    task: PlacementTask
    network: Visitor
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    relations: Relations
    still: Tensor  # [group, feature] what no step changes
    start: NDArray[np.int64]  # [group] devices that each life begins at
    best: NDArray[np.int64]  # [group] devices, the best that this life met
    worth: float = -math.inf  # its reward
    stale: int = 0  # passes since
    life: int = 1
    returns: deque[NDArray[np.float64]] = field(default_factory=deque)  # [step] of the last passes
    finalists: Finalists = field(default_factory=Finalists)
    evaluations: int = 0
    passes: int = 0  # of this life
    total: int = 0  # passes

    @classmethod
    def new(
        cls, config: Config, task: PlacementTask, start: NDArray[np.integer] | None
    ) -> "Improver":
        """Returns a run that begins at a start, [group]; None = where all is by default."""
        grouping = task.grouping
        usual = grouping.summarise(grouping.space.default)
        begin = np.asarray(usual if start is None else start, np.int64)
        network, optimizer = _beginner(config, task, config.seed)
        return cls(
            config=config,
            task=task,
            network=network,
            optimizer=optimizer,
            generator=torch.Generator().manual_seed(config.seed),
            relations=Relations.of(torch.from_numpy(flow_between(grouping) > 0)),
            still=torch.from_numpy(group_features(grouping)),
            start=begin,
            best=begin,
            returns=deque(maxlen=config.history),
        )

    def evaluate(self, placements: NDArray[np.int64]) -> Evaluation | None:
        """Returns what placements, [worker, group], are worth; None: no budget is left."""
        room = self.config.evaluations - self.evaluations
        found = self.task.evaluate(placements[:room])
        self.finalists.note(placements, found, self.evaluations)
        self.evaluations += len(found.reward)
        if len(found.reward) < len(placements):
            return None
        top = int(found.reward.argmax())
        if found.reward[top] > self.worth:
            self.best, self.worth = placements[top].copy(), float(found.reward[top])
            self.stale = -1
        return found

    def begin_again(self) -> None:
        """Forgets what was learned and where it led, not what was found."""
        self.life, self.stale = self.life + 1, 0
        self.best, self.worth, self.passes = self.start, -math.inf, 0
        self.returns.clear()
        seed = self.config.seed + self.life
        self.network, self.optimizer = _beginner(self.config, self.task, seed)

    def observe(self, placements: NDArray[np.int64], group: int) -> Tensor:
        """Returns features of the groups, [worker, group, feature], where one is visited."""
        workers, size = placements.shape
        rank = torch.arange(size)
        moving = torch.stack(
            [(rank < group).float(), (rank == group).float(), (rank - group) / size], 1
        )
        devices = nn.functional.one_hot(torch.from_numpy(placements), self.task.num_devices)
        known = torch.cat([self.still, moving], 1).expand(workers, -1, -1)
        return torch.cat([known, devices.float()], 2)

    def logits(self, placements: NDArray[np.int64], group: int) -> Tensor:
        """Returns logits of devices for a group, [worker, dev]; first it is likely to stay."""
        allowed = torch.from_numpy(self.task.allowed[group])[None]
        lean = [leaning(allowed, torch.tensor([dev]), self.config.stay) for dev in
                placements[:, group].tolist()]  # fmt: skip
        logits: Tensor = self.network(self.observe(placements, group), self.relations, group)
        return logits + torch.cat(lean)

    def go_over(self) -> Pass | None:
        """Visits all groups; returns None where the budget ended before."""
        now = np.tile(self.best, (self.config.workers, 1))
        begin = self.evaluate(now[:1])  # all begin alike
        if begin is None:
            return None
        before = np.repeat(begin.reward, len(now))
        logs, entropies = list[Tensor](), list[Tensor]()
        gains, results = list[NDArray[np.float64]](), list[Evaluation]()
        for group in range(self.task.num_groups):
            logits = self.logits(now, group)
            allowed = torch.from_numpy(self.task.allowed[group]).expand(logits.shape)
            table = losses.masked_log_softmax(logits, allowed)[:, None]  # [worker, 1, dev]
            chosen = sample(table.detach(), allowed[:, None], len(now), self.generator)
            now[:, group] = chosen[:, 0].numpy()
            found = self.evaluate(now)
            if found is None:
                return None
            gains.append(found.reward - before)
            before = found.reward
            results.append(found)
            logs.append(table[:, 0].gather(1, chosen)[:, 0])
            entropies.append(losses.categorical_entropy(table).mean())
        times, fits = (
            np.stack([r.step_time for r in results]),
            np.stack([r.fits for r in results]),
        )
        return Pass(torch.stack(logs), torch.stack(entropies), np.stack(gains), times, fits)

    def learn(self, done: Pass) -> tuple[float, float]:
        """Makes the step of REINFORCE; returns the loss and the norm of its gradient."""
        config = self.config
        back = np.cumsum(done.gain[::-1], axis=0)[::-1]  # [step, worker] what followed
        self.returns.append(back.mean(axis=1))
        advantage = back - np.mean(self.returns, axis=0)[:, None]
        advantage = advantage / max(1e-8, float(advantage.std()))
        worth = torch.from_numpy(advantage.astype(np.float32))
        loss = -(worth * done.log_probability).mean()
        total = loss - config.entropy_weight * done.entropy.mean()
        share = min(1.0, self.passes / config.falls)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate + share * (config.last_rate - config.learning_rate)
        self.optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), config.gradient_limit)
        self.optimizer.step()
        return float(loss.detach()), float(norm)

    def iterate(self) -> Diagnostics | None:
        """Makes a pass and learns from it; returns None where the budget ended within it."""
        begin, before = time.perf_counter(), self.evaluations
        if self.stale >= self.config.patience:
            self.begin_again()
        done = self.go_over()
        if done is None:
            return None
        loss, norm = self.learn(done)
        self.passes, self.stale, self.total = self.passes + 1, self.stale + 1, self.total + 1
        best, fits = self.finalists.best, done.fits
        return Diagnostics(
            iteration=self.total,
            life=self.life,
            evaluations=self.evaluations,
            evaluations_per_second=(self.evaluations - before) / (time.perf_counter() - begin),
            best_step_time=best.step_time if best is not None and best.fits else math.inf,
            mean_step_time=float(done.step_time[fits].mean()) if fits.any() else math.nan,
            mean_reward=float(done.gain.sum(axis=0).mean()),
            fits=float(fits.mean()),
            entropy=float(done.entropy.mean().detach()),
            approx_kl=math.nan,
            clip_fraction=math.nan,
            explained_variance=math.nan,
            policy_loss=loss,
            value_loss=math.nan,
            gradient_norm=norm,
            epochs=1,
        )


def _beginner(
    config: Config, task: PlacementTask, seed: int
) -> tuple[Visitor, torch.optim.Optimizer]:
    """Returns a network that knows nothing, and what trains it."""
    network = seeded(lambda: Visitor(task.num_devices, config.width, config.rounds), seed)
    return network, torch.optim.Adam(network.parameters(), lr=config.learning_rate)


def train(
    config: Config,
    task: PlacementTask,
    *,
    start: NDArray[np.integer] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
) -> Searched:
    """Trains on one task.

    Args:
        config: what decides the run.
        task: the task; one that returns fewer placements than it is given ends the run.
        start: devices to begin at, [group]; None = where all is by default.
        folder: refused: these runs keep no checkpoints.
        resume: likewise.
        listener: called after each pass.

    Returns:
        What was found; after Ctrl-C too.

    Raises:
        UsageError: a folder is given.
    """
    refuse_folder(config.NAME, folder, resume=resume)
    improver = Improver.new(config, task, start)
    interrupted = False
    try:
        with torch_threads(config.threads):
            while improver.evaluations < config.evaluations:
                row = improver.iterate()
                if row is None:
                    break
                if listener is not None:
                    listener(row)
    except KeyboardInterrupt:
        interrupted = True
    ranked = improver.finalists.ranked
    return Searched(ranked, improver.total, improver.evaluations, interrupted)


if __name__ == "__main__":
    sys.exit(run(Config, train))
