"""Do learners pay: ``python -m bench.learners`` compares methods at equal budgets.

A cell is a model, a method and a seed. All methods begin at the best placement of the constructive
planners, whose evaluations count for none of them. They search under the contention that policies
train on (`agents.fidelity`); the best that they met are simulated again under the default, and that
decides. Budgets are equal evaluations or, with ``--seconds``, equal processor time; m-SCT and METIS
make their few proposals and stop. A finished cell is stored at once, and skipped where it is
stored: its key has the method's sources (those in `agents`), the problem, and what the simulator
says about the start. ``--minutes`` runs what fits; what did not is shown empty.
`bench.learner_report` says more about the stored cells.
"""

import argparse
import ast
import hashlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agents.fidelity import training_settings
from agents.planners import learned
from agents.planners.anneal import Anneal
from agents.planners.cross_entropy import CrossEntropy
from agents.planners.m_sct import MSct
from agents.planners.mcmc import Mcmc
from agents.planners.metis import Metis
from agents.planners.policy_gradient import PolicyGradient
from agents.planners.post import post
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace, Planner
from agents.portfolio_search import BASELINES, CONSTRUCTIVE, IMPROVERS, SHARES
from bench.intervals import summary
from bench.learner_arms import ARMS
from simcore import Cluster, Problem, Settings
from simcore.atomic import write_whole
from simcore.cluster import resolve
from simcore.sources import load_graph

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "learners.json"
MODELS = ("nasnet-large", "moe", "gnmt-4", "inception-v3", "bert-base")
YARDSTICK = "anneal"
FINALISTS = 16  # placements that are simulated again, and each planner's best

Cell = dict[str, Any]
Slot = tuple[Any, ...]


class Step(NamedTuple):
    """A planner and its share of what is left of the evaluations when it starts."""

    planner: Planner
    share: float = 1.0
    repeats: bool = True  # whether it may begin again where it gave up early


class Limits(NamedTuple):
    """What a cell may spend; None = as much as it likes."""

    evaluations: int | None
    seconds: float | None


LEAN = Step(CrossEntropy(), SHARES["cross_entropy"])
METHODS: dict[str, tuple[Step, ...]] = {
    "constructive": (),  # the floor that all others begin at
    "anneal": (Step(Anneal()),),
    "cross_entropy": (Step(CrossEntropy()),),
    "cross_entropy+anneal": (LEAN, Step(Anneal())),
    "ppo": (Step(PolicyGradient()),),
    "eagle": (Step(learned.eagle()),),
    "mars": (Step(learned.mars()),),
    "post": (Step(post()),),
    "hierarchical": (Step(learned.hierarchical()),),
    "reinforce": (Step(learned.reinforce()),),
    "placeto": (Step(learned.placeto()),),
    "gdp": (Step(learned.gdp()),),
    "mcmc": (Step(Mcmc()),),
    "m_sct": (Step(MSct(), repeats=False),),
    "metis": (Step(Metis(), repeats=False),),
    "cross_entropy+ppo+anneal": (LEAN, Step(PolicyGradient(), SHARES["ppo"]), Step(Anneal())),
    "portfolio": tuple(Step(planner, SHARES.get(planner.name, 1.0)) for planner in IMPROVERS),
    **{name: (Step(arm),) for name, arm in ARMS.items()},
}
USUAL = tuple(method for method in METHODS if method not in ARMS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """What the methods search on one model and cluster.

    Attributes:
        model: the graph's name.
        cluster: the cluster's name.
        space: simulated as policies are trained.
        full: the same, simulated as plans are by default.
        identity: hex digits that change with the problem and with what the simulator says.
    """

    model: str
    cluster: str
    space: PlacementSpace
    full: PlacementSpace
    identity: str

    @classmethod
    def of(cls, source: str, cluster: Cluster) -> "Ground":
        """Returns the ground of a model's name or a graph file."""
        graph, job, _ = load_graph(source)
        spaces = [
            PlacementSpace.build(Problem.build(graph, cluster, job, settings))
            for settings in (training_settings(cluster, Settings()), Settings())
        ]
        parts = [part.content_hash() for part in (graph, cluster, job)]
        finds = started(spaces[0], 0).by_finder.values()
        for space in spaces:
            scores = space.evaluate(np.stack([found.placement for found in finds]))
            parts += [f"{value:.9g}" for value in (*scores.step_time, *scores.overflow)]
        return cls(
            model=graph.name,
            cluster=cluster.name,
            space=spaces[0],
            full=spaces[1],
            identity=digest(parts),
        )


# what a cell is called


def digest(parts: Iterable[str]) -> str:
    """Returns 16 hex digits of texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def path_of(module: str) -> Path:
    """Returns where a module is."""
    return ROOT / (module.replace(".", "/") + ".py")


def sources(module: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Returns the modules of `agents` that one imports, itself and what they import included."""
    if module in seen or not module.startswith("agents.") or not path_of(module).is_file():
        return seen
    seen |= {module}
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                seen = sources(name, seen)
    return seen


def code_of(method: str) -> str:
    """Returns a hash of a method's planners, their constants and their sources."""
    steps = METHODS[method]
    planners = (*BASELINES, *CONSTRUCTIVE, *(step.planner for step in steps))
    modules = frozenset[str]()
    for planner in planners:
        modules = sources(type(planner).__module__, modules)
        modules = sources(f"agents.{getattr(planner, 'system', '')}", modules)
    texts = [path_of(module).read_text() for module in sorted(modules)]
    return digest([repr(steps), repr(FINALISTS), *texts])


def slot_of(cell: Cell) -> Slot:
    """Returns what a table has one cell of."""
    limit = (cell["evaluations"] or 0, cell.get("budget_seconds") or 0)
    return (cell["model"], cell["cluster"], cell["method"], *limit, cell["seed"])


# what a cell holds


def started(space: PlacementSpace, seed: int) -> Recorder:
    """Returns what the constructive planners find."""
    recorder = Recorder(space=space)
    for number, planner in enumerate((*BASELINES, *CONSTRUCTIVE)):
        planner.search(space, np.random.default_rng([seed, number]), Budget(), recorder)
    return recorder


def search(space: PlacementSpace, method: str, limits: Limits, seed: int) -> tuple[Recorder, int]:
    """Returns what a method finds and the evaluations it made.

    A learner that gives up early begins again, near the best so far, until all is spent.
    """
    recorder = started(space, seed)
    budget = Budget(limits.seconds, limits.evaluations, clock=time.process_time)
    steps, rng = METHODS[method], np.random.default_rng([seed, 100])
    for step in steps:
        step.planner.search(space, rng, budget.part(step.share), recorder)
    while steps and steps[-1].repeats and budget.left():
        before = budget.used
        steps[-1].planner.search(space, rng, budget, recorder)
        if budget.used == before:
            break
    return recorder, budget.used


def final_time(full: PlacementSpace, recorder: Recorder) -> float | None:
    """Returns the least step time of the finalists at full fidelity, s; None where none fits."""
    finds = [*recorder.curve[-FINALISTS:], *recorder.by_finder.values()]
    if not finds:
        return None
    scores = full.evaluate(np.stack([found.placement for found in finds]))
    fits = np.isfinite(scores.step_time) & (scores.overflow == 0)
    return float(scores.step_time[fits].min()) if fits.any() else None


def run_cell(ground: Ground, empty: Cell) -> Cell:
    """Returns a cell with what its method found."""
    for step in METHODS[empty["method"]]:  # loaded before the clock starts
        if system := getattr(step.planner, "system", None):
            importlib.import_module(f"agents.{system}")
    limits = Limits(empty["evaluations"], empty["budget_seconds"])
    begin = time.process_time()
    recorder, used = search(ground.space, empty["method"], limits, empty["seed"])
    seconds = time.process_time() - begin
    best, before = recorder.best, recorder.evaluations - used
    return empty | {
        "step_time_s": final_time(ground.full, recorder),
        "search_step_time_s": None if best is None else best.step_time,
        "finder": None if best is None else best.finder,
        "evaluations_made": used,
        "seconds": round(seconds, 2),
        "curve": [
            [max(0, found.evaluations - before), float(f"{found.step_time:.6g}")]
            for found in recorder.curve
        ],
    }


# the study


def plan_cells(grounds: Sequence[Ground], args: argparse.Namespace) -> list[tuple[Ground, Cell]]:
    """Returns all cells, empty, in the order to run: of each seed all models and methods."""
    codes = {method: code_of(method) for method in args.methods}
    return [
        (
            ground,
            {
                "model": ground.model,
                "cluster": ground.cluster,
                "method": method,
                "evaluations": None if args.seconds else args.evaluations,
                "budget_seconds": args.seconds,
                "seed": seed,
                "key": digest([ground.identity, codes[method]]),
            },
        )
        for seed in range(args.seeds)
        for ground in grounds
        for method in args.methods
    ]


def read(path: Path) -> list[Cell]:
    """Returns the stored cells."""
    if not path.exists():
        return []
    cells: list[Cell] = json.loads(path.read_text())["cells"]
    return cells


def write(path: Path, cells: Iterable[Cell]) -> None:
    """Stores cells, one a line."""
    lines = ",\n".join(json.dumps(cell) for cell in sorted(cells, key=slot_of))
    write_whole(path, f'{{"cells": [\n{lines}\n]}}\n'.encode())


def run(cells: Sequence[tuple[Ground, Cell]], out: Path, minutes: float | None) -> list[Cell]:
    """Runs the cells that are not stored and may still fit; returns all that there are."""
    stored, end = {slot_of(cell): cell for cell in read(out)}, time.monotonic()
    end += np.inf if minutes is None else 60 * minutes
    done: list[Cell] = []
    longest: dict[Slot, float] = {}  # s, by model and method
    for ground, empty in cells:
        cell = stored.get(slot_of(empty))
        kind = (empty["model"], empty["method"])
        if cell is None or cell["key"] != empty["key"]:
            if time.monotonic() + longest.get(kind, 0.0) >= end:
                continue
            try:
                cell = run_cell(ground, empty)
            except KeyboardInterrupt:
                break
            print(line_of(cell), file=sys.stderr, flush=True)
            stored[slot_of(cell)] = cell
            write(out, stored.values())
        longest[kind] = max(longest.get(kind, 0.0), cell["seconds"])
        done.append(cell)
    return done


def line_of(cell: Cell) -> str:
    """Returns what is said about a cell that is finished."""
    found = cell["step_time_s"]
    what = "nothing fits" if found is None else f"{found * 1e3:.1f} ms"
    return f"{cell['model']} {cell['method']} seed {cell['seed']}: {what}, {cell['seconds']:.1f} s"


def median(cells: Iterable[Cell], model: str, method: str) -> tuple[float, int]:
    """Returns the median step time of a model's seeds, s, and of how many; inf: nothing fits."""
    times = [
        np.inf if cell["step_time_s"] is None else cell["step_time_s"]
        for cell in cells
        if (cell["model"], cell["method"]) == (model, method)
    ]
    return (statistics.median(times) if times else np.nan), len(times)


def table(done: Sequence[Cell], models: Sequence[str], methods: Sequence[str], seeds: int) -> str:
    """Returns medians in ms, and their ratio to annealing's; ``2/3``: that many seeds are there."""
    rows = [["model", *methods]]
    ratios: dict[str, list[float]] = {method: [] for method in methods}
    for model in models:
        usual, _ = median(done, model, YARDSTICK)
        row = [model]
        for method in methods:
            value, count = median(done, model, method)
            ratio = value / usual
            if np.isfinite(ratio):
                ratios[method].append(ratio)
            text = f"{value * 1e3:.1f}" if np.isfinite(value) else "none fits" if count else ""
            text += f" ({ratio:.3f})" if np.isfinite(ratio) else ""
            row.append(text + (f" {count}/{seeds}" if 0 < count < seeds else ""))
        rows.append(row)
    means = [f"({np.exp(np.mean(np.log(r))):.3f})" if r else "" for r in ratios.values()]
    seconds = [[c["seconds"] for c in done if c["method"] == method] for method in methods]
    rows.append(["geometric mean", *means])
    rows.append(["seconds a cell", *(f"{np.mean(s):.1f}" if s else "" for s in seconds)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the study and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="names or graph files")
    parser.add_argument("--cluster", default="4xP100-PCIe")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=USUAL)
    parser.add_argument("--evaluations", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, help="of each cell, in place of evaluations")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="what does not fit is left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    grounds = [Ground.of(source, resolve(args.cluster)) for source in args.models]
    done = run(plan_cells(grounds, args), args.out, args.minutes)
    budget = f"{args.seconds:g} s" if args.seconds else f"{args.evaluations} evaluations"
    print(
        f"{args.cluster}, {budget}: median step time of {args.seeds} seeds, "
        f"ms (ratio to {YARDSTICK})"
    )
    models = [ground.model for ground in grounds]
    print(table(done, models, args.methods, args.seeds))
    print(f"\nratio to {YARDSTICK}, 95 % bootstrap intervals over seeds; evaluations to the best")
    print(summary(done, models, args.methods, YARDSTICK))


if __name__ == "__main__":
    main()
