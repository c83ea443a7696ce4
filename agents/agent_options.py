"""Options of ``placewright plan`` that let a trained policy take part in the search."""

import argparse
import importlib
from pathlib import Path
from typing import Any

from simcore.errors import UsageError

SYSTEMS = ("eagle", "mars")
SHIPPED = Path(__file__).parent / "checkpoints"


def add_agent_options(group: argparse._ArgumentGroup) -> None:
    """Adds ``--agent``, ``--checkpoint`` and ``--zero-shot``."""
    group.add_argument(
        "--agent",
        choices=SYSTEMS,
        help="let this policy (a reconstruction) propose placements and learn on the task, with "
        "three tenths of the budget, before the others improve on the best",
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="of placewright train; else the one that ships, where there is one",
    )
    group.add_argument(
        "--zero-shot", action="store_true", help="the policy proposes, but does not learn"
    )


def learners_of(args: argparse.Namespace) -> tuple[Any, ...]:
    """Returns the planners that the options ask for.

    Raises:
        UsageError: options without ``--agent``, no such checkpoint, or no placements to propose.
        PlacewrightError: a checkpoint that cannot be read; it is, so that no search starts in vain.
    """
    if args.agent is None:
        if args.checkpoint is not None or args.zero_shot:
            raise UsageError("--checkpoint and --zero-shot need --agent")
        return ()
    if args.strategy in {"pipeline", "sharding"}:
        raise UsageError(f"--agent proposes placements; --strategy {args.strategy} has none")
    path = args.checkpoint or SHIPPED / f"{args.agent}.pt"
    if not path.is_file():
        raise UsageError(f"--agent {args.agent}: there is no checkpoint {path} (--checkpoint)")
    trained = importlib.import_module("agents.planners.trained").TrainedPlanner
    planner = trained(checkpoint=path, tune=not args.zero_shot, name=args.agent)
    planner.load()
    return (planner,)
