"""Clusters: a TOML file or Python values -> devices, channels and the routes between devices."""

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.errors import ClusterError, ProfileError
from simcore.profile import suggestion
from simcore.profile_store import file_names, find_file, load_link, load_profile
from simcore.routes import Hop, RouteArrays, route_arrays, widest_routes
from simcore.units import GB, US, GiB

LOCAL = "local"  # this machine, as `placewright calibrate collect` found it


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or CPU.

    Attributes:
        name: unique in its cluster.
        kind: names a hardware profile.
        node: the machine it sits in; a label.
        memory: capacity, bytes.
        forwards: whether routes of other devices may pass through it.
    """

    name: str
    kind: str
    node: str
    memory: int
    forwards: bool = False

    @classmethod
    def of_kind(
        cls, name: str, kind: str, *, node: str = "node0", forwards: bool = False
    ) -> "Device":
        """Returns a device with the memory of its kind's profile.

        Raises:
            ClusterError: the kind has no profile.
        """
        return cls(name, kind, node, _known(kind, f"device {name!r}"), forwards)


@dataclass(frozen=True, slots=True)
class Link:
    """One full-duplex link or port between two nodes (devices or switches).

    Attributes:
        a: name of one end.
        b: name of the other end.
        kind: names a link profile, or "" where only the numbers are known.
        bandwidth: of each direction, bytes/s.
        latency: of one hop, s.
    """

    a: str
    b: str
    kind: str
    bandwidth: float
    latency: float

    @classmethod
    def of_kind(cls, a: str, b: str, kind: str) -> "Link":
        """Returns a link with the bandwidth and latency of its kind's profile.

        Raises:
            ClusterError: the kind has no profile.
        """
        try:
            profile = load_link(kind)
        except ProfileError as error:
            raise ClusterError(f"link {a!r}-{b!r}: {error}") from None
        return cls(a, b, kind, profile.bandwidth, profile.latency)


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction of a link: link k gives channel 2k from a to b and 2k + 1 from b to a."""

    id: int
    src: str
    dst: str
    link: int
    bandwidth: float  # bytes/s
    latency: float  # s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Devices joined by links; routes are computed once, here.

    The route from i to j is the widest path, then the one of fewest channels, then the one whose
    channel ids come first in lexicographic order; it passes through devices only where they
    forward. A pair without a path is allowed; `reachable` says so. Axes: dev, hop (channels of all
    routes).

    Raises:
        ClusterError: no devices, a name used twice, an unknown kind, a link to an unknown node or
            to itself, a bandwidth that is not positive, a latency or memory that is negative.
    """

    name: str
    devices: tuple[Device, ...]
    switches: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    description: str = ""
    channels: tuple[Channel, ...] = field(init=False)  # [2 * link]
    # the fields of RouteArrays
    reachable: NDArray[np.bool_] = field(init=False)  # [dev, dev] true on the diagonal
    route_latency: NDArray[np.float64] = field(init=False)  # [dev, dev] s; inf = unreachable
    route_bandwidth: NDArray[np.float64] = field(init=False)  # [dev, dev] bytes/s; inf on i == j
    first_hop: NDArray[np.int64] = field(init=False)  # [dev * dev + 1] offsets by i * num_dev + j
    hops: NDArray[np.int32] = field(init=False)  # [hop] channel ids

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        for name in ("devices", "switches", "links"):
            set_field(self, name, tuple(getattr(self, name)))
        _check(self)
        channels = tuple(
            Channel(2 * index + back, *ends, index, link.bandwidth, link.latency)
            for index, link in enumerate(self.links)
            for back, ends in enumerate(((link.a, link.b), (link.b, link.a)))
        )
        set_field(self, "channels", channels)
        for name, value in _routed(self)._asdict().items():
            value.flags.writeable = False
            set_field(self, name, value)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the devices, in order."""
        return tuple(device.name for device in self.devices)

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """Indices of the devices that are not CPUs."""
        return tuple(
            i for i, device in enumerate(self.devices) if not load_profile(device.kind).is_cpu
        )

    def device_index(self, name: str) -> int:
        """Returns the index of a device.

        Raises:
            ClusterError: no such device; the message lists them.
        """
        names = self.device_names
        if name not in names:
            raise ClusterError(
                f"cluster {self.name!r} has no device {name!r}{suggestion(name, list(names))}; "
                f"devices: {', '.join(names)}"
            )
        return names.index(name)

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Returns channel ids from one device to another; empty if equal or unreachable."""
        pair = source * self.num_devices + target
        return tuple(self.hops[self.first_hop[pair] : self.first_hop[pair + 1]].tolist())

    def content_hash(self) -> str:
        """Returns 16 hex digits that change with any device, switch or link, not with the name."""
        content = (
            [[d.name, d.kind, d.node, d.memory, d.forwards] for d in self.devices],
            self.switches,
            [[k.a, k.b, k.kind, float(k.bandwidth), float(k.latency)] for k in self.links],
        )
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]

    @classmethod
    def preset(cls, name: str) -> "Cluster":
        """Returns a cluster that ships with the program, or one of the user's folder.

        Raises:
            ClusterError: no such preset; the message lists them.
        """
        known = presets()
        if name == LOCAL and name not in known:
            raise ClusterError(
                f"cluster {name!r}: this machine was not measured yet; "
                "run `placewright calibrate collect`"
            )
        if name not in known:
            raise ClusterError(
                f"unknown cluster {name!r}{suggestion(name, known)}; presets: {', '.join(known)}"
                " (or give the path of a .toml file)"
            )
        return cls.load(find_file("clusters", f"{name}.toml"))

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Returns the cluster of a TOML file.

        Raises:
            ClusterError: naming the file, the key or device, and the reason.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
            reason = error.strerror if isinstance(error, OSError) else error
            raise ClusterError(f"{path}: cannot be read: {reason}") from None
        return cls.from_toml(text, str(path))

    @classmethod
    def from_toml(cls, text: str, source: str) -> "Cluster":
        """Returns the cluster that TOML text describes.

        Args:
            text: the content of a cluster file.
            source: file name, for messages.

        Raises:
            ClusterError: naming the source, the key or device, and the reason.
        """
        raw: dict[str, object] = {}
        try:
            raw = tomllib.loads(text)
            record = msgspec.convert(raw, _ClusterFile)
            return cls(
                name=record.name,
                description=record.description,
                devices=tuple(_device(entry) for entry in record.devices),
                switches=tuple(record.switches),
                links=tuple(_link(entry) for entry in record.links),
            )
        except msgspec.ValidationError as error:
            raise ClusterError(f"{source}: {_located(str(error), raw)}") from None
        except (tomllib.TOMLDecodeError, ClusterError) as error:
            raise ClusterError(f"{source}: {error}") from None


def presets() -> list[str]:
    """Returns the names of the clusters that ship with the program and the user's, sorted."""
    return file_names("clusters", ".toml")


def resolve(name_or_path: str | Path) -> Cluster:
    """Returns a preset by name, or the cluster of a path (anything with ``.toml`` or a slash).

    Raises:
        ClusterError: no such preset or file, or a malformed file.
    """
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text or "\\" in text:
        return Cluster.load(name_or_path)
    return Cluster.preset(text)


class _DeviceEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One device of a cluster file."""

    name: str
    kind: str
    node: str = "node0"
    memory_GiB: float | None = None
    forwards: bool = False


class _LinkEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One link of a cluster file: a kind, or numbers, or a kind whose numbers are overridden."""

    a: str
    b: str
    kind: str = ""
    bandwidth_GBps: float | None = None
    latency_us: float | None = None


class _ClusterFile(msgspec.Struct, forbid_unknown_fields=True):
    """A cluster file."""

    format: Literal["placewright-cluster/1"]
    name: str
    devices: list[_DeviceEntry]
    switches: list[str] = []
    links: list[_LinkEntry] = []
    description: str = ""


def _device(entry: _DeviceEntry) -> Device:
    where = f"device {entry.name!r}"
    memory = _known(entry.kind, where)
    if entry.memory_GiB is not None:
        if not 0 < entry.memory_GiB < 2**30:  # 2**30 GiB keeps sums of bytes inside int64
            raise ClusterError(
                f"{where}: memory_GiB must be positive and below 2**30, not {entry.memory_GiB}"
            )
        memory = round(entry.memory_GiB * GiB)
    return Device(entry.name, entry.kind, entry.node, memory, entry.forwards)


def _link(entry: _LinkEntry) -> Link:
    bandwidth = None if entry.bandwidth_GBps is None else entry.bandwidth_GBps * GB
    latency = None if entry.latency_us is None else entry.latency_us * US
    if bandwidth is not None and latency is not None:
        return Link(entry.a, entry.b, entry.kind, bandwidth, latency)
    if not entry.kind:
        raise ClusterError(
            f"link {entry.a!r}-{entry.b!r}: give kind, or bandwidth_GBps and latency_us"
        )
    link = Link.of_kind(entry.a, entry.b, entry.kind)
    return Link(
        entry.a,
        entry.b,
        entry.kind,
        link.bandwidth if bandwidth is None else bandwidth,
        link.latency if latency is None else latency,
    )


def _known(kind: str, where: str) -> int:
    """Returns the memory of a kind's profile in bytes, or says that there is no such kind."""
    try:
        return load_profile(kind).memory
    except ProfileError as error:
        raise ClusterError(f"{where}: {error}") from None


def _located(message: str, raw: Mapping[str, object]) -> str:
    """Adds the name of the device or the ends of the link to msgspec's "at `$.devices[3]`"."""
    found = re.search(r"\$\.(devices|links)\[(\d+)\]", message)
    entries = raw.get(found[1]) if found else None
    entry = entries[int(found[2])] if found and isinstance(entries, list) else None
    if not isinstance(entry, dict):
        return message
    label = entry.get("name") or f"{entry.get('a')}-{entry.get('b')}"
    return f"{message} ({label})"


def _routed(cluster: Cluster) -> RouteArrays:
    """Numbers devices, then switches, and returns the arrays of the routes between devices."""
    node = {name: i for i, name in enumerate((*cluster.device_names, *cluster.switches))}
    passes = [device.forwards for device in cluster.devices] + [True] * len(cluster.switches)
    channels = [
        Hop(node[channel.src], node[channel.dst], channel.bandwidth, channel.latency)
        for channel in cluster.channels
    ]
    return route_arrays(
        widest_routes(channels, passes, cluster.num_devices), channels, cluster.num_devices
    )


def _check(cluster: Cluster) -> None:
    """Refuses a cluster that cannot be simulated."""
    where = f"cluster {cluster.name!r}"
    if not cluster.devices:
        raise ClusterError(f"{where}: needs at least one device")
    nodes: set[str] = set()
    for name in (*cluster.device_names, *cluster.switches):
        if not name or name in nodes:
            raise ClusterError(
                f"{where}: {'two nodes are' if name else 'a node is'} named {name!r}"
            )
        nodes.add(name)
    for device in cluster.devices:
        _known(device.kind, f"{where}: device {device.name!r}")
        if not 0 < device.memory < 2**60:
            raise ClusterError(
                f"{where}: device {device.name!r}: memory must be positive, not {device.memory}"
            )
    for link in cluster.links:
        _check_link(link, nodes, f"{where}: link {link.a!r}-{link.b!r}")


def _check_link(link: Link, nodes: set[str], where: str) -> None:
    for end in (link.a, link.b):
        if end not in nodes:
            raise ClusterError(f"{where}: no device or switch is named {end!r}")
    if link.a == link.b:
        raise ClusterError(f"{where}: joins a node with itself")
    if not 0 < link.bandwidth < math.inf:
        raise ClusterError(f"{where}: bandwidth must be positive and finite, not {link.bandwidth}")
    if not 0 <= link.latency < math.inf:
        raise ClusterError(
            f"{where}: latency must be finite and not negative, but is {link.latency}"
        )
