"""Proximal policy optimisation over placements, from configuration to loop, in one file.

Schulman et al., Proximal policy optimization algorithms, 2017. The policy is the simplest there is,
a table of logits per group, so one encode gives K placements at once. A placement is read as an
episode: group after group is decided, in program order, and the reward comes after the last one.
The value of what is decided so far is a sum over the groups decided, so that a decision is credited
with what it changed; a moving average can take its place. EAGLE and Mars train their networks by
the same loop.

    python -m agents.ppo bert-base --cluster 4xP100-PCIe --evaluations 20000 --folder run
"""

import functools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents import checkpoint, losses
from agents.command_line import check_options, option, run
from agents.diagnostics import Diagnostics, Journal
from agents.finalists import Finalist, Finalists
from agents.policy import (
    Actor,
    Choose,
    Decided,
    Worth,
    compare,
    drawing,
    negative_log_likelihood,
    repeating,
)
from agents.task import Evaluation
from agents.torch_state import seeded, torch_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All that decides a run beside the task; the help of each field is its documentation."""

    NAME: ClassVar[str] = "ppo"
    GROUPS: ClassVar[int] = 128  # decisions of a task, unless said otherwise
    evaluations: int = option(20_000, "placements to simulate", least=1)
    seed: int = option(0, "of all that is drawn", least=0)
    placements: int = option(64, "placements sampled per iteration, K", least=1)
    epochs: int = option(4, "passes over the placements of an iteration, at most", least=1)
    learning_rate: float = option(0.05, "of Adam", least=0, above=True)
    clip: float = option(0.2, "how far a ratio of probabilities may go from 1", least=0, above=True)
    kl_limit: float = option(0.05, "KL per decision that ends an iteration's passes", least=0)
    entropy_weight: float = option(0.003, "of the entropy bonus, per nat and decision", least=0)
    baseline: Literal["value", "ema"] = option("ema", "what a reward is compared with")
    value_weight: float = option(0.5, "of the loss of the values", least=0)
    lambda_: float = option(1.0, "of the advantages; 1 trusts rewards only", least=0, most=1)
    decay: float = option(0.9, "of the moving averages of rewards", least=0, most=1)
    gradient_limit: float = option(1.0, "norm of a gradient, at most", least=0, above=True)
    centre: bool = option(True, "subtract the mean of an iteration from its advantages")
    advantage_limit: float = option(5.0, "of an advantage, in deviations", least=0, above=True)
    elite_every: int = option(0, "iterations between fits to the best, as Post; 0: none", least=0)
    elite: float = option(0.1, "fraction of an iteration that is best", least=0, most=1, above=True)
    elite_steps: int = option(10, "steps of a fit", least=1)
    start_weight: float = option(0.7, "probability of a given start, at first", least=0, most=1)
    patience: int = option(20, "iterations without a better placement that end a life", least=1)
    lives: int = option(1000, "policies that begin from nothing, one after another", least=1)
    checkpoint_every: int = option(20, "iterations between checkpoints", least=1)
    threads: int = option(1, "of torch; tensors this small gain nothing from more", least=1)

    def __post_init__(self) -> None:
        check_options(self)


class BatchEnv(Protocol):
    """What is learned from: `agents.task.PlacementTask` is one."""

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Actions there are, [group, dev]."""

    def evaluate(self, actions: NDArray[np.integer]) -> Evaluation:
        """Returns what placements are worth, [K, group]; fewer where a budget ends."""

    def content_hash(self) -> str:
        """Returns what changes with anything that decides a reward."""


class Policy(Actor):
    """A categorical over devices for each group, and the value of what is decided so far."""

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self.allowed: Tensor
        self.register_buffer("allowed", allowed)  # bool [group, dev]
        self.logits = nn.Parameter(torch.zeros(allowed.shape))  # [group, dev]
        self.change = nn.Parameter(torch.zeros(allowed.shape))  # [group, dev] of the value
        self.start = nn.Parameter(torch.zeros(()))  # value before the first group

    def forward(self) -> Tensor:
        """Returns log probabilities, [group, dev]."""
        return losses.masked_log_softmax(self.logits, self.allowed)

    def decide(self, choose: Choose) -> Decided:
        """Decides all groups at once."""
        table = self()
        entropy = losses.categorical_entropy(table).mean()
        return Decided(choose(table), (table,), None, entropy)

    def values(self, actions: Tensor) -> Tensor:
        """Returns the value before each group is decided, [K, group]; sees earlier groups only."""
        change = self.change[torch.arange(actions.shape[1]), actions]  # [K, group]
        return self.start + change.cumsum(1) - change

    @torch.no_grad()
    def lean(self, actions: Tensor, probability: float) -> None:
        """Begins near a placement, [group]: the rest of the probability is uniform."""
        uniform = (1.0 - probability) * self.allowed / self.allowed.sum(1, keepdim=True)
        uniform[torch.arange(len(actions)), actions] += probability
        self.logits.copy_(uniform.clamp_min(1e-6).log())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainResult:
    """What a run found.

    Attributes:
        finalists: the best placements, to be simulated again where rewards were cheap.
        iterations: made in all.
        evaluations: placements simulated in all.
        history: the diagnostics of each iteration since the start or the resumption.
        policy: as trained.
        interrupted: whether Ctrl-C ended it.
    """

    finalists: tuple[Finalist, ...]
    iterations: int
    evaluations: int
    history: tuple[Diagnostics, ...]
    policy: Actor
    interrupted: bool


class Samples(NamedTuple):
    """Placements that were sampled and what became of them. Axes: K, decision."""

    actions: Tensor  # int64 [K, decision]
    values: Tensor  # [K, decision]
    entropy: float  # nats per device that is chosen
    found: Evaluation  # of each placement
    placements: NDArray[np.int64]  # [K, group] devices that the decisions amount to


MakeActor: TypeAlias = Callable[[], Actor]
"""Returns a policy that knows nothing, the same each time but for torch's own generator."""


@dataclass(slots=True, kw_only=True)
class Learner:
    """All that changes in a run, and that a checkpoint keeps."""

    policy: Actor
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    make: MakeActor
    averages: tuple[float, float] | None = None  # of rewards that fit: mean, standard deviation
    record: float = -math.inf  # best reward of this life
    stale: int = 0  # iterations since
    life: int = 1
    iteration: int = 0
    evaluations: int = 0
    finalists: Finalists = field(default_factory=Finalists)

    @classmethod
    def new(
        cls,
        config: Config,
        env: BatchEnv,
        start: NDArray[np.integer] | None,
        make: MakeActor | None = None,
    ) -> "Learner":
        """Returns a learner that knows nothing but a start, [group]; None: of a table of logits."""
        make = make or functools.partial(Policy, torch.from_numpy(env.allowed.copy()))
        policy = seeded(make, config.seed)
        if start is not None:
            policy.lean(torch.from_numpy(np.asarray(start, np.int64)), config.start_weight)
        generator = torch.Generator().manual_seed(config.seed)
        optimizer = _optimizer(config, policy)
        return cls(policy=policy, optimizer=optimizer, generator=generator, make=make)

    def begin_again(self, config: Config) -> None:
        """Forgets the policy, not what it found."""
        self.life += 1
        self.policy = seeded(self.make, config.seed + self.life)
        self.optimizer = _optimizer(config, self.policy)
        self.averages, self.record, self.stale = None, -math.inf, 0

    def is_over(self, config: Config) -> bool:
        """Whether a run has nothing left to do."""
        is_stale = self.stale >= config.patience and self.life == config.lives
        return is_stale or self.evaluations >= config.evaluations

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            **self.progress(),
        }

    def progress(self) -> dict[str, Any]:
        """Returns what is known beside the policy."""
        return {
            "averages": self.averages,
            "counts": [self.iteration, self.evaluations, self.record, self.stale, self.life],
            "finalists": self.finalists.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what a checkpoint kept."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.take_up(state)

    def take_up(self, state: dict[str, Any]) -> None:
        """Takes up what was known beside the policy."""
        self.averages = state["averages"]
        self.iteration, self.evaluations, self.record, self.stale, self.life = state["counts"]
        self.finalists.restore(state["finalists"])


def _optimizer(config: Config, policy: Actor) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [values for values in policy.parameters() if values.requires_grad], lr=config.learning_rate
    )


@torch.no_grad()
def rollout(learner: Learner, env: BatchEnv, num: int) -> Samples:
    """Samples placements from one encode and simulates them; fewer where the budget ends."""
    policy = learner.policy
    decided = policy.decide(drawing(num, learner.generator))
    placements = policy.place(decided.actions).numpy()  # [K, group]
    found = env.evaluate(placements)
    actions = decided.actions[: len(found.reward)]
    values, entropy = policy.values(actions), float(decided.entropy)
    return Samples(actions, values, entropy, found, placements[: len(found.reward)])


class Advantages(NamedTuple):
    """What a decision was worth, against what was expected. Axes: K, decision."""

    advantage: Tensor  # [K, decision] in standard deviations
    target: Tensor  # [K, decision] of the values
    counts: Tensor  # bool [K] what enters statistics and values
    explained_variance: float


def advantages(config: Config, learner: Learner, samples: Samples) -> Advantages:
    """Credits each decision, and moves the averages of the rewards.

    Rewards are compared with what fits only: what does not fit has a penalty as its reward, which
    would hide all other differences. Where (almost) nothing fits everything is compared with
    everything, and no average moves.
    """
    found, limit = samples.found, config.advantage_limit
    some_fit = found.fits.sum() > 1
    counts = found.fits if some_fit else np.ones(len(found.fits), np.bool_)
    now = found.reward[counts]
    mean, spread = float(now.mean()), float(now.std())
    if some_fit:
        mean, spread = learner.averages or (mean, spread)
        learner.averages = (
            losses.ema(mean, now, decay=config.decay),
            losses.ema(spread, now.std(keepdims=True), decay=config.decay),
        )
    reward = np.clip((found.reward - mean) / max(1e-8, spread), -limit, limit)  # [K]

    if config.baseline == "ema":  # all decisions of a placement are worth the same
        raw, v_t = reward[:, None], np.zeros((len(reward), 1))
    else:
        v_t = samples.values.numpy().astype(np.float64)
        raw = _generalised(config, reward, v_t.T).T
    explained = losses.explained_variance(v_t, np.broadcast_to(reward[:, None], v_t.shape))
    centre = raw[counts].mean() if config.centre else 0.0
    advantage = (raw - centre) / max(1e-8, float(raw[counts].std()))
    shape = samples.actions.shape
    return Advantages(
        torch.from_numpy(np.clip(advantage, -limit, limit).astype(np.float32)).expand(shape),
        torch.from_numpy((raw + v_t).astype(np.float32)).expand(shape),
        torch.from_numpy(counts),
        explained,
    )


def _generalised(
    config: Config, reward: NDArray[np.float64], v_t: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the advantage of each decision, [decision, K], from rewards [K] that end episodes."""
    r_t, ends = np.zeros_like(v_t), np.zeros(v_t.shape, np.bool_)
    r_t[-1:], ends[-1:] = reward, True  # a whole placement terminates
    v_tp1 = np.concatenate([v_t[1:], np.zeros_like(v_t[:1])])
    return losses.gae(
        r_t, v_t, v_tp1, ends, np.zeros_like(ends), discount=1.0, lambda_=config.lambda_
    )


class Update(NamedTuple):
    """What an update did."""

    approx_kl: float
    clip_fraction: float
    policy_loss: float
    value_loss: float
    gradient_norm: float
    epochs: int


def update(config: Config, learner: Learner, samples: Samples, credit: Advantages) -> Update:
    """Climbs the clipped surrogate until the policy has moved as far as it may."""
    policy, old, norm, epochs = learner.policy, None, math.nan, 0
    worth: Worth | None = None
    counts = credit.counts[:, None].expand_as(credit.target)
    value_loss = torch.full((), math.nan)
    while True:
        now = policy.decide(repeating(samples.actions))
        old = old or now  # nothing has moved yet: this is what sampled
        worth = worth or Worth.of(now, credit.advantage)
        compared = compare(now, old, worth, clip=config.clip)
        if config.baseline == "value":
            values = policy.values(samples.actions)
            value_loss = losses.value_loss(values, credit.target, counts)
        if epochs == config.epochs or compared.approx_kl > config.kl_limit:
            break
        loss = compared.loss - config.entropy_weight * now.entropy
        if config.baseline == "value":
            loss = loss + config.value_weight * value_loss
        norm = step(config, learner, loss)
        epochs += 1
    return Update(
        approx_kl=compared.approx_kl,
        clip_fraction=compared.clip_fraction,
        policy_loss=float(compared.loss.detach()),
        value_loss=float(value_loss.detach()),
        gradient_norm=norm,
        epochs=epochs,
    )


def step(config: Config, learner: Learner, loss: Tensor) -> float:
    """Descends a loss by one step; returns the norm that its gradient had."""
    learner.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(learner.policy.parameters(), config.gradient_limit)
    learner.optimizer.step()
    return float(norm)


def imitate(config: Config, learner: Learner, actions: Tensor, steps: int) -> float:
    """Makes decisions, [K, decision], more probable; returns -log p per decision at the end.

    The fit of the cross-entropy method where there is no closed form; also what learns from plans
    that someone else found.
    """
    loss = torch.zeros(())
    for _ in range(steps):
        loss = negative_log_likelihood(learner.policy.decide(repeating(actions)))
        step(config, learner, loss)
    return float(loss.detach())


def fit_elite(config: Config, learner: Learner, samples: Samples) -> None:
    """Fits the policy to the best of an iteration, where its turn has come."""
    if not config.elite_every or (learner.iteration + 1) % config.elite_every:
        return
    size = max(1, round(config.elite * len(samples.actions)))
    best = np.argsort(-samples.found.reward, kind="stable")[:size].copy()
    imitate(config, learner, samples.actions[torch.from_numpy(best)], config.elite_steps)


def train(  # noqa: PLR0913 - what a run is made of
    config: Config,
    env: BatchEnv,
    *,
    start: NDArray[np.integer] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
    learner: Learner | None = None,
) -> TrainResult:
    """Trains a policy on one task.

    Args:
        config: what decides the run. Same configuration and task, same curve, bit for bit, whether
            in one go or resumed.
        env: the task; one that returns fewer placements than it is given ends the run.
        start: devices to begin near, [group]; None = from nothing.
        folder: where checkpoints and diagnostics go; None = nowhere.
        resume: go on from the checkpoint in the folder, to `config.evaluations`.
        listener: called after each iteration.
        learner: what is trained, new; None = a table of logits, that begins near the start.

    Returns:
        What was found; after Ctrl-C too.

    Raises:
        PlacewrightError: there is no checkpoint to resume from, or it is of another run.
    """
    learner = learner or Learner.new(config, env, start)
    identity = _identity(config, env)
    if resume:
        learner.restore(checkpoint.load(folder, identity))
    journal = None if folder is None else Journal(folder, after=learner.iteration)
    history: list[Diagnostics] = []
    interrupted = False
    try:
        with torch_threads(config.threads):
            while not learner.is_over(config):
                row = iterate(config, learner, env)
                if row is None:
                    break
                history.append(row)
                is_due = row.iteration % config.checkpoint_every == 0 or learner.is_over(config)
                if folder is not None and is_due:
                    checkpoint.save(folder, identity, learner.state())
                if journal is not None:
                    journal.write(row)
                if listener is not None:
                    listener(row)
    except KeyboardInterrupt:
        interrupted = True
    if journal is not None:
        journal.close()
    return TrainResult(
        finalists=learner.finalists.ranked,
        iterations=learner.iteration,
        evaluations=learner.evaluations,
        history=tuple(history),
        policy=learner.policy,
        interrupted=interrupted,
    )


def iterate(config: Config, learner: Learner, env: BatchEnv) -> Diagnostics | None:
    """Runs one iteration; returns None where the budget of the task ended within it."""
    begin = time.perf_counter()
    if learner.stale >= config.patience:
        learner.begin_again(config)
    num = min(config.placements, config.evaluations - learner.evaluations)
    samples = rollout(learner, env, num)
    found = samples.found
    learner.finalists.note(samples.placements, found, learner.evaluations)
    if len(found.reward) < num:
        return None
    credit = advantages(config, learner, samples)
    done = update(config, learner, samples, credit)
    fit_elite(config, learner, samples)
    best_now = float(found.reward.max())
    learner.stale = 0 if best_now > learner.record else learner.stale + 1
    learner.record = max(learner.record, best_now)
    learner.iteration += 1
    learner.evaluations += num
    best, fits = learner.finalists.best, found.fits
    return Diagnostics(
        iteration=learner.iteration,
        life=learner.life,
        evaluations=learner.evaluations,
        evaluations_per_second=num / (time.perf_counter() - begin),
        best_step_time=best.step_time if best is not None and best.fits else math.inf,
        mean_step_time=float(found.step_time[fits].mean()) if fits.any() else math.nan,
        mean_reward=float(found.reward[fits].mean()) if fits.any() else math.nan,
        fits=float(fits.mean()),
        entropy=samples.entropy,
        explained_variance=credit.explained_variance,
        **done._asdict(),
    )


def _identity(config: Config, env: BatchEnv) -> dict[str, str]:
    """Returns what a checkpoint has to agree with to be resumed; a run may be made longer."""
    decisive = {name: value for name, value in asdict(config).items() if name != "evaluations"}
    return {
        "learner": config.NAME,
        "task": env.content_hash(),
        "configuration": json.dumps(decisive),
    }


if __name__ == "__main__":
    sys.exit(run(Config, train))
