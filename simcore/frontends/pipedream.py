"""PipeDream's layer profiles (``graph.txt``) -> fixed OpGraph.

A profile lists the layers of a network with measured forward and backward milliseconds and the
bytes of their outputs for a whole minibatch, then the edges between them. A layer becomes a
forward op (under its own name, ``node12``), a backward op (``node12.backward``) and, where it has
parameters, an update op (``node12.update``). The backward op reads the gradients of the layer's
outputs, its saved inputs and outputs, and its parameters; a gradient is as large as what it is
the gradient of.

What the file leaves open is decided so:

- The seconds contain the launch (layers were timed one by one), so ops launch no kernels of their
  own.
- ``Input`` layers carry data-loading time; it is dropped.
- Layers that no parameter comes before, or that no gradient reaches, have no backward op. A
  profile without any backward time is an inference profile: forward ops only.
- ``ReLU(inplace)``, reshapes and ``__getitem__`` share the storage of what they read; the last
  two, where they took no time, are views and stay with it.
- Parameters are fp32. The minibatch size is not in the file, so the graph's batch is unknown.
"""

import re
from pathlib import Path
from typing import NamedTuple

from simcore.errors import GraphError
from simcore.frontends.files import decode_text, parse_number, read_bytes
from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.signature import OpClass, Phase, Role, Signature
from simcore.topology import topological_order
from simcore.units import MS

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FP32 = 4  # bytes

# the first pattern that a layer's text starts with names its class
_CLASSES: tuple[tuple[str, OpClass], ...] = (
    (r"Input\d*\b", OpClass.INPUT),
    (r"View|Flatten|Reshape|__getitem__", OpClass.VIEW),
    (r"Conv\d?d", OpClass.CONVOLUTION),
    (r"Linear|Classifier", OpClass.MATMUL),
    (r"LSTM|GRU|RNN|EmuBidirLSTM|RecurrentAttention", OpClass.RNN),
    (r"\w*Norm", OpClass.NORMALISATION),
    (r"ReLU|Dropout|Add|Mul|Sigmoid|Tanh|Hardtanh", OpClass.POINTWISE),
    (r"\w*Pool", OpClass.POOLING),
    (r"Embedding", OpClass.EMBEDDING),
    (r"Softmax|LogSoftmax", OpClass.SOFTMAX),
    (r"Concat", OpClass.COPY),
)


class Layer(NamedTuple):
    """One node line of a profile."""

    name: str
    text: str  # what PyTorch prints for the layer
    op_class: OpClass
    forward: float  # s
    backward: float  # s
    outputs: tuple[int, ...]  # [output] bytes
    parameter: int  # bytes


class Profile(NamedTuple):
    """A whole profile, checked."""

    name: str
    layers: dict[str, Layer]  # in topological order
    sources: dict[str, list[str]]  # layer -> the layers that feed it, in the file's order


def read_pipedream(path: str | Path) -> OpGraph:
    """Returns the graph of a profile.

    Args:
        path: the ``graph.txt``.

    Raises:
        GraphError: the file cannot be read or breaks the format; names file, line and reason.
    """
    return decode_profile(decode_text(read_bytes(path), str(path)), str(path))


def decode_profile(text: str, source: str) -> OpGraph:
    """Returns the graph of a profile's text; `source` names the file in errors (GraphError)."""
    return _Training(parse_profile(text, source)).graph()


def parse_profile(text: str, source: str) -> Profile:
    """Returns the layers and edges of a profile's text.

    Args:
        text: the file's text.
        source: names the file in errors.

    Raises:
        GraphError: a malformed line, a layer listed twice, an edge to a missing layer, a cycle.
    """
    layers: dict[str, Layer] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{source}, line {number}"
        if line[:1].isspace() and line.strip():
            edges.append((*_edge(line, where), where))
        elif line.strip():
            layer = _layer(line.rstrip(), where)
            if layer.name in layers:
                raise GraphError(f"{where}: {layer.name} is listed twice")
            layers[layer.name] = layer
    if not layers:
        raise GraphError(f"{source}: no layers; is this a PipeDream profile?")
    return _ordered(layers, edges, source)


def _ordered(layers: dict[str, Layer], edges: list[tuple[str, str, str]], source: str) -> Profile:
    """Sorts by layer number as far as the edges allow: PipeDream numbers layers as they ran."""
    names = sorted(layers, key=lambda name: (int("".join(re.findall("[0-9]", name)) or 0), name))
    targets: dict[str, list[str]] = {name: [] for name in names}
    sources: dict[str, list[str]] = {name: [] for name in names}
    for first, second, where in edges:
        for name in (first, second):
            if name not in layers:
                raise GraphError(f"{where}: there is no layer {name!r}")
        if first not in sources[second]:  # x + x lists its edge twice
            targets[first].append(second)
            sources[second].append(first)
    order = topological_order(targets, source)
    return Profile(Path(source).name, {name: layers[name] for name in order}, sources)


def _edge(line: str, where: str) -> tuple[str, str]:
    names = [name.strip() for name in line.split(" -- ")]
    if len(names) != 2 or not all(names):
        raise GraphError(f"{where}: an edge is 'nodeA -- nodeB', not {line.strip()[:80]!r}")
    return names[0], names[1]


def _layer(line: str, where: str) -> Layer:
    name, *middle = line.split(" -- ")
    if middle and re.fullmatch(r"stage_id=\d+", middle[-1]):
        middle.pop()  # a plan of PipeDream's, not a property of the graph
    if len(middle) < 2:
        raise GraphError(
            f"{where}: a layer is 'nodeN -- text -- {_FIELDS[0]}=..., ...', not {line[:80]!r}"
        )
    where = f"{where}: {name}"
    values = _values(middle[-1], where)
    forward, backward, parameter = (
        parse_number(values[key], f"{where}: {key}") for key in (*_FIELDS[:2], _FIELDS[3])
    )
    sizes = re.sub(r"^\[(.*)\]$", r"\1", values["activation_size"]).split(";")
    text = " ".join(" -- ".join(middle[:-1]).split())
    return Layer(
        name=name,
        text=text,
        op_class=_op_class(text, is_free=forward == backward == 0),
        forward=forward * MS,
        backward=backward * MS,
        outputs=tuple(round(parse_number(s, f"{where}: activation_size")) for s in sizes),
        parameter=round(parameter),
    )


def _values(fields: str, where: str) -> dict[str, str]:
    values = {}
    for item in fields.split(", "):
        key, _, value = item.partition("=")
        if key not in _FIELDS:
            raise GraphError(f"{where}: unknown field {item[:80]!r}")
        values[key] = value.strip()
    if missing := [key for key in _FIELDS if key not in values]:
        raise GraphError(f"{where}: {missing[0]} is missing")
    return values


def _op_class(text: str, *, is_free: bool) -> OpClass:
    found = next((c for pattern, c in _CLASSES if re.match(pattern, text)), OpClass.OTHER)
    # a reshape that took time moved data
    return OpClass.COPY if found is OpClass.VIEW and not is_free else found


def _learning(profile: Profile) -> set[str]:
    """Returns the layers that have a backward op."""
    layers = profile.layers
    if all(layer.backward == 0 for layer in layers.values()):
        return set()
    trained: set[str] = set()  # a gradient is wanted: there is a parameter at or before the layer
    for name, layer in layers.items():
        if layer.parameter or trained.intersection(profile.sources[name]):
            trained.add(name)
    reached = {next(reversed(layers))}  # a gradient arrives, the first one at the last layer
    learning: set[str] = set()
    for name, layer in reversed(layers.items()):
        if layer.op_class is OpClass.INPUT:
            continue
        is_size = layer.text.startswith("Size(")  # a shape has no gradient
        if layer.backward > 0 or (name in trained and name in reached and not is_size):
            learning.add(name)
            reached.update(profile.sources[name])
    return learning


class _Training:
    """Writes a profile as one training step: forward, backward reversed, then the updates."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.learning = _learning(profile)
        self.builder = GraphBuilder(profile.name)
        self.size: dict[int, int] = {}  # activation or gradient tensor -> bytes
        self.owner: dict[int, str] = {}  # activation tensor -> layer that writes it
        self.op: dict[str, int] = {}  # layer -> forward op
        self.reads: dict[str, list[int]] = {}  # layer -> activation tensors
        self.parameter: dict[str, int] = {}  # layer -> parameter tensor
        self.gradients: dict[int, list[int]] = {}  # activation tensor -> its gradient tensors

    def graph(self) -> OpGraph:
        """Returns the graph."""
        layers = list(self.profile.layers.values())
        for layer in layers:
            self._forward(layer)
        updates = {
            layer.name: self._backward(layer)
            for layer in reversed(layers)
            if layer.name in self.learning
        }
        for layer in layers:
            if layer.parameter and layer.name in updates:
                self._update(layer, updates[layer.name])
        return self.builder.build()

    def _forward(self, layer: Layer) -> None:
        name, is_view = layer.name, layer.op_class is OpClass.VIEW
        reads = [t for source in self.profile.sources[name] for t in self._taken(source, layer)]
        inputs = list(reads)
        if layer.parameter:
            self.parameter[name] = self.builder.parameter(f"{name}.parameters", layer.parameter)
            inputs.append(self.parameter[name])
        base = None
        if is_view or "inplace" in layer.text:
            base = self._same_size(reads, layer.outputs)
        op = self.builder.op(
            name,
            target=layer.text,
            op_class=layer.op_class,
            inputs=inputs,
            outputs=[Out(size, storage_of=base, role=_role(layer)) for size in layer.outputs],
            unit_of=self.op[self.owner[base]] if is_view and base is not None else None,
            kernels=0,
            seconds=0.0 if layer.op_class is OpClass.INPUT else layer.forward,
        )
        self.op[name], self.reads[name] = op, reads
        for tensor, size in zip(self.builder.outputs(op), layer.outputs, strict=True):
            self.size[tensor], self.owner[tensor] = size, name

    def _backward(self, layer: Layer) -> int | None:
        """Adds the backward op and returns the gradient of the layer's parameters."""
        name = layer.name
        results = self.builder.outputs(self.op[name])
        arriving = [g for result in results for g in self.gradients.get(result, ())]
        wanted = [t for t in self.reads[name] if self.owner[t] in self.learning]
        base = None
        if layer.op_class is OpClass.VIEW:
            base = self._same_size(arriving, [self.size[t] for t in wanted])
        saved = [*results, *self.reads[name]]
        outputs = [
            Out(self.size[t], storage_of=base, name=f"{name}.gradient.{index}")
            for index, t in enumerate(wanted)
        ]
        if layer.parameter:
            saved.append(self.parameter[name])
            outputs.append(
                Out(layer.parameter, role=Role.GRADIENT, name=f"{name}.parameters.gradient")
            )
        op = self.builder.op(
            f"{name}.backward",
            target=layer.text,
            phase=Phase.B,
            op_class=layer.op_class,
            inputs=[*arriving, *saved],
            outputs=outputs,
            unit_of=self.op[name],
            kernels=0,
            seconds=layer.backward,
        )
        for tensor, gradient in zip(wanted, self.builder.outputs(op), strict=False):
            self.gradients.setdefault(tensor, []).append(gradient)
            self.size[gradient] = self.size[tensor]
        return self.builder.outputs(op)[-1] if layer.parameter else None

    def _update(self, layer: Layer, gradient: int | None) -> None:
        assert gradient is not None
        parameter = self.parameter[layer.name]
        elements = -(-layer.parameter // _FP32)
        self.builder.op(
            f"{layer.name}.update",
            target="optimizer",
            phase=Phase.U,
            op_class=OpClass.UPDATE,
            signature=Signature("update", "fp32", (("elements", elements, 0),)),
            inputs=[parameter, gradient],
            outputs=[Out(layer.parameter, storage_of=parameter, role=Role.PARAMETER)],
            unit_of=self.op[layer.name],
            elements=elements,
        )

    def _taken(self, source: str, reader: Layer) -> tuple[int, ...]:
        """Returns what a layer reads of another: one element of a tuple, or all of it."""
        outputs = self.builder.outputs(self.op[source])
        found = re.fullmatch(r"__getitem__\((\d+)\)", reader.text)
        element = int(found[1]) if found else len(outputs)
        return outputs[element : element + 1] or outputs

    def _same_size(self, tensors: list[int], sizes: tuple[int, ...] | list[int]) -> int | None:
        """Returns the tensor that a single result of equal size is a new version of."""
        if len(sizes) != 1:
            return None
        return next((t for t in tensors if self.size[t] == sizes[0]), None)


def _role(layer: Layer) -> Role:
    return Role.INPUT if layer.op_class is OpClass.INPUT else Role.ACTIVATION
