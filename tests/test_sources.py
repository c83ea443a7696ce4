"""What a user names is found: models, factories and files, and never by a file's say-so."""

import json
import sys
from pathlib import Path

import pytest

from simcore import sources
from simcore.errors import GraphError, JobError, UsageError
from simcore.graph import OpGraph
from simcore.graph_file import write_graph
from simcore.sources import is_captured, is_file, load_graph, read_graph_file

PROFILE = (
    "node1 -- Linear(1, 1) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=4.0, parameter_size=8.0\n"
)
NODE = {"id": 0, "fpgaLatency": 1.0, "cpuLatency": 9.0, "size": 0.0, "name": "a"}
FACTORY = """
import torch

def linear(batch: int):
    return torch.nn.Linear(3, 1), torch.zeros(batch, 3)
"""


IDLE = (
    FACTORY
    + """
def idle():
    net = torch.nn.Linear(3, 1)
    net.spare = torch.nn.Linear(3, 1)
    return net, torch.zeros(2, 3)
"""
)


def content(tmp_path: Path, kind: str) -> bytes:
    if kind == "pipedream":
        return PROFILE.encode()
    if kind == "partitioning":
        return json.dumps({"nodes": [NODE], "edges": []}).encode()
    write_graph(OpGraph.from_edges({"a": 1.0}, []), tmp_path / "own")
    return (tmp_path / "own").read_bytes()


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n\n"])
@pytest.mark.parametrize("kind", ["pipedream", "partitioning", "own"])
def test_a_file_is_known_by_its_content(tmp_path: Path, kind: str, start: bytes) -> None:
    path = tmp_path / "odd.name"
    path.write_bytes(start + content(tmp_path, kind))
    assert read_graph_file(path).op_names[0] in ("a", "node1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "not a graph file"),
        ("{}", 'neither "format" nor "nodes"'),
        ('{"format": "placewright-plan/1"}', "placewright-plan/1"),
        ('{"format": 3}', "not a graph"),
        ('{"nodes": [', "truncated"),
        ("[1]", "not a graph"),
        ("[" * 100_000, "odd.name"),
        ('{"x": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_of_no_known_format_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "odd.name"
    path.write_text(text)
    with pytest.raises(GraphError, match=r"odd\.name") as caught:
        read_graph_file(path)
    assert reason in str(caught.value)


def test_a_model_wins_over_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vgg-16").write_text(PROFILE)
    assert not is_file("vgg-16")
    assert is_captured("vgg-16")
    assert load_graph("./vgg-16")[0].op_names[0] == "node1"


def test_an_unknown_name_is_met_with_a_suggestion() -> None:
    with pytest.raises(GraphError, match="did you mean vgg-16 or vgg-19"):
        load_graph("VGG_16x")
    with pytest.raises(GraphError, match="neither a model nor a file"):
        load_graph("")


def test_a_file_keeps_its_batch_and_takes_the_rest_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    write_graph(OpGraph.from_edges({"a": 1.0}, [], batch=8), path)
    graph, job, source = load_graph(str(path), {"optimizer": "sgd"})
    assert (job.batch, job.optimizer, source) == (8, "sgd", str(path))
    assert graph.num_ops == 1
    with pytest.raises(JobError, match="sequence length"):
        load_graph(str(path), {"sequence_length": 4})


def test_a_factory_is_captured_at_the_batch_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_net.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    graph, job, _ = load_graph("my_own_net:linear", {"batch": 6})
    assert (graph.batch, job.batch) == (6, 6)
    assert int(graph.elements.sum()) == 4


def test_parameters_without_gradient_are_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_idle_net.py").write_text(IDLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.warns(UserWarning, match="2 trainable .* not updated: spare.weight, spare.bias"):
        load_graph("my_idle_net:idle")


def test_a_factory_that_only_a_file_names_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_made", None)
    with pytest.raises(UsageError, match="os:getcwd, which is not run because a file says so"):
        load_graph("os:getcwd", trusted=False)
