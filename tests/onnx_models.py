"""ONNX files made node by node; initializers have shapes but no data, as nobody reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

VGG_19 = (2, 2, 4, 4, 4)
CHANNELS = (64, 128, 256, 512, 512)


def tensor(name: str, shape: Sequence[int]) -> Any:
    made = TensorProto(name=name, data_type=TensorProto.FLOAT)
    made.dims.extend(shape)
    made.data_location = TensorProto.EXTERNAL
    return made


class Maker:
    """Collects nodes; each returns the name of its first output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def weight(self, name: str, *shape: int) -> str:
        self.initializers.append(tensor(name, shape))
        return name

    def numbers(self, name: str, values: Sequence[int]) -> str:
        self.initializers.append(
            helper.make_tensor(name, TensorProto.INT64, [len(values)], list(values))
        )
        return name

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        made = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(op, inputs, made, name=name, **attributes))
        return name

    def model(self, inputs: Sequence[tuple[str, int, Sequence[Any]]], result: str) -> Any:
        given = [helper.make_tensor_value_info(*each) for each in inputs]
        out = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "model", given, [out], self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def vgg(batch: int | str = "batch", *, repeats: Sequence[int] = VGG_19, side: int = 224) -> Any:
    """Returns VGG, with the loss of labels, as `simcore.models.vgg` builds it."""
    maker = Maker()
    now, channels, place = "images", 3, 0
    for width, count in zip(CHANNELS, repeats, strict=True):
        for _ in range(count):
            name = f"features.{place}"
            kernel = maker.weight(f"{name}.weight", width, channels, 3, 3)
            bias = maker.weight(f"{name}.bias", width)
            now = maker.node("Conv", now, kernel, bias, pads=[1] * 4, kernel_shape=[3, 3])
            now = maker.node("Relu", now)
            channels, place = width, place + 2
        now = maker.node("MaxPool", now, kernel_shape=[2, 2], strides=[2, 2])
        place += 1
    now = maker.node("Flatten", now)
    before = channels * (side // 32) ** 2
    for layer, width in ((0, 4096), (3, 4096), (6, 1000)):
        name = f"classifier.{layer}"
        weight = maker.weight(f"{name}.weight", width, before)
        now = maker.node("Gemm", now, weight, maker.weight(f"{name}.bias", width), transB=1)
        if layer < 6:
            now = maker.node("Relu", now)
        before = width
    loss = maker.node("SoftmaxCrossEntropyLoss", now, "labels")
    inputs = (
        ("images", TensorProto.FLOAT, [batch, 3, side, side]),
        ("labels", TensorProto.INT64, [batch]),
    )
    return maker.model(inputs, loss)


def one_node(op: str, shape: Sequence[int], *weights: Sequence[int], **attributes: Any) -> Any:
    """Returns a product and one op behind it, whose further inputs are weights."""
    maker = Maker()
    first = maker.node("Mul", "x", maker.weight("scale", *shape[1:]))
    names = [maker.weight(f"w{place}", *each) for place, each in enumerate(weights)]
    done = maker.node(op, first, *names, **attributes)
    return maker.model((("x", TensorProto.FLOAT, list(shape)),), done)


def attention(batch: int | str, *, heads: int = 4, width: int = 32, length: int = 16) -> Any:
    """Returns attention written out, with reshapes to a shape that names the batch."""
    maker = Maker()
    lead = batch if isinstance(batch, int) else 0
    apart = maker.numbers("apart", [lead, length, heads, width // heads])
    joint = maker.numbers("joint", [lead, length, width])
    parts = []
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        done = maker.node("MatMul", "x", maker.weight(f"{name}.weight", width, width))
        parts.append(maker.node("Transpose", maker.node("Reshape", done, apart), perm=order))
    scores = maker.node("Softmax", maker.node("MatMul", parts[0], parts[1]), axis=-1)
    seen = maker.node("Transpose", maker.node("MatMul", scores, parts[2]), perm=[0, 2, 1, 3])
    out = maker.node("Reshape", seen, joint)
    out = maker.node("MatMul", out, maker.weight("o.weight", width, width))
    scale, shift = maker.weight("norm.weight", width), maker.weight("norm.bias", width)
    out = maker.node("LayerNormalization", out, scale, shift)
    return maker.model((("x", TensorProto.FLOAT, [batch, length, width]),), out)


def recurrent(op: str, gates: int, *, directions: int = 1, layout: int = 0) -> Any:
    """Returns one recurrent layer, 32 wide with 64 hidden, and a product behind it."""
    maker, hidden, way = Maker(), 64, "bidirectional" if directions == 2 else "forward"
    now = "x" if layout else maker.node("Transpose", "x", perm=[1, 0, 2])
    weights = [
        maker.weight("rnn.w", directions, gates * hidden, 32),
        maker.weight("rnn.r", directions, gates * hidden, hidden),
        maker.weight("rnn.b", directions, 2 * gates * hidden),
    ]
    outputs = 3 if op == "LSTM" else 2
    options = {"hidden_size": hidden, "direction": way, "layout": layout}
    now = maker.node(op, now, *weights, outputs=outputs, **options)
    if not layout:
        now = maker.node("Transpose", now, perm=[2, 0, 1, 3])
    now = maker.node("Reshape", now, maker.numbers("flat", [0, 0, -1]))
    now = maker.node("MatMul", now, maker.weight("head.weight", directions * hidden, 8))
    return maker.model((("x", TensorProto.FLOAT, ["batch", 10, 32]),), now)


def resized(mode: str, **inputs: Any) -> Any:
    """Returns a convolution and a Resize of its pictures to twice their size."""
    maker = Maker()
    now = maker.node("Conv", "x", maker.weight("c.weight", 4, 3, 3, 3), pads=[1] * 4)
    if "sizes" in inputs:
        names = ["", "", maker.numbers("sizes", inputs["sizes"])]
    else:
        factors = helper.make_tensor("scales", TensorProto.FLOAT, [4], [1.0, 1.0, 2.0, 2.0])
        maker.initializers.append(factors)
        names = ["", "scales"]
    now = maker.node("Resize", now, *names, mode=mode)
    return maker.model((("x", TensorProto.FLOAT, ["batch", 3, 16, 16]),), now)


def save(model: Any, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


__all__ = ["attention", "one_node", "onnx", "save", "vgg"]
