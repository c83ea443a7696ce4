"""An ONNX file -> OpGraph and Job: its forward, trained.

A file of ONNX is, nearly always, a forward. Its nodes are run as the torch ops that they stand for,
on fake tensors, and the training step is recorded as that of any model: the backward is autograd's,
the update is the job's. Derived, not read, are therefore: the backward; the update; the loss (the
first output where it is one number, else the mean of the floating outputs); that every floating
initializer of more than one element is a parameter, but for the statistics of batch norms and the
factors of a Resize; and that batch norms use the statistics of the batch.

A first dimension with a name is the batch; other named dimensions are the sequence length. A file
with a fixed batch is rescaled: see `torch_onnx_moves`.
"""

import contextlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from simcore.errors import CaptureError, GraphError, JobError
from simcore.frontends.torch_capture import capture_report
from simcore.frontends.torch_onnx_layers import LAYERS, VALUES
from simcore.frontends.torch_onnx_moves import MOVES
from simcore.frontends.torch_onnx_nodes import FUNCTIONS, Node
from simcore.graph import OpGraph
from simcore.job import Job

DEFAULT_BATCH = 32  # samples, where the file leaves it open
DEFAULT_LENGTH = 128  # tokens, where the file leaves it open
_STATISTICS = (3, 4)  # inputs of a batch norm
_MARKS = re.compile(r"[^\w.]+")
_FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
_ERRORS = (ValueError, TypeError, IndexError, AttributeError, KeyError)


class _Input(NamedTuple):
    """One input of the graph."""

    shape: tuple[int, ...]  # 0 = the batch
    dtype: torch.dtype


class _Call(NamedTuple):
    """One node: what it is called with."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    shape: tuple[int, ...] | None  # of its first input, in the file


def decode_onnx(content: bytes, source: str, changes: Mapping[str, Any]) -> tuple[OpGraph, Job]:
    """Returns the training step of an ONNX file, and its job.

    Args:
        content: of the file.
        source: its path, for messages.
        changes: fields of the job that differ from the file's own.

    Raises:
        GraphError: no ONNX, no package to read it, or an op that is not known; names file and node.
        CaptureError: the step cannot be recorded.
        JobError: the batch, or the sequence length, of the file cannot be changed.
    """
    onnx = _package(source)
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # the protobuf library has errors of its own
        raise GraphError(f"{source}: not ONNX: {_line(error)}") from None
    if not model.graph.node:
        raise GraphError(f"{source}: not ONNX, or without nodes")
    with contextlib.suppress(onnx.shape_inference.InferenceError):
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    if "sequence_length" in changes and not _has_length(model):
        raise JobError(f"{source}: no input has a sequence length that is open")
    job = Job().replace(**changes)
    length = job.sequence_length or DEFAULT_LENGTH
    try:
        inputs = _inputs(onnx, model, length, source)
        fixed = _fixed_batch(inputs)
        module = _Model(onnx, model, source, fixed)
    except (*_ERRORS, RuntimeError) as error:
        raise GraphError(f"{source}: not a sound graph of ONNX: {_line(error)}") from None
    job = job if job.batch else job.replace(batch=fixed or DEFAULT_BATCH)

    def example(batch: int) -> tuple[torch.Tensor, ...]:
        module.batch = (fixed, batch)
        return tuple(_example(each, fixed, batch) for each in inputs)

    try:
        graph, report = capture_report(module, example, job, name=source)
    except CaptureError as error:
        if fixed and "batch" in str(error):
            raise JobError(
                f"{error}; the batch of {fixed} is part of the file: export it with a dynamic one"
            ) from None
        raise
    if missing := report.missing_gradients:
        names = ", ".join(missing[:5])
        what = f"{source}: {len(missing)} initializers get no gradient and are not updated: {names}"
        warnings.warn(what, stacklevel=2)
    return graph, job


def module_of(model: Any, source: str) -> nn.Module:
    """Returns the forward of a loaded model, with parameters on the meta device."""
    onnx = _package(source)
    return _Model(onnx, model, source, 0)


def _package(source: str) -> Any:
    try:
        import onnx
        import onnx.reference
        import onnx.shape_inference
    except ImportError:
        raise GraphError(
            f"{source}: reading ONNX needs the package onnx: pip install 'placewright[onnx]'"
        ) from None
    return onnx


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _inputs(onnx: Any, model: Any, length: int, source: str) -> list[_Input]:
    """Returns the inputs that are no initializers."""
    held = {each.name for each in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in held:
            continue
        kind = value.type.tensor_type
        if not kind.elem_type:
            raise GraphError(f"{source}: input {value.name!r} is no tensor")
        shape = [dim.dim_value or (0 if place == 0 else length)
                 for place, dim in enumerate(kind.shape.dim)]  # fmt: skip
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        known = _FLOATS.get(kind.elem_type) or torch.from_numpy(np.zeros(1, dtype)).dtype
        found.append(_Input(tuple(shape), known))
    return found


def _has_length(model: Any) -> bool:
    """Returns whether an input has an open dimension beside the first, which is the batch."""
    held = {each.name for each in model.graph.initializer}
    shapes = (v.type.tensor_type.shape.dim[1:] for v in model.graph.input if v.name not in held)
    return any(not dim.dim_value for shape in shapes for dim in shape)


def _fixed_batch(inputs: Sequence[_Input]) -> int:
    """Returns the first dimension of the first input, 0 where it is open."""
    return next((each.shape[0] for each in inputs if each.shape), 0)


def _example(each: _Input, fixed: int, batch: int) -> torch.Tensor:
    shape = list(each.shape)
    if shape and shape[0] in (0, fixed):
        shape[0] = batch
    return torch.empty(shape, dtype=each.dtype)


class _Step(nn.Module):
    """One node, as a module, so that its ops are recorded under its name."""

    def __init__(self, call: _Call, source: str, opset: int) -> None:
        super().__init__()
        self.call, self.source, self.opset = call, source, opset

    def forward(self, inputs: Sequence[Any], batch: tuple[int, int]) -> Any:
        """Runs the node; known values stay known where nothing else is read."""
        call = self.call
        where = f"{self.source}: node {call.name} ({call.op})"
        function = FUNCTIONS.get(call.op) or MOVES.get(call.op) or LAYERS.get(call.op)
        known = not any(isinstance(value, torch.Tensor) for value in inputs)
        if known:
            return _evaluated(call, inputs, where)
        if function is None:
            raise CaptureError(f"{where}: this op is not supported")
        try:
            return function(Node(call.op, inputs, call.attributes, call.shape, batch, self.opset))
        except _ERRORS as error:
            raise CaptureError(f"{where}: {_line(error)}") from None
        except RuntimeError as error:
            now = f" at batch {batch[1]}" if batch[0] not in (0, batch[1]) else ""
            raise CaptureError(f"{where}{now}: {_line(error)}") from None


def _evaluated(call: _Call, inputs: Sequence[Any], where: str) -> Any:
    """Runs a node of known values with ONNX's reference."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    names = [f"i{place}" if value is not None else "" for place, value in enumerate(inputs)]
    outputs = [f"o{place}" for place in range(len(call.outputs))]
    node = onnx.helper.make_node(call.op, names, outputs, **call.attributes)
    feeds = {name: value for name, value in zip(names, inputs, strict=True) if name}
    try:
        made: Any = ReferenceEvaluator(node).run(None, feeds)
    except Exception as error:  # whatever numpy raises in it
        raise CaptureError(f"{where}: {_line(error)}") from None
    return tuple(made) if len(made) > 1 else made[0]


class _Model(nn.Module):
    """The graph of a file, run node by node."""

    def __init__(self, onnx: Any, model: Any, source: str, fixed: int) -> None:
        super().__init__()
        self.source, self.batch = source, (fixed, fixed)
        graph = model.graph
        self.known: dict[str, Any] = {"": None}
        self.paths: dict[str, str] = {}  # initializer -> where it is a parameter or buffer
        self.results = [each.name for each in graph.output]
        held = {each.name for each in graph.initializer}
        self.given = [each.name for each in graph.input if each.name not in held]
        opset = max(
            (o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1
        )
        calls = _calls(onnx, graph, source)
        frozen = {
            call.inputs[place] for call in calls if call.op == "BatchNormalization"
            for place in _STATISTICS if place < len(call.inputs)
        }  # fmt: skip
        read = {
            call.inputs[place] for call in calls for place in VALUES.get(call.op, ())
            if place < len(call.inputs)
        }  # fmt: skip
        for each in graph.initializer:
            if each.name in read:
                self.known[each.name] = self._array(onnx, each)
            else:
                self._hold(onnx, each, is_frozen=each.name in frozen)
        self.steps: list[tuple[str, _Call]] = []
        self._place(calls, opset)

    def _hold(self, onnx: Any, tensor: Any, *, is_frozen: bool) -> None:
        """Keeps an initializer: as a known value, a buffer or a parameter."""
        shape, kind = tuple(tensor.dims), _FLOATS.get(tensor.data_type)
        if kind is None or int(np.prod(shape)) <= 1:
            self.known[tensor.name] = self._array(onnx, tensor)
            return
        parent, leaf = self._container(tensor.name)
        empty = torch.empty(shape, dtype=kind, device="meta")
        if is_frozen:
            parent.register_buffer(leaf, empty)
        else:
            parent.register_parameter(leaf, nn.Parameter(empty))

    def _array(self, onnx: Any, tensor: Any) -> Any:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            shape, kind = tuple(tensor.dims), tensor.data_type
            return np.ones(shape, onnx.helper.tensor_dtype_to_np_dtype(kind))
        return onnx.numpy_helper.to_array(tensor)

    def _container(self, name: str) -> tuple[nn.Module, str]:
        """Returns the module that a dotted name is in, and its last part."""
        *path, leaf = [part for part in _MARKS.sub("_", name).split(".") if part] or ["_"]
        parent: nn.Module = self
        for part in path:
            if not isinstance(getattr(parent, part, None), nn.Module):
                parent.add_module(part if not hasattr(parent, part) else f"{part}_", nn.Module())
            parent = getattr(parent, part)
        while hasattr(parent, leaf):
            leaf += "_"
        self.paths[name] = ".".join([*path, leaf])
        return parent, leaf

    def _place(self, calls: Sequence[_Call], opset: int) -> None:
        """Makes a module of each node, beside the parameters that it reads."""
        now = ""
        for call in calls:
            held = next((self.paths[name] for name in call.inputs if name in self.paths), None)
            now = now if held is None else held.rpartition(".")[0]
            name = f"{now}.{_MARKS.sub('_', call.name)}" if now else _MARKS.sub("_", call.name)
            name = name.replace("..", ".")
            parent, leaf = self._container_of_step(name)
            parent.add_module(leaf, _Step(call, self.source, opset))
            self.steps.append((f"{now}.{leaf}" if now else leaf, call))

    def _container_of_step(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        parent = self.get_submodule(path) if path else self
        while hasattr(parent, leaf):
            leaf += "_"
        return parent, leaf

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Runs all nodes in order."""
        values: dict[str, Any] = dict(self.known) | dict(zip(self.given, inputs, strict=True))
        for name, path in self.paths.items():
            owner, _, leaf = path.rpartition(".")
            values[name] = getattr(self.get_submodule(owner), leaf)
        for path, call in self.steps:
            for name in call.inputs:
                if name not in values:
                    raise CaptureError(f"{self.source}: node {call.name}: no value {name!r}")
            made = self.get_submodule(path)([values[name] for name in call.inputs], self.batch)
            many = made if isinstance(made, tuple) else (made,)
            values |= dict(zip(call.outputs, many, strict=False))
        results = [values[name] for name in self.results]
        return results[0] if len(results) == 1 else tuple(results)


def _calls(onnx: Any, graph: Any, source: str) -> list[_Call]:
    """Returns the nodes in order."""
    found = []
    taken: set[str] = set()
    shapes = {
        each.name: tuple(dim.dim_value for dim in each.type.tensor_type.shape.dim)
        for each in (*graph.input, *graph.value_info, *graph.output)
    }
    for place, node in enumerate(graph.node):
        name = (node.name or f"{node.op_type}_{place}").replace(".", "_")
        name = name if name not in taken else f"{name}_{place}"
        taken.add(name)
        attributes = {
            each.name: onnx.helper.get_attribute_value(each) for each in node.attribute
        }  # fmt: skip
        if any(each.g.node for each in node.attribute):
            raise GraphError(
                f"{source}: node {name} ({node.op_type}): control flow is not supported; export "
                "the graph without branches and loops"
            )
        if node.domain not in ("", "ai.onnx", "com.microsoft"):
            raise GraphError(f"{source}: node {name}: domain {node.domain!r} is not known")
        shape = shapes.get(node.input[0]) if node.input else None
        found.append(
            _Call(name, node.op_type, tuple(node.input), tuple(node.output), attributes, shape)
        )
    return found
