"""Study of sharded plans: ``python -m bench.automap --minutes 30`` fills ``results/automap.json``.

A cell is a model, a cluster, a method and a seed. Every method searches the same spaces: on each
mesh of all GPUs with one axis that splits, the linkage groups (equal layers alike), on the compiled
simulator with one communication stream. ``data_parallel`` and ``megatron`` (the style ``tensor``)
are the floor. The optimum of the additive objective on the same meshes is exact (``ilp``: by the
dynamic program, or by the integer program where that is asked for), and its plan is simulated like
the others. A finished cell is stored at once and skipped where it is stored.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agents.automap.bounds import mesh_bound
from agents.automap.operators import OperatorPartition, Pruning
from agents.automap.planner import meshes, optimum, search
from agents.automap.search import Found, anneal, greedy, random_search
from agents.dqn import Config, train
from simcore.atomic import write_whole
from simcore.cluster import Cluster
from simcore.errors import PlacewrightError
from simcore.plan import Plan
from simcore.shard_batch import simulate_folded
from simcore.shard_space import STREAM, WHOLE
from simcore.simulation import simulate
from simcore.sources import load_graph

RESULTS = Path(__file__).resolve().parent / "results" / "automap.json"
MODELS = ("vgg-19", "bert-large", "t5-base", "gpt2-xl", "moe-stacked")
CLUSTERS = ("2x8xV100", "8xA100-NVSwitch")
METHODS = ("data_parallel", "megatron", "ilp", "greedy", "random", "anneal", "dqn")
SEEDED = ("greedy", "random", "anneal", "dqn")

Cell = dict[str, Any]


def problems_of(model: str, cluster: str, pruning: Pruning) -> list[OperatorPartition]:
    """Returns the problem of each mesh that has one axis that splits."""
    graph, job, _ = load_graph(model)
    where = Cluster.preset(cluster)
    names = [device.name for device in where.devices if not device.kind.startswith("CPU")]
    found = []
    for mesh in meshes(len(names)):
        if "y" in mesh:
            continue
        try:
            found.append(OperatorPartition.build(graph, where, job, names, mesh, pruning=pruning))
        except PlacewrightError as error:
            print(f"{model} on {cluster}, {mesh}: {error}", file=sys.stderr)
    return found


def row_of(problem: OperatorPartition, method: str) -> np.ndarray | None:
    """Returns the plan of a method that needs no search, None where there is none."""
    space = problem.folded.spaces[0]
    try:
        if method == "ilp":
            return optimum(problem, kept=problem.capacity)[0]
        if method == "megatron":
            return space.styled({space.axes[0]: "tensor"})
    except PlacewrightError:
        return None
    raise ValueError(method)


def copies(problem: OperatorPartition) -> Cell:
    """Returns data parallelism over all devices, its gradients in buckets, simulated in full."""
    space = problem.folded.spaces[0]
    task = (problem.folded.graph, space.cluster, space.job)
    plan = Plan.data_parallel(*task, space.devices, settings=STREAM)
    result = simulate(*task, plan)
    fits = result.feasible
    return {
        "step_time_s": result.step_time if fits else math.inf,
        "mesh": {"dp": len(space.devices)},
    }


def searched(problem: OperatorPartition, method: str, evaluations: int, seed: int) -> Found:
    """Returns what a search finds on one mesh."""
    if method == "dqn":
        return train(Config(evaluations=evaluations, seed=seed), problem).found
    run: dict[str, Callable[..., Found]] = {
        "greedy": greedy,
        "random": random_search,
        "anneal": anneal,
    }
    return run[method](problem, evaluations, seed=seed)


def measure(problems: list[OperatorPartition], method: str, evaluations: int, seed: int) -> Cell:
    """Returns the best plan of a method over all meshes."""
    best: Cell = {"step_time_s": math.inf}
    begin = time.perf_counter()
    if method == "data_parallel":
        return copies(problems[0]) | {"seconds": time.perf_counter() - begin}
    for problem in problems:
        problem.known.clear()
        if method in SEEDED:
            found = searched(problem, method, evaluations // len(problems), seed)
            row = None if found.chosen is None else problem.rows(found.chosen[None])[0]
        else:
            row = row_of(problem, method)
        if row is None:
            continue
        worth = simulate_folded(problem.folded, row[None])
        if worth.overflow[0] or worth.step_time[0] >= best["step_time_s"]:
            continue
        additive = problem.additive
        best = {
            "step_time_s": float(worth.step_time[0]),
            "mesh": dict(zip(problem.folded.spaces[0].mesh.names,
                             problem.folded.spaces[0].mesh.sizes, strict=True)),
            "additive_s": float(additive.cost(additive.objective(), row[None])[0]),
            "splits": [f"{name}:{factor}" for (name, factor), value
                       in zip(problem.folded.names, row.tolist(), strict=True) if value != WHOLE],
        }  # fmt: skip
    return best | {"seconds": time.perf_counter() - begin}


def known_of(problems: list[OperatorPartition]) -> Cell:
    """Returns what is known about the spaces: optima, bounds, sizes."""
    exact = [search(p, p.fixed, 4096) for p in problems if p.space_size <= 4096]
    return {
        "additive_optimum_s": min(optimum(problem)[1] for problem in problems),
        "bound_s": min(mesh_bound(problem.additive) for problem in problems),
        "space": [problem.space_size for problem in problems],
        "simulated_optimum_s": min((f.step_time for f in exact), default=None),
        "meshes_tried_fully": len(exact),
        "meshes": len(problems),
    }


def pruning_rows(model: str, cluster: str, evaluations: int) -> Iterator[Cell]:
    """Yields what each switch of pruning does on one mesh: all of them, then one left out."""
    graph, job, _ = load_graph(model)
    where = Cluster.preset(cluster)
    names = [device.name for device in where.devices if not device.kind.startswith("CPU")]
    switches = ("fold", "dominated", "memory")
    for out in ("nothing", *switches):
        pruning = Pruning(**{name: name != out for name in switches})
        begin = time.perf_counter()
        problem = OperatorPartition.build(
            graph, where, job, names, {"x": len(names)}, pruning=pruning
        )
        built = time.perf_counter() - begin
        begin = time.perf_counter()
        row, least = optimum(problem)
        proven = time.perf_counter() - begin
        begin = time.perf_counter()
        found = anneal(problem, evaluations, seed=0, start=problem.chosen(row))
        yield {
            "model": model,
            "left_out": out,
            "slots": problem.num_slots,
            "log10_plans": round(math.log10(problem.space_size), 1),
            "build_seconds": round(built, 2),
            "optimum_seconds": round(proven, 3),
            "anneal_seconds": round(time.perf_counter() - begin, 2),
            "additive_optimum_s": least,
            "annealed_s": found.step_time,
            "found_at": found.found_at,
        }


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Yields what a table has a cell of."""
    for cluster in args.clusters:
        for model in args.models:
            yield model, cluster, "known", 0
            for method in METHODS:
                for seed in range(args.seeds if method in SEEDED else 1):
                    yield model, cluster, method, seed


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--evaluations", type=int, default=2000, help="over all meshes together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--file", type=Path, default=RESULTS)
    parser.add_argument("--pruning", action="store_true", help="print what pruning does instead")
    args = parser.parse_args()
    if args.pruning:
        for model in args.models:
            for row in pruning_rows(model, args.clusters[0], args.evaluations):
                print(json.dumps(row), flush=True)
        return
    stored = json.loads(args.file.read_text()) if args.file.exists() else {}
    begin, held = time.perf_counter(), ("", "")
    problems: list[OperatorPartition] = []
    for model, cluster, method, seed in cells(args):
        key = f"{model} {cluster} {method} {seed} {args.evaluations}"
        if key in stored:
            continue
        if time.perf_counter() - begin > 60 * args.minutes:
            break
        print(f"{key} …", file=sys.stderr)
        if held != (model, cluster):
            problems, held = problems_of(model, cluster, Pruning()), (model, cluster)
        if not problems:
            continue
        is_known = method == "known"
        stored[key] = known_of(problems) if is_known else measure(
            problems, method, args.evaluations, seed
        )  # fmt: skip
        args.file.parent.mkdir(exist_ok=True)
        write_whole(args.file, json.dumps(stored, indent=1).encode())
    for key, cell in stored.items():
        value = cell.get("step_time_s", cell.get("simulated_optimum_s"))
        print(f"{key:60} {value}  {cell.get('mesh', '')}")


if __name__ == "__main__":
    main()
