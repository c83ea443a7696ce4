"""What a step would take if one thing were faster: links, devices, ops, the host, by simulation.

A critical path says what the step waits for now; it does not say what it would wait for next. So
each change is made and the plan simulated again, with the same plan and everything else as it is.
"""

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.cost import kinds_of
from simcore.errors import UsageError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.pipeline_build import stage_of_units
from simcore.plan import Plan, Settings
from simcore.result import Result
from simcore.simulation import Options, simulate_checked
from simcore.units import format_seconds

FASTER = 2.0  # times
MOST_MODULES = 8  # whose ops are made faster, those of most time on the critical path
MOST_LINKS = 6  # that are made faster one by one, those that carry most
LEAST = 1e-6  # relative; a gain below is rounding


class Change(NamedTuple):
    """One thing made faster.

    Attributes:
        what: in words, for example ``the 4 PCIe3x16 links twice as fast``.
        step_time: s, with the change.
        saved: s.
    """

    what: str
    step_time: float
    saved: float

    def text(self, step_time: float) -> str:
        """Returns the change in a sentence, given the step without it."""
        if self.saved < LEAST * step_time:
            return f"{self.what}: no gain"
        share = self.saved / step_time
        return f"{self.what}: {format_seconds(self.step_time)} a step, {share:.1%} less"


Run = tuple[OpGraph, Cluster, Job, Plan, Result, Settings]  # a simulation and what it is of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What is simulated again and again."""

    graph: OpGraph
    cluster: Cluster
    job: Job
    plan: Plan
    options: Options

    def time(self, cluster: Cluster | None = None, **changes: object) -> float:
        """Returns the step time on another cluster or with other options."""
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        where = self.cluster if cluster is None else cluster
        return simulate_checked(self.graph, where, self.job, self.plan, options).step_time


def what_if(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    plan: Plan,
    result: Result,
    settings: Settings | None = None,
) -> list[Change]:
    """Returns what single changes would save, the best first.

    Each link kind, each of the links that carry most, each device kind in use and each stage of a
    pipeline, else each of the modules with most time on the critical path, is made twice as fast;
    and launches are made free.

    Args:
        graph: the graph the plan is for.
        cluster: the cluster it is for.
        job: the job.
        plan: a valid plan.
        result: its simulation under these settings.
        settings: how to simulate; None = as the plan says.
    """
    task = _Task(graph=graph, cluster=cluster, job=job, plan=plan,
                 options=Options.of(plan, settings))  # fmt: skip
    parts = _stages(task) if len(plan.stages) > 1 else _modules(task, result)
    times = [*_links(task, result), *_devices(task, result), *parts, *_host(task)]
    changes = [Change(what, time, result.step_time - time) for what, time in times]
    return sorted(changes, key=lambda change: (-change.saved, change.what))


def asked_change(  # noqa: PLR0913, PLR0917 - what a simulation consists of, and the question
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    plan: Plan,
    result: Result,
    settings: Settings | None,
    question: str,
) -> Change:
    """Returns what one change that a user names would save.

    Args:
        graph: the graph the plan is for.
        cluster: the cluster it is for.
        job: the job.
        plan: a valid plan.
        result: its simulation under these settings.
        settings: how to simulate; None = as the plan says.
        question: ``NAME`` or ``NAME=TIMES``: a link (``gpu0-gpu1``), a link kind, a device kind, a
            stage, a module with all inside it, or an op, that many times as fast (2).

    Raises:
        UsageError: there is nothing of that name, or the times are not a positive number.
    """
    task = _Task(graph=graph, cluster=cluster, job=job, plan=plan,
                 options=Options.of(plan, settings))  # fmt: skip
    name, times = _read_question(question)
    if links := _links_of(cluster, name):
        changed = task.time(_with_faster(cluster, links, times))
    else:
        changed = task.time(scale=_scale(task, name, times))
    return Change(f"{name} {times:g} times as fast", changed, result.step_time - changed)


def change_rows(run: Run, questions: Sequence[str], *, usual: bool) -> list[dict[str, str | float]]:
    """Returns what changes would save, as rows of a report: those named, then the usual ones.

    Args:
        run: a simulation and what it is of.
        questions: as of `asked_change`.
        usual: whether those of `what_if` follow.
    """
    changes = [asked_change(*run, question) for question in questions]
    changes += what_if(*run) if usual else []
    return [
        {
            "what": each.what,
            "step_time_s": each.step_time,
            "saved_s": each.saved,
            "text": each.text(run[4].step_time),
        }
        for each in changes
    ]


def _read_question(question: str) -> tuple[str, float]:
    before, separator, text = question.rpartition("=")
    name = (before if separator else text).strip()
    if not name:
        raise UsageError(f"{question!r} names nothing that could be faster")
    if not separator:
        return name, FASTER
    try:
        times = float(text)
    except ValueError:
        times = math.nan
    if not 0.0 < times < math.inf:
        raise UsageError(f"{question!r}: {text!r} is no positive number of times")
    return name, times


def _links_of(cluster: Cluster, name: str) -> list[int]:
    """Returns the links of a kind, or between two ends, ``a-b``."""
    plain = name.replace(" ", "")
    return [
        number
        for number, link in enumerate(cluster.links)
        if name == link.kind or plain in {f"{link.a}-{link.b}", f"{link.b}-{link.a}"}
    ]


def _scale(task: _Task, name: str, times: float) -> NDArray[np.float64]:
    """Returns what ops take, [op, kind], with a device kind, a stage, a module or an op faster."""
    graph, kinds = task.graph, kinds_of(task.cluster)
    scale = np.ones((graph.num_ops, len(kinds)))
    stages = [stage.name for stage in task.plan.stages if len(task.plan.stages) > 1]
    if name in kinds:
        scale[:, kinds.index(name)] = 1.0 / times
        return scale
    if name in stages:
        here = stage_of_units(task.plan, graph)[graph.unit] == stages.index(name)
    else:
        modules = zip(graph.op_names, graph.op_modules, strict=True)
        here = np.array([name in {op, m} or m.startswith(f"{name}.") for op, m in modules])
    if not here.any():
        links = [name for link in task.cluster.links for name in (link.kind, f"{link.a}-{link.b}")]
        known = [*filter(None, links), *kinds, *stages, *graph.op_modules, *graph.op_names]
        near = difflib.get_close_matches(name, dict.fromkeys(known), 3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(
            f"{name!r} is no link, kind of link or device, stage, module or op of this plan{hint}"
        )
    scale[here] = 1.0 / times
    return scale


def _links(task: _Task, result: Result) -> Iterator[tuple[str, float]]:
    """Yields link kinds, then single links, that carried anything, and the step with them."""
    carried = _carried(task.cluster, result)
    links = task.cluster.links
    used = [number for number in range(len(links)) if carried[number] > 0]
    by_kind: dict[str, list[int]] = {}
    for number in used:
        link = links[number]
        by_kind.setdefault(link.kind or f"{link.bandwidth / 1e9:g} GB/s", []).append(number)
    for kind, members in by_kind.items():
        count = (
            f"the {len(members)} {kind} links in use" if len(members) > 1 else f"the {kind} link"
        )
        yield f"{count} twice as fast", task.time(_with_faster(task.cluster, members))
    if len(by_kind) < len(used):
        for number in sorted(used, key=lambda n: -carried[n])[:MOST_LINKS]:
            link = links[number]
            what = f"the link {link.a} - {link.b} twice as fast"
            yield what, task.time(_with_faster(task.cluster, [number]))


def _carried(cluster: Cluster, result: Result) -> NDArray[np.float64]:
    """Returns the bytes that each link carried for transfers and collectives, [link]."""
    carried = np.zeros(len(cluster.links))
    for transfer in result.run.transfers():
        for channel in cluster.route(transfer.source, transfer.target):
            carried[cluster.channels[channel].link] += transfer.num_bytes
    if (result.run.placement < 0).any():  # collectives: between all devices that compute
        used = [number for number, use in enumerate(result.devices) if use.num_ops]
        for source in used:
            for target in used:
                for channel in cluster.route(source, target) if source != target else ():
                    carried[cluster.channels[channel].link] += 1.0
    return carried


def _with_faster(cluster: Cluster, links: list[int], times: float = FASTER) -> Cluster:
    faster = list(cluster.links)
    for number in links:
        faster[number] = replace(faster[number], bandwidth=faster[number].bandwidth * times)
    return Cluster(
        name=cluster.name,
        devices=cluster.devices,
        switches=cluster.switches,
        links=tuple(faster),
        description=cluster.description,
    )


def _devices(task: _Task, result: Result) -> Iterator[tuple[str, float]]:
    """Yields the device kinds that compute, and the step with each twice as fast."""
    kinds = kinds_of(task.cluster)
    busy = {use.kind: 0 for use in result.devices}
    for use in result.devices:
        busy[use.kind] += bool(use.num_ops)
    for kind, count in busy.items():
        if count:
            scale = np.ones((task.graph.num_ops, len(kinds)))
            scale[:, kinds.index(kind)] = 1.0 / FASTER
            many = f"the {count} {kind} in use" if count > 1 else f"the {kind}"
            yield f"{many} twice as fast", task.time(scale=scale)


def _modules(task: _Task, result: Result) -> Iterator[tuple[str, float]]:
    """Yields the modules of most time on the critical path, and the step with each in half."""
    seconds: dict[str, float] = {}
    module_of = dict(zip(task.graph.op_names, task.graph.op_modules, strict=True))
    for step in result.critical_path:
        name = step.name.split(" (")[0]  # without the copy
        if step.kind == "compute" and name in module_of:
            module = module_of[name] or name
            seconds[module] = seconds.get(module, 0.0) + step.end - step.start
    shape = (task.graph.num_ops, len(kinds_of(task.cluster)))
    for module in sorted(seconds, key=lambda name: (-seconds[name], name))[:MOST_MODULES]:
        mine = [m == module or (not m and name == module) for name, m in module_of.items()]
        scale = np.where(np.array(mine)[:, None], 1.0 / FASTER, np.ones(shape))
        yield f"the ops of {module} in half the time", task.time(scale=scale)


def _stages(task: _Task) -> Iterator[tuple[str, float]]:
    """Yields the stages of a pipeline, and the step with the ops of each in half the time."""
    stage = stage_of_units(task.plan, task.graph)[task.graph.unit]
    shape = (task.graph.num_ops, len(kinds_of(task.cluster)))
    for number, each in enumerate(task.plan.stages):
        scale = np.where((stage == number)[:, None], 1.0 / FASTER, np.ones(shape))
        yield f"the ops of {each.name} in half the time", task.time(scale=scale)


def _host(task: _Task) -> Iterator[tuple[str, float]]:
    """Yields free launches, where they are not free already, and the step with them."""
    if task.options.settings.launch == "eager":
        free = msgspec.structs.replace(task.options.settings, launch="graph")
        yield "kernel launches free (CUDA graphs)", task.time(settings=free)
