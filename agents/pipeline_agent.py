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
- it begins with what classical planners find (`agents.pipelines.teachers`): it imitates their
  plans, then samples near the best plan known (``teachers=false`` begins from nothing).

    python -m agents.pipeline_agent two-tower --cluster 4xP100-PCIe --set evaluations=2000
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from agents import ppo
from agents.command_line import Progress, changed
from agents.diagnostics import Diagnostics
from agents.pipelines.env import PipelineTask
from agents.pipelines.network import Config, Network, Policy, edges_of, freedom_of
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.pipelines.teachers import taught_plans
from agents.planners.pipeline_plans import CHANGES
from agents.planners.space import PlacementSpace
from agents.torch_state import torch_threads
from simcore import Problem
from simcore.cli import FAILED, INTERRUPTED, OK, USAGE, note
from simcore.cluster import resolve
from simcore.errors import PlacewrightError, UsageError
from simcore.options import MODEL_HELP, add_job_options, job_changes
from simcore.sources import load_graph
from simcore.units import format_seconds

__all__ = ["Config", "Network", "Policy", "edges_of", "freedom_of", "main", "train"]


def train(  # noqa: PLR0913 - what a run is made of
    config: Config,
    task: PipelineTask,
    *,
    start: NDArray[np.integer] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    listener: Callable[[Diagnostics], None] | None = None,
    network: Network | None = None,
) -> ppo.TrainResult:
    """Trains on one task; arguments and result as `ppo.train`; `start` are decisions, [decision].

    Args:
        config: what decides the run; its task is of `freedom_of` it.
        task: the task.
        start: decisions to begin near, None = from nothing.
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
        best = made[0].finalists.best if made and config.teachers else None
        near = start if best is None else np.array(best.actions)
        if near is not None:
            policy.lean(torch.from_numpy(np.asarray(near, np.int64)), config.start_weight)
        return policy

    with torch_threads(config.threads):
        learner = ppo.Learner.new(config, task, None, make)
        made.append(learner)
        if config.teachers:
            _teach(config, learner, task)
    return ppo.train(config, task, folder=folder, resume=resume, listener=listener, learner=learner)


def _teach(config: Config, learner: ppo.Learner, task: PipelineTask) -> None:
    """Simulates what classical planners find, imitates it, and leans to the best."""
    plans = taught_plans(task)
    if not plans:
        return
    actions = np.stack([task.actions(plan) for plan in plans])
    found = task.evaluate(actions)
    actions = actions[: len(found.reward)]
    learner.finalists.note(actions, found, learner.evaluations)
    learner.evaluations += len(found.reward)
    best = learner.finalists.best
    if best is not None and isinstance(learner.policy, Policy):
        ppo.imitate(config, learner, torch.from_numpy(actions), config.teaching)
        learner.policy.lean(torch.from_numpy(np.array(best.actions, np.int64)), config.start_weight)


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
    found = train(config, task, folder=args.folder, resume=args.resume, listener=Progress())
    best = found.finalists[0] if found.finalists and found.finalists[0].fits else None
    record = {
        "graph": graph.name,
        "cluster": args.cluster,
        "feasible": best is not None,
        "best_step_time_s": None if best is None else best.step_time,
        "found_at": None if best is None else best.evaluations,
        "plan": None if best is None else dataclasses.asdict(task.plan(np.array(best.actions))),
        "evaluations": found.evaluations,
        "interrupted": found.interrupted,
    }
    words = "nothing found fits" if best is None else f"{format_seconds(best.step_time)} a step"
    text = json.dumps(record, default=str) if args.json else f"{graph.name}: {words}"
    sys.stdout.write(f"{text}\n")
    return OK if best is not None else FAILED


if __name__ == "__main__":
    sys.exit(main())
