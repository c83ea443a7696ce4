"""Options that several commands share: what is trained, and how plans are simulated."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

from msgspec.structs import replace

from simcore.job import Optimizer, Precision

if TYPE_CHECKING:
    from simcore.plan import Settings

_SETTINGS = {  # field of Settings -> choices, help
    "order": (
        ("program", "ready"),
        "program: a device runs its ops in the program's order, as a CUDA stream does; ready: as "
        "their inputs arrive",
    ),
    "host": (
        ("one", "per_rank"),
        "one: one process launches the ops of all devices; per_rank: one process for each device, "
        "as copies of the model always have",
    ),
    "launch": (
        ("eager", "graph"),
        "eager: the host takes time to launch every kernel; graph (CUDA graphs): none",
    ),
    "contention": (
        ("none", "port", "ordered", "fifo", "fair"),
        "what transfers wait for. fair: nothing but a copy engine, and they share channels max-min "
        "fair; fifo: every channel of their route, first come, first served; ordered: every "
        "channel, in the order of the plan; port: the sender's port, in the order of the plan; "
        "none: nothing",
    ),
    "p2p": (
        ("copy", "inline", "rendezvous"),
        "copy: transfers run on a stream of their own; inline: on the compute streams of both "
        "devices, just before their first reader (tensor.to(device)); rendezvous: once the "
        "receiver has come to their first reader (send and receive)",
    ),
    "slow_down": (
        ("on", "off"),
        "whether compute and communication slow each other, by the factors of the hardware "
        "profiles",
    ),
}
LIKE = ("placeto",)  # keys of simcore.plan.LIKE, which is heavy to import

MODEL_HELP = (
    "a model by name (placewright graph --list shows them), a factory of your own "
    "(package.module:function, which returns a module and example inputs), or a graph file: "
    "PipeDream graph.txt, dnn-partitioning JSON, HLO or StableHLO text, ONNX or placewright's own "
    "JSON"
)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that change a graph's job; `job_changes` reads them."""
    group = parser.add_argument_group("job", "What is trained; the defaults are the model's own.")
    group.add_argument(
        "--batch", type=whole_number, metavar="N", help="samples per step, over all devices"
    )
    group.add_argument(
        "--sequence-length",
        type=whole_number,
        metavar="N",
        help="tokens per sample; for image models by name, pixels of a side",
    )
    group.add_argument(
        "--optimizer",
        choices=get_args(Optimizer),
        help="decides the memory of its state and the traffic of an update (adam, unless the model "
        "has its own)",
    )
    group.add_argument(
        "--precision",
        choices=get_args(Precision),
        help="of parameters, activations and gradients (fp32, likewise); with 16 bits the "
        "optimizer keeps an fp32 copy of the parameters",
    )
    group.add_argument(
        "--assume-linear",
        action="store_true",
        default=None,
        help="scale the measured seconds of a graph file linearly to --batch, and by the fp32 peak "
        "to other kinds of GPU",
    )


def job_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the job that the command line sets."""
    names = ("batch", "sequence_length", "optimizer", "precision", "assume_linear")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def add_settings_options(
    parser: argparse.ArgumentParser,
    description: str = "Defaults: --order program --host one --launch eager --p2p copy "
    "--contention fair --slow-down on.",
) -> None:
    """Adds the options of how plans are simulated; `settings_of` reads them."""
    group = parser.add_argument_group("simulation", description)
    group.add_argument(
        "--like",
        choices=LIKE,
        help="as another simulator does it, but for the options given beside it. placeto: --order "
        "ready --launch graph --contention fifo --slow-down off",
    )
    for name, (choices, text) in _SETTINGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", choices=choices, help=text)


def settings_of(args: argparse.Namespace, base: Settings | None = None) -> Settings:
    """Returns the settings that the command line asks for, the others as in `base`."""
    from simcore.plan import LIKE as ALIKE
    from simcore.plan import Settings

    if args.like is not None:
        base = ALIKE[args.like]
    given = {name: getattr(args, name) for name in _SETTINGS}
    changes = {name: value for name, value in given.items() if value is not None}
    if "slow_down" in changes:
        changes["slow_down"] = changes["slow_down"] == "on"
    return replace(base or Settings(), **changes)


def whole_number(text: str) -> int:
    """Returns a whole number of at least 1; what argparse calls for a count."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
