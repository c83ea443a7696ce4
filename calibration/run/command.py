"""``placewright run``: a plan runs on this machine, and its prediction is held against it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from simcore.cli import Answer, Subparsers, make_console, note, show_table
from simcore.errors import UsageError
from simcore.options import whole_number
from simcore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from calibration.run.result import RunRecord


def add_run(subparsers: Subparsers) -> None:
    """Adds ``placewright run``."""
    parser = subparsers.add_parser(
        "run",
        help="run a plan for real on this machine, and compare with its prediction",
        description="Starts one process for each device of the plan, trains some steps with random "
        "parameters and example inputs, and prints predicted beside measured time and memory. "
        "Plans for GPUs that are not here run on CPU processes of one core each.",
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument(
        "--graph",
        metavar="MODEL",
        help="the model or factory, if not where the plan says; needed for a factory, since a plan "
        "file never runs code",
    )
    parser.add_argument("--cluster", metavar="NAME", help="where the cluster is, likewise")
    _add_effort(parser)
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append predicted and measured to this file"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the last step for ui.perfetto.dev"
    )
    parser.set_defaults(run=_run)


def _add_effort(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=whole_number, default=12, metavar="N", help="steps to measure (12)"
    )
    parser.add_argument(
        "--warmup", type=whole_number, default=3, metavar="N", help="steps before these (3)"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="a rank that does not end a step in this time ends the run (60)",
    )
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto",
                        help="of torch.distributed (auto: nccl between GPUs)")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="where ranks run (auto: as the plan says, if it is here)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the parameters (0)")
    parser.add_argument(
        "--allow-noise", action="store_true", help="measure even if other programs disturb"
    )


def _seconds(text: str) -> float:
    """Returns a positive number of seconds; what argparse calls."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _run(args: argparse.Namespace) -> Answer:
    from calibration.run.launch import Launch, ranks_of
    from calibration.run.measure import Effort, measure
    from calibration.run.result import append_record, run_record, write_timeline
    from simcore.commands import plan_cluster, plan_graph
    from simcore.plan import Plan
    from simcore.simulation import simulate
    from simcore.sources import is_captured

    plan = Plan.load(args.plan)
    source = args.graph or plan.graph.source
    if not is_captured(source):
        raise UsageError(
            f"{args.plan}: a run needs a model by name or a factory (--graph), not a graph file"
        )
    _check_outputs(args)
    graph, cluster = plan_graph(args, plan), plan_cluster(args, plan)
    predicted = simulate(graph, cluster, plan.job, plan)
    if plan.settings.order != "program":
        note("placewright: warning: ranks run in program order, not as inputs arrive")
    launch = Launch(backend=args.backend, device=args.device, timeout=args.timeout, seed=args.seed)
    ranks = ranks_of(plan, graph, cluster, source, launch)
    note(f"starting {len(ranks.works)} processes over {ranks.backend}: {', '.join(ranks.devices)}")
    effort = Effort(args.steps, args.warmup, args.allow_noise)
    with ranks.fleet(args.timeout) as fleet:
        measured = measure(fleet, fleet.load(ranks.works), effort, note)
    record = run_record(plan, predicted, measured, ranks)
    if args.record is not None:
        append_record(args.record, record)
        note(f"appended to {args.record}")
    if args.trace is not None:
        write_timeline(args.trace, measured, ranks.names)
        note(f"wrote {args.trace}")
    return Answer(data=to_builtins(record), show=lambda: _show(record))


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuses files that cannot be written before minutes of measuring are spent."""
    if args.trace is not None and args.record is not None and _is_same(args.trace, args.record):
        raise UsageError(f"{args.trace}: the trace would overwrite the record")
    for path in (args.trace, args.record):
        if path is None:
            continue
        if _is_same(path, args.plan):
            raise UsageError(f"{path}: would overwrite the plan")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: no such folder: {path.parent}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{path}: cannot be written")


def _is_same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


def _show(record: RunRecord) -> None:
    console = make_console()
    console.print(
        f"{record.graph} ({record.schedule}) on {record.cluster}, {len(record.ranks)} processes "
        f"over {record.backend}"
    )
    held = "it ran on other devices than predicted for" if record.stands_in else "predicted is"
    off = "" if record.stands_in else f" {abs(record.error):.1%} too "
    off += "" if record.stands_in else ("slow" if record.error > 0 else "fast")
    console.print(
        f"predicted {format_seconds(record.predicted_s)}, measured "
        f"{format_seconds(record.measured_s)} a step (± {record.spread:.1%}): {held}{off}"
    )
    show_table(
        ["device", "ran on", "predicted peak", "measured peak"],
        [
            [
                rank.device,
                rank.ran_on,
                format_bytes(rank.predicted_peak_bytes),
                format_bytes(rank.measured_peak_bytes),
            ]
            for rank in record.ranks
        ],
        right=(2, 3),
    )
    console.print(
        f"loss {record.first_loss:.5g} -> {record.last_loss:.5g} over {record.steps} measured "
        f"steps; the yardstick drifted by {record.drift:.1%}"
    )
