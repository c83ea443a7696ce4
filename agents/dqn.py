"""Deep Q-learning over a decision problem, from configuration to loop, in one file.

Mnih et al., Human-level control through deep reinforcement learning, 2015, with the parts of
Rainbow (Hessel et al. 2018), each a switch: double Q (van Hasselt et al. 2016), dueling heads (Wang
et al. 2016), prioritized replay (Schaul et al. 2016), noisy layers (Fortunato et al. 2018), returns
of n steps, and distributions of returns (C51: Bellemare et al. 2017). A return of many steps is
that of whatever was explored; as nothing here is drawn by chance but the actions, what matters is
the best that followed an action, not the mean: values are high expectiles of returns (implicit
Q-learning: Kostrikov et al. 2022), 0.5 = means. Masked actions are neither taken nor looked at in a
target. Episodes run side by side, one slot a step; see `agents.automap.episodes`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents import checkpoint
from agents.automap.episodes import Episodes, observation_size
from agents.automap.problem import DecisionProblem
from agents.automap.search import Found
from agents.command_line import check_options, option
from agents.networks.q_values import Network
from agents.replay import Batch, Replay
from agents.torch_state import seeded, torch_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All that decides a run beside the problem; the help of each field is its documentation."""

    NAME: ClassVar[str] = "dqn"
    evaluations: int = option(2000, "plans to simulate", least=1)
    seed: int = option(0, "of all that is drawn", least=0)
    double: bool = option(True, "the online network chooses the action that the target values")
    dueling: bool = option(False, "a value of the state and advantages of actions")
    prioritized: bool = option(True, "replay what was least expected most often")
    noisy: bool = option(False, "noise in the weights explores, not chance alone")
    distributional: bool = option(False, "learn distributions of returns")
    n_step: int = option(64, "rewards before the target is asked; the only one comes last", least=1)
    episodes: int = option(16, "episodes side by side", least=1)
    updates: int = option(16, "gradient steps after each batch of episodes", least=1)
    batch_size: int = option(64, "transitions of a gradient step", least=1)
    capacity: int = option(2**14, "transitions in the replay, a power of two", least=2)
    learning_rate: float = option(3e-3, "of Adam", least=0, above=True)
    expectile: float = option(0.97, "weight of returns above what was expected", least=0, most=1)
    discount: float = option(1.0, "of what follows", least=0, most=1)
    target_every: int = option(50, "gradient steps between copies to the target", least=1)
    epsilon: float = option(1.0, "chance of a random action at first", least=0, most=1)
    last_epsilon: float = option(0.05, "and at the end of its decay", least=0, most=1)
    decay: float = option(0.3, "part of the evaluations that it decays over", least=0, most=1)
    alpha: float = option(0.6, "exponent of priorities", least=0)
    beta: float = option(0.4, "exponent of the correction for them, at first", least=0, most=1)
    width: int = option(128, "of the hidden layers", least=1)
    atoms: int = option(51, "points of a distribution", least=2)
    least: float = option(-6.0, "return that distributions begin at")
    most: float = option(4.0, "return that they end at")
    gradient_limit: float = option(10.0, "norm of a gradient, at most", least=0, above=True)
    checkpoint_every: int = option(20, "batches of episodes between checkpoints", least=1)
    threads: int = option(1, "of torch; tensors this small gain nothing from more", least=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.capacity & (self.capacity - 1):
            raise ValueError(f"capacity must be a power of two, not {self.capacity}")
        if self.least >= self.most:
            raise ValueError(f"least must be below most, not {self.least:g} and {self.most:g}")


# formulas


def masked_argmax(q: Tensor, allowed: Tensor) -> Tensor:
    """Returns the best allowed action, [B], from values and mask [B, action]."""
    return q.masked_fill(~allowed, -math.inf).argmax(-1)


def n_step(
    r_t: NDArray[np.float64], ends: NDArray[np.bool_], count: int, discount: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Returns sums of the next rewards of an episode, and what is left to be asked of a target.

    Args:
        r_t: reward of each step, [episode, step].
        ends: whether the episode is over after it, [episode, step].
        count: rewards that are summed, at most.
        discount: of each further step.

    Returns:
        (return [episode, step], discount of the value that follows, 0 = none, [episode, step],
        step that it is the value of, [episode, step]).
    """
    episodes, steps = r_t.shape
    total, left = np.zeros((episodes, steps)), np.ones((episodes, steps))
    after = np.minimum(np.arange(steps) + count, steps)
    for step in range(steps):
        for later in range(step, int(after[step])):
            total[:, step] += left[:, step] * r_t[:, later]
            left[:, step] *= np.where(ends[:, later], 0.0, discount)
    return total, left, np.broadcast_to(after, (episodes, steps)).copy()


def project(p_t: Tensor, r_t: Tensor, discount_t: Tensor, support: Tensor) -> Tensor:
    """Returns the distribution of r + discount x return on the points of the support, [B, atom].

    The projection of C51: each shifted point gives its probability to its two neighbours.

    Args:
        p_t: probabilities of the returns that follow, [B, atom].
        r_t: [B].
        discount_t: [B].
        support: rising, evenly spaced, [atom].
    """
    gap = support[1] - support[0]
    moved = (r_t[:, None] + discount_t[:, None] * support).clamp(support[0], support[-1])
    place = ((moved - support[0]) / gap).clamp(0, len(support) - 1)
    near = (1.0 - (place[:, :, None] - torch.arange(len(support))).abs()).clamp_min(0.0)
    return (p_t[:, :, None] * near).sum(1)


# learning


@dataclass(slots=True, kw_only=True)
class Learner:
    """All that changes in a run, and that a checkpoint keeps."""

    online: Network
    target: Network
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    rng: np.random.Generator
    replay: Replay
    best: tuple[int, ...] = ()
    reward: float = -math.inf
    step_time: float = math.inf
    found_at: int = 0
    evaluations: int = 0
    iteration: int = 0
    updates: int = 0
    losses: list[float] = field(default_factory=list)  # of this go, not kept

    @classmethod
    def new(cls, config: Config, problem: DecisionProblem) -> "Learner":
        """Returns a learner that knows nothing."""
        sizes = (observation_size(problem), problem.num_actions)
        online = seeded(lambda: Network(config, *sizes), config.seed)
        target = Network(config, *sizes)
        target.load_state_dict(online.state_dict())
        return cls(
            online=online,
            target=target,
            optimizer=torch.optim.Adam(online.parameters(), lr=config.learning_rate),
            generator=torch.Generator().manual_seed(config.seed),
            rng=np.random.default_rng(config.seed),
            replay=Replay(config, *sizes),
        )

    _COUNTS: ClassVar[tuple[str, ...]] = (
        "best", "reward", "step_time", "found_at", "evaluations", "iteration", "updates",
    )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, the replay included."""
        counts = {name: getattr(self, name) for name in self._COUNTS}
        return counts | {
            "best": list(self.best),
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "rng": json.dumps(self.rng.bit_generator.state),
            "replay": self.replay.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what a checkpoint kept."""
        for name in self._COUNTS:
            setattr(self, name, state[name])
        self.best = tuple(state["best"])
        for name in ("online", "target", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.replay.restore(state["replay"])


@torch.no_grad()
def act(
    learner: Learner, seen: NDArray[np.float32], mask: NDArray[np.bool_], epsilon: float
) -> NDArray[np.int64]:
    """Returns an allowed action for each episode, [episode]; 0 where none is allowed."""
    q = learner.online(torch.from_numpy(seen)).numpy()
    random = np.where(mask, learner.rng.random(mask.shape), -1.0).argmax(1)
    best = np.where(mask, q, -np.inf).argmax(1)
    explores = learner.rng.random(len(seen)) < epsilon
    taken: NDArray[np.int64] = np.where(explores, random, best).astype(np.int64)
    return taken


def rollout(
    config: Config, learner: Learner, problem: DecisionProblem, count: int, epsilon: float
) -> None:
    """Runs episodes side by side to their ends, notes the best plan and fills the replay."""
    episodes = Episodes(problem, count)
    if not problem.num_slots:  # there is but one plan, and nothing to learn
        _note_best(learner, episodes, count)
        return
    learner.online.draw(learner.generator if config.noisy and epsilon > 0 else None)
    seen, masks = [episodes.observation()], [episodes.mask]
    alive, actions, rewards, ends = [], [], [], []
    for _ in range(problem.num_slots):
        alive.append(episodes.alive.copy())
        actions.append(act(learner, seen[-1], masks[-1], epsilon))
        done = episodes.step(actions[-1])
        seen.append(done.observation)
        masks.append(done.mask)
        rewards.append(done.reward)
        ends.append(done.is_over)
    _note_best(learner, episodes, count)
    total, left, after = n_step(np.array(rewards).T, np.array(ends).T, config.n_step,
                                config.discount)  # fmt: skip
    episode, step = np.nonzero(np.array(alive).T)
    later = after[episode, step]
    frames, allowed = np.array(seen), np.array(masks)
    learner.replay.add(
        seen=frames[step, episode],
        action=np.array(actions)[step, episode],
        reward=total[episode, step],
        discount=left[episode, step],
        after=frames[later, episode],
        mask=allowed[later, episode],
    )


def _note_best(learner: Learner, episodes: Episodes, count: int) -> None:
    worth = episodes.worth
    if worth is not None and worth.reward.max() > learner.reward:
        top = int(worth.reward.argmax())
        plan = episodes.chosen[np.flatnonzero(episodes.alive)[top]]
        learner.best, learner.reward = tuple(plan.tolist()), float(worth.reward[top])
        learner.step_time = float(worth.step_time[top]) if worth.fits[top] else math.inf
        learner.found_at = learner.evaluations + top + 1
    learner.evaluations += count  # dead ends too


def learn(config: Config, learner: Learner) -> float:
    """Makes one gradient step on a batch of the replay; returns its loss."""
    spent = min(1.0, learner.evaluations / config.evaluations)
    batch = learner.replay.draw(config, config.beta + (1 - config.beta) * spent, learner.rng)
    for network in (learner.online, learner.target):
        network.draw(learner.generator if config.noisy else None)
    error = _errors(config, learner, batch)
    loss = (batch.weight * error).mean()
    learner.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(learner.online.parameters(), config.gradient_limit)
    learner.optimizer.step()
    if config.prioritized:
        learner.replay.expect(config, batch.items, error.detach().numpy().astype(np.float64))
    learner.updates += 1
    if learner.updates % config.target_every == 0:
        learner.target.load_state_dict(learner.online.state_dict())
    return float(loss.detach())


def _errors(config: Config, learner: Learner, batch: Batch) -> Tensor:
    """Returns Huber's error, or the cross entropy of distributions, of each transition, [B]."""
    rows = torch.arange(len(batch.action))
    goes_on = batch.mask.any(-1)  # False: the episode was over
    with torch.no_grad():
        chooser = learner.online if config.double else learner.target
        choice = masked_argmax(chooser(batch.after), batch.mask | ~goes_on[:, None])
        raw = learner.target.raw(batch.after)[rows, choice]
        discount = batch.discount * goes_on
        if config.distributional:
            target = project(raw.softmax(-1), batch.reward, discount, learner.online.support)
        else:
            target = batch.reward + discount * raw[:, 0]
    now = learner.online.raw(batch.seen)[rows, batch.action]
    if config.distributional:
        return -(target * now.log_softmax(-1)).sum(-1)
    weight = torch.where(target > now[:, 0].detach(), config.expectile, 1.0 - config.expectile)
    return 2.0 * weight * nn.functional.smooth_l1_loss(now[:, 0], target, reduction="none")


def iterate(config: Config, learner: Learner, problem: DecisionProblem) -> None:
    """Runs a batch of episodes and learns from the replay."""
    spent = learner.evaluations / config.evaluations
    part = min(1.0, spent / config.decay) if config.decay else 1.0
    epsilon = config.epsilon + (config.last_epsilon - config.epsilon) * part
    count = min(config.episodes, config.evaluations - learner.evaluations)
    rollout(config, learner, problem, count, epsilon)
    if len(learner.replay) >= config.batch_size:
        learner.losses.extend(learn(config, learner) for _ in range(config.updates))
    learner.iteration += 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainResult:
    """What a run found, its learner, and whether Ctrl-C ended it."""

    found: Found
    learner: Learner
    interrupted: bool


def train(
    config: Config,
    problem: DecisionProblem,
    *,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[int, float], None] | None = None,
) -> TrainResult:
    """Trains on one problem; the same configuration and problem give the same run, bit for bit.

    Args:
        config: what decides the run.
        problem: what is searched.
        folder: where checkpoints go, the replay included; None = nowhere.
        resume: go on from the checkpoint in the folder.
        listener: called after each batch with evaluations made and the best step time, s.

    Raises:
        PlacewrightError: there is no checkpoint to resume from, or it is of another run.
    """
    learner, interrupted = Learner.new(config, problem), False
    identity = {
        "learner": config.NAME,
        "task": problem.content_hash(),
        "configuration": json.dumps(asdict(config)),
    }
    if resume:
        learner.restore(checkpoint.load(folder, identity))
    if not problem.num_slots:
        rollout(config, learner, problem, 1, 0.0)
    try:
        with torch_threads(config.threads):
            while learner.evaluations < config.evaluations and problem.num_slots:
                iterate(config, learner, problem)
                is_over = learner.evaluations >= config.evaluations
                if folder is not None and (
                    is_over or learner.iteration % config.checkpoint_every == 0
                ):
                    checkpoint.save(folder, identity, learner.state())
                if listener is not None:
                    listener(learner.evaluations, learner.step_time)
    except KeyboardInterrupt:
        interrupted = True
    best = np.array(learner.best, np.int64) if math.isfinite(learner.reward) else None
    found = Found(best, learner.reward, learner.step_time, learner.evaluations, learner.found_at)
    return TrainResult(found=found, learner=learner, interrupted=interrupted)


def policy_plan(learner: Learner, problem: DecisionProblem) -> NDArray[np.int64] | None:
    """Returns the plan that the network alone leads to, [slot]; None at a dead end."""
    episodes = Episodes(problem, 1)
    learner.online.draw(None)
    for _ in range(problem.num_slots):
        if not episodes.mask.any():
            return None
        episodes.step(act(learner, episodes.observation(), episodes.mask, 0.0))
    plan: NDArray[np.int64] = episodes.chosen[0]
    return plan
