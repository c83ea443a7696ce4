"""Pipelined placement by PPO: encoder, recurrent partitioner and scheduler, trained together.

After the description that reviewers give of "Pipeline parallelism optimization with deep
reinforcement learning" (submitted to ICLR 2024): a graph convolution encodes operators, a recurrent
partitioner cuts the whole graph into sub-graphs, a scheduler with embeddings of accelerators puts
them on GPUs, PPO trains all three. What reviewers missed is decided here, and is ours:

- edges keep their direction (``direction=symmetrised`` is the paper's arm);
- the number of stages is chosen (``stages=4`` fixes it, as in the paper);
- masks keep stages a DAG, none empty, and in the memory's bounds (`agents.pipelines.env`);
- embeddings of devices come from features of devices and links, so other clusters work;
- copies of a stage are part of the plan (``copies=false`` is without), and so are microbatches, the
  schedule and what is recomputed;
- the reward is the simulated step of synchronous training, so the mathematics stays as it was;
- one stage is copies of the whole model, so the space has what PipeDream's planner answers with;
- it begins with what classical planners find (`agents.pipelines.teachers`): it imitates their
  plans, then samples near the best plan known (``teachers=false`` begins from nothing);
- of what it draws, the plans with the least estimates are simulated (``wide=1``: all);
- in turns with it the best plans are changed step by step (`agents.pipelines.refine`;
  ``refining=0`` without, ``policy=false`` nothing but that).

    python -m agents.pipeline_agent two-tower --cluster 4xP100-PCIe --set evaluations=2000
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from agents import ppo
from agents.command_line import Progress, changed
from agents.diagnostics import Diagnostics
from agents.finalists import Finalist
from agents.pipelines.anneal import Best
from agents.pipelines.env import PipelineTask
from agents.pipelines.network import Config, Network, Policy, edges_of, freedom_of
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import DagPlan, Simulator
from agents.pipelines.refine import paid, refined
from agents.pipelines.teachers import taught_plans
from agents.planners.pipeline_plans import CHANGES
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from agents.policy import Actor
from agents.torch_state import seeded, torch_threads
from simcore import Problem
from simcore.cli import FAILED, INTERRUPTED, OK, USAGE, note
from simcore.cluster import resolve
from simcore.errors import PlacewrightError, UsageError
from simcore.options import MODEL_HELP, add_job_options, job_changes
from simcore.plan import DEFAULT_BUCKETS
from simcore.sources import load_graph
from simcore.units import format_seconds

__all__ = ["Config", "Network", "Policy", "edges_of", "freedom_of", "main", "solve", "train"]

_IMITATED = 8  # plans that are known
_KEPT = 16  # plans, from turn to turn
_NEXT_SEED = 1_000_003  # of the next turn
_REFINED = 0.8  # of what a policy leaves of a turn


def train(  # noqa: PLR0913 - what a run is made of
    config: Config,
    task: PipelineTask,
    *,
    known: Sequence[DagPlan] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
    network: Network | None = None,
) -> ppo.TrainResult:
    """Trains the policy on one task; arguments and result as `ppo.train`.

    Args:
        config: what decides the run; its task is of `freedom_of` it.
        task: the task.
        known: plans of the space to imitate, the best of which it begins near; None = those of
            classical planners, unless the configuration says otherwise.
        folder: where checkpoints and diagnostics go; None = nowhere.
        resume: go on from the checkpoint in the folder.
        listener: called after each iteration.
        network: trained before on other tasks or clusters; it is trained on.

    Raises:
        PlacewrightError: there is no checkpoint to resume from, or it is of another run.
    """
    made: list[ppo.Learner] = []

    def make() -> Policy:
        policy = Policy(config, network or Network(config), task)
        if made:
            _lean(config, made[0], policy)
            if isinstance(made[0].policy, Policy):
                policy.met = made[0].policy.met
        return policy

    with torch_threads(config.threads):
        learner = ppo.Learner.new(config, task, None, make)
        if known is None and config.teachers:
            known = taught_plans(task)
        _teach(config, learner, task, known or ())
        if known or config.teachers:
            made.append(learner)
    return ppo.train(config, task, folder=folder, resume=resume, listener=listener, learner=learner)


def _teach(
    config: Config, learner: ppo.Learner, task: PipelineTask, known: Sequence[DagPlan]
) -> None:
    """Simulates known plans, imitates the best of them, and leans to the best."""
    plans = [plan for plan in known if is_decided(plan)]
    if not plans:
        return
    actions = np.stack([task.actions(plan) for plan in plans])
    found = task.evaluate(actions)
    learner.finalists.note(actions[: len(found.reward)], found, learner.evaluations)
    learner.evaluations += len(found.reward)
    best = np.array([each.actions for each in learner.finalists.ranked[:_IMITATED]], np.int64)
    if len(best):
        ppo.imitate(config, learner, torch.from_numpy(best), config.teaching)
        _lean(config, learner, learner.policy)


def _lean(config: Config, learner: ppo.Learner, policy: Actor) -> None:
    best = learner.finalists.best
    if best is not None:
        policy.lean(torch.from_numpy(np.array(best.actions, np.int64)), config.start_weight)


class Solved(NamedTuple):
    """What a run found, and what it began with."""

    best: Best | None  # None where nothing legal was found
    taught: Best | None  # the best plan of a teacher
    evaluations: int
    interrupted: bool


def solve(
    config: Config,
    task: PipelineTask,
    budget: Budget,
    *,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
) -> Solved:
    """Asks teachers; then, in turns, the policy proposes plans and the best ones are changed.

    What a teacher plans is always among the plans that are compared, so none of them is better.

    Args:
        config: what decides the run.
        task: the task, of `freedom_of` the configuration.
        budget: of all but the simulations that teachers make.
        folder: where checkpoints and diagnostics of the first turn go; None = nowhere.
        resume: go on from the checkpoint in the folder.
        listener: called after each iteration.

    Raises:
        PlacewrightError: there is no checkpoint to resume from, or it is of another run.
    """
    plans = taught_plans(task, budget) if config.teachers else []
    scores = paid(task, budget).score(plans)
    pool = _best(Best(*pair) for pair in zip(scores, plans, strict=False))
    taught = pool[0] if pool else None
    network = seeded(lambda: Network(config), config.seed)
    turn, interrupted = 0, False
    while budget.left() and not interrupted:
        before = budget.used
        how = dataclasses.replace(config, seed=config.seed + _NEXT_SEED * turn)
        if config.policy or not pool:
            part = paid(task, budget.part(1.0 - config.refining))
            known = [best.plan for best in pool]
            files = (folder, resume) if turn == 0 else (None, False)
            found = train(
                how, part, known=known, folder=files[0], resume=files[1], listener=listener,
                network=network,
            )  # fmt: skip
            interrupted = found.interrupted
            pool = _best([*pool, *_decided(task, found.finalists)])
        if not interrupted and config.refining:
            pool = refined(task, pool, budget.part(_REFINED), how.seed)[:_KEPT]
        turn += 1
        if budget.used == before:  # nothing is left to try
            break
    return Solved(pool[0] if pool else None, taught, budget.used, interrupted)


def _best(found: Iterable[Best]) -> list[Best]:
    """Returns the best distinct plans, best first."""
    legal = {best.plan: best for best in found if best.score.step_time < np.inf}
    return sorted(legal.values(), key=lambda best: best.score.rank)[:_KEPT]


def _decided(task: PipelineTask, finalists: Sequence[Finalist]) -> list[Best]:
    """Returns finalists as plans; they were simulated before."""
    plans = [task.plan(np.array(each.actions)) for each in finalists]
    return [Best(*pair) for pair in zip(task.score(plans), plans, strict=True)]


def is_decided(plan: DagPlan) -> bool:
    """Whether decisions lead to a plan: no node is cut in two, gradients are summed as usual."""
    return not plan.apart and plan.buckets == DEFAULT_BUCKETS


# the command


def main(argv: Sequence[str] | None = None) -> int:
    """Trains on the model that the arguments name; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--cluster", required=True, help="a preset, or a .toml file")
    parser.add_argument("--allow", action="append", default=[], choices=sorted(CHANGES))
    parser.add_argument("--folder", type=Path, help="for checkpoints and diagnostics")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="part of the configuration: " + ", ".join(f.name for f in dataclasses.fields(Config)),
    )
    add_job_options(parser)
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except PlacewrightError as error:
        note(f"{parser.prog}: error: {error}")
        return USAGE if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        note(f"{parser.prog}: interrupted")
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    config: Config = changed(Config, args.set)
    graph, job, _ = load_graph(args.model, job_changes(args))
    space = PlacementSpace.build(Problem.build(graph, resolve(args.cluster), job))
    allow = frozenset(CHANGES[word] for word in args.allow)
    simulator = Simulator(nodes=NodeGraph.build(space), allow=allow)
    task = PipelineTask.build(simulator, freedom_of(config))
    note(f"{graph.name}: {graph.num_ops} ops in {task.num_nodes} nodes, {task.num_devices} GPUs")
    budget = Budget(evaluations=config.evaluations)
    found = solve(config, task, budget, folder=args.folder, resume=args.resume, listener=Progress())
    best = found.best if found.best is not None and found.best.score.fits else None
    taught = None if found.taught is None else found.taught.score
    record = {
        "graph": graph.name,
        "cluster": args.cluster,
        "feasible": best is not None,
        "best_step_time_s": None if best is None else best.score.step_time,
        "taught_step_time_s": taught.step_time if taught is not None and taught.fits else None,
        "plan": None if best is None else dataclasses.asdict(best.plan),
        "evaluations": found.evaluations,
        "interrupted": found.interrupted,
    }
    words = (
        "nothing found fits" if best is None else f"{format_seconds(best.score.step_time)} a step"
    )
    text = json.dumps(record, default=str) if args.json else f"{graph.name}: {words}"
    sys.stdout.write(f"{text}\n")
    return OK if best is not None else FAILED


if __name__ == "__main__":
    sys.exit(main())
