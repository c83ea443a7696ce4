"""``placewright plan FILE.json --objective max-load --exact``: the best split, with a proof."""

import argparse
import math
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agents.commands import located
from agents.exact.contiguous import Progress, Solution, best_contiguous
from agents.exact.free import best_free
from agents.exact.max_load import MaxLoadProblem, device_loads, read_max_load
from agents.exact.max_load_plan import cluster_text, make_placement_plan
from simcore.atomic import write_whole
from simcore.cli import FAILED, OK, Answer, make_console, note, show_table
from simcore.cluster import Cluster
from simcore.errors import GraphError, UsageError
from simcore.options import job_changes
from simcore.plan import Plan, Provenance
from simcore.sources import is_file, load_graph
from simcore.units import format_bytes

Row = dict[str, Any]
_SECONDS_BETWEEN_NOTES = 5.0


def plan_max_load(args: argparse.Namespace) -> Answer:
    """Solves a dnn-partitioning file for its own devices, and writes the plan.

    Raises:
        UsageError: the source is no such file, or an option does not go with the objective.
        GraphError: the file breaks its format.
    """
    check_options(args)
    problem = _problem(args.model)
    listener = _Notes(quiet=args.quiet)
    started = time.perf_counter()
    solve = best_contiguous if args.contiguous else best_free
    solution = solve(problem, seconds=args.budget, listener=listener)
    seconds = time.perf_counter() - started
    record = _record(problem, solution, contiguous=args.contiguous)
    record["seconds"] = seconds
    record["out"] = record["cluster_out"] = None
    if solution.placement is None:
        record["error"] = "no placement that obeys the memory limit was found"
        note(f"placewright: error: {record['error']}")
    else:
        record["out"] = str(args.out)
        written = _write(args, problem, solution, seconds)
        record["cluster_out"] = None if written is None else str(written)
    status = FAILED if solution.placement is None else OK
    return Answer(data=record, show=lambda: _show(record), status=status)


def check_options(args: argparse.Namespace) -> None:
    """Refuses options of the search in the simulator; the file brings its own machine."""
    for flag in ("cluster", "evaluations", "microbatches", "schedule"):
        if getattr(args, flag) is not None:
            raise UsageError(
                f"--{flag} does not go with --objective max-load: the file brings its own devices"
            )
    for flag in ("pin", "exclude", "allow", "reserve_memory"):
        if getattr(args, flag):
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} does not go with --objective max-load")


def _problem(source: str) -> MaxLoadProblem:
    if not is_file(source):
        raise UsageError(
            f"--objective max-load needs a dnn-partitioning file (JSON with maxFPGAs and nodes), "
            f"which {source} is not"
        )
    try:
        return read_max_load(source)
    except GraphError as error:
        raise GraphError(f"--objective max-load needs a dnn-partitioning file: {error}") from None


class _Notes:
    """Progress on standard error, every few seconds."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.stage = ""
        self.said = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        recently = now - self.said < _SECONDS_BETWEEN_NOTES
        if self.quiet or (progress.stage == self.stage and recently):
            return
        self.stage, self.said = progress.stage, now
        best = "none yet" if math.isinf(progress.load) else f"{progress.load:.6g}"
        done = f", {progress.done:.0%} done" if progress.done else ""
        note(f"{progress.stage}: best {best}, proven bound {progress.bound:.6g}{done}")


def _record(problem: MaxLoadProblem, solution: Solution, *, contiguous: bool) -> Row:
    found = solution.placement is not None
    return {
        "feasible": found,
        "objective": "max-load",
        "contiguous": contiguous,
        "objective_value": solution.load if found else None,
        "proven_bound": solution.bound,
        "gap": solution.load / solution.bound - 1 if found and solution.bound else None,
        "optimal": found and solution.is_optimal,
        "method": solution.method,
        "ideals": solution.num_ideals,
        "interrupted": solution.interrupted,
        "devices": _device_rows(problem, solution),
    }


def _device_rows(problem: MaxLoadProblem, solution: Solution) -> list[Row]:
    if solution.placement is None:
        return []
    load, memory = device_loads(problem, solution.placement)
    return [
        {
            "name": problem.device_name(device),
            "load": float(load[device]),
            "memory_bytes": float(memory[device]),
            "nodes": [
                problem.node_ids[node] for node in (solution.placement == device).nonzero()[0]
            ],
        }
        for device in range(problem.num_devices)
    ]


def _write(
    args: argparse.Namespace, problem: MaxLoadProblem, solution: Solution, seconds: float
) -> Path | None:
    """Writes the plan and, beside it, the cluster of the file's devices; returns the latter."""
    assert solution.placement is not None
    graph, job, source = load_graph(args.model, job_changes(args))
    text = cluster_text(problem)
    cluster = Cluster.from_toml(text, args.model)
    path = _cluster_path(args.out)
    if path is not None:
        write_whole(path, text.encode())
    plan: Plan = make_placement_plan(args.model, graph, cluster, job, solution.placement)
    origin = Provenance(
        strategy=f"max-load, {solution.method}",
        seed=0,
        evaluations=0,
        seconds=seconds,
        budget_s=args.budget,
    )
    plan = replace(plan, provenance=origin)
    where = cluster.name if path is None else str(path.absolute())
    located(plan, args.out, source, where).save(args.out)
    return path


def _cluster_path(out: Path) -> Path | None:
    """Returns where the cluster goes; nowhere if the plan goes into no file (``/dev/null``)."""
    if out.exists() and not out.is_file():
        return None
    return out.with_suffix(".cluster.toml")


def _show(record: Row) -> None:
    say = make_console().print
    if record["objective_value"] is None:
        say(record["error"])
        return
    kind = "contiguous split" if record["contiguous"] else "placement"
    proof = "proven to be the best" if record["optimal"] else f"at most {record['gap']:.2%} above"
    say(
        f"{kind}: largest load {record['objective_value']:.6g} in the file's unit, {proof}"
        f" (bound {record['proven_bound']:.6g}; {record['method']})"
    )
    rows = [
        (
            row["name"],
            f"{row['load']:.6g}",
            format_bytes(round(row["memory_bytes"])),
            str(len(row["nodes"])),
        )
        for row in record["devices"]
    ]
    show_table(("device", "load", "memory", "operators"), rows)
    if record["interrupted"]:
        say("interrupted: this is the best so far")
    say("wrote " + " and ".join(filter(None, (record["out"], record["cluster_out"]))))
