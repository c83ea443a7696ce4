"""A plan and its simulation -> one record, for JSON, and one screen, for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from simcore.cluster import Cluster
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.pipeline_summary import explain_pipeline, short_module, stage_rows
from simcore.plan import Plan
from simcore.profile_store import load_profile
from simcore.result import DeviceUse, Result
from simcore.shard_summary import explain_sharding
from simcore.shards import is_sharded
from simcore.units import format_bytes, format_seconds

Row = dict[str, Any]  # what the command line prints as JSON; the unit is in the key

EQUAL = 0.01  # relative; times that differ by less are called equal in words
MODEL_ERROR = 0.03  # relative; a gain of less may not be there on the real machine
_SIMPLE = ("single_device", "data_parallel")
_UNKNOWN = "not known: the plan file does not say"


def describe_job(job: Job) -> str:
    """Returns a job in a few words, for example ``batch 48, size 512, adam, fp32``."""
    parts = [
        None if job.batch is None else f"batch {job.batch}",
        None if job.sequence_length is None else f"size {job.sequence_length}",
        job.optimizer,
        job.precision,
        "times scaled linearly" if job.assume_linear else None,
    ]
    return ", ".join(part for part in parts if part)


def plan_record(
    graph: OpGraph, cluster: Cluster, job: Job, plan: Plan, result: Result, lower_bound: float
) -> Row:
    """Returns all there is to say about a plan.

    Args:
        graph: the graph.
        cluster: the cluster.
        job: the job.
        plan: the plan; what its provenance does not say is None.
        result: its simulation.
        lower_bound: seconds that no plan of its plan space can beat.
    """
    origin = plan.provenance
    baselines = dict(origin.baselines) if origin is not None else {}
    notes = dict(origin.baseline_notes) if origin is not None else {}
    for name in _SIMPLE:
        if baselines.setdefault(name, None) is None:
            notes.setdefault(name, _UNKNOWN)
    return {
        "feasible": result.feasible,
        "step_time_s": result.step_time,
        "throughput_samples_per_s": result.throughput,
        "peak_memory_bytes": {use.name: use.reserved for use in result.devices},
        "allocated_memory_bytes": {use.name: use.allocated for use in result.devices},
        "capacity_bytes": {use.name: use.capacity for use in result.devices},
        "lower_bound_s": lower_bound,
        "gap": max(0.0, result.step_time / lower_bound - 1.0) if lower_bound else 0.0,
        "strategy": None if origin is None else origin.strategy,
        "evaluations": None if origin is None else origin.evaluations,
        "seconds": None if origin is None else origin.seconds,
        "seed": None if origin is None else origin.seed,
        "baselines": baselines,
        "baseline_notes": notes,
        "graph": {"name": graph.name, "hash": graph.content_hash()},
        "job": {"name": plan.job_name or describe_job(job), "hash": job.content_hash()},
        "cluster": {"name": cluster.name, "hash": cluster.content_hash()},
        "devices": [_device_row(use, result.step_time) for use in result.devices],
        "stages": stage_rows(graph, plan, result) if plan.is_pipeline else [],
        "semantics": list(plan.semantics),
        "explanation": explain(graph, plan, result, baselines, notes),
    }


def _device_row(use: DeviceUse, step_time: float) -> Row:
    return {
        "name": use.name,
        "kind": use.kind,
        "ops": use.num_ops,
        "busy": use.busy / step_time if step_time else 0.0,
        "busy_s": use.busy,
        "communication_s": use.communication,
        "launch_s": use.launch,
        "bubble_s": use.bubble,
    }


def explain(
    graph: OpGraph,
    plan: Plan,
    result: Result,
    baselines: Mapping[str, float | None],
    notes: Mapping[str, str],
) -> str:
    """Returns in a sentence or two why the plan is as it is, and what it is good for."""
    if not result.feasible:
        worst = max(result.devices, key=lambda use: use.reserved - use.capacity)
        return (
            f"Does not fit: {worst.name} needs {format_bytes(worst.reserved)} and has "
            f"{format_bytes(worst.capacity)}."
        )
    if len(plan.stages) == 1 and is_sharded(plan):
        return explain_sharding(graph, plan, result)
    if plan.is_pipeline:
        return explain_pipeline(graph, plan, result, baselines, notes)
    if plan.stages[0].mesh is not None:
        return _explain_copies(plan, result, baselines, notes)
    return _explain_placement(plan, result, baselines, notes)


def _explain_placement(
    plan: Plan,
    result: Result,
    baselines: Mapping[str, float | None],
    notes: Mapping[str, str],
) -> str:
    used = [use for use in result.devices if use.num_ops]
    if len(used) == 1:
        return _explain_one(plan, result, used[0])
    return _explain_spread(result, used, baselines, notes)


def _explain_copies(
    plan: Plan,
    result: Result,
    baselines: Mapping[str, float | None],
    notes: Mapping[str, str],
) -> str:
    exposed = max(use.communication for use in result.devices)
    share = exposed / result.step_time if result.step_time else 0.0
    text = (
        f"Each of {plan.data_parallel_degree} GPUs trains a copy of the model on "
        f"{result.batch_per_copy} of {result.samples} samples; summing the gradients takes "
        f"{format_seconds(result.collective_time)}, of which {format_seconds(exposed)} "
        f"({share:.0%} of the step) are not hidden behind the backward.{_buckets(plan)}"
    )
    single = baselines.get("single_device")
    if single is not None and result.step_time:
        return f"{text} {single / result.step_time:.2f} times as fast as one GPU."
    return " ".join([text, *_cannot(notes)])


def _buckets(plan: Plan) -> str:
    """Says what a training script has to set, where that is not the default."""
    said = ""
    if not plan.buckets.num_bytes:
        said += " All are summed at once, after the backward."
    if plan.buckets.as_views:
        said += " They are views of their buckets (gradient_as_bucket_view=True)."
    return said


def _explain_one(plan: Plan, result: Result, used: DeviceUse) -> str:
    others = [
        use
        for use in result.devices
        if use.name != used.name
        and use.name not in plan.constraints.exclude
        and not load_profile(use.kind).is_cpu
    ]
    if load_profile(used.kind).is_cpu:
        return f"Everything runs on the CPU {used.name}."
    if not others:
        return f"{used.name} is the only GPU there is to use."
    if used.launch > 0.5 * result.step_time:
        return (
            f"One GPU is best: it waits for the host to launch kernels for "
            f"{used.launch / result.step_time:.0%} of the step, and more GPUs would wait as well."
        )
    return (
        "One GPU is best: its ops mostly wait for one another, so that sending tensors to other "
        "GPUs costs more than working side by side saves."
    )


def _explain_spread(
    result: Result,
    used: Sequence[DeviceUse],
    baselines: Mapping[str, float | None],
    notes: Mapping[str, str],
) -> str:
    step = result.step_time
    single = baselines.get("single_device")
    alike = len({use.kind for use in used}) == 1
    one = single if single is not None else sum(use.busy for use in used) if alike else None
    at_once = sum(use.busy for use in used) / step if step else 0.0
    sentences = _cannot(notes) if single is None and "single_device" in notes else []
    share = f"{at_once:.2f} of {len(used)} devices compute at a time"
    if one is not None and step >= one * (1.0 - EQUAL):
        sentences.append(f"This is no faster than one GPU; use it only to fit: {share}.")
    elif one is not None:
        would = " would be, if it had the memory" if sentences else ""
        sentences.append(f"It is {one / step:.2f} times as fast as one GPU{would}: {share}.")
    else:
        sentences.append(f"The model is spread over {len(used)} devices: {share}.")
    copies = baselines.get("data_parallel")
    if copies is not None and copies < step:
        sentences.append(f"Data parallel (copies of the model) takes {format_seconds(copies)}.")
    return " ".join(sentences + _tied(step, baselines))


def _tied(step: float, baselines: Mapping[str, float | None]) -> list[str]:
    """Returns a warning where a simpler plan is about as fast."""
    for name in _SIMPLE:
        time = baselines.get(name)
        if time is not None and step <= time < step * (1.0 + MODEL_ERROR):
            gain = time / step - 1.0
            return [f"{name} is simpler and only {gain:.1%} slower: less than the model's error."]
    return []


def _cannot(notes: Mapping[str, str]) -> list[str]:
    """Returns why one GPU is not enough, in a sentence; none where that is not known."""
    reason = notes.get("single_device", "no GPU can run it all")
    return [] if reason == _UNKNOWN else [f"One GPU alone cannot do it: {reason}."]


def print_plan(console: Console, record: Row) -> None:
    """Prints a record of `plan_record` as one screen."""
    print_headline(console, record)
    console.print()
    console.print(_stage_table(record) if record["stages"] else _device_table(record))
    console.print()
    console.print(_comparison_table(record))
    bound, gap = record["lower_bound_s"], record["gap"]
    console.print(
        Text(
            f"\nlower bound {format_seconds(bound)}: no plan of this kind is faster; this one is "
            f"{gap:.1%} above it"
        )
    )
    if record["strategy"]:
        console.print(
            Text(
                f"found by {record['strategy']} with {record['evaluations']:,} simulations in "
                f"{record['seconds']:.1f} s, seed {record['seed']}"
            )
        )


def print_headline(console: Console, record: Row) -> None:
    """Prints what is planned, how fast it is and why."""
    job, step = record["job"]["name"], record["step_time_s"]
    rate = record["throughput_samples_per_s"]
    speed = f"{format_seconds(step)} a step"
    if rate is not None:
        speed += f", {rate:,.0f} samples/s" if rate >= 1000 else f", {rate:.4g} samples/s"
    if not record["feasible"]:
        speed = f"does not fit ({speed} if it did)"
    title = Text(f"{record['graph']['name']} ({job}) on {record['cluster']['name']}: ")
    console.print(title.append(speed, style="bold green" if record["feasible"] else "bold red"))
    console.print(Text(record["explanation"]))


def _device_table(record: Row) -> Table:
    table = _table("device", "kind", "ops", "busy", "peak memory", "capacity", "full")
    idle = []
    for row in record["devices"]:
        name = row["name"]
        peak, capacity = record["peak_memory_bytes"][name], record["capacity_bytes"][name]
        if not row["ops"]:
            idle.append(name)
            continue
        full = f"{peak / capacity:.0%}" if capacity else "-"
        table.add_row(
            name,
            row["kind"],
            str(row["ops"]),
            f"{row['busy']:.0%}",
            format_bytes(peak),
            format_bytes(capacity),
            Text(full, style="red" if peak > capacity else ""),
        )
    if idle:
        table.caption = Text(f"idle: {', '.join(idle)}")
        table.caption_justify = "left"
    return table


def _stage_table(record: Row) -> Table:
    table = _table(
        "stage", "modules", "devices", "busy", "peak memory", "capacity", "full", left=(1, 2)
    )
    for row in record["stages"]:
        peak, capacity = row["peak_memory_bytes"], row["capacity_bytes"]
        ends = dict.fromkeys(short_module(row[key]) for key in ("first_module", "last_module"))
        table.add_row(
            row["name"],
            Text(" .. ".join(ends)),
            ", ".join(row["devices"]),
            f"{row['busy']:.0%}",
            format_bytes(peak),
            format_bytes(capacity),
            Text(f"{peak / capacity:.0%}" if capacity else "-", style="red" * (peak > capacity)),
        )
    idle = [row["name"] for row in record["devices"] if not row["ops"]]
    if idle:
        table.caption = Text(f"idle: {', '.join(idle)}")
        table.caption_justify = "left"
    return table


def _comparison_table(record: Row) -> Table:
    table = _table("strategy", "step", "against this plan", "", left=(3,))
    step, notes = record["step_time_s"], record["baseline_notes"]
    table.add_row(Text("this plan", style="bold"), Text(format_seconds(step), style="bold"), "", "")
    for name, time in record["baselines"].items():
        ratio = "" if time is None or not step else f"{time / step:.2f}x"
        shown = "-" if time is None else format_seconds(time)
        table.add_row(name, shown, ratio, Text(notes.get(name, "")))
    return table


def _table(*columns: str, left: Sequence[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        is_left = index == 0 or index in left or column == "kind"
        table.add_column(column, justify="left" if is_left else "right", overflow="fold")
    return table
