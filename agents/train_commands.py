"""The commands of trained policies: ``placewright train`` and ``placewright evaluate``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agents.agent_options import SYSTEMS
from simcore.cli import FAILED, INTERRUPTED, OK, Answer, Subparsers, note
from simcore.errors import UsageError
from simcore.units import format_seconds

if TYPE_CHECKING:
    from agents.evaluate import Row


def add_train(subparsers: Subparsers) -> None:
    """Adds ``placewright train``."""
    parser = subparsers.add_parser(
        "train",
        help="train a placement policy offline on many graphs and clusters",
        description="Trains EAGLE or Mars (reconstructions) on every graph on every cluster in "
        "turn, and writes DIR/eagle.pt or DIR/mars.pt, which placewright plan --agent takes. "
        "Ctrl-C keeps what is trained; --resume goes on from the last checkpoint.",
    )
    parser.add_argument("system", choices=SYSTEMS, help="what is trained")
    _add_tasks(parser)
    parser.add_argument("--evaluations", type=_whole, default=100_000, metavar="N",
                        help="placements to simulate, over all tasks (100000)")  # fmt: skip
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR",
                        help="for checkpoints, diagnostics and the result")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in DIR")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the configuration (python -m agents.mars --help lists them); repeatable",
    )
    parser.set_defaults(run=_train)


def add_evaluate(subparsers: Subparsers) -> None:
    """Adds ``placewright evaluate``."""
    parser = subparsers.add_parser(
        "evaluate",
        help="compare trained policies with classical planners on many graphs and clusters",
        description="Places every graph on every cluster with each policy, without training "
        "(zero-shot: draws, what is recombined of them, and with --polish neighbours of the best; "
        "the simulator decides) and, with --tune, after training on the "
        "task. Beside them: the best of the constructive planners, and annealing with as many "
        "evaluations. All step times are at full fidelity.",
    )
    parser.add_argument("checkpoint", nargs="+", type=Path, metavar="FILE",
                        help="of placewright train")  # fmt: skip
    _add_tasks(parser)
    parser.add_argument("--placements", type=_whole, default=256, metavar="N",
                        help="simulated zero-shot (256)")  # fmt: skip
    parser.add_argument("--polish", type=int, default=0, metavar="N",
                        help="neighbours tried after that, unit by unit (0)")  # fmt: skip
    parser.add_argument("--tune", type=int, default=0, metavar="N",
                        help="evaluations of training on each task (0: none)")  # fmt: skip
    parser.set_defaults(run=_evaluate)


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", nargs="+", required=True, metavar="MODEL",
                        help="models, graph files, or generated:COUNT")  # fmt: skip
    parser.add_argument("--cluster", nargs="+", required=True, metavar="NAME",
                        help="presets or .toml files")  # fmt: skip
    parser.add_argument("--groups", type=_whole, default=128, metavar="N",
                        help="decisions of a task, at most (128)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (0)")


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**62):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _train(args: argparse.Namespace) -> Answer:
    from agents.command_line import Progress, changed
    from agents.families import family, tasks_of
    from agents.train import system_of, train_family
    from simcore.cluster import resolve

    config_type = system_of(args.system).Config
    config = changed(config_type, args.set, evaluations=args.evaluations, seed=args.seed)
    clusters = [resolve(name) for name in args.cluster]
    tasks = tasks_of(family(args.graphs, args.seed), clusters, num_groups=args.groups)
    note(f"{args.system}: {len(tasks)} tasks")
    trained, interrupted = train_family(
        args.system,
        config,
        tasks,
        folder=args.folder,
        resume=args.resume,
        listener=Progress(),
        say=note,
    )
    path = args.folder / f"{args.system}.pt"
    size = sum(values.numel() for values in trained.network.parameters())
    data = {
        "system": args.system,
        "tasks": len(tasks),
        "parameters": size,
        "out": str(path),
        "interrupted": interrupted,
    }
    text = f"{args.system}: {size:,} weights, trained on {len(tasks)} tasks\nwrote {path}\n"
    status = INTERRUPTED if interrupted else OK
    return Answer(data=data, show=lambda: _write(text), status=status)


def _write(text: str) -> None:
    sys.stdout.write(text)


def _evaluate(args: argparse.Namespace) -> Answer:
    from agents.evaluate import Policies, evaluate
    from agents.families import family
    from agents.train import Trained
    from simcore.cluster import resolve

    for name in ("tune", "polish"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name} must be at least 0, not {getattr(args, name)}")
    policies = Policies(
        trained={path.stem: Trained.load(path) for path in args.checkpoint},
        placements=args.placements,
        polish=args.polish,
        tune=args.tune,
        groups=args.groups,
    )
    if len(policies.trained) < len(args.checkpoint):
        raise UsageError("two checkpoints have the same file name")
    clusters = [resolve(name) for name in args.cluster]
    rows: list[Row] = []
    for graph, job in family(args.graphs, args.seed):
        for cluster in clusters:
            rows.append(evaluate(policies, graph, job, cluster, args.seed))
            note(f"{rows[-1].graph} on {rows[-1].cluster} done")
    data = {"rows": [row._asdict() for row in rows]}
    fits = all(any(time is not None for time in row.step_time_s.values()) for row in rows)
    return Answer(data=data, show=lambda: _show(rows), status=OK if fits else FAILED)


def _show(rows: list[Row]) -> None:
    """Writes a table: step time of each method, and how long it took to find."""
    methods = list(rows[0].step_time_s)
    table = [["graph", "cluster", *methods]]
    for row in rows:
        cells = [_cell(row.step_time_s[name], row.seconds[name]) for name in methods]
        table.append([row.graph, row.cluster, *cells])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        _write(f"{text.rstrip()}\n")


def _cell(step_time: float | None, seconds: float) -> str:
    found = "none fits" if step_time is None else format_seconds(step_time)
    return f"{found} in {seconds:.1f} s"
