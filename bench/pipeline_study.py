"""Pipelines by learning and by planning: ``python -m bench.pipeline_study --minutes 60``.

A cell is a model, a cluster, a method and a seed. All methods have the same seconds of processor
time (or, with ``--evaluations``, simulations) and are rated by the same simulator, as synchronous
training; what a published planner takes by itself is stored beside. A finished cell is stored at
once and skipped where it is stored (its key has a hash of the problem and of the sources that
decide it); ``--minutes`` runs what fits. Methods without chance have seed 0 only. ``--report``
prints what is stored: ratios to PipeDream's stages and to data parallelism, and the gap to the
bound. Every method may answer copies of the whole model too, as PipeDream's planner does.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents.pipelines.bound import dag_bound
from bench.pipeline_methods import AGENTS, CHAINS, METHODS, SEEDED, Ground
from simcore.atomic import write_whole
from simcore.errors import PlacewrightError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "pipeline_study.json"
BRANCHED = ("two-tower", "multi-modal")
MODELS = (*BRANCHED, "bert-base", "vgg-16", "resnet-50", "gnmt-4", "bert-large")
CLUSTERS = ("4xP100-PCIe", "8xV100-NVLink", "2xA100+4xT4")
NODES = tuple(f"agents/pipelines/{name}.py" for name in ("env", "nodes", "plans", "compiled_masks"))
CHAIN = tuple(f"agents/planners/pipeline_{x}.py" for x in ("chain", "cuts", "layouts", "search"))
PROGRAMS = ("agents/planners/*stage_dag*.py", "agents/pipelines/estimate.py")
PUBLISHED = (*NODES, "agents/pipelines/published.py")
MOVES = (*NODES, "agents/pipelines/moves.py")
AGENT = (
    *("agents/pipelines/*.py", "agents/pipeline_agent.py", "agents/ppo.py", *PROGRAMS),
    *("agents/exact/dapple.py", "agents/exact/pipedream_planner.py"),
)
SOURCES = {  # of each method; learners' are AGENT
    "data_parallel": ("agents/planners/data_parallel.py",),
    "equal_split": CHAIN,
    "expert": (*CHAIN, "agents/planners/data_parallel.py"),
    "pipedream": (*PUBLISHED, "agents/exact/pipedream_planner.py"),
    "dapple": (*PUBLISHED, "agents/exact/dapple.py"),
    "piper": (*PUBLISHED, "agents/exact/piper*.py"),
    "alpa": (*NODES, "agents/pipelines/alpa.py", *PROGRAMS),
    "chain": CHAIN,
    "stage_dag": (*MOVES, *PROGRAMS),
    "anneal": (*MOVES, "agents/pipelines/anneal.py"),
}
CLOSE = 1.01  # of PipeDream's step time: as good


def code_hash(method: str) -> str:
    """Returns hex digits that change with the sources that decide the cells of a method."""
    files = {file for name in SOURCES.get(method, AGENT) for file in ROOT.glob(name)}
    digest = hashlib.sha256(repr(AGENTS.get(method, "")).encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Yields (model, cluster, method, seed), whole models first."""
    for cluster in args.clusters:
        for model in args.models:
            for method in args.methods:
                for seed in range(args.seeds if method in SEEDED else 1):
                    yield model, cluster, method, seed


def budget_name(args: argparse.Namespace) -> str:
    """Returns what a cell's key says of its budget."""
    return f"{args.seconds:g}s" if args.evaluations is None else str(args.evaluations)


def run(args: argparse.Namespace, stored: dict[str, Any]) -> None:
    """Runs cells that are not stored until the minutes are spent."""
    end = time.monotonic() + 60 * args.minutes
    ground, of = None, ("", "")
    for model, cluster, method, seed in cells(args):
        if time.monotonic() > end:
            return
        if of != (model, cluster):
            seconds = args.seconds if args.evaluations is None else None
            ground, of = Ground.of(model, cluster, args.evaluations, seconds), (model, cluster)
        assert ground is not None
        cell = "/".join((model, cluster, method, str(seed), budget_name(args)))
        identity = f"{ground.identity}-{code_hash(method)}"
        if stored.get(cell, {}).get("identity") == identity:
            continue
        ground.simulator.known.clear()
        begin, error = time.process_time(), ""
        try:
            step_time = METHODS[method](ground, seed)
        except PlacewrightError as reason:
            step_time, error = math.inf, str(reason)
        spent = time.process_time() - begin
        stored[cell] = {
            "step_time_s": step_time if math.isfinite(step_time) else None,
            "bound_s": dag_bound(ground.task),
            "processor_seconds": round(spent, 1),
            "identity": identity,
            "error": error,
        }
        write_whole(args.results, f"{json.dumps(stored, indent=1)}\n".encode())
        print(f"{cell}: {stored[cell]['step_time_s']}", file=sys.stderr)


def report(args: argparse.Namespace, stored: dict[str, Any]) -> None:
    """Prints a row for each model and cluster, and what they come to."""
    rows = []
    for cluster in args.clusters:
        for model in args.models:
            found = {m: _times(args, stored, (model, cluster, m)) for m in METHODS}
            if any(found.values()):
                bound = stored_bound(args, stored, model, cluster)
                rows.append((model, cluster, bound, found))
    names = [m for m in METHODS if any(found[m] for *_, found in rows)]
    print("| model | cluster | bound | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 3) + "|")
    for model, cluster, bound, found in rows:
        base = _middle(found["pipedream"])
        words = [_cell(_middle(found[m]), base) for m in names]
        print(f"| {model} | {cluster} | {bound * 1e3:.1f} | " + " | ".join(words) + " |")
    for name in names:
        print(f"{name}: {_summary(name, rows)}")


Rows = list[tuple[str, str, float, dict[str, list[float]]]]


def _summary(name: str, rows: Rows) -> str:
    """Says how a method stands against data parallelism, PipeDream and all chain planners."""
    parts = []
    for other in ("data_parallel", "pipedream"):
        ratios = [b / a for *_, f in rows if (a := _middle(f[name])) and (b := _middle(f[other]))]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            parts.append(f"over {other} {mean:.3f} in the mean, {max(ratios):.2f} at most")
    single = [
        value / base
        for model, *_, f in rows
        if model not in BRANCHED and (base := _middle(f["pipedream"]))
        for value in f[name]
    ]
    if single:
        close = sum(ratio <= CLOSE for ratio in single) / len(single)
        parts.append(
            f"chains: median {statistics.median(single):.3f} of PipeDream's time, "
            f"{close:.0%} of {len(single)} cells at most {CLOSE}"
        )
    best = [
        (value, min(chains))
        for model, *_, f in rows
        if model in BRANCHED and (value := _middle(f[name]))
        if (chains := [t for m in CHAINS if (t := _middle(f[m]))])
    ]
    if best:
        wins = sum(value < other * (1 - 1e-9) for value, other in best)
        parts.append(f"branches: beats all chain planners in {wins} of {len(best)}")
    return "; ".join(parts)


def _cell(value: float | None, base: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f}" + (f" ({value / base:.3f})" if base else "")


def _middle(times: list[float]) -> float | None:
    return statistics.median(times) if times else None


def stored_bound(
    args: argparse.Namespace, stored: dict[str, Any], model: str, cluster: str
) -> float:
    """Returns the stored bound of pipelines of a model on a cluster, s; nan where there is none."""
    found = (
        cell["bound_s"]
        for key, cell in stored.items()
        if key.startswith(f"{model}/{cluster}/") and key.endswith(f"/{budget_name(args)}")
    )
    return next(found, math.nan)


def _times(
    args: argparse.Namespace, stored: dict[str, Any], where: tuple[str, str, str]
) -> list[float]:
    """Returns step times over seeds, s; copies of the model where those are faster."""
    model, cluster, _ = where
    copies = stored.get("/".join((model, cluster, "data_parallel", "0", budget_name(args))), {})
    times = []
    for seed in range(args.seeds):
        cell = stored.get("/".join((*where, str(seed), budget_name(args))))
        if cell is not None:
            both = (cell["step_time_s"], copies.get("step_time_s"))
            times += [min(time for time in both if time is not None)] if any(both) else []
    return times


def main() -> None:
    """Runs the study, or prints what is stored."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor, for each cell")
    parser.add_argument("--evaluations", type=int, help="simulations for each cell instead")
    parser.add_argument("--minutes", type=float, default=60.0, help="on the clock, of the study")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    stored = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.report:
        run(args, stored)
    report(args, stored)


if __name__ == "__main__":
    main()
