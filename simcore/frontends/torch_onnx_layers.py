"""ONNX's recurrent layers and Resize, in torch.

A recurrent layer is one op, as accelerators run it. What does not change what there is to do is not
looked at: the order of the gates in the weights, the direction of a single one, lengths of single
sequences, where a GRU resets, clipping.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from simcore.frontends.torch_onnx_nodes import Node, Tensor

_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}  # inputs of the first states
_PEEPHOLES = 7
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
_SECOND = 10  # last opset where the factors of a Resize are its second input
VALUES = {"Resize": (1, 2), "Upsample": (1,)}  # inputs whose values decide, parameters never
_MODES: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}


def _recurrent(node: Node) -> tuple[Tensor, ...]:
    """Returns all outputs, then the last states; axes are direction, step, batch as ONNX has them.

    Raises:
        ValueError: peepholes, coupled gates, activations that torch does not have, or weights of
            other shapes than the layer's.
    """
    batch_first = bool(node.get("layout", 0))
    x = _sequence(node, batch_first)
    weights, biases = (node.tensor(1), node.tensor(2)), node.optional(3)
    directions, hidden = _checked(node, x, weights, biases)
    if node.optional(_PEEPHOLES) is not None or node.get("input_forget", 0):
        raise ValueError("peepholes and coupled gates are not supported")
    shape = (directions, x.shape[1], hidden)
    states = [_state(node, place, shape, batch_first) for place in _STATES[node.op]]
    given = states if node.op == "LSTM" else states[0]
    flat = _flat(weights, biases)
    made = _function(node)(x, given, flat, biases is not None, 1, 0.0, True, directions == 2, False)
    out = made[0].reshape(*x.shape[:2], directions, hidden)
    ends = made[1:]
    if batch_first:
        return (out.transpose(0, 1), *(end.transpose(0, 1) for end in ends))
    return (out.transpose(1, 2), *ends)


def _sequence(node: Node, batch_first: bool) -> Tensor:
    """Returns the input, [step, batch, feature]."""
    x = node.tensor(0)
    if x.dim() != 3:
        raise ValueError(f"its input has {x.dim()} axes, not step, batch and feature")
    return x.transpose(0, 1) if batch_first else x


def _checked(
    node: Node, x: Tensor, weights: tuple[Tensor, Tensor], biases: Tensor | None
) -> tuple[int, int]:
    """Returns directions and hidden features.

    Raises:
        ValueError: shapes that do not belong to these, naming the input.
    """
    name = node.get("direction", b"forward").decode()
    if name not in _DIRECTIONS:
        raise ValueError(f"direction {name!r} is not known")
    hidden = int(node.get("hidden_size", (0, *weights[1].shape)[-1]))
    if hidden < 1:
        raise ValueError(f"{hidden} hidden features, where there must be one or more")
    directions, rows = _DIRECTIONS[name], _GATES[node.op] * hidden
    wanted = [(directions, rows, x.shape[2]), (directions, rows, hidden), (directions, 2 * rows)]
    for what, given, shape in zip(
        ("weights", "recurrent weights", "biases"), (*weights, biases), wanted, strict=True
    ):
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(
                f"{what} of shape {tuple(given.shape)}, where {name}, {hidden} hidden features "
                f"and {_GATES[node.op]} gates need {shape}"
            )
    return directions, hidden


def _state(node: Node, place: int, shape: tuple[int, ...], batch_first: bool) -> Tensor:
    """Returns a first state, [direction, batch, hidden]; zeros where none is given.

    Raises:
        ValueError: a state of another shape; the batch may also be that of the file.
    """
    state = node.optional(place)
    if state is None:
        return node.tensor(0).new_zeros(shape)
    directions, batch, hidden = shape
    fitting = [(directions, size, hidden) for size in (batch, node.batch[0])]
    if batch_first:
        fitting = [(size, first, last) for first, size, last in fitting]
    if tuple(state.shape) not in fitting:
        given, wanted = tuple(state.shape), fitting[0]
        raise ValueError(f"a first state of shape {given}, where the layer needs {wanted}")
    return state.transpose(0, 1).contiguous() if batch_first else state


def _flat(weights: tuple[Tensor, Tensor], biases: Tensor | None) -> list[Tensor]:
    """Returns the weights of each direction as torch lists them."""
    parts = list(weights) + ([] if biases is None else list(biases.chunk(2, 1)))
    apart = [[part.squeeze(0)] if part.shape[0] == 1 else part.unbind(0) for part in parts]
    return [each for direction in zip(*apart, strict=True) for each in direction]


def _function(node: Node) -> Callable[..., tuple[Tensor, ...]]:
    names = [name.decode() for name in node.get("activations", [])]
    if node.op != "RNN":
        usual = {"LSTM": {"Sigmoid", "Tanh"}, "GRU": {"Sigmoid", "Tanh"}}[node.op]
        if set(names) - usual:
            raise ValueError(f"activations {', '.join(names)} are not supported")
        found: Callable[..., tuple[Tensor, ...]] = _MODES[node.op]
        return found
    if set(names) - {"Tanh", "Relu"} or len(set(names)) > 1:
        raise ValueError(f"activations {', '.join(names)} are not supported")
    return torch.rnn_relu if "Relu" in names else torch.rnn_tanh


def _resized(node: Node) -> Tensor:
    """Returns a picture, or anything with as many axes behind the channels, in another size."""
    data = node.tensor(0)
    target = _target(node, data)
    mode = node.get("mode", b"nearest").decode()
    mode = {"linear": {3: "linear", 4: "bilinear", 5: "trilinear"}.get(data.dim(), ""),
            "cubic": "bicubic"}.get(mode, mode)  # fmt: skip
    return F.interpolate(data, target, mode=mode)


def _target(node: Node, data: Tensor) -> list[int]:
    """Returns how long the axes behind the channels become.

    Raises:
        ValueError: it is not known, or channels change too.
    """
    rank = data.dim()
    axes = [axis % rank for axis in node.get("axes", range(rank))]
    if rank < 3 or axes not in (list(range(rank)), list(range(2, rank))):
        raise ValueError(f"axes {axes} of {rank} are not those behind the channels")
    sizes, factors = node.numbers("sizes", 3), _factors(node)
    given = sizes if sizes is not None else factors
    if given is None:
        raise ValueError("the size depends on the values of a tensor")
    if len(given) != len(axes):
        raise ValueError(f"{len(given)} sizes or factors of {len(axes)} axes")
    same = 1 if sizes is None else data.shape[1]
    if axes[0] == 0 and given[1] != same:
        raise ValueError("channels change too")
    behind = zip(data.shape[2:], given[2 - rank :], strict=True)
    return [int(n * each) if sizes is None else int(each) for n, each in behind]


def _factors(node: Node) -> list[float] | None:
    """Returns a factor for each axis, None where they are not known.

    They are the third input of a Resize since opset 11, else the second, before 9 an attribute.
    """
    place = 2 if node.op == "Resize" and node.opset > _SECOND else 1
    scales = node.get("scales") if node.value(place) is None else node.value(place)
    if scales is None or isinstance(scales, torch.Tensor):
        return None
    return [float(factor) for factor in scales]


LAYERS: dict[str, Callable[[Node], Any]] = {
    **dict.fromkeys(_STATES, _recurrent),
    "Resize": _resized,
    "Upsample": _resized,
}
