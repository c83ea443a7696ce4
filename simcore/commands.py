"""The commands of the simulator: ``placewright simulate`` and ``graph``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from simcore.cli import FAILED, OK, Answer, Subparsers, make_console, note, show_table
from simcore.errors import UsageError
from simcore.options import (
    MODEL_HELP,
    add_job_options,
    add_settings_options,
    job_changes,
    settings_of,
    whole_number,
)
from simcore.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from simcore.cluster import Cluster
    from simcore.graph import OpGraph
    from simcore.plan import Plan, Settings
    from simcore.uncertainty import Draws
    from simcore.what_if import Run

Row = dict[str, Any]


def add_graph(subparsers: Subparsers) -> None:
    """Adds ``placewright graph``."""
    parser = subparsers.add_parser(
        "graph",
        help="show the computation graph of a model or file, or convert it",
        description="Shows ops, placement units, FLOPs and bytes of a model or graph file; with "
        "--out, writes it as placewright's own JSON.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--list", action="store_true", help="list the models known by name")
    parser.add_argument("--by", choices=("kind", "module"), default="kind", help="group ops by")
    parser.add_argument(
        "--depth", type=whole_number, metavar="N", help="module levels kept with --by module (2)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the graph here (.json)")
    add_job_options(parser)
    parser.set_defaults(run=_graph)


def _graph(args: argparse.Namespace) -> Answer:
    from simcore.graph_file import write_graph
    from simcore.sources import is_captured, load_graph
    from simcore.summary import groups, kinds, modules, totals

    if args.list:
        return _model_list()
    if args.model is None:
        raise UsageError("give a MODEL, or --list")
    if args.depth is not None and args.by != "module":
        raise UsageError("--depth goes with --by module")
    if args.out is not None and args.out.suffix != ".json":
        raise UsageError(f"--out {args.out}: the name must end in .json")
    if is_captured(args.model):
        note(f"capturing {args.model} ...")
    graph, job, source = load_graph(args.model, job_changes(args))
    if args.out is not None:
        write_graph(graph, args.out)
        note(f"wrote {args.out}")
    keys = kinds(graph) if args.by == "kind" else modules(graph, depth=args.depth or 2)
    data = {
        **totals(graph, job),
        "source": source,
        "by": args.by,
        "groups": groups(graph, job, keys),
        "out": None if args.out is None else str(args.out),
    }
    return Answer(data=data, show=lambda: _show_graph(data))


def _model_list() -> Answer:
    from simcore.models import model_names, model_spec

    specs = [model_spec(name) for name in model_names()]
    rows = [
        {
            "name": spec.name,
            "summary": spec.summary,
            "parameters": spec.parameters,
            "batch": spec.default_job.batch,
            "sequence_length": spec.default_job.sequence_length,
            "unit": spec.unit,
            "optimizer": spec.default_job.optimizer,
            "precision": spec.default_job.precision,
            "reason": spec.reason,
        }
        for spec in specs
    ]
    cells = [
        [
            str(row["name"]),
            format_count(spec.parameters),
            str(row["batch"]),
            f"{row['sequence_length']} {spec.unit}",
            f"{row['optimizer']}, {row['precision']}",
            spec.summary,
        ]
        for row, spec in zip(rows, specs, strict=True)
    ]
    columns = ["model", "parameters", "batch", "size", "job", "what it is"]
    return Answer(data={"models": rows}, show=lambda: show_table(columns, cells, right=(1, 2, 3)))


def _show_graph(data: Row) -> None:
    phases = ", ".join(f"{count} {phase}" for phase, count in data["ops_by_phase"].items() if count)
    batch = data["job"]["batch"]
    lines = [
        f"{data['name']} at batch {'unknown' if batch is None else batch} ({data['source']})",
        f"{data['ops']} ops ({phases}), {data['units']} placement units, {data['edges']} edges",
        f"{format_count(data['trained_parameters'])} trained parameters "
        f"({format_bytes(data['parameter_bytes'])}), "
        f"{format_bytes(data['activation_bytes'])} of activations, "
        f"{format_count(data['flops'])}FLOP",
    ]
    if data["measured_s"] is not None:
        device = data["measured_on"] or "an unnamed device"
        lines.append(f"measured: {format_seconds(data['measured_s'])} of ops on {device}")
    print("\n".join(lines))
    measured = data["measured_s"] is not None
    rows = [
        [
            row["name"],
            str(row["ops"]),
            format_count(row["flops"]),
            format_bytes(row["parameter_bytes"]),
            format_bytes(row["activation_bytes"]),
            *([_or_dash(row["measured_s"])] if measured else []),
        ]
        for row in data["groups"]
    ]
    columns = [data["by"], "ops", "FLOP", "parameters", "activations"]
    show_table([*columns, *(["measured"] if measured else [])], rows)


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def add_simulate(subparsers: Subparsers) -> None:
    """Adds ``placewright simulate``."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a plan file again, and write its timeline",
        description="Finds the graph and cluster of a plan, checks both, and simulates the plan.",
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument(
        "--graph",
        metavar="MODEL",
        help="where the graph is, if not where the plan says; needed if it comes from a factory, "
        "since a plan file never runs code",
    )
    parser.add_argument(
        "--cluster", metavar="NAME", help="where the cluster is, likewise: a preset or a .toml file"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline here, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="simulate also with one thing at a time twice as fast: links, devices, modules, hosts",
    )
    parser.add_argument(
        "--samples",
        type=whole_number,
        metavar="N",
        help="simulate also N (10 or more) draws of what costs may be, and say the step's deciles",
    )
    parser.add_argument(
        "--faster",
        action="append",
        default=[],
        metavar="NAME[=TIMES]",
        help="simulate also with this twice, or so many times, as fast: a link (gpu0-gpu1), a kind "
        "of link or device, a stage, a module or an op; may be repeated",
    )
    add_settings_options(parser, "The default of each is what the plan was made with.")
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> Answer:
    from simcore.bounds import plan_bound
    from simcore.cost import assumptions
    from simcore.path_text import path_text
    from simcore.plan import Plan
    from simcore.plan_summary import plan_record
    from simcore.simulation import simulate
    from simcore.trace import write_trace
    from simcore.uncertainty import Draws

    plan = Plan.load(args.plan)
    draws = None if args.samples is None else Draws(samples=args.samples)
    if args.trace is not None and args.trace.exists() and args.trace.samefile(args.plan):
        raise UsageError(f"--trace {args.trace}: would overwrite the plan")
    graph, cluster = plan_graph(args, plan), plan_cluster(args, plan)
    for text in assumptions(graph, plan.job, [device.kind for device in cluster.devices]):
        note(f"placewright: warning: {text}")
    settings = settings_of(args, plan.settings)
    if settings != plan.settings:
        note("simulated otherwise than planned: the plan's baselines do not compare")
    result = simulate(graph, cluster, plan.job, plan, settings=settings)
    bound = plan_bound(graph, cluster, plan, settings, result)
    record = plan_record(graph, cluster, plan.job, plan, result, bound)
    record["trace"] = None if args.trace is None else str(args.trace)
    record["interval_s"] = _interval(draws, graph, cluster, plan, settings)
    record["critical_path"] = path_text(result)
    record["what_if"] = _changes(args, (graph, cluster, plan.job, plan, result, settings))
    if args.trace is not None:
        write_trace(args.trace, cluster, result)
        note(f"wrote {args.trace}")
    status = OK if result.feasible else FAILED
    return Answer(data=record, show=lambda: _show_plan(record), status=status)


def _interval(
    draws: Draws | None, graph: OpGraph, cluster: Cluster, plan: Plan, settings: Settings
) -> Row | None:
    """Returns the deciles of the step time where they were asked for."""
    from simcore.uncertainty import sampled

    if draws is None:
        return None
    note(f"simulating {draws.samples} draws ...")
    return sampled(graph, cluster, plan.job, plan, draws, settings=settings)._asdict()


def _changes(args: argparse.Namespace, run: Run) -> list[Row] | None:
    from simcore.what_if import change_rows

    if not args.what_if and not args.faster:
        return None
    note("simulating changes ...")
    return change_rows(run, args.faster, usual=args.what_if)


def _show_plan(record: Row) -> None:
    from simcore.plan_summary import print_plan

    print_plan(make_console(), record)
    if (interval := record.get("interval_s")) is not None:
        low, high = (f"{interval[key] * 1e3:.4g} ms" for key in ("p10", "p90"))
        print(f"\nin {interval['samples']} draws of the costs, eight of ten take {low} to {high}")
    if record.get("what_if") is not None:
        print("\nthe step waits for")
        for line in record["critical_path"]:
            print(f"  {line}")
        print("\nif")
        for change in record["what_if"]:
            print(f"  {change['text']}")


def plan_graph(args: argparse.Namespace, plan: Plan) -> OpGraph:
    """Returns the graph a plan is for; code is run only if the command line names it."""
    from simcore.sources import is_captured, is_file, load_graph

    source = args.graph or plan.graph.source
    if not source:
        raise UsageError(f"{args.plan}: does not say where its graph is; give --graph")
    if not args.graph and is_file(source):
        source = str(args.plan.resolve().parent / source)
    if is_captured(source) and (args.graph or ":" not in source):  # a plan's factory is not run
        note(f"capturing {source} ...")
    job = {name: value for name, value in asdict(plan.job).items() if value is not None}
    return load_graph(source, job, trusted=bool(args.graph))[0]


def plan_cluster(args: argparse.Namespace, plan: Plan) -> Cluster:
    """Returns the cluster a plan is for, from where the command line or the plan says."""
    from simcore.cluster import resolve

    source = plan.cluster.source
    if args.cluster is None and source.startswith("."):
        source = str(args.plan.resolve().parent / source)
    return resolve(args.cluster or source or plan.cluster.name)
