"""``placewright plan``: what it prints, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from agents.commands import add_plan
from simcore import Cluster, OpGraph, Plan, simulate
from simcore import cli as command_line
from simcore.commands import add_simulate
from simcore.graph_file import write_graph
from simcore.sources import load_graph
from simcore.units import GiB
from tests.test_cli import Command
from tests.test_portfolio import step

KEYS = {
    "feasible",
    "step_time_s",
    "throughput_samples_per_s",
    "peak_memory_bytes",
    "allocated_memory_bytes",
    "capacity_bytes",
    "lower_bound_s",
    "gap",
    "strategy",
    "evaluations",
    "seconds",
    "baselines",
    "baseline_notes",
    "seed",
    "graph",
    "job",
    "cluster",
}


@pytest.fixture(autouse=True)
def _only_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command_line, "entry_points", lambda group: [Command("plan", add_plan)])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_graph(step(3, gradient=400, measured_on="V100-SXM2-16GB"), tmp_path / "step.json")
    return "step.json"


def run(*arguments: str, evaluations: int = 200) -> int:
    budget = ["--evaluations", str(evaluations)]
    return command_line.main(["plan", *arguments, *budget])


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert run(*arguments, "--json") == status
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    data: dict[str, Any] = json.loads(out)
    return data


def test_the_answer_has_all_keys(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, model, "--cluster", "4xV100-NVLink", "--seed", "3")
    assert data.keys() >= KEYS
    names = Cluster.preset("4xV100-NVLink").device_names
    for key in ("peak_memory_bytes", "allocated_memory_bytes", "capacity_bytes"):
        assert tuple(data[key]) == names
        assert all(isinstance(value, int) for value in data[key].values())
    assert data["baselines"].keys() >= {"single_device", "data_parallel"}
    for name, value in data["baselines"].items():
        assert value is not None or data["baseline_notes"][name]
    for key in ("graph", "job", "cluster"):
        assert data[key].keys() == {"name", "hash"}
    assert data["feasible"] is True
    assert data["seed"] == 3
    assert data["step_time_s"] >= data["lower_bound_s"]
    assert data["gap"] == data["step_time_s"] / data["lower_bound_s"] - 1
    assert data["throughput_samples_per_s"] == 4 / data["step_time_s"]


def test_the_plan_file_finds_its_graph_and_gives_the_same_time(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plans").mkdir()
    out = tmp_path / "plans" / "mine.json"
    data = answer(capsys, model, "--cluster", "4xV100-NVLink", "--out", str(out))
    plan = Plan.load(out)
    assert plan.graph.source == "../step.json"
    assert plan.cluster.source == "4xV100-NVLink"
    assert data["out"] == str(out)
    graph, _, _ = load_graph(str(out.parent / plan.graph.source))
    cluster = Cluster.preset(plan.cluster.source)
    assert simulate(graph, cluster, plan.job, plan).step_time == data["step_time_s"]


def test_a_file_that_does_not_say_its_device_kind_is_taken_for_the_gpus_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, warned in ((None, True), ("V100-SXM2-16GB", False)):
        graph = OpGraph.from_edges({"a": 1.0}, [], measured_on=kind)
        write_graph(graph, tmp_path / "step.json")
        assert run("step.json", "--cluster", "4xV100-NVLink") == 0
        assert ("are taken as those of V100-SXM2-16GB" in capsys.readouterr().err) == warned


def test_simulate_refuses_a_trace_in_place_of_the_plan(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, model, "--cluster", "4xV100-NVLink")
    commands = [Command("simulate", add_simulate)]
    monkeypatch.setattr(command_line, "entry_points", lambda group: commands)
    assert command_line.main(["simulate", "plan.json", "--trace", "./plan.json"]) == 2
    assert "would overwrite the plan" in capsys.readouterr().err
    assert Plan.load("plan.json").provenance is not None


def test_a_graph_beside_the_plan_is_not_taken_for_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_graph(OpGraph.from_edges({"a": 1.0}, []), tmp_path / "a.json")
    (tmp_path / "vgg16").write_bytes((tmp_path / "a.json").read_bytes())
    answer(capsys, "./vgg16", "--cluster", "1xV100")
    assert Plan.load(tmp_path / "plan.json").graph.source == "./vgg16"


def test_the_same_seed_gives_the_same_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for _ in range(2):
        assert run(model, "--cluster", "2xA100+4xT4", "--assume-linear", "--seed", "1") == 0
        plan = json.loads((tmp_path / "plan.json").read_text())
        del plan["provenance"]["seconds"]
        texts.append(json.dumps(plan))
    assert texts[0] == texts[1]
    capsys.readouterr()


def test_a_person_reads_one_screen(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--cluster", "4xV100-NVLink", "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) < 40
    for word in (
        "step",
        "gpu0",
        "single_device",
        "data_parallel",
        "lower bound",
        "wrote plan.json",
    ):
        assert word in out


def test_progress_goes_to_standard_error(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, model, "--cluster", "4xV100-NVLink")
    assert run(model, "--cluster", "4xV100-NVLink", "--json") == 0
    err = capsys.readouterr().err
    assert err.startswith("preparing the simulator")
    assert "single_device: best 9 ms by single_device" in err


def test_what_does_not_fit_is_status_1_and_still_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_graph(step(2, gradient=9 * GiB), tmp_path / "large.json")
    data = answer(capsys, "large.json", "--cluster", "1xV100", "--exclude", "cpu0", status=1)
    assert data.keys() >= KEYS | {"error"}
    assert data["feasible"] is False
    assert data["step_time_s"] > 0
    assert "gpu0" in data["error"]
    assert "too much" in data["error"]
    assert not (tmp_path / "plan.json").exists()


def test_demands_reach_the_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demands = ["--pin", "f1=gpu2", "--exclude", "gpu0", "--reserve-memory", "1.5GiB"]
    data = answer(capsys, model, "--cluster", "4xV100-NVLink", *demands)
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.constraints.pins == {"f1": "gpu2"}
    assert plan.constraints.exclude == ("gpu0",)
    assert plan.constraints.reserve_memory_bytes == 3 * GiB // 2
    assert data["capacity_bytes"]["gpu1"] == pytest.approx((15.77 - 1.5) * GiB)
    assert data["peak_memory_bytes"]["gpu0"] == 0


def test_settings_and_job_reach_the_plan(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--order", "ready", "--contention", "port", "--optimizer", "sgd", "--batch", "8"]
    answer(capsys, model, "--cluster", "4xV100-NVLink", "--assume-linear", *options)
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.settings.order, plan.settings.contention) == ("ready", "port")
    assert (plan.job.optimizer, plan.job.batch, plan.job.assume_linear) == ("sgd", 8, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "4xV100"], "did you mean"),
        (["--pin", "f1"], "write MODULE=DEVICE"),
        (["--pin", "f1=gpu0", "--pin", "f1=gpu1"], "contradicts"),
        (["--pin", "f9=gpu0"], "no module or op 'f9'"),
        (["--pin", "f1=gpu9"], "no device 'gpu9'"),
        (["--exclude", "gpu9"], "no device 'gpu9'"),
        (["--reserve-memory", "much"], "not a size"),
        (["--reserve-memory", "-1"], "--reserve-memory"),
        (["--seed", "x"], "not a whole number"),
        (["--strategy", "best"], "invalid choice"),
        (["--budget", "3"], "not allowed with"),
        (["--out", "no/where/plan.json"], "there is no folder"),
        (["--out", "."], "cannot be written"),
        (["--out", "./step.json"], "would overwrite what the plan is made from"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    model: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = [] if "--cluster" in options else ["--cluster", "4xV100-NVLink"]
    status = run(model, *cluster, *options, evaluations=50)
    err = capsys.readouterr().err
    assert message in err
    assert status == (1 if "--cluster" in options else 2)
    assert "Traceback" not in err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_a_budget_that_is_no_time_is_refused(
    model: str, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["plan", model, "--cluster", "1xV100", f"--budget={seconds}"]) == 2
    assert "is not a number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 2**30), ("1 gb", 10**9), ("500MiB", 500 * 2**20), ("123", 123), ("0.5KiB", 512)],
)
def test_sizes_are_read_as_people_write_them(
    model: str, tmp_path: Path, text: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, model, "--cluster", "4xV100-NVLink", "--reserve-memory", text)
    assert Plan.load(tmp_path / "plan.json").constraints.reserve_memory_bytes == size


def test_an_interruption_saves_the_best_plan(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def press(_: object, progress: Any) -> None:
        if progress.stage == "chain_split":
            raise KeyboardInterrupt

    monkeypatch.setattr("agents.commands._Display.update", press)
    data = answer(capsys, model, "--cluster", "4xV100-NVLink")
    assert data["interrupted"] is True
    assert Plan.load(tmp_path / "plan.json").predicted is not None
