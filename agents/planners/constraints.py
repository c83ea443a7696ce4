"""What the user demands of a placement, by name -> units and devices."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.errors import UsageError
from simcore.graph import OpGraph, Phase
from simcore.profile import suggestion


class Limits(NamedTuple):
    """Demands as numbers."""

    pins: dict[int, int]  # unit -> device
    exclude: frozenset[int]  # devices


def resolve_limits(
    graph: OpGraph, cluster: Cluster, pins: Mapping[str, str], exclude: Sequence[str]
) -> Limits:
    """Returns the demands as numbers.

    Args:
        graph: the graph.
        cluster: the cluster.
        pins: module path or op name -> device name; a module stands for all that is inside it.
        exclude: device names.

    Raises:
        UsageError: an unknown name (with what is close to it), demands that contradict each other,
            no device left.
    """
    excluded = frozenset(_device(cluster, name, f"--exclude {name}") for name in exclude)
    if len(excluded) == len(cluster.devices):
        raise UsageError(f"--exclude: no device of {cluster.name} is left")
    pinned: dict[int, tuple[int, str]] = {}
    for what, where in pins.items():
        flag = f"--pin {what}={where}"
        device = _device(cluster, where, flag)
        if device in excluded:
            raise UsageError(f"{flag}: {where} is excluded")
        for unit in units_of(graph, what, flag).tolist():
            other, earlier = pinned.setdefault(unit, (device, flag))
            if other != device:
                raise UsageError(
                    f"{flag} contradicts {earlier}: both hold for op {graph.unit_names[unit]!r}"
                )
    return Limits({unit: device for unit, (device, _) in pinned.items()}, excluded)


def units_of(graph: OpGraph, name: str, flag: str) -> NDArray[np.int32]:
    """Returns the units of a module (with all inside it) or of an op, [...].

    A unit belongs to the modules of its forward ops: an embedding that is tied to the head also
    sums the head's gradient, which does not make it a part of the head.
    """
    inside = [
        module == name or (bool(name) and module.startswith(f"{name}."))
        for module in graph.op_modules
    ]
    forward = graph.phase == Phase.F
    chosen = np.array(inside, np.bool_) & forward
    if name in graph.op_names:
        chosen[graph.op_names.index(name)] = True
    if not chosen.any():
        raise UsageError(f"{flag}: {_unknown(graph, name)}")
    return np.unique(graph.unit[chosen])


def _unknown(graph: OpGraph, name: str) -> str:
    paths = {""}
    for module in set(graph.op_modules):
        while module not in paths:
            paths.add(module)
            module = module.rpartition(".")[0]  # noqa: PLW2901 - up to the root
    known = sorted(paths - {""}) + list(graph.op_names)
    roots = sorted({path.partition(".")[0] for path in paths - {""}})[:8]
    hint = suggestion(name, known) or (roots and f"; modules: {', '.join(roots)}") or ""
    return f"{graph.name} has no module or op {name!r}{hint}"


def _device(cluster: Cluster, name: str, flag: str) -> int:
    names = cluster.device_names
    if name not in names:
        hint = suggestion(name, list(names))
        raise UsageError(
            f"{flag}: {cluster.name} has no device {name!r}{hint}; devices: {', '.join(names)}"
        )
    return names.index(name)
