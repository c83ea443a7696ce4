"""OpGraph: one training step as arrays of ops and tensors; GraphBuilder makes it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.errors import GraphError
from simcore.loops import OpLoops, check_tensors
from simcore.parts import (
    MAX_BYTES,
    FixedCosts,
    OpPart,
    Out,
    TensorPart,
    affine_bytes,
    fixed_costs,
    hash_of,
    tensor_columns,
)
from simcore.signature import Affine, OpClass, Phase, Role, Signature
from simcore.topology import topological_order, unique_names

__all__ = ["FixedCosts", "GraphBuilder", "OpClass", "OpGraph", "Out", "Phase", "Role", "Sized"]

MAX_TOTAL = 2**62  # bytes of all tensors at one batch; keeps every sum inside int64


class Sized(NamedTuple):
    """The graph at one batch."""

    tensor_bytes: NDArray[np.int64]  # [tensor]
    storage_bytes: NDArray[np.int64]  # [storage] the largest tensor that lives in it
    workspace: NDArray[np.int64]  # [op] bytes alive only while the op runs
    resident: NDArray[np.int64]  # [op] bytes on the op's device for the whole step
    flops: NDArray[np.float64]  # [op] FLOP, 0 where the op has no signature
    traffic: NDArray[np.int64]  # [op] bytes read and written, 0 where the op has no signature


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpGraph:
    """One training step: ops in program order (which is topological), tensors with identity.

    Axes: op, tensor, storage, unit. Tensors without a producer (parameters and buffers) come first,
    the others follow by producer, so the outputs of an op are a range. A storage is the memory that
    aliases and in-place versions share. A unit is what a placement decides: a forward op, its
    backward and the update of its parameters. Bytes are pairs (c0, c1): c0 + c1 * batch.
    """

    name: str
    op_names: tuple[str, ...]  # [op] unique
    op_modules: tuple[str, ...]  # [op] nn.Module path, "" = none
    op_targets: tuple[str, ...]  # [op] what the framework calls it
    phase: NDArray[np.uint8]  # [op] Phase
    op_class: NDArray[np.uint8]  # [op] OpClass
    signature: NDArray[np.int32]  # [op] index into signatures, -1 = none
    signatures: tuple[Signature, ...]
    unit: NDArray[np.int32]  # [op] numbered by first op
    kernels: NDArray[np.int32]  # [op] kernels launched
    sync: NDArray[np.bool_]  # [op] the host waits for its end
    workspace: NDArray[np.int64]  # [op, 2] bytes
    resident: NDArray[np.int64]  # [op, 2] bytes
    elements: NDArray[np.int64]  # [op] parameter elements that an UPDATE op updates
    first_input: NDArray[np.int64]  # [op + 1] offsets into inputs
    inputs: NDArray[np.int32]  # [use] tensor ids, ascending and distinct within an op
    first_output: NDArray[np.int64]  # [op + 1] tensor ids
    tensor_names: tuple[str, ...]  # [tensor]
    tensor_producer: NDArray[np.int32]  # [tensor] op, -1 = parameter or buffer
    tensor_bytes: NDArray[np.int64]  # [tensor, 2] bytes
    tensor_storage: NDArray[np.int32]  # [tensor]
    tensor_role: NDArray[np.uint8]  # [tensor] Role
    batch: int | None = None  # samples of the example or the measurement
    fixed: FixedCosts | None = None
    loops: tuple[OpLoops | None, ...] | None = None  # [op] None = no rule; None = not known at all
    first_consumer: NDArray[np.int64] = field(init=False)  # [tensor + 1] offsets into consumers
    consumers: NDArray[np.int32] = field(init=False)  # [use] ops, ascending within a tensor

    def __post_init__(self) -> None:
        op_of_use = np.repeat(np.arange(self.num_ops, dtype=np.int32), np.diff(self.first_input))
        order = np.argsort(self.inputs, kind="stable")
        counts = np.bincount(self.inputs, minlength=self.num_tensors)
        first = np.zeros(self.num_tensors + 1, np.int64)
        np.cumsum(counts, out=first[1:])
        object.__setattr__(self, "first_consumer", first)
        object.__setattr__(self, "consumers", np.ascontiguousarray(op_of_use[order]))
        for value in (getattr(self, name) for name in self.__slots__):
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        """Number of tensors, parameters and buffers included."""
        return len(self.tensor_names)

    @property
    def num_units(self) -> int:
        """Number of placement units."""
        return int(self.unit.max()) + 1 if self.num_ops else 0

    @property
    def num_storages(self) -> int:
        """Number of storages."""
        return int(self.tensor_storage.max()) + 1 if self.num_tensors else 0

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Name of each unit: that of its first op which is not just an input or a view, [unit]."""
        free = np.isin(self.op_class, (OpClass.INPUT, OpClass.VIEW))
        order = np.lexsort((np.arange(self.num_ops), free, self.unit))
        _, first = np.unique(self.unit[order], return_index=True)
        return tuple(self.op_names[op] for op in order[first])

    @property
    def persistent_storage(self) -> NDArray[np.bool_]:
        """Whether a storage holds a parameter or buffer, [storage]."""
        persistent = np.zeros(self.num_storages, np.bool_)
        held = np.isin(self.tensor_role, (Role.PARAMETER, Role.BUFFER))
        persistent[self.tensor_storage[held]] = True
        return persistent

    def loops_of(self, op: int) -> OpLoops | None:
        """Returns the loops of an op, None where they are not known."""
        return None if self.loops is None else self.loops[op]

    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Returns (producer, consumer, tensor) of every use of a produced tensor, each [edge]."""
        tensor = np.repeat(
            np.arange(self.num_tensors, dtype=np.int32), np.diff(self.first_consumer)
        )
        produced = self.tensor_producer[tensor] >= 0
        tensor = tensor[produced]
        return self.tensor_producer[tensor], self.consumers[produced], tensor

    def at_batch(self, batch: int | None) -> Sized:
        """Returns bytes and FLOPs at a batch (None: the graph's own, 1 where it has none).

        A graph file measured at one batch has sizes without a slope: they stay as they are.

        Raises:
            GraphError: a size is negative at this batch, or their sum leaves int64.
        """
        size = batch if batch is not None else (self.batch or 1)
        tensor_bytes = self._bytes_at(self.tensor_bytes, size, self.tensor_names)
        flops = np.array([s.flops(size) for s in self.signatures] + [0.0])
        traffic = [s.traffic_bytes(size) for s in self.signatures] + [0]
        if max(traffic) > MAX_TOTAL:
            raise GraphError(f"{self.name}: an op moves over 2**62 bytes at batch {size}")
        return Sized(
            tensor_bytes=tensor_bytes,
            storage_bytes=self.storage_bytes(tensor_bytes),
            workspace=self._bytes_at(self.workspace, size, self.op_names),
            resident=self._bytes_at(self.resident, size, self.op_names),
            flops=flops[self.signature],
            traffic=np.array(traffic, np.int64)[self.signature],
        )

    def storage_bytes(self, tensor_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the largest tensor that lives in each storage, [storage] from [tensor]."""
        largest = np.zeros(self.num_storages, np.int64)
        np.maximum.at(largest, self.tensor_storage, tensor_bytes)
        return largest

    def _bytes_at(
        self, pairs: NDArray[np.int64], size: int, names: tuple[str, ...]
    ) -> NDArray[np.int64]:
        """Returns c0 + c1 * size, refused where it is negative or its sum leaves int64."""
        if float(np.abs(pairs.astype(np.float64)).sum(axis=0) @ (1.0, float(size))) > MAX_TOTAL:
            raise GraphError(f"{self.name}: over 2**62 bytes at batch {size}")
        values = pairs[:, 0] + pairs[:, 1] * size
        if values.min(initial=0) < 0:
            worst = int(values.argmin())
            raise GraphError(
                f"{self.name}: {names[worst]!r} has {values[worst]} bytes at batch {size}"
            )
        return values

    def content_hash(self) -> str:
        """Returns 16 hex digits that change with anything but the graph's name."""
        keys = (name for name in self.__slots__ if name != "name")
        return hash_of({key: getattr(self, key) for key in keys})

    @classmethod
    def from_edges(
        cls,
        ops: Mapping[str, float] | Iterable[tuple[str, float]],
        edges: Iterable[tuple[str, str, int]],
        *,
        name: str = "graph",
        colocate: Mapping[str, str] | None = None,
        measured_on: str | None = None,
        batch: int | None = None,
    ) -> "OpGraph":
        """Returns a fixed graph from op times and edges, for timing one's own graph.

        The seconds are taken to be all that an op costs, its launch included.

        Args:
            ops: op name -> seconds, in any order (program order is topological, ties as given).
            edges: (from, to, bytes). Edges of one op with equal bytes carry the same tensor, which
                is sent once to each device that needs it; other byte counts are other tensors.
            name: the graph's name.
            colocate: op name -> label; ops of one label are one placement unit.
            measured_on: device kind of the seconds; None = unknown.
            batch: samples the seconds are for.

        Raises:
            GraphError: a cycle, an edge to a missing op, a negative or NaN number.
        """
        seconds = dict(ops) if isinstance(ops, Mapping) else unique_names(ops, name)
        outgoing: dict[str, dict[int, list[str]]] = {op: {} for op in seconds}
        for source, target, num_bytes in edges:
            for op in (source, target):
                if op not in seconds:
                    raise GraphError(f"{name}: edge {source} -> {target}: no op named {op!r}")
            outgoing[source].setdefault(num_bytes, []).append(target)
        if bad := [op for op, value in seconds.items() if not value >= 0]:
            raise GraphError(f"{name}: op {bad[0]!r}: seconds is {seconds[bad[0]]}")
        order = topological_order(
            {op: [t for ts in by.values() for t in ts] for op, by in outgoing.items()}, name
        )
        builder = GraphBuilder(name, batch=batch)
        arriving: dict[str, list[int]] = {op: [] for op in seconds}
        labels: dict[str, int] = {}
        for op in order:
            label = None if colocate is None else colocate.get(op)
            handle = builder.op(
                op,
                inputs=arriving[op],
                outputs=[Out(num_bytes) for num_bytes in outgoing[op]],
                kernels=0,
                seconds=seconds[op],
                unit_of=None if label is None else labels.get(label),
            )
            if label is not None:
                labels.setdefault(label, handle)
            for tensor, targets in zip(builder.outputs(handle), outgoing[op].values(), strict=True):
                for target in targets:
                    arriving[target].append(tensor)
        return builder.build(measured_on=measured_on)


class GraphBuilder:
    """Collects ops in program order and returns a checked `OpGraph`; every frontend uses it."""

    def __init__(self, name: str, *, batch: int | None = None) -> None:
        self.name = name
        self.batch = batch
        self._tensors: list[TensorPart] = []
        self._ops: list[OpPart] = []
        self._outputs: list[list[int]] = []  # tensor handles of each op
        self._parent: list[int] = []  # union-find over ops: placement units

    @property
    def num_ops(self) -> int:
        """Number of ops so far."""
        return len(self._ops)

    def parameter(self, name: str, num_bytes: int | Affine) -> int:
        """Adds a trainable or frozen parameter and returns its tensor handle."""
        return self._tensor(name, -1, Out(num_bytes, role=Role.PARAMETER))

    def buffer(self, name: str, num_bytes: int | Affine) -> int:
        """Adds a buffer (persistent, not trained) and returns its tensor handle."""
        return self._tensor(name, -1, Out(num_bytes, role=Role.BUFFER))

    def op(  # noqa: PLR0913 - one keyword per field of an op
        self,
        name: str,
        *,
        module: str = "",
        target: str = "",
        phase: Phase = Phase.F,
        op_class: OpClass = OpClass.OTHER,
        signature: Signature | None = None,
        inputs: Iterable[int] = (),
        outputs: Iterable[Out] = (),
        unit_of: int | None = None,
        kernels: int = 1,
        sync: bool = False,
        workspace: int | Affine = 0,
        resident: int | Affine = 0,
        elements: int = 0,
        seconds: float = math.nan,
        cpu_seconds: float = math.nan,
        loops: OpLoops | None = None,
    ) -> int:
        """Adds the next op of the program and returns its handle.

        The fields are those of `OpGraph`, and: `inputs` and `outputs` are what it reads (tensor
        handles) and writes; `unit_of` is an op whose placement unit it joins (None starts one);
        `seconds` and `cpu_seconds` are measured (NaN: costed from the signature; inf: not there);
        `loops` calls an input by its tensor handle, an output by its place among `outputs`.

        Raises:
            GraphError: an unknown tensor, or a number that is negative or out of range.
        """
        handle = len(self._ops)
        where = f"{self.name}: op {name!r}"
        used = sorted(set(inputs))
        if used and not 0 <= used[0] <= used[-1] < len(self._tensors):
            raise GraphError(f"{where}: input tensor {used[-1]} does not exist")
        for label, value in (("seconds", seconds), ("cpu_seconds", cpu_seconds)):
            if value < 0:
                raise GraphError(f"{where}: {label} is negative ({value})")
        if not (0 <= kernels <= 2**31 - 1 and 0 <= elements <= MAX_BYTES):
            raise GraphError(f"{where}: kernels {kernels} or elements {elements} out of range")
        self._ops.append(
            OpPart(name, module, target, phase, op_class, signature, used, kernels, sync,
                affine_bytes(workspace, f"{where}: workspace"),
                affine_bytes(resident, f"{where}: resident"),
                elements, seconds, cpu_seconds, loops)
        )  # fmt: skip
        self._parent.append(handle)
        self._outputs.append([])
        for index, out in enumerate(outputs):
            self._tensor(out.name or f"{name}:{index}", handle, out)
        if loops is not None:
            check_tensors(loops, used, len(self._outputs[handle]), where)
        if unit_of is not None:
            self.merge_units(unit_of, handle)
        return handle

    def outputs(self, op: int) -> tuple[int, ...]:
        """Returns the tensor handles an op writes, in order."""
        return tuple(self._outputs[op])

    def merge_units(self, first: int, second: int) -> None:
        """Makes two ops, and all ops already with them, one placement unit."""
        a, b = self._find(first), self._find(second)
        self._parent[max(a, b)] = min(a, b)

    def build(self, *, measured_on: str | None = None) -> OpGraph:
        """Returns the checked, read-only graph.

        Args:
            measured_on: device kind of the measured seconds, None = unknown.

        Raises:
            GraphError: no ops, or two ops of one name.
        """
        if not self._ops:
            raise GraphError(f"{self.name}: a graph needs at least one op")
        names = unique_names(((op.name, 0.0) for op in self._ops), self.name)
        signatures = tuple(dict.fromkeys(op.signature for op in self._ops if op.signature))
        index: dict[Signature | None, int] = {s: i for i, s in enumerate(signatures)}
        roots = [self._find(op) for op in range(len(self._ops))]
        units = {root: unit for unit, root in enumerate(dict.fromkeys(roots))}
        return OpGraph(
            name=self.name,
            op_names=tuple(names),
            op_modules=tuple(op.module for op in self._ops),
            op_targets=tuple(op.target for op in self._ops),
            phase=np.array([op.phase for op in self._ops], np.uint8),
            op_class=np.array([op.op_class for op in self._ops], np.uint8),
            signature=np.array([index.get(op.signature, -1) for op in self._ops], np.int32),
            signatures=signatures,
            unit=np.array([units[root] for root in roots], np.int32),
            kernels=np.array([op.kernels for op in self._ops], np.int32),
            sync=np.array([op.sync for op in self._ops], np.bool_),
            workspace=np.array([op.workspace for op in self._ops], np.int64),
            resident=np.array([op.resident for op in self._ops], np.int64),
            elements=np.array([op.elements for op in self._ops], np.int64),
            batch=self.batch,
            fixed=fixed_costs(self._ops, measured_on, self.batch),
            **tensor_columns(self._ops, self._tensors),
        )

    def _tensor(self, name: str, producer: int, out: Out) -> int:
        handle = len(self._tensors)
        if out.storage_of is not None and not 0 <= out.storage_of < handle:
            raise GraphError(f"{self.name}: tensor {name!r} shares a storage that does not exist")
        storage = handle if out.storage_of is None else self._tensors[out.storage_of].storage
        size = affine_bytes(out.bytes, f"{self.name}: tensor {name!r}")
        self._tensors.append(TensorPart(name, producer, size, storage, out.role))
        if producer >= 0:
            self._outputs[producer].append(handle)
        return handle

    def _find(self, op: int) -> int:
        while self._parent[op] != op:
            self._parent[op] = self._parent[self._parent[op]]
            op = self._parent[op]
        return op
