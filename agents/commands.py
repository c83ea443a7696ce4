"""The command of the planners: ``placewright plan``."""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.agent_options import add_agent_options, learners_of
from simcore.cli import FAILED, OK, Answer, Subparsers, make_console, note
from simcore.errors import UsageError
from simcore.options import (
    MODEL_HELP,
    add_job_options,
    add_settings_options,
    job_changes,
    settings_of,
)
from simcore.units import format_seconds

if TYPE_CHECKING:
    from agents.planners.pipeline_layouts import Demands
    from agents.portfolio import PortfolioResult, Progress
    from simcore.cluster import Cluster
    from simcore.graph import OpGraph
    from simcore.job import Job
    from simcore.plan import Plan

_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def add_plan(subparsers: Subparsers) -> None:
    """Adds ``placewright plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="search for the fastest plan of a model on a cluster that fits the memory",
        description="Searches for the plan with the least step time that fits the memory: a device "
        "for every part of the model, copies of it, or pipeline stages; writes the plan. Ctrl-C "
        "ends the search and keeps the best plan so far.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="a preset (placewright clusters shows them), or a .toml file; needed, but with "
        "--objective max-load",
    )
    parser.add_argument("--out", type=Path, default=Path("plan.json"), metavar="FILE",
                        help="where the plan is written (plan.json)")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    _add_search_options(parser.add_argument_group("search"))
    _add_pipeline_options(parser.add_argument_group("pipelines"))
    add_agent_options(parser.add_argument_group("trained policies"))
    _add_exact_options(parser.add_argument_group("dnn-partitioning files"))
    add_job_options(parser)
    add_settings_options(parser)
    parser.set_defaults(run=_plan)


def _add_search_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategy",
        choices=("auto", "placement", "pipeline", "sharding"),
        default="auto",
        help="placement: a device for every op; pipeline: stages that work on microbatches; "
        "sharding: ops split over devices; auto: all of these, and copies of the model (auto)",
    )
    budget = group.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="how long to search, at most; reading the model and compiling come on top (20)",
    )
    budget.add_argument(
        "--evaluations",
        type=_whole,
        metavar="N",
        help="plans to simulate instead; then the same seed gives the same plan",
    )
    group.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the search (0)")
    group.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="MODULE=DEVICE",
        help="keep a module, with all inside it, or an op on a device; may be repeated "
        "(placewright graph MODEL --by module shows names)",
    )
    group.add_argument(
        "--exclude", action="append", default=[], metavar="DEVICE",
        help="use a device for nothing; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--reserve-memory", type=_bytes, default=0, metavar="SIZE",
        help="leave this much free on every GPU, for example 1GiB",
    )  # fmt: skip


def _add_pipeline_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--microbatches", type=_whole, metavar="N", help="how many, instead of the fastest"
    )
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="which, instead of the fastest: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zbv or "
        "pipedream",
    )
    group.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=("asynchronous", "batch-norm"),
        help="what a plan may change in the mathematics of training. asynchronous: updates that do "
        "not wait (pipedream); batch-norm: statistics of microbatches. May be repeated",
    )


def _add_exact_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--objective",
        choices=("step-time", "max-load"),
        default="step-time",
        help="max-load: the largest load of a device, for a dnn-partitioning file with its own "
        "devices, memory and costs, in the file's unit (step-time)",
    )
    group.add_argument(
        "--exact", action="store_true", help="prove how good it is; goes with --objective max-load"
    )
    group.add_argument(
        "--contiguous",
        action="store_true",
        help="each device holds a contiguous part of the forward graph",
    )


def _is_exact(args: argparse.Namespace) -> bool:
    """Returns whether a file is to be solved for its own devices; refuses half of the options."""
    if args.objective == "max-load" and not args.exact:
        raise UsageError("--objective max-load needs --exact; there is no other search for it")
    if args.objective != "max-load":
        for flag in ("exact", "contiguous"):
            if getattr(args, flag):
                raise UsageError(f"--{flag} needs --objective max-load")
        if args.cluster is None:
            raise UsageError("the following arguments are required: --cluster")
    return bool(args.objective == "max-load")


def _demands(args: argparse.Namespace) -> Demands:
    from agents.planners.pipeline_layouts import Demands
    from agents.planners.pipeline_plans import CHANGES

    if args.strategy in {"placement", "sharding"}:
        for flag in ("microbatches", "schedule"):
            if getattr(args, flag) is not None:
                raise UsageError(
                    f"--{flag} is about pipelines; --strategy {args.strategy} has none"
                )
    return Demands(
        microbatches=args.microbatches,
        schedule=args.schedule,
        allow=frozenset(CHANGES[change] for change in args.allow),
    )


def _plan(args: argparse.Namespace) -> Answer:
    from agents import portfolio
    from simcore import cluster as clusters
    from simcore.cost import assumptions
    from simcore.sources import is_captured, load_graph

    if _is_exact(args):
        from agents.exact.command import plan_max_load

        _check_writable(args.out, args.model)
        return plan_max_load(args)
    pins, demands, learners = _pins(args.pin), _demands(args), learners_of(args)
    _check_writable(args.out, args.model, args.cluster)
    cluster = clusters.resolve(args.cluster)
    if is_captured(args.model) and not args.quiet:
        note(f"capturing {args.model} ...")
    graph, job, source = load_graph(args.model, job_changes(args))
    for text in assumptions(graph, job, [device.kind for device in cluster.devices]):
        note(f"placewright: warning: {text}")
    with _Display(quiet=args.quiet) as display:
        found = portfolio.plan(
            graph,
            cluster,
            job,
            settings=settings_of(args),
            strategy=args.strategy,
            demands=demands,
            budget_seconds=portfolio.DEFAULT_BUDGET if args.budget is None else args.budget,
            evaluations=args.evaluations,
            seed=args.seed,
            pins=pins,
            exclude=args.exclude,
            reserve_memory=args.reserve_memory,
            progress=display.update,
            learners=learners,
        )
    plan = located(found.plan, args.out, source, args.cluster)
    if found.feasible:
        plan.save(args.out)
    return _answer(graph, cluster, job, found, args.out)


def _answer(
    graph: OpGraph, cluster: Cluster, job: Job, found: PortfolioResult, out: Path
) -> Answer:
    from simcore.plan_summary import plan_record

    record = plan_record(graph, cluster, job, found.plan, found.result, found.lower_bound)
    record["why"] = None if found.why is None else found.why.record()
    if found.why is not None:
        record["explanation"] = f"{record['explanation']} {found.why.words()}".strip()
    record["sharding"] = None if found.sharding is None else found.sharding.record()
    record["interrupted"] = found.interrupted
    record["out"] = str(out) if found.feasible else None
    if found.reason is not None:
        record["error"] = found.reason
        note(f"placewright: error: {found.reason}")
    return Answer(data=record, show=lambda: _show(record), status=OK if found.feasible else FAILED)


def _show(record: dict[str, Any]) -> None:
    from simcore.plan_summary import print_plan

    print_plan(make_console(), record)
    for sentence in (record["sharding"] or {}).get("sentences", ()):
        print(sentence)
    if record["interrupted"]:
        print("interrupted: this is the best plan so far")
    print(f"wrote {record['out']}" if record["out"] else "no plan was written")


def located(plan: Plan, out: Path, source: str, cluster: str) -> Plan:
    """Returns the plan with the sources that find its graph and cluster from the plan's folder."""
    import msgspec

    from simcore.sources import is_file

    folder = Path(os.path.realpath(out)).parent
    is_path = cluster.endswith(".toml") or "/" in cluster or "\\" in cluster
    return msgspec.structs.replace(
        plan,
        graph=msgspec.structs.replace(
            plan.graph, source=_relative(source, folder) if is_file(source) else source
        ),
        cluster=msgspec.structs.replace(
            plan.cluster, source=_relative(cluster, folder) if is_path else cluster
        ),
    )


def _relative(path: str, folder: Path) -> str:
    """Returns a path as seen from a folder; it begins with a dot, so no model has its name."""
    seen = os.path.relpath(os.path.realpath(path), folder).replace(os.sep, "/")
    return seen if seen.startswith("../") else f"./{seen}"


class _Display:
    """Progress on standard error: one live line on a terminal, one line per stage elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.live = self.console.status("") if self.console.is_terminal and not quiet else None
        self.stage = ""
        self.shown = 0.0

    def __enter__(self) -> _Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, progress: Progress) -> None:
        """Shows where the search stands, at most ten times a second."""
        if self.quiet:
            return
        is_new, self.stage = progress.stage != self.stage, progress.stage
        if self.live is None:
            if is_new:
                note(_line(progress))
        elif is_new or time.monotonic() - self.shown > 0.1:
            self.shown = time.monotonic()
            self.live.update(_line(progress))


def _line(progress: Progress) -> str:
    if progress.stage == "compile":
        return "preparing the simulator (compiled on the first run, then cached) ..."
    best = "nothing fits yet"
    if progress.best is not None:
        best = f"best {format_seconds(progress.best)} by {progress.finder}"
    left = progress.seconds_left
    rest = f"{progress.spent:.0%} of the budget spent" if left is None else f"{left:.0f} s left"
    return f"{progress.stage}: {best}, {progress.evaluations:,} simulations, {rest}"


def _pins(texts: list[str]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for text in texts:
        module, equals, device = text.rpartition("=")
        if not (equals and module and device):
            raise UsageError(f"--pin {text}: write MODULE=DEVICE")
        if pins.setdefault(module, device) != device:
            raise UsageError(f"--pin {text} contradicts --pin {module}={pins[module]}")
    return pins


def _check_writable(out: Path, *sources: str) -> None:
    """Refuses a place where no plan can be written before the search, not after it."""
    if any(os.path.exists(source) and out.exists() and out.samefile(source) for source in sources):
        raise UsageError(f"--out {out}: would overwrite what the plan is made from")
    folder = Path(os.path.realpath(out)).parent
    if not folder.is_dir():
        raise UsageError(f"--out {out}: there is no folder {folder}")
    is_special = out.exists() and not out.is_file()  # /dev/null, a pipe
    if out.is_dir() or not os.access(out if is_special else folder, os.W_OK):
        raise UsageError(f"--out {out}: cannot be written")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**62):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _SIZES or float(found[1]) * _SIZES[found[2]] > 2**60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1GiB or 500MiB")
    return round(float(found[1]) * _SIZES[found[2]])
