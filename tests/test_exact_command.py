"""``placewright plan FILE.json --objective max-load --exact``: what it prints, writes, refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from agents.commands import add_plan
from agents.exact.contiguous import Progress, best_contiguous
from agents.exact.free import best_free
from agents.exact.max_load import MaxLoadProblem, make_max_load, read_max_load
from simcore import Cluster, Plan, simulate
from simcore import cli as command_line
from simcore.frontends.dnn_partitioning import DeviceLimits, Edge, Node, PartitioningFile
from simcore.sources import load_graph
from tests.test_cli import Command

EXACT = ("--objective", "max-load", "--exact")


@pytest.fixture(autouse=True)
def _only_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command_line, "entry_points", lambda group: [Command("plan", add_plan)])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def graph(tmp_path: Path) -> str:
    """A diamond and an operator behind it: a -> b, c -> d -> e."""
    rows = [("a", 1.0, 7), ("b", 3.0, None), ("c", 3.0, None), ("d", 1.0, None), ("e", 4.0, None)]
    nodes = [
        {"id": i, "name": name, "fpgaLatency": time, "cpuLatency": 10 * time, "size": 8.0}
        | ({} if color is None else {"colorClass": color})
        for i, (name, time, color) in enumerate(rows)
    ]
    arcs = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
    edges = [{"sourceId": one, "destId": other, "cost": 0.5} for one, other in arcs]
    content = {
        "maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 30.0, "nodes": nodes, "edges": edges
    }  # fmt: skip
    (tmp_path / "graph.json").write_text(json.dumps(content))
    return "graph.json"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert command_line.main(["plan", *arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("kind", "load"), [(("--contiguous",), 8.0), ((), 7.5)])
def test_the_answer_has_the_objective_and_a_proof(
    graph: str, capsys: pytest.CaptureFixture[str], kind: tuple[str, ...], load: float
) -> None:
    found = answer(capsys, graph, *EXACT, *kind)
    # contiguous: a, b, c take 1 + 3 + 3, and the tensors of b and c leave; d and e go elsewhere
    # free: b, c take 3 + 3, and three tensors cross; a, d, e take 1 + 1 + 4, and the same three
    assert found["objective_value"] == pytest.approx(load)
    assert found["proven_bound"] == pytest.approx(load, rel=1e-6)
    assert found["feasible"]
    assert found["contiguous"] == bool(kind)
    assert sorted(n for row in found["devices"] for n in row["nodes"]) == [0, 1, 2, 3, 4]
    assert max(row["load"] for row in found["devices"]) == found["objective_value"]
    assert all(row["memory_bytes"] <= 30 for row in found["devices"] if "cpu" not in row["name"])


def test_the_plan_can_be_simulated_on_the_cluster_that_is_written(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, graph, *EXACT, "--contiguous", "--out", "best.json")
    plan = Plan.load(found["out"])
    cluster = Cluster.load(found["cluster_out"])
    ops, job, _ = load_graph(graph)
    assert cluster.device_names == ("accelerator0", "accelerator1", "cpu0")
    assert plan.validate(ops, cluster, job) == []
    assert simulate(ops, cluster, job, plan).step_time > 0
    assert plan.cluster.source == "./best.cluster.toml"


def test_what_is_shown_names_the_load_and_the_proof(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["plan", graph, *EXACT, "--contiguous"]) == 0
    said = capsys.readouterr()
    assert "contiguous split: largest load 8 in the file's unit, proven to be the best" in said.out
    assert "wrote plan.json and plan.cluster.toml" in said.out
    assert "linear orders: best none yet" in said.err


def test_a_file_that_does_not_fit_its_memory_is_infeasible(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(graph).read_text().replace('"maxCPUs": 1', '"maxCPUs": 0')
    Path(graph).write_text(text.replace("30.0", "12.0"))
    found = answer(capsys, graph, *EXACT, "--contiguous", status=1)
    assert not found["feasible"]
    assert found["objective_value"] is None
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("vgg16", *EXACT), "needs a dnn-partitioning file"),
        (("graph.json", *EXACT, "--cluster", "1xV100"), "--cluster does not go with"),
        (("graph.json", *EXACT, "--pin", "a=cpu0"), "--pin does not go with"),
        (("graph.json", "--objective", "max-load"), "needs --exact"),
        (("graph.json", "--exact", "--cluster", "1xV100"), "--exact needs --objective max-load"),
        (("graph.json",), "required: --cluster"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    graph: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert command_line.main(["plan", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"nodes": [], "edges": []}')
    assert command_line.main(["plan", "other.json", *EXACT]) == 1
    assert "needs a dnn-partitioning file: other.json: no nodes" in capsys.readouterr().err


def grid(width: int, length: int) -> MaxLoadProblem:
    """Returns chains side by side; their ideals are (length + 1) ** width."""
    nodes = [Node(n, 1.0 + n % 5, 50.0, 1.0, True, False, None) for n in range(width * length)]
    edges = [Edge(n, n + 1, 0.3) for n in range(width * length) if (n + 1) % length]
    limits = DeviceLimits(accelerators=3, cpus=1, accelerator_memory=1e3)
    return make_max_load(PartitioningFile(nodes, edges), limits, "grid")


@pytest.mark.parametrize("solve", [best_contiguous, best_free])
def test_ctrl_c_keeps_the_best_so_far(solve: Any) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.load < float("inf"):
            raise KeyboardInterrupt

    solution = solve(grid(3, 6), listener=interrupt)
    assert solution.interrupted
    assert solution.placement is not None
    assert solution.bound <= solution.load


def test_too_many_ideals_are_searched_at_the_borders_within_the_time() -> None:
    solution = best_contiguous(grid(9, 6), seconds=2)
    assert solution.num_ideals is None
    assert solution.placement is not None
    assert solution.bound <= solution.load <= 1.2 * solution.bound


def test_a_file_keeps_its_numbers(graph: str) -> None:
    problem = read_max_load(graph)
    assert (problem.num_accelerators, problem.num_cpus, problem.capacity) == (2, 1, 30.0)
    assert problem.tensor_cost.tolist() == [0.5] * 4  # one tensor an operator, read twice or once
