"""``placewright calibrate collect``: measures this machine and writes its profiles.

Heavy packages are imported when it runs.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcore.cli import FAILED, OK, Answer, note, show_table
from simcore.errors import UsageError
from simcore.profile_store import HOME_VARIABLE, home
from simcore.units import format_seconds

if TYPE_CHECKING:
    from calibration.collect.check import StepCheck
    from calibration.collect.collect import Collected

DESCRIPTION = (
    "Measures ops of models in situ, launches, memory, messages and collectives of this machine, "
    "and writes device, link and curve files and the cluster 'local'. What is finished is kept: a "
    "collection that was interrupted goes on where it stopped."
)
LARGEST_ERROR = 0.25  # of --check, above which the command fails


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--models",
        type=_names,
        metavar="MODEL[@SIZE],...",
        help="models, or package.module:factory; SIZE in tokens or pixels "
        "(bert-base@64,resnet-50@96)",
    )
    parser.add_argument(
        "--batches", type=_numbers, metavar="N,...", help="batches of each model (1,2)"
    )
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adam", "adamw"))
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="M", help="begin nothing after this (10)"
    )
    parser.add_argument("--passes", type=int, metavar="N", help="timed steps of each model (7)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder to write to (default: the user's folder, {home()})",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare predicted with measured steps of one device"
    )
    parser.add_argument(
        "--allow-noise", action="store_true", help="keep what was measured on a noisy machine"
    )


def run(options: argparse.Namespace) -> Answer:
    """Runs the command."""
    from calibration.collect.check import check_steps
    from calibration.collect.collect import DEFAULT_BATCHES, DEFAULT_MODELS, Effort, collect

    _check(options)
    changes = {"optimizer": options.optimizer, "precision": options.precision}
    more = {} if options.passes is None else {"passes": options.passes}
    folder = options.out or home()
    collected = collect(
        options.models or DEFAULT_MODELS,
        folder,
        batches=options.batches or DEFAULT_BATCHES,
        effort=Effort(
            minutes=options.minutes,
            device=options.device,
            allow_noise=options.allow_noise,
            job={key: value for key, value in changes.items() if value is not None},
            progress=note,
            **more,
        ),
    )
    checks = check_steps(collected, folder) if options.check else []
    is_wrong = any(abs(check.error) > LARGEST_ERROR for check in checks)
    status = OK if collected.is_enough and not is_wrong else FAILED
    return Answer(
        data=_data(collected, checks, folder, checked=options.check),
        show=lambda: _show(collected, checks, folder),
        status=status,
    )


def _check(options: argparse.Namespace) -> None:
    if not options.minutes > 0:
        raise UsageError(f"--minutes must be positive, not {options.minutes}")
    if options.passes is not None and options.passes < 1:
        raise UsageError(f"--passes must be at least 1, not {options.passes}")


def _data(
    collected: "Collected", checks: "list[StepCheck]", folder: Path, *, checked: bool
) -> dict[str, Any]:
    host = collected.host
    return {
        "device": host.device,
        "kind": host.kind,
        "num_devices": host.num_devices,
        "software": host.software,
        "folder": str(folder),
        "files": [str(path) for path in collected.files],
        "records": len(collected.records),
        "skipped": list(collected.skipped),
        "yardstick_drift": collected.drift,
        "check": [check._asdict() | {"error": check.error} for check in checks]
        if checked
        else None,
    }


def _show(collected: "Collected", checks: "list[StepCheck]", folder: Path) -> None:
    host = collected.host
    lines = [
        f"{host.kind}: {host.num_devices} x {host.description} ({host.software})",
        f"{len(collected.records)} records, {len(collected.files) - 1} files in {folder}",
    ]
    if collected.skipped:
        lines.append(f"no time for: {', '.join(collected.skipped)} (run it again to go on)")
    if not collected.is_enough:
        lines.append("that is too little for a profile")
    if folder != home():
        lines.append(f"they are used where {HOME_VARIABLE}={folder} is set")
    print("\n".join(lines))
    if checks:
        columns = ["step on one device", "predicted", "measured", "error", "wall", "not in table"]
        show_table(
            columns,
            [
                [
                    check.workload,
                    format_seconds(check.predicted),
                    format_seconds(check.measured),
                    f"{check.error:+.1%}",
                    format_seconds(check.wall),
                    f"{check.roofline_share:.1%}",
                ]
                for check in checks
            ],
            right=(1, 2, 3, 4, 5),
        )


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError("give at least one model")
    return found


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"whole numbers parted by commas, not {text!r}")
    return [int(part) for part in parts]
