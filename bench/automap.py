"""Study of sharded plans: ``python -m bench.automap --minutes 30`` fills ``results/automap.json``.

A cell is a model, a cluster, a method and a seed. Every method searches the same spaces: meshes of
all GPUs, and of those of the first server where there are several, with one or two axes that split;
of all these the `MESHES` whose optimum of the additive objective is least. A space decides for each
linkage group (equal layers alike), on the compiled simulator with one communication stream.
``data_parallel`` and ``megatron`` (the style ``tensor``) are the floor, on all meshes. The optimum
of the additive objective is exact by two ways: ``program`` (dynamic program) and ``ilp`` (HiGHS);
their plans are simulated like the others. ``combined`` searches pipelines of sharded stages, which
the others do not have, in as much processor time as `--combined-seconds`. The best plan of each is
simulated in full too. Seconds are processor time. A cell keeps the seconds at which each better
plan was found, without those of making the spaces (in ``known``). At the end it is printed when
each method came within 1 % of the best known, and how long the proof of the additive optimum took.
A finished cell is stored at once and skipped where it is stored.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from agents.automap.bounds import mesh_bound
from agents.automap.combined import Combined
from agents.automap.ilp import Limits, solve
from agents.automap.operators import OperatorPartition, Pruning
from agents.automap.planner import device_sets, meshes, optimum
from agents.automap.search import Found, anneal, greedy, random_search
from agents.dqn import Config, train
from agents.planners.pipeline_shards import CombinedSearch
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from simcore.atomic import write_whole
from simcore.cluster import Cluster
from simcore.errors import PlacewrightError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.lower import Problem
from simcore.models.moe import SHAPE, MixtureOfExperts, StackedExpertLayer
from simcore.plan import ONE_HOST, Plan
from simcore.shard_batch import simulate_folded
from simcore.shard_space import WHOLE
from simcore.shard_summary import layout_name
from simcore.simulation import simulate
from simcore.sources import load_graph

RESULTS = Path(__file__).resolve().parent / "results" / "automap.json"
DEEP_MOE = "bench.automap:moe_24"
MODELS = ("vgg-19", "bert-large", "t5-base", DEEP_MOE, "gpt2-xl")
CLUSTERS = ("2x8xV100", "8xA100-NVSwitch")
METHODS = (
    "data_parallel", "megatron", "program", "ilp", "combined", "anneal", "dqn", "greedy", "random"
)  # fmt: skip
SPACES = ("program", "ilp", "anneal", "dqn", "greedy", "random")
SEEDED = ("greedy", "random", "anneal", "dqn")
MESHES = 6  # that are searched
NEAR = 1.01  # times the best known
PRUNINGS = ("nothing", "fold", "dominated", "memory")  # left out

Cell = dict[str, Any]


def moe_24() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Returns a mixture of experts of 24 layers, every second one with 8 experts, and inputs."""
    ids = torch.zeros((32, 512), dtype=torch.long)
    return MixtureOfExperts(replace(SHAPE, layers=24), StackedExpertLayer), (ids, ids)


class Curve:
    """When better plans were found: processor seconds since the beginning, and s a step."""

    def __init__(self) -> None:
        self.begin = time.process_time()
        self.points: list[tuple[float, float]] = []

    def note(self, step_time: float) -> None:
        """Notes a plan, if it is the best."""
        if step_time < (self.points[-1][1] if self.points else math.inf):
            self.points.append((time.process_time() - self.begin, step_time))


class Study:
    """One model on one cluster: its spaces, and what was simulated in full."""

    def __init__(self, model: str, cluster: str) -> None:
        self.model = model
        changes = {"optimizer": "adam"} if ":" in model else None
        self.graph, self.job, _ = load_graph(model, changes)
        self.cluster = Cluster.preset(cluster)
        self.full: dict[bytes, float] = {}
        begin = time.process_time()
        self.problems = list(self._problems())
        self.build_seconds = time.process_time() - begin
        self.best = sorted(self.problems, key=lambda p: p[1])[:MESHES]

    @property
    def task(self) -> tuple[OpGraph, Cluster, Job]:
        """What every simulation is given."""
        return self.graph, self.cluster, self.job

    def _problems(self) -> Iterator[tuple[OperatorPartition, float]]:
        """Yields the problem of each mesh with the least of its additive objective, s."""
        for names in device_sets(self.cluster):
            for mesh in meshes(len(names)):
                try:
                    problem = OperatorPartition.build(*self.task, names, mesh)
                    yield problem, optimum(problem, kept=problem.capacity)[1]
                except PlacewrightError as error:
                    print(f"{self.model}, {mesh}: {error}", file=sys.stderr)

    def in_full(self, plan: Plan | None) -> float | None:
        """Returns the step time of a plan under the default settings, None where it cannot run."""
        if plan is None:
            return None
        settings = msgspec.structs.replace(ONE_HOST, host="per_rank")
        plan = msgspec.structs.replace(plan, settings=settings)
        key = msgspec.json.encode(plan)
        if key not in self.full:
            try:
                result = simulate(*self.task, plan)
            except PlacewrightError:  # a batch that does not divide
                return None
            self.full[key] = result.step_time if result.feasible else math.inf
        return self.full[key]


def row_of(problem: OperatorPartition, method: str) -> np.ndarray | None:
    """Returns the plan of a method that needs no search, None where there is none."""
    space = problem.folded.spaces[0]
    try:
        if method == "program":
            return optimum(problem, kept=problem.capacity)[0]
        if method == "ilp":
            less = problem.additive.restricted(problem.keep)
            return solve(less, less.objective(), Limits(kept=problem.capacity)).row
        if len(space.axes) == 1:
            return space.styled({space.axes[0]: "tensor"})
    except PlacewrightError:
        pass
    return None


def copies(study: Study) -> Cell:
    """Returns data parallelism over all devices, or those of one server."""
    found = []
    for names in device_sets(study.cluster):
        plan = Plan.data_parallel(*study.task, names)
        found.append((study.in_full(plan), len(names)))
    seconds, count = min(((s, n) for s, n in found if s is not None), default=(math.inf, 0))
    return {"step_time_s": seconds, "full_s": seconds, "mesh": {"dp": count}}


def combined(study: Study, seconds: float) -> Cell:
    """Returns the best pipeline of sharded stages, as the planner of ``plan`` finds it."""
    space = PlacementSpace.build(Problem.build(*study.task, ONE_HOST))
    budget = Budget(seconds, clock=time.process_time)
    index = study.cluster.device_index
    searches: list[CombinedSearch] = []
    curve = Curve()

    def listen(_: Budget) -> None:
        curve.note(searches[-1].step_time if searches[-1].fits else math.inf)

    for names in reversed(device_sets(study.cluster)):  # the fewer first
        problem = Combined.build(space, [index(name) for name in names])
        search = CombinedSearch(problem, listen)
        searches.append(search)
        search.run(budget.part(1.0 if len(names) == len(space.devices) else 0.5))
    best = min(searches, key=lambda each: each.step_time if each.fits else math.inf)
    found = {
        "step_time_s": math.inf,
        "evaluations": sum(len(each.tried) for each in searches),
        "curve": curve.points,
    }
    if best.plan is None or not best.fits:
        return found
    return found | {
        "step_time_s": best.step_time,
        "full_s": best.step_time,
        "layout": layout_name(study.graph, best.plan),
        "microbatches": best.plan.microbatches,
        "schedule": best.plan.schedule,
    }


def searched(
    problem: OperatorPartition, method: str, evaluations: int, seed: int, curve: Curve
) -> Found:
    """Returns what a search finds on one mesh."""

    def note(_: int, step_time: float) -> None:
        curve.note(step_time)

    if method == "dqn":
        return train(Config(evaluations=evaluations, seed=seed), problem, listener=note).found
    run: dict[str, Callable[..., Found]] = {
        "greedy": greedy,
        "random": random_search,
        "anneal": anneal,
    }
    return run[method](problem, evaluations, seed=seed, progress=note)


def measure(study: Study, method: str, args: argparse.Namespace, seed: int) -> Cell:
    """Returns the best plan of a method over all meshes."""
    curve = Curve()
    if method == "data_parallel":
        return copies(study) | {"seconds": time.process_time() - curve.begin}
    if method == "combined":
        cell = combined(study, args.combined_seconds)
        return cell | {"seconds": time.process_time() - curve.begin}
    best: Cell = {"step_time_s": math.inf}
    winner: tuple[OperatorPartition, np.ndarray] | None = None
    for problem, _ in study.problems if method == "megatron" else study.best:
        problem.known.clear()
        if method in SEEDED:
            count = args.evaluations // len(study.best)
            found = searched(problem, method, count, seed, curve)
            row = None if found.chosen is None else problem.rows(found.chosen[None])[0]
        else:
            row = row_of(problem, method)
        if row is None:
            continue
        worth = simulate_folded(problem.folded, row[None])
        curve.note(math.inf if worth.overflow[0] else float(worth.step_time[0]))
        if not worth.overflow[0] and worth.step_time[0] < best["step_time_s"]:
            best, winner = _cell(problem, row, float(worth.step_time[0])), (problem, row)
    best |= {"seconds": time.process_time() - curve.begin, "curve": curve.points}
    if winner is not None:
        best["full_s"] = study.in_full(winner[0].plan(winner[1]))
    return best


def _cell(problem: OperatorPartition, row: np.ndarray, seconds: float) -> Cell:
    additive, mesh = problem.additive, problem.folded.spaces[0].mesh
    return {
        "step_time_s": seconds,
        "mesh": dict(zip(mesh.names, mesh.sizes, strict=True)),
        "additive_s": float(additive.cost(additive.objective(), row[None])[0]),
        "splits": [
            f"{name}:{factor} along {problem.folded.spaces[0].axes[value]}"
            for (name, factor), value in zip(problem.folded.names, row.tolist(), strict=True)
            if value != WHOLE
        ],
    }


def known_of(study: Study) -> Cell:
    """Returns what is known about the spaces: optima, bounds, sizes."""
    return {
        "additive_optimum_s": study.best[0][1],
        "bound_s": min(mesh_bound(problem.additive) for problem, _ in study.problems),
        "meshes": [
            {
                "mesh": dict(zip(p.folded.spaces[0].mesh.names, p.folded.spaces[0].mesh.sizes,
                                 strict=True)),
                "additive_optimum_s": least,
                "log10_plans": round(math.log10(p.space_size), 2),
            }
            for p, least in study.problems
        ],
        "build_seconds": study.build_seconds,
    }  # fmt: skip


def pruned(study: Study, out: str, evaluations: int) -> Cell:
    """Returns what it does to leave one pruning out, on one axis over all GPUs."""
    pruning = Pruning(**{name: name != out for name in PRUNINGS[1:]})
    names = device_sets(study.cluster)[0]
    times = [time.process_time()]
    try:
        mesh = {"x": len(names)}
        problem = OperatorPartition.build(*study.task, names, mesh, pruning=pruning)
        times.append(time.process_time())
        row, least = optimum(problem)
        times.append(time.process_time())
        found = anneal(problem, evaluations, seed=0, start=problem.chosen(row))
        times.append(time.process_time())
    except PlacewrightError as error:
        return {"refused": str(error), "seconds": time.process_time() - times[0]}
    built, proven, annealed = np.diff(times).round(3).tolist()
    return {
        "slots": problem.num_slots,
        "log10_plans": round(math.log10(problem.space_size), 1),
        "build_seconds": built,
        "optimum_seconds": proven,
        "anneal_seconds": annealed,
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
            if args.pruning and cluster == args.clusters[0]:
                for out in PRUNINGS:
                    yield model, cluster, f"without-{out}", 0


def fill(args: argparse.Namespace, stored: dict[str, Cell]) -> None:
    """Measures the cells that are missing, until the minutes of processor time are spent."""
    begin, held = time.process_time(), ("", "")
    study: Study | None = None
    for model, cluster, method, seed in cells(args):
        key = f"{model} {cluster} {method} {seed} {args.evaluations}"
        if key in stored:
            continue
        if time.process_time() - begin > 60 * args.minutes:
            return
        print(f"{key} …", file=sys.stderr)
        if study is None or held != (model, cluster):
            study, held = Study(model, cluster), (model, cluster)
        if not study.problems:
            continue
        if method == "known":
            stored[key] = known_of(study)
        elif method.startswith("without-"):
            stored[key] = pruned(study, method.removeprefix("without-"), args.evaluations // 4)
        else:
            stored[key] = measure(study, method, args, seed)
        args.file.parent.mkdir(exist_ok=True)
        write_whole(args.file, f"{json.dumps(stored, indent=1)}\n".encode())


def nearing(stored: dict[str, Cell]) -> Iterator[str]:
    """Yields a line for each cell of a method: seconds until it was within 1 % of the best known.

    The best known is that of all methods that search the same spaces, ``combined`` apart; making
    the spaces and proving their optimum is told beside it.
    """
    groups: dict[tuple[str, str], dict[tuple[str, int], Cell]] = {}
    for key, cell in stored.items():
        model, cluster, method, number, _ = key.split()
        groups.setdefault((model, cluster), {})[method, int(number)] = cell
    for (model, cluster), methods in groups.items():
        times = [c["step_time_s"] for (m, _), c in methods.items() if m in SPACES]
        best, known = min(times, default=math.inf), methods.get(("known", 0), {})
        made = known.get("build_seconds")
        proof = "not measured" if made is None else f"{made:.1f} s"
        yield f"{model} {cluster}: best known {best:.4g} s; spaces and proven optimum {proof}"
        for (method, seed), cell in methods.items():
            if method in SPACES or method == "combined":
                yield f"  {method} {seed}: {_reached(cell, best)}"


def _reached(cell: Cell, best: float) -> str:
    """Says when a cell came within 1 % of the best known."""
    if cell["step_time_s"] > NEAR * best:
        return f"not within 1 % ({cell['step_time_s'] / best - 1.0:.1%} above)"
    if "curve" not in cell:
        return f"within 1 % in at most {cell['seconds']:.1f} s"
    seconds = next(when for when, step_time in cell["curve"] if step_time <= NEAR * best)
    return f"within 1 % after {seconds:.2f} s"


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--evaluations", type=int, default=3000, help="over all meshes together")
    parser.add_argument("--combined-seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="of processor time")
    parser.add_argument("--file", type=Path, default=RESULTS)
    parser.add_argument("--pruning", action="store_true", help="also leave out each pruning")
    args = parser.parse_args()
    stored = json.loads(args.file.read_text()) if args.file.exists() else {}
    try:
        fill(args, stored)
    except KeyboardInterrupt:
        print("interrupted: finished cells are kept", file=sys.stderr)
    for key, cell in stored.items():
        value = cell.get("step_time_s", cell.get("additive_optimum_s"))
        print(f"{key:60} {value}  {cell.get('mesh', cell.get('layout', ''))}")
    print("\n".join(nearing(stored)))


if __name__ == "__main__":
    main()
