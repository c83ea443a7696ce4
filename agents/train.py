"""Offline training: one network on a family of tasks in turn, and what a trained network is.

Every iteration belongs to one task, whose rewards have their own averages; the weights, the
optimizer and the random numbers are shared. Before it come, where the configuration asks for them,
Deep Graph Infomax over all graphs (Mars) and imitation of what annealing found on each task.
"""

import copy
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from agents import checkpoint, contrastive, ppo
from agents.agent_options import SYSTEMS
from agents.decode import coherent, fitted
from agents.diagnostics import Diagnostics, Journal
from agents.networks.inputs import Inputs
from agents.observe import observe
from agents.planners.anneal import Anneal
from agents.planners.recorder import Budget, Recorder
from agents.policy import Actor, likeliest
from agents.portfolio_search import BASELINES, CONSTRUCTIVE
from agents.task import PlacementTask
from agents.teachers import KEPT, renumbered
from agents.torch_state import seeded, torch_threads
from simcore.errors import PlacewrightError

_FOREVER = 2**31  # iterations: a network that many tasks share is never begun again


def system_of(name: str) -> ModuleType:
    """Returns the module of a system: its `Config`, `Network`, `on_task` and `train`."""
    return importlib.import_module(f"agents.{name}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """A network and what it was made by.

    Attributes:
        system: ``eagle`` or ``mars``.
        config: what decided its training; its sizes are the network's.
        network: the weights.
    """

    system: str
    config: ppo.Config
    network: nn.Module

    def on_task(self, task: PlacementTask) -> Actor:
        """Returns the policy on a task."""
        actor: Actor = system_of(self.system).on_task(self.config, self.network, task)
        return actor

    @torch.no_grad()
    def propose(self, task: PlacementTask, num: int, seed: int) -> np.ndarray[Any, Any]:
        """Returns placements, int64 [plan, group], without any training: the likeliest, then draws.

        Groups that are estimated not to fit where they are drawn are moved (`agents.decode`).

        Args:
            task: any task.
            num: of placements.
            seed: of the draws.
        """
        with torch_threads(self.config.threads):
            return self._propose(task, num, seed)

    def _propose(self, task: PlacementTask, num: int, seed: int) -> np.ndarray[Any, Any]:
        actor = self.on_task(task)
        actions = [actor.decide(likeliest).actions]
        if num > 1:
            generator = torch.Generator().manual_seed(seed)
            actions.append(actor.decide(coherent(num - 1, generator)).actions)
        return fitted(task.grouping, actor.place(torch.cat(actions)).numpy())

    def tuned(
        self, task: PlacementTask, evaluations: int, seed: int, **changes: Any
    ) -> ppo.TrainResult:
        """Trains a copy on one task.

        Args:
            task: the task.
            evaluations: to make.
            seed: of the run.
            **changes: of the configuration.
        """
        config = replace(self.config, evaluations=evaluations, seed=seed, lives=1, **changes)
        result: ppo.TrainResult = system_of(self.system).train(config, task, network=self.network)
        return result

    def save(self, path: Path) -> None:
        """Writes the network and its configuration."""
        identity = {"system": self.system, "configuration": json.dumps(asdict(self.config))}
        checkpoint.write(path, identity, self.network.state_dict())

    @classmethod
    def load(cls, path: Path) -> "Trained":
        """Reads a network; nothing in the file is executed.

        Raises:
            PlacewrightError: there is no such file, or it is not a trained network.
        """
        identity, state = checkpoint.read(path)
        if identity.get("system") not in SYSTEMS:
            raise PlacewrightError(f"{path}: not a trained network of {' or '.join(SYSTEMS)}")
        module = system_of(identity["system"])
        try:
            config = module.Config(**json.loads(identity["configuration"]))
            network = module.Network(config)
            network.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PlacewrightError(f"{path}: of another version: {reason}") from None
        return cls(system=identity["system"], config=config, network=network)


class Course:
    """A network in training on many tasks."""

    def __init__(self, system: str, config: ppo.Config, tasks: Sequence[PlacementTask]) -> None:
        module = system_of(system)
        self.config = replace(config, patience=_FOREVER, lives=1)
        self.tasks, self.system = tasks, system
        network = seeded(lambda: self._new(module.Network), config.seed)
        self.trained = Trained(system=system, config=config, network=network)
        weights = [values for values in network.parameters() if values.requires_grad]
        optimizer = torch.optim.Adam(weights, lr=config.learning_rate)
        generator = torch.Generator().manual_seed(config.seed)
        self.learners = [
            ppo.Learner(policy=actor, optimizer=optimizer, generator=generator, make=_never(actor))
            for actor in (self.trained.on_task(task) for task in tasks)
        ]

    def _new(self, kind: Callable[[Any], Any]) -> nn.Module:
        """Returns a network; its encoder, where there is one, has seen the graphs of all tasks."""
        network: nn.Module = kind(self.config)
        steps = getattr(self.config, "pretrain", 0)
        if not steps:
            return network
        inputs = [Inputs.of(observe(task.grouping)) for task in self.tasks]
        graphs = [contrastive.Sample(features=one.ops, edges=one.edges) for one in inputs]
        width = self.config.width  # type: ignore[attr-defined]
        contrastive.pretrain(network.encoder, width, graphs, steps * len(graphs))  # type: ignore[arg-type]
        return network

    def imitate(self, evaluations: int, steps: int, say: Callable[[str], None]) -> None:
        """Learns from what annealing finds on each task, as many steps on each, in turn."""
        plans = list[np.ndarray[Any, Any]]()
        for number, task in enumerate(self.tasks):
            say(f"annealing task {number + 1} of {len(self.tasks)}")
            found = best_plans(task, evaluations, self.config.seed)
            plans.append(renumbered(task, found))
        for number in range(steps):
            if number % 10 == 0:
                say(f"imitation: step {number} of {steps} on each task")
            for learner, actions in zip(self.learners, plans, strict=True):
                ppo.imitate(self.config, learner, torch.from_numpy(actions), 1)

    @property
    def iteration(self) -> int:
        """Iterations made, of all tasks."""
        return sum(learner.iteration for learner in self.learners)

    @property
    def evaluations(self) -> int:
        """Placements simulated, of all tasks."""
        return sum(learner.evaluations for learner in self.learners)

    def step(self) -> Diagnostics:
        """Makes an iteration on the task whose turn it is; its number is that of all tasks."""
        turn = self.iteration % len(self.tasks)
        row = ppo.iterate(self.config, self.learners[turn], self.tasks[turn])
        assert row is not None  # these tasks have no budget of their own
        return row._replace(iteration=self.iteration, evaluations=self.evaluations)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        first = self.learners[0]
        return {
            "network": self.trained.network.state_dict(),
            "optimizer": first.optimizer.state_dict(),
            "generator": first.generator.get_state(),
            "learners": [learner.progress() for learner in self.learners],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what a checkpoint kept."""
        self.trained.network.load_state_dict(state["network"])
        self.learners[0].optimizer.load_state_dict(state["optimizer"])
        self.learners[0].generator.set_state(state["generator"])
        for learner, kept in zip(self.learners, state["learners"], strict=True):
            learner.take_up(kept)


def best_plans(task: PlacementTask, evaluations: int, seed: int) -> np.ndarray[Any, Any]:
    """Returns plans to imitate, int64 [plan, group], best first.

    They are what the constructive planners find and annealing makes of it, said in groups; those
    that are worth less than the best of them by more than a tenth teach nothing and are left out.

    Args:
        task: the task.
        evaluations: of annealing.
        seed: of all that is drawn.
    """
    space, grouping = task.grouping.space, task.grouping
    recorder, budget = Recorder(space=space), Budget(evaluations=evaluations)
    for number, planner in enumerate((*BASELINES, *CONSTRUCTIVE)):
        planner.search(space, np.random.default_rng([seed, number]), Budget(), recorder)
    Anneal().search(space, np.random.default_rng([seed, 100]), budget, recorder)
    finds = [*recorder.curve[-2 * KEPT :], *recorder.by_finder.values()]
    said = np.stack([grouping.summarise(found.placement) for found in finds]).astype(np.int64)
    plans = np.unique(said, axis=0)
    reward = task.evaluate(plans).reward
    order = np.argsort(-reward, kind="stable")[:KEPT]
    kept: np.ndarray[Any, Any] = plans[order[reward[order] > reward.max() - np.log(1.1)]]
    return kept


def _never(actor: Actor) -> ppo.MakeActor:
    """Returns a maker of the policy there is: no life ends where patience has no end."""
    return lambda: copy.deepcopy(actor)


def train_family(  # noqa: PLR0913 - what a run is made of
    system: str,
    config: ppo.Config,
    tasks: Sequence[PlacementTask],
    *,
    folder: Path,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Trained, bool]:
    """Trains a network on tasks in turn and writes it to ``SYSTEM.pt`` in the folder.

    Args:
        system: ``eagle`` or ``mars``.
        config: what decides the run; `evaluations` are those of all tasks together.
        tasks: at least one.
        folder: for checkpoints, diagnostics and the network.
        resume: go on from the folder's checkpoint; the curve is that of one run.
        listener: called after each iteration.
        say: is told what is done before the first iteration.

    Returns:
        The network, and whether Ctrl-C ended the training.

    Raises:
        PlacewrightError: there is no checkpoint to resume from, or it is of another run.
    """
    identity = {
        "learner": system,
        "task": " ".join(task.content_hash() for task in tasks),
        "configuration": json.dumps(
            {k: v for k, v in asdict(config).items() if k != "evaluations"}
        ),
    }
    kept = checkpoint.load(folder, identity) if resume else None
    with torch_threads(config.threads):
        course = Course(system, config, tasks)
        if kept is not None:
            course.restore(kept)
        elif evaluations := getattr(config, "imitate", 0):
            course.imitate(evaluations, config.imitate_steps, say)  # type: ignore[attr-defined]
        interrupted = _run(course, folder, identity, listener)
    course.trained.save(folder / f"{system}.pt")
    return course.trained, interrupted


def _run(
    course: Course,
    folder: Path,
    identity: dict[str, str],
    listener: Callable[[Diagnostics], None] | None,
) -> bool:
    """Iterates until the evaluations are made; returns whether Ctrl-C came before."""
    config, journal = course.config, Journal(folder, after=course.iteration)
    try:
        while course.evaluations < config.evaluations:
            row = course.step()
            is_over = course.evaluations >= config.evaluations
            if row.iteration % config.checkpoint_every == 0 or is_over:
                checkpoint.save(folder, identity, course.state())
            journal.write(row)
            if listener is not None:
                listener(row)
    except KeyboardInterrupt:
        return True
    finally:
        journal.close()
    return False
