"""``placewright run``, from the plan file to the record."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from calibration.run.measure import Effort, Measured, measure
from calibration.run.work import StepReport
from calibration.run.yardstick import drift_of, time_yardstick
from simcore.cli import main
from simcore.cluster import Cluster
from simcore.errors import RunError
from simcore.plan import Plan
from simcore.sources import load_graph

SOURCE = "tests.run_models:skip"


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    graph, job, _ = load_graph(SOURCE, {"batch": 8, "optimizer": "sgd"})
    cluster = Cluster.preset("4xV100-NVLink")
    places = [unit % 2 for unit in range(graph.num_units)]
    path = tmp_path / "plan.json"
    Plan.from_placement(graph, cluster, job, places).save(path)
    return path


def test_a_plan_runs_and_its_record_is_kept(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, trace = plan_file.with_name("runs.jsonl"), plan_file.with_name("trace.json")
    command = ["run", str(plan_file), "--graph", SOURCE, "--steps", "5", "--warmup", "1", "--json"]
    command += ["--allow-noise", "--record", str(records), "--trace", str(trace)]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(records.read_text())
    assert printed["stands_in"]
    assert printed["backend"] == "gloo"
    assert [rank["device"] for rank in printed["ranks"]] == ["gpu0", "gpu1"]
    assert printed["measured_s"] > 0
    assert printed["last_loss"] < printed["first_loss"]
    check_timeline(json.loads(trace.read_text())["traceEvents"])


def check_timeline(events: Sequence[dict[str, Any]]) -> None:
    """Ops run one at a time, in the order of the graph, and after what they need."""
    graph, _, _ = load_graph(SOURCE, {"batch": 8, "optimizer": "sgd"})
    order = {name: op for op, name in enumerate(graph.op_names)}
    span = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in order}
    assert {"first.addmm", "last.addmm", "last.weight.update"} <= span.keys()
    for track in (0, 1):
        mine = [e for e in events if e["ph"] == "X" and e["tid"] == track]
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine)
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))
        ran = [order[e["name"]] for e in mine if e["name"] in order]
        assert ran == sorted(ran)
    producer, consumer, _ = graph.edges()
    for a, b in zip(producer.tolist(), consumer.tolist(), strict=True):
        before, after = (span.get(graph.op_names[op]) for op in (a, b))
        assert before is None or after is None or before[1] <= after[0] + 1e-3


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["--graph", "graph.json"], 2, "needs a model by name or a factory"),
        (["--graph", SOURCE, "--timeout", "no"], 2, "is not a number of seconds"),
        (["--graph", SOURCE, "--device", "cuda"], 1, "this machine has 0"),
        (["--graph", SOURCE, "--backend", "nccl"], 1, "every rank needs a GPU of its own"),
        ([], 2, "needs a model by name or a factory"),
        (["--graph", SOURCE, "--record", "no/such/r.jsonl"], 2, "no such folder: no/such"),
        (["--graph", SOURCE, "--trace", "."], 2, "cannot be written"),
        (["--graph", SOURCE, "--trace", "x.json", "--record", "./x.json"], 2, "would overwrite"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    status: int,
    reason: str,
) -> None:
    assert main(["run", str(plan_file), *arguments]) == status
    said = capsys.readouterr().err.splitlines()
    assert reason in said[-1]


class Drifting:
    """A fleet of one rank whose yardstick goes as it is told."""

    def __init__(self, yardsticks: Sequence[float]) -> None:
        self.yardsticks = list(yardsticks)

    def ask(self, question: str) -> list[Any]:
        answers = {"start_peak": None, "peak": (3, 1)}
        return [self.yardsticks.pop(0) if question == "yardstick" else answers[question]]

    def step(self, number: int, **_: bool) -> list[StepReport]:
        return [StepReport(1.0, 1.5, (0.25,), (), {})]


def tried(yardsticks: Sequence[float], *, allow_noise: bool = False) -> Measured:
    effort = Effort(steps=2, warmup=1, allow_noise=allow_noise)
    return measure(Drifting(yardsticks), 0, effort)  # type: ignore[arg-type]


def test_a_noisy_machine_is_refused_after_three_tries() -> None:
    quiet, noisy = (1.0, 1.02, 1.0), (1.0, 1.2, 1.0)
    assert tried(quiet).median == 0.5
    assert tried(noisy + quiet).drift == pytest.approx(0.02)
    assert tried(noisy, allow_noise=True).drift == pytest.approx(0.2)
    with pytest.raises(RunError, match=r"^noisy machine: the yardstick drifted by 20%"):
        tried(noisy * 3)


def test_drift_is_the_worst_of_any_rank_from_its_own_median() -> None:
    assert drift_of([[1.0, 2.0], [1.0, 2.0], [1.0, 2.6]]) == pytest.approx(0.3)
    assert drift_of([[1.0, 5.0], [1.05, 5.0], [1.1, 5.0]]) == pytest.approx(0.05 / 1.05)


def test_the_yardstick_takes_a_while() -> None:
    assert 1e-5 < time_yardstick() < 10


def test_spread_is_half_the_distance_between_quartiles_over_the_median() -> None:
    seconds = tuple(1.0 + number / 10 for number in range(5))
    measured = Measured(
        seconds=seconds, losses=(), peak_bytes=(), bare_bytes=(), drift=0.0, slices=()
    )
    assert measured.spread == pytest.approx(0.15 / 1.2)
