"""What Deep Graph Infomax is worth to Mars on one task: ``python -m bench.pretraining``.

Mars learns each graph from nothing, without and with pre-training of its encoder on that graph, at
equal evaluations. Printed are the medians of the best step times, the ratio with over without with
its 95 % bootstrap interval over seeds (seeds are drawn again in pairs), and the geometric mean.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agents import mars
from agents.fidelity import training_settings
from agents.planners.space import PlacementSpace
from agents.task import PlacementTask
from bench.intervals import DRAWS, TAIL
from simcore import Problem, Settings
from simcore.atomic import write_whole
from simcore.cluster import resolve
from simcore.sources import load_graph

GRAPHS = ("gnmt-4", "gnmt-8", "inception-v3", "resnet-50", "vgg-19", "bert-base")


def best(task: PlacementTask, args: argparse.Namespace, steps: int, seed: int) -> float:
    """Returns the best step time of a run, s; inf where nothing fits."""
    config = mars.Config(
        evaluations=args.evaluations, seed=seed, pretrain=steps, imitate=0, placements=32
    )
    found = mars.train(config, task).finalists[0]
    return found.step_time if found.fits else np.inf


def measure(name: str, args: argparse.Namespace) -> list[list[float]]:
    """Returns the best step times of a graph, [without, with][seed] s."""
    graph, job, _ = load_graph(name)
    cluster = resolve(args.cluster)
    problem = Problem.build(graph, cluster, job, training_settings(cluster, Settings()))
    task = PlacementTask.build(PlacementSpace.build(problem))
    times = []
    for steps in (0, args.steps):
        times.append([best(task, args, steps, seed) for seed in range(args.seeds)])
        print(name, steps, times[-1], file=sys.stderr, flush=True)
    return times


def ratios(times: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Returns logs of with over without: of the medians, then of draws of seeds."""
    without, with_ = np.array(times)
    drawn = np.random.default_rng(0).integers(len(without), size=(DRAWS, len(without)))
    drawn = np.concatenate([np.arange(len(without))[None], drawn])
    logs: NDArray[np.float64] = np.log(
        np.median(with_[drawn], axis=1) / np.median(without[drawn], axis=1)
    )
    return logs


def said(logs: NDArray[np.float64]) -> str:
    """Returns a ratio and its interval."""
    low, high = np.exp(np.percentile(logs[1:], [TAIL, 100 - TAIL]))
    return f"{np.exp(logs[0]):.3f} [{low:.3f}, {high:.3f}]"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is not in ``--out`` and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS)
    parser.add_argument("--cluster", default="4xP100-PCIe")
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50, help="of pre-training")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("pretraining.json"))
    args = parser.parse_args(argv)
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.graphs:
        if name not in done:
            done[name] = measure(name, args)
            write_whole(args.out, (json.dumps(done) + "\n").encode())
    logs = [ratios(done[name]) for name in args.graphs]
    for name, log in zip(args.graphs, logs, strict=True):
        middle = [f"{np.median(times) * 1e3:.1f}" for times in done[name]]
        print(f"{name}: {middle[0]} -> {middle[1]} ms, {said(log)}")
    print(f"geometric mean: {said(np.mean(logs, axis=0))}")


if __name__ == "__main__":
    main()
