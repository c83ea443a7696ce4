"""The plan: all that is decided, in one schema, checked against its graph, job and cluster."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.atomic import write_whole
from simcore.cluster import Cluster
from simcore.collectives import ALGORITHMS
from simcore.errors import JobError, PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan_parts import (
    CUSTOM,
    DEFAULT_BUCKETS,
    LIKE,
    NO_SCHEDULE,
    ONE_HOST,
    RANK_HOSTS,
    SEMANTICS,
    SEMANTICS_BATCH_NORM,
    Buckets,
    Constraints,
    Predicted,
    Provenance,
    Ref,
    Settings,
    Stage,
)

__all__ = [
    "CUSTOM",
    "DEFAULT_BUCKETS",
    "FORMAT",
    "LIKE",
    "NO_SCHEDULE",
    "ONE_HOST",
    "RANK_HOSTS",
    "SEMANTICS",
    "SEMANTICS_BATCH_NORM",
    "Buckets",
    "Constraints",
    "Plan",
    "Predicted",
    "Provenance",
    "Ref",
    "Settings",
    "Stage",
]

FORMAT = "placewright-plan/1"
MAX_FILE_BYTES = 2**30
MAX_NUMBER = 2**62  # of bytes reserved and priorities; keeps sums inside int64


class _Tag(msgspec.Struct):
    """The one field that is looked at first."""

    format: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan and where it belongs.

    A plan with several stages, several microbatches or a sharded optimizer is a pipeline; it has a
    schedule by name, or ``custom`` and the actions of every rank (``2F0``: stage, phase,
    microbatch). `optimizer_sharding` is ZeRO's stage: copies of a stage share the optimizer state
    (1), and the gradients (2), and the parameters (3). `semantics` names what changes the
    mathematics of the training step.
    """

    graph: Ref
    job: Job
    cluster: Ref
    stages: tuple[Stage, ...]
    format: str = FORMAT
    job_name: str = ""
    job_hash: str = ""  # "" = not stated
    microbatches: int = 1
    schedule: str = NO_SCHEDULE
    actions: tuple[tuple[str, ...], ...] = ()
    optimizer_sharding: int = 0
    priorities: tuple[int, ...] = ()
    buckets: Buckets = DEFAULT_BUCKETS
    settings: Settings = ONE_HOST
    constraints: Constraints = Constraints()
    predicted: Predicted | None = None
    provenance: Provenance | None = None
    semantics: tuple[str, ...] = ()

    @classmethod
    def from_placement(
        cls,
        graph: OpGraph,
        cluster: Cluster,
        job: Job,
        unit_devices: NDArray[np.integer] | Sequence[int],
        *,
        settings: Settings = ONE_HOST,
    ) -> "Plan":
        """Returns the plan of one stage with an op -> device map.

        Args:
            graph: the graph.
            cluster: the cluster.
            job: the job.
            unit_devices: device index of each placement unit, [unit].
            settings: how it is to be simulated.
        """
        names = [device.name for device in cluster.devices]
        if len(unit_devices) != graph.num_units:
            raise PlanError(
                f"placement of {len(unit_devices)} units for a graph of {graph.num_units} units"
            )
        for unit, device in enumerate(unit_devices):
            if not 0 <= device < len(names):
                raise PlanError(
                    f"placement: unit {graph.unit_names[unit]!r}: no device number {device}"
                )
        placement = {
            unit: names[device] for unit, device in zip(graph.unit_names, unit_devices, strict=True)
        }
        used = set(placement.values())
        devices = tuple(name for name in names if name in used)
        stage = Stage(devices=devices, placement=placement)
        return cls._of(graph, cluster, job, stage, settings)

    @classmethod
    def data_parallel(
        cls,
        graph: OpGraph,
        cluster: Cluster,
        job: Job,
        devices: Sequence[str],
        *,
        settings: Settings = RANK_HOSTS,
    ) -> "Plan":
        """Returns the plan that gives each device a copy of the model and a slice of the batch."""
        stage = Stage(devices=tuple(devices), mesh={"dp": len(devices)})
        return cls._of(graph, cluster, job, stage, settings)

    @classmethod
    def _of(
        cls, graph: OpGraph, cluster: Cluster, job: Job, stage: Stage, settings: Settings
    ) -> "Plan":
        return cls(
            graph=Ref(name=graph.name, hash=graph.content_hash()),
            cluster=Ref(name=cluster.name, hash=cluster.content_hash()),
            job=job,
            job_hash=job.content_hash(),
            stages=(stage,),
            settings=settings,
        )

    @property
    def is_pipeline(self) -> bool:
        """Whether the plan has stages or microbatches that a schedule puts in order."""
        return len(self.stages) > 1 or self.schedule != NO_SCHEDULE

    @property
    def data_parallel_degree(self) -> int:
        """Number of data-parallel copies, 1 where the plan is a placement."""
        return (self.stages[0].mesh or {}).get("dp", 1)

    def validate(self, graph: OpGraph, cluster: Cluster, job: Job) -> list[str]:
        """Returns every violation, by op and device; an empty list is a valid plan."""
        found = []
        for what, name, mine, other in (
            ("graph", self.graph.name, self.graph.hash, graph.content_hash()),
            ("cluster", self.cluster.name, self.cluster.hash, cluster.content_hash()),
            ("job", self.job_name or "job", self.job.content_hash(), job.content_hash()),
        ):
            if mine != other:
                found.append(f"plan is for {what} {name!r} ({mine}), not for this one ({other})")
        if self.job_hash not in ("", self.job.content_hash()):
            found.append(f"plan was made for another job ({self.job_hash}) than the one it states")
        found += self._validate_schedule()
        if self.priorities and len(self.priorities) != graph.num_ops:
            found.append(f"plan has {len(self.priorities)} priorities for {graph.num_ops} ops")
        if any(abs(priority) > MAX_NUMBER for priority in self.priorities):
            found.append("plan has a priority beyond 2**62")
        if not 0 <= self.buckets.num_bytes <= MAX_NUMBER:
            found.append(f"plan has buckets of {self.buckets.num_bytes} bytes")
        if self.buckets.algorithm not in {"auto", *ALGORITHMS["all_reduce"]}:
            found.append(f"plan has no all-reduce by {self.buckets.algorithm!r}")
        reserve = self.constraints.reserve_memory_bytes
        if not 0 <= reserve <= MAX_NUMBER:
            found.append(f"plan has reserve_memory_bytes {reserve}; it must be between 0 and 2**62")
        if not self.stages:
            found.append("plan has no stages")
        for stage in self.stages:
            found += self._validate_stage(stage, graph, cluster)
        return found

    def _validate_schedule(self) -> list[str]:
        found: list[str] = []
        ranks = dict.fromkeys(stage.devices for stage in self.stages)
        devices = [device for rank in ranks for device in rank]
        found += [
            f"device {device!r} is in two ranks; stages share all their devices or none"
            for device in dict.fromkeys(devices)
            if len(ranks) > 1 and devices.count(device) > 1
        ]
        if self.is_pipeline and self.priorities:
            found.append("plan has priorities of ops, but a pipeline's schedule orders them")
        if not self.is_pipeline:
            found += [
                f"stage {stage.name!r}: has {field}, but the plan has no schedule"
                for stage in self.stages
                for field, given in (
                    ("ops", stage.ops),
                    ("recompute", stage.recompute != "none"),
                )
                if given
            ]
            if self.microbatches > 1 or self.optimizer_sharding:
                found.append("plan has microbatches or a sharded optimizer, but no schedule")
        elif self.schedule == NO_SCHEDULE:
            found.append(f"plan has {len(self.stages)} stages, but no schedule")
        if self.microbatches < 1:
            found.append(f"plan has {self.microbatches} microbatches")
        if not 0 <= self.optimizer_sharding <= 3:
            found.append(f"plan has optimizer_sharding {self.optimizer_sharding}; it is 0 to 3")
        if (self.schedule == CUSTOM) != bool(self.actions):
            found.append("plan has actions if, and only if, its schedule is 'custom'")
        found += [
            f"plan has semantics {change!r}; known: {', '.join(SEMANTICS)}"
            for change in self.semantics
            if change not in SEMANTICS
        ]
        names = [stage.name for stage in self.stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        return found + [f"two stages are named {name!r}" for name in twice]

    def _validate_stage(self, stage: Stage, graph: OpGraph, cluster: Cluster) -> list[str]:
        names = {device.name for device in cluster.devices}
        found = [f"stage {stage.name!r}: no device {d!r}" for d in stage.devices if d not in names]
        found += [
            f"stage {stage.name!r}: device {d!r} is excluded"
            for d in stage.devices
            if d in self.constraints.exclude
        ]
        if not stage.devices:
            found.append(f"stage {stage.name!r}: lists no devices")
        if len(set(stage.devices)) != len(stage.devices):
            found.append(f"stage {stage.name!r}: a device is listed twice")
        if self.is_pipeline and stage.placement is not None:
            found.append(f"stage {stage.name!r}: a stage of a pipeline has a mesh, no placement")
        elif (stage.mesh is None) == (stage.placement is None):
            found.append(f"stage {stage.name!r}: needs either a mesh or a placement")
        if stage.mesh is not None and stage.devices:
            found += _validate_mesh(stage, stage.mesh)
        if stage.placement is not None:
            found += _validate_placement(stage.placement, graph, set(stage.devices))
        return found

    def unit_devices(self, graph: OpGraph, cluster: Cluster) -> NDArray[np.int32]:
        """Returns the device index of each placement unit, int32 [unit], of a valid placement."""
        placement = self.stages[0].placement
        if placement is None:
            raise PlanError("plan has a mesh, not a placement")
        index = {device.name: number for number, device in enumerate(cluster.devices)}
        return np.array([index[placement[unit]] for unit in graph.unit_names], np.int32)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan file; an interrupted write leaves the old file as it was."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        try:
            write_whole(path, text + b"\n")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or no name
            raise PlanError(f"{path}: cannot write the plan: {_reason(error)}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan file.

        Raises:
            PlanError: the file is missing, truncated, too large, or not a plan of this format.
        """
        try:
            with Path(path).open("rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                    raise PlanError(f"{path}: larger than 1 GiB, not a plan")
                data = file.read(MAX_FILE_BYTES)
        except (OSError, ValueError) as error:
            raise PlanError(f"{path}: cannot read the plan: {_reason(error)}") from None
        try:
            tag = msgspec.json.decode(data, type=_Tag).format
            if tag != FORMAT:
                raise PlanError(f"{path}: format {tag!r}, expected {FORMAT!r}")
            return msgspec.json.decode(data, type=Plan)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, JobError) as error:
            raise PlanError(f"{path}: not a plan file: {error}") from None


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _validate_mesh(stage: Stage, mesh: Mapping[str, int]) -> list[str]:
    found = [
        f"stage {stage.name!r}: axis {axis!r} of size {size}"
        for axis, size in mesh.items()
        if size < 1
    ]
    if not found and math.prod(mesh.values()) != len(stage.devices):
        found.append(
            f"stage {stage.name!r}: mesh {mesh} does not cover its {len(stage.devices)} devices"
        )
    found += [
        f"stage {stage.name!r}: shards along {axis!r}, which is not an axis of its mesh"
        for axis in stage.sharding
        if axis not in mesh or axis == "dp"
    ]
    return found + [
        f"stage {stage.name!r}: axis {axis!r} splits nothing"
        for axis, size in mesh.items()
        if axis != "dp" and size > 1 and not stage.sharding.get(axis)
    ]


def _validate_placement(
    placement: Mapping[str, str], graph: OpGraph, devices: set[str]
) -> list[str]:
    units = set(graph.unit_names)
    found = [f"placement: no op {op!r} in the graph" for op in placement if op not in units]
    found += [f"placement: op {op!r} has no device" for op in units if op not in placement]
    found += [
        f"placement: op {op!r} is on {device!r}, which the stage does not list"
        for op, device in placement.items()
        if device not in devices
    ]
    return sorted(found)
