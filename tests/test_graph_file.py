import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore import graph_file
from simcore.errors import GraphError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.graph_file import decode_graph, encode_graph, read_graph, write_graph
from simcore.signature import CLASS_NAMES, Signature

SECONDS = st.sampled_from([math.nan, 0.0, 1e-9, 0.1, 5e300, math.inf])
BYTES = st.one_of(
    st.integers(0, 2**53 + 1),
    st.tuples(st.integers(-(2**50), 2**50), st.integers(1, 2**50)),
)
NAMES = st.sampled_from(["", "a", "net.layer.0", 'q"\\\n\0', "größe", "数"])


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """Graphs in which every field has every kind of value."""
    batch = draw(st.none() | st.integers(1, 2**40))
    builder = GraphBuilder(draw(NAMES), batch=batch)
    tensors = [builder.parameter(draw(NAMES), draw(BYTES)) for _ in range(draw(st.integers(0, 2)))]
    tensors += [builder.buffer(draw(NAMES), draw(BYTES)) for _ in range(draw(st.integers(0, 2)))]
    measured = draw(st.booleans())
    for op in range(draw(st.integers(1, 6))):
        handle = builder.op(
            f"{draw(NAMES)}{op}",
            module=draw(NAMES),
            target=draw(NAMES),
            phase=draw(st.sampled_from(Phase)),
            op_class=draw(st.sampled_from(OpClass)),
            signature=draw(st.none() | signatures()),
            inputs=draw(st.lists(st.sampled_from(tensors), max_size=3)) if tensors else [],
            outputs=draw(st.lists(outputs(tensors), max_size=2)),
            unit_of=draw(st.none() | st.integers(0, op - 1)) if op else None,
            kernels=draw(st.integers(0, 2**31 - 1)),
            sync=draw(st.booleans()),
            workspace=draw(BYTES),
            resident=draw(BYTES),
            elements=draw(st.integers(0, 2**60)),
            seconds=draw(SECONDS) if measured else math.nan,
            cpu_seconds=draw(SECONDS) if measured else math.nan,
        )
        tensors += builder.outputs(handle)
    graph = builder.build()
    return builder.build(measured_on=draw(st.none() | NAMES)) if graph.fixed else graph


def outputs(tensors: list[int]) -> st.SearchStrategy[Out]:
    base = st.none() | st.sampled_from(tensors) if tensors else st.none()
    name = st.none() | NAMES.filter(bool)
    return st.builds(Out, BYTES, base, st.sampled_from(Role), name)


def signatures() -> st.SearchStrategy[Signature]:
    dims = st.tuples(st.just("elements"), st.integers(0, 2**53 + 1), st.integers(0, 9))
    classes = st.sampled_from([name for name in CLASS_NAMES if name in ("other", "softmax", "rnn")])
    factor = st.floats(0, 1e9)
    return st.builds(Signature, classes, NAMES, st.tuples(dims), factor, st.just((3, 4)))


@given(graphs())
@settings(max_examples=60)
def test_what_is_read_is_what_was_written(graph: OpGraph) -> None:
    data = encode_graph(graph)
    again = decode_graph(data, "file")
    assert again.name == graph.name
    assert again.content_hash() == graph.content_hash()
    assert encode_graph(again) == data


def test_a_file_is_read_back(tmp_path: Path) -> None:
    graph = OpGraph.from_edges({"a": 1.5, "b": 2}, [("a", "b", 8)], measured_on="T4-16GB", batch=4)
    write_graph(graph, tmp_path / "graph.json")
    again = read_graph(str(tmp_path / "graph.json"))
    assert again.content_hash() == graph.content_hash()
    assert again.fixed is not None
    assert again.fixed.measured_on == "T4-16GB"


def test_the_file_is_one_line_an_op() -> None:
    graph = OpGraph.from_edges({"a": 1.5, "b": math.inf}, [("a", "b", 8)])
    assert encode_graph(graph).decode().splitlines() == [
        "{",
        '"format": "placewright-graph/1",',
        '"name": "graph",',
        '"batch": null,',
        '"measured_on": null,',
        '"signatures": [],',
        '"tensors": [',
        '{"bytes":8}',
        "],",
        '"ops": [',
        '{"name":"a","kernels":0,"outputs":[0],"seconds":1.5},',
        '{"name":"b","kernels":0,"inputs":[0],"seconds":"inf"}',
        "]",
        "}",
    ]


def test_writing_replaces_a_file_at_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    for seconds in (1.0, 2.0):
        write_graph(OpGraph.from_edges({"a": seconds}, []), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["graph.json"]
    assert json.loads(path.read_text())["ops"][0]["seconds"] == 2.0


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "graph.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(GraphError, match=r"graph.json: cannot be written: No space left on device"):
        write_graph(OpGraph.from_edges({"a": 1.0}, []), path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["graph.json"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("absent.json", "cannot be read: No such file"),
        ("", "cannot be read: Is a directory"),
        ("nul\0", "cannot be read: embedded null"),
    ],
)
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        read_graph(f"{tmp_path}/{path}")


@pytest.mark.parametrize("path", ["absent/graph.json", "", "nul\0"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(GraphError, match="cannot be written: "):
        write_graph(OpGraph.from_edges({"a": 1.0}, []), f"{tmp_path}/{path}")
    assert list(tmp_path.iterdir()) == []


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(2**30 + 1)  # sparse
    with pytest.raises(GraphError, match=r"huge.json: 1073741825 bytes is more than .* \(1 GiB\)"):
        read_graph(path)


def test_huge_data_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(graph_file, "MAX_FILE_BYTES", 10)
    with pytest.raises(GraphError, match="x: 11 bytes is more than"):
        decode_graph(b" " * 11, "x")


# one op "a" with a tensor that op "b" reads, and a parameter that "b" reads too
GOOD: dict[str, Any] = {
    "format": "placewright-graph/1",
    "name": "g",
    "signatures": [{"op_class": "other", "dtype": "fp32"}],
    "tensors": [{"name": "w", "bytes": 4, "role": "parameter"}, {"bytes": 8}, {"bytes": 8}],
    "ops": [
        {"name": "a", "outputs": [1], "signature": 0},
        {"name": "b", "inputs": [0, 1], "outputs": [2]},
    ],
}


def changed(*path: Any, to: Any) -> bytes:
    """The good file with one value changed, or left out where it is None."""
    content = json.loads(json.dumps(GOOD))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    if to is None:
        del place[path[-1]]
    return json.dumps(content).encode()


def test_a_file_written_by_hand_is_read() -> None:
    graph = decode_graph(json.dumps(GOOD).encode(), "file")
    assert graph.op_names == ("a", "b")
    assert graph.tensor_names == ("w", "a:0", "b:0")
    assert graph.num_units == 2
    assert graph.kernels.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (json.dumps(GOOD).encode()[:-30], "truncated"),
        (b"\xff\xfe{}", "malformed"),
        (json.dumps(GOOD).encode().replace(b'"b"', b'"\xff"'), "UTF-8"),
        (b"[" * 10**6, "Expected `object`, got `array`"),
        (b'{"x":' + b"[" * 10**6, "nested too deeply|recursion"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "format is None, not 'placewright-graph/1'"),
        (b"input1 -- forward_compute_time=1", "malformed"),
        (changed("format", to="placewright-graph/2"), "format is 'placewright-graph/2', not"),
        (changed("format", to=1), "Expected `str | null`, got `int`"),
        (changed("colour", to="red"), "unknown field `colour`"),
        (changed("name", to=None), "missing required field `name`"),
        (changed("batch", to=0), "batch must be between 1 and 2"),
        (changed("batch", to=10**30), "batch must be between 1 and 2"),
        (changed("measured_on", to="T4-16GB"), "measured_on is 'T4-16GB', but no op has seconds"),
        (changed("ops", to=[]), "the first 3 tensors have no producer"),
        (changed("ops", 1, "colour", to="red"), r"unknown field `colour` - at `\$.ops\[1\]`"),
        (changed("ops", 1, "name", to="a"), "g: two ops are named 'a'"),
        (changed("ops", 1, "phase", to="G"), "op 'b': phase: 'G' is none of F, B, I, W, U"),
        (changed("ops", 1, "op_class", to="matmull"), "op 'b': op_class: 'matmull' is none of"),
        (changed("ops", 1, "seconds", to=-1), "op 'b': seconds is negative"),
        (changed("ops", 1, "seconds", to="nan"), "Invalid enum value 'nan'"),
        (changed("ops", 1, "seconds", to=[1]), r"Expected `float \| str \| null`, got `array`"),
        (changed("ops", 1, "cpu_seconds", to=-1), "op 'b': cpu_seconds is negative"),
        (changed("ops", 1, "kernels", to=-1), "op 'b': kernels -1"),
        (changed("ops", 1, "kernels", to=1.5), "Expected `int`, got `float`"),
        (changed("ops", 1, "elements", to=10**30), "op 'b': kernels 1 or elements 1000"),
        (changed("ops", 1, "workspace", to=-1), "op 'b': workspace: .* is negative"),
        (changed("ops", 1, "resident", to=[0, -1]), "op 'b': resident: .* is negative"),
        (changed("ops", 1, "workspace", to=[1, 2, 3]), "Expected `array` of length 2"),
        (changed("ops", 1, "sync", to="yes"), "Expected `bool`, got `str`"),
        (changed("ops", 1, "inputs", to=[3]), "op 'b': input 3 is not a position in tensors"),
        (changed("ops", 1, "inputs", to=[-1]), "op 'b': input -1 is not a position in tensors"),
        (changed("ops", 1, "inputs", to=[10**30]), "op 'b': input 1000.* is not a position"),
        (changed("ops", 0, "inputs", to=[2]), "op 'a': input 2 is made by op 'b'"),
        (changed("ops", 1, "inputs", to=[2]), "op 'b': input 2 is made by op 'b'"),
        (changed("ops", 1, "outputs", to=[1]), r"op 'b': outputs are \[1\], .*must be \[2\]"),
        (changed("ops", 1, "outputs", to=[2, 3, 4]), "ops have 4 outputs, tensors are fewer"),
        (changed("ops", 0, "signature", to=1), "op 'a': signature 1 is not a position"),
        (changed("ops", 0, "signature", to=-1), "op 'a': signature -1 is not a position"),
        (changed("ops", 1, "unit", to="x"), r"Expected `int \| null`, got `str`"),
        (changed("tensors", 0, "role", to="gradient"), "tensors.0. 'w': the first 1 tensors have"),
        (changed("tensors", 0, "name", to=None), "tensors.0. None: the first 1 tensors have"),
        (changed("tensors", 0, "storage_of", to=0), "tensors.0. 'w': the first 1 tensors have"),
        (changed("tensors", 0, "bytes", to=-4), "tensor 'w': .* is negative"),
        (changed("tensors", 2, "bytes", to=-4), "tensor 'b:0': .* is negative"),
        (changed("tensors", 2, "bytes", to=10**30), "tensor 'b:0': 1000.* is not a whole number"),
        (changed("tensors", 2, "bytes", to=int("9" * 400)), "out of range|is not a whole number"),
        (changed("tensors", 2, "role", to="weight"), "op 'b': role: 'weight' is none of"),
        (changed("ops", 0, "phase", to="f"), "op 'a': phase: 'f' is none of F, B, I, W, U"),
        (changed("tensors", 2, "storage_of", to=2), "'b:0' shares a storage that does not exist"),
        (changed("tensors", 2, "storage_of", to=-1), "'b:0' shares a storage that does not exist"),
        (changed("tensors", 2, "bytes", to="8"), r"Expected `int \| array`, got `str`"),
        (changed("signatures", 0, "op_class", to="x"), r"signatures\[0\]: .*unknown op class 'x'"),
        (changed("signatures", 0, "op_class", to="matmul"), r"signatures\[0\]: .*missing dims"),
        (changed("signatures", 0, "colour", to=1), r"signatures\[0\]: .*unknown field `colour`"),
        (changed("signatures", 0, "factor", to=-1), r"signatures\[0\]: .*factor -1"),
        (changed("signatures", 0, "traffic", to=[-1, 0]), r"signatures\[0\]: .*traffic -1"),
        (changed("signatures", 0, to=7), r"signatures\[0\]: Expected `object`, got `int`"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_name_and_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(GraphError, match=f"^file: .*({reason})") as error:
        decode_graph(data, "file")
    assert len(str(error.value).splitlines()) == 1


def test_no_damage_to_a_file_escapes_as_another_error() -> None:
    rng = np.random.default_rng(0)
    good = np.frombuffer(json.dumps(GOOD).encode(), np.uint8)
    for _ in range(2000):
        data = good.copy()
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        cut = data[: rng.integers(len(data) // 2, len(data) + 1)].tobytes()
        try:
            decode_graph(cut, "file").content_hash()
        except GraphError as error:
            assert str(error).startswith("file: ")  # noqa: PT017 - most damages are refused
