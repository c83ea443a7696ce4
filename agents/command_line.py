"""The command line of a learner, as of ``python -m agents.ppo``: options are its configuration."""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from agents.diagnostics import Diagnostics
from agents.fidelity import training_settings
from agents.finalists import Finalist, Finalists
from agents.planners.space import PlacementSpace
from agents.reward import Form, negative_log_time, negative_sqrt_time, negative_time
from agents.task import PlacementTask
from simcore import Problem
from simcore.cli import FAILED, INTERRUPTED, OK, USAGE, note
from simcore.cluster import resolve
from simcore.errors import PlacewrightError, UsageError
from simcore.options import (
    MODEL_HELP,
    add_job_options,
    add_settings_options,
    job_changes,
    settings_of,
)
from simcore.sources import load_graph
from simcore.units import format_seconds

_FORMS: dict[str, Form] = {
    "log": negative_log_time,
    "sqrt": negative_sqrt_time,
    "time": negative_time,
}
_EVERY = 1.0  # s between lines of progress


def option(
    default: Any,
    text: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: bool = False,
) -> Any:
    """Returns a field of a configuration.

    Args:
        default: its value unless said otherwise.
        text: what it is; also its help.
        least: the smallest value it may have.
        most: the greatest.
        above: whether it has to be more than the smallest.
    """
    metadata = {"help": text, "least": least, "most": most, "above": above}
    return dataclasses.field(default=default, metadata=metadata)


def check_options(config: Any) -> None:
    """Refuses a configuration with a value out of its bounds, or that is not a choice of its field.

    Raises:
        ValueError: names the field, the value and the rule.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, kind, bounds = getattr(config, field.name), hints[field.name], field.metadata
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise ValueError(f"{field.name} must be one of {get_args(kind)}, not {value!r}")
            continue
        low, high = bounds["least"], bounds["most"]
        if not low <= value <= high or (bounds["above"] and value == low) or math.isinf(value):
            limit = (
                f" {'above' if bounds['above'] else 'at least'} {low:g}" if low > -math.inf else ""
            )
            limit += f" and at most {high:g}" if high < math.inf else " and finite"
            raise ValueError(f"{field.name} must be{limit}, not {value}")


def changed(config_type: type, texts: Sequence[str], **values: Any) -> Any:
    """Returns a configuration of values and of texts such as ``width=128``.

    Raises:
        UsageError: names the field or the text, and the reason.
    """
    hints, fields = get_type_hints(config_type), dataclasses.fields(config_type)
    names = {field.name.strip("_"): field.name for field in fields}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names:
            raise UsageError(f"--set {text}: there is no {name!r}; known: {', '.join(names)}")
        kind = hints[names[name]]
        try:
            values[names[name]] = _READERS.get(kind, str)(value)
        except (KeyError, ValueError):
            raise UsageError(f"--set {text}: {value!r} is not of the type of {name}") from None
    try:
        return config_type(**values)
    except ValueError as error:
        raise UsageError(f"--set: {error}") from None


_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: {"true": True, "false": False}.__getitem__,
}


def run(config_type: type, train: Callable[..., Any], argv: Sequence[str] | None = None) -> int:
    """Trains on the model that the arguments name, and says what came out.

    Args:
        config_type: a dataclass whose fields are `option`s.
        train: a learner's `train(config, task, *, folder, resume, listener)`, whose result has
            `finalists`, `evaluations`, `iterations` and `interrupted`.
        argv: arguments without the program's name; None takes them from the process.

    Returns:
        The exit status: 0 good, 1 nothing fits or failed, 2 wrong usage, 130 interrupted.
    """
    parser = _parser(config_type)
    args = parser.parse_args(argv)
    try:
        given = {name.name: getattr(args, name.name) for name in dataclasses.fields(config_type)}
        try:
            config = config_type(**given)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return _train(args, config, train)
    except PlacewrightError as error:
        note(f"{parser.prog}: error: {error}")
        return USAGE if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        note(f"{parser.prog}: interrupted")
        return INTERRUPTED


def _parser(config_type: type) -> argparse.ArgumentParser:
    module = sys.modules[config_type.__module__]
    parser = argparse.ArgumentParser(
        description=(module.__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a preset, or a .toml file"
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=getattr(config_type, "GROUPS", 128),
        help="groups of units, at most",
    )
    parser.add_argument("--reward", choices=list(_FORMS), default="log", help="of a step time")
    parser.add_argument(
        "--full",
        action="store_true",
        help="train on the fullest simulation, not the cheapest",
    )
    parser.add_argument("--folder", type=Path, help="for checkpoints and diagnostics")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_options(parser.add_argument_group("learning"), config_type)
    add_job_options(parser)
    add_settings_options(parser)
    return parser


def _add_options(group: argparse._ArgumentGroup, config_type: type) -> None:
    """Adds an option for each field of a configuration."""
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        kind = hints[field.name]
        how: dict[str, Any]
        if get_origin(kind) is Literal:
            how = {"choices": get_args(kind)}
        elif kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument(
            f"--{field.name.strip('_').replace('_', '-')}",
            dest=field.name,
            default=field.default,
            help=field.metadata["help"],
            **how,
        )


def _train(args: argparse.Namespace, config: Any, train: Callable[..., Any]) -> int:
    if args.groups < 1:
        raise UsageError(f"--groups must be at least 1, not {args.groups}")
    if args.resume and args.folder is None:
        raise UsageError("--resume needs the --folder of the run")
    cluster = resolve(args.cluster)
    graph, job, _ = load_graph(args.model, job_changes(args))
    settings = settings_of(args)
    full, task = (
        _task(Problem.build(graph, cluster, job, how), args)
        for how in (settings, settings if args.full else training_settings(cluster, settings))
    )
    note(
        f"{graph.name}: {graph.num_ops} ops in {task.num_groups} groups; trains on contention "
        f"{task.grouping.space.problem.settings.contention}"
    )
    begin = time.perf_counter()
    trained = train(config, task, folder=args.folder, resume=args.resume, listener=Progress())
    best = best_in_full(full, trained.finalists)
    record = {
        "graph": graph.name,
        "cluster": cluster.name,
        "groups": task.num_groups,
        "feasible": best is not None and best.fits,
        "best_step_time_s": None if best is None else best.step_time,
        "found_at": None if best is None else best.evaluations,
        "usual_step_time_s": full.reward.baseline,
        "evaluations": trained.evaluations,
        "iterations": trained.iterations,
        "seconds": round(time.perf_counter() - begin, 3),
        "interrupted": trained.interrupted,
    }
    sys.stdout.write(f"{json.dumps(record) if args.json else _words(record)}\n")
    return OK if record["feasible"] else FAILED


def _task(problem: Problem, args: argparse.Namespace) -> PlacementTask:
    space = PlacementSpace.build(problem)
    return PlacementTask.build(space, num_groups=args.groups, form=_FORMS[args.reward])


def best_in_full(full: PlacementTask, finalists: Sequence[Finalist]) -> Finalist | None:
    """Returns the best of the finalists as the fullest simulation sees them, None if there is none.

    Args:
        full: the task that the finalists are of, simulated in full.
        finalists: as the training saw them.
    """
    again = Finalists()
    for finalist in finalists:
        actions = np.array([finalist.actions])
        again.note(actions, full.evaluate(actions), finalist.evaluations - 1)
    return again.best


class Progress:
    """Tells a person how a run goes, about once a second."""

    def __init__(self) -> None:
        self.told = -math.inf

    def __call__(self, row: Diagnostics) -> None:
        """Notes one iteration."""
        if time.monotonic() - self.told < _EVERY:
            return
        self.told = time.monotonic()
        note(
            f"iteration {row.iteration} (life {row.life}): best {_time(row.best_step_time)}, "
            f"mean {_time(row.mean_step_time)}, {row.evaluations:,} simulations "
            f"({row.evaluations_per_second:,.0f}/s), entropy {row.entropy:.3f}, "
            f"KL {row.approx_kl:.4f}, clipped {row.clip_fraction:.0%}"
        )


def _time(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "nothing fits"


def _words(record: dict[str, Any]) -> str:
    best = record["best_step_time_s"]
    if best is None:
        found = "no legal placement"
    elif record["feasible"]:
        found = f"{format_seconds(best)} a step, found at simulation {record['found_at']:,}"
    else:
        found = "nothing found fits the memory"
    return (
        f"{record['graph']} on {record['cluster']}: {found} (everything on its default device: "
        f"{format_seconds(record['usual_step_time_s'])}); {record['evaluations']:,} simulations"
    )
