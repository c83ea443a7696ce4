"""Does the policy keep up with the simulator: ``python -m bench.train_speed``.

Placements per second of factorised Mars training on a random graph, and what share of the time is
simulation and reward. By default as the target says: 5,000 ops, vectors of 128, 4 PPO epochs, both
on one decision per group and, with ``--groups 5000``, on one per op. The first iteration is not
counted. ``--contention`` names the discipline (``ordered`` takes the sweep). The peak memory of
the process is printed too: ``--ops 50000 --iterations 1``.
"""

import argparse
import json
import resource
import time

import numpy as np
import torch

from agents import mars, ppo
from agents.networks.inputs import Inputs
from agents.observe import observe
from agents.planners.space import PlacementSpace
from agents.task import Evaluation, PlacementTask
from agents.torch_state import torch_threads
from bench.graphs import layered_dag
from simcore import Job, Problem, Settings
from simcore.cluster import resolve


class Clocked:
    """A task that knows how long its rewards took."""

    def __init__(self, task: PlacementTask) -> None:
        self.task, self.seconds = task, 0.0
        self.allowed, self.content_hash = task.allowed, task.content_hash

    def evaluate(self, actions: np.ndarray) -> Evaluation:
        begin = time.perf_counter()
        found = self.task.evaluate(actions)
        self.seconds += time.perf_counter() - begin
        return found


def measure(args: argparse.Namespace) -> dict[str, float | int | str]:
    """Returns the figures of one run."""
    problem = Problem.build(
        layered_dag(args.ops), resolve(args.cluster), Job(), Settings(contention=args.contention)
    )
    task = PlacementTask.build(PlacementSpace.build(problem), num_groups=args.groups)
    config = mars.Config(
        evaluations=(args.iterations + 1) * args.placements,
        placements=args.placements,
        width=args.width,
        segment=max(16, args.groups // 64),
        epochs=4,
        kl_limit=1e9,
        pretrain=0,
        threads=args.threads,
    )
    inputs, env = Inputs.of(observe(task.grouping)), Clocked(task)
    learner = ppo.Learner.new(config, env, None, lambda: mars.new_policy(config, inputs, None))
    with torch_threads(args.threads):
        ppo.iterate(config, learner, env)  # compiles
        env.seconds, begin = 0.0, time.perf_counter()
        for _ in range(args.iterations):
            row = ppo.iterate(config, learner, env)
        seconds = time.perf_counter() - begin
    return {
        "ops": args.ops,
        "decisions": task.num_groups,
        "width": args.width,
        "placements": args.placements,
        "epochs": row.epochs,
        "contention": args.contention,
        "evaluations_per_second": round(args.iterations * args.placements / seconds, 1),
        "simulation_share": round(env.seconds / seconds, 3),
        "peak_GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", type=int, default=5000)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--placements", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--cluster", default="4xV100-NVLink")
    parser.add_argument("--contention", default="ordered")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
