"""``placewright plan`` with pipelines: the file it writes, what it says, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from agents import portfolio
from agents.commands import add_plan
from agents.planners.pipeline_layouts import Demands
from simcore import Cluster, Job, Plan, Settings, simulate
from simcore import cli as command_line
from simcore.commands import add_simulate
from simcore.errors import InfeasibleError
from simcore.graph_file import write_graph
from simcore.plan_summary import plan_record
from simcore.sources import load_graph
from simcore.units import GiB, MiB
from tests.test_cli import Command
from tests.test_pipeline_planners import layers
from tests.test_planners import CPU, GPU, mesh

CLUSTER = ("--cluster", "4xV100-NVLink", "--assume-linear")


@pytest.fixture(autouse=True)
def _two_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = [Command("plan", add_plan), Command("simulate", add_simulate)]
    monkeypatch.setattr(command_line, "entry_points", lambda group: commands)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Eight layers of 200 MB of parameters: copies of it sum them, stages do not."""
    graph = layers([4e-3] * 8, batch=16, parameters=200_000_000, activation=16_000)
    write_graph(graph, tmp_path / "layers.json")
    return "layers.json"


def run(*arguments: str, evaluations: int = 60) -> int:
    return command_line.main(["plan", *arguments, "--evaluations", str(evaluations)])


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, **options: int) -> dict[str, Any]:
    status = options.pop("status", 0)
    assert run(*arguments, "--json", **options) == status
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize("strategy", ["pipeline", "auto"])
def test_the_file_loads_validates_and_simulates_to_the_same_time(
    strategy: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = answer(capsys, model, *CLUSTER, "--strategy", strategy, evaluations=400)
    plan = Plan.load(tmp_path / "plan.json")
    graph, job, _ = load_graph(model, {"assume_linear": True})
    cluster = Cluster.preset("4xV100-NVLink")
    assert plan.is_pipeline
    assert plan.validate(graph, cluster, job) == []
    assert simulate(graph, cluster, job, plan).step_time == data["step_time_s"]
    assert data["strategy"] == "pipeline"
    assert data["baselines"]["pipeline"] == data["step_time_s"]
    assert data["baselines"]["data_parallel"] > data["step_time_s"]
    assert 0 < data["lower_bound_s"] <= data["step_time_s"]
    assert command_line.main(["simulate", "plan.json", "--json", "--trace", "trace.json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == data["step_time_s"]
    assert again["stages"] == data["stages"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_stages_are_in_the_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(
        capsys, model, *CLUSTER, "--strategy", "pipeline", "--schedule", "1f1b",
        "--microbatches", "8",
    )  # fmt: skip
    stages = data["stages"]
    assert stages[0]["first_module"] == "net.0"
    assert stages[-1]["last_module"] == "net.7"
    assert sum(stage["units"] for stage in stages) == 8
    for stage in stages:
        assert 0 < stage["busy"] <= 1
        assert stage["peak_memory_bytes"] == max(
            data["peak_memory_bytes"][device] for device in stage["devices"]
        )
    assert "schedule 1f1b, 8 microbatches of 2 samples" in data["explanation"]
    assert "What binds: stage" in data["explanation"]
    assert data["semantics"] == []


def test_microbatches_and_schedule_may_be_fixed(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--microbatches", "4", "--schedule", "gpipe"]
    answer(capsys, model, *CLUSTER, "--strategy", "pipeline", *fixed)
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.microbatches, plan.schedule) == (4, "gpipe")


def test_the_same_evaluations_write_the_same_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for _ in range(2):
        data = answer(capsys, model, *CLUSTER, "--strategy", "pipeline", "--seed", "1")
        plan = json.loads((tmp_path / "plan.json").read_text())
        del plan["provenance"]["seconds"]
        texts.append(json.dumps(plan))
        assert data["evaluations"] <= 60
    assert texts[0] == texts[1]


def test_a_person_reads_one_screen(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, *CLUSTER, "--strategy", "pipeline", "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) < 40
    for word in ("stage0", "net.0", "gpu0", "busy", "bubble", "What binds", "pipeline",
                 "data_parallel", "single_device", "lower bound", "wrote plan.json"):  # fmt: skip
        assert word in out


def test_progress_names_the_search_for_pipelines(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, *CLUSTER, "--strategy", "pipeline", "--json") == 0
    assert "\npipeline: " in capsys.readouterr().err


def test_placements_alone_have_no_pipelines_beside_them(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = answer(capsys, model, *CLUSTER, "--strategy", "placement")
    assert "pipeline" not in data["baselines"]
    assert data["stages"] == []


# the mathematics


@pytest.fixture
def normed(tmp_path: Path) -> str:
    graph = layers(
        [4e-3] * 8, batch=16, parameters=200_000_000, activation=16_000,
        target="aten._native_batch_norm_legit_functional.default",
    )  # fmt: skip
    write_graph(graph, tmp_path / "normed.json")
    return "normed.json"


def test_batch_norm_is_split_only_where_that_is_allowed(
    normed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = answer(capsys, normed, *CLUSTER, "--strategy", "pipeline")
    assert Plan.load(tmp_path / "plan.json").microbatches == 1
    assert "--allow batch-norm" in data["baseline_notes"]["pipeline"]
    allowed = answer(capsys, normed, *CLUSTER, "--strategy", "pipeline", "--allow", "batch-norm")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.semantics == ("batch norm per microbatch",)
    assert plan.microbatches > 1
    assert allowed["step_time_s"] < data["step_time_s"]
    assert allowed["semantics"] == ["batch norm per microbatch"]
    assert "changes the mathematics of training: batch norm" in allowed["explanation"]


def test_where_all_plans_split_batch_norm_the_leave_is_asked_for(
    normed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(normed, *CLUSTER, "--strategy", "pipeline", "--microbatches", "4")
    err = capsys.readouterr().err
    assert status == 1
    assert "every pipeline changes the mathematics" in err
    assert "--allow batch-norm" in err


def test_an_asynchronous_pipeline_needs_leave(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (model, *CLUSTER, "--strategy", "pipeline", "--schedule", "pipedream")
    assert run(*asked) == 2
    assert "needs --allow asynchronous" in capsys.readouterr().err
    data = answer(capsys, *asked, "--allow", "asynchronous", evaluations=12)
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.schedule == "pipedream"
    assert plan.semantics == ("asynchronous updates",)
    assert "a minibatch of 16 samples at a time" in data["explanation"]


def test_nothing_asynchronous_is_chosen_unasked(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, model, *CLUSTER, evaluations=300)
    assert Plan.load(tmp_path / "plan.json").semantics == ()


# refusals


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--schedule", "1fb1"], 2, "did you mean '1f1b'"),
        (["--microbatches", "5"], 2, "a batch of 16 does not divide by it"),
        (["--microbatches", "0"], 2, "not a whole number"),
        (["--allow", "everything"], 2, "invalid choice"),
        (["--strategy", "placement", "--schedule", "gpipe"], 2, "is about pipelines"),
        (["--strategy", "placement", "--microbatches", "4"], 2, "is about pipelines"),
        (["--strategy", "sharding", "--microbatches", "4"], 2, "is about pipelines"),
        (["--agent", "mars"], 2, "--agent proposes placements; --strategy pipeline has none"),
        (["--schedule", "interleaved", "--microbatches", "1"], 1, "no pipeline of layers"),
        (["--exclude", "gpu0", "--exclude", "gpu1", "--exclude", "gpu2"], 1, "needs two GPUs"),
    ],
)
def test_what_cannot_be_is_one_line(
    model: str, options: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = [] if "--strategy" in options else ["--strategy", "pipeline"]
    if "--schedule" in options and "interleaved" in options:
        options = [*options, "--exclude", "gpu0", "--exclude", "gpu1", "--exclude", "gpu2"]
    assert run(model, *CLUSTER, *strategy, *options, "--quiet") == status
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_seconds_of_one_batch_have_no_pipelines(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = answer(capsys, model, "--cluster", "4xV100-NVLink", evaluations=100)
    assert data["baselines"]["pipeline"] is None
    assert "--assume-linear" in data["baseline_notes"]["pipeline"]


def test_what_does_not_fit_is_said_with_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_graph(layers([1e-3] * 2, parameters=9 * GiB), tmp_path / "large.json")
    assert run("large.json", *CLUSTER, "--strategy", "pipeline", "--quiet") == 1
    assert "no pipeline of layers on 4xV100-NVLink" in capsys.readouterr().err


# the portfolio


def test_pipelines_compete_with_placements_and_copies() -> None:
    graph = layers([1e-2] * 8, parameters=4, activation=80)
    job = Job(batch=8, optimizer="sgd", assume_linear=True)
    cluster = mesh(*[GPU] * 4, bandwidth=1e10)
    settings = Settings(slow_down=False)
    copies = portfolio.plan(graph, cluster, job, evaluations=300, settings=settings)
    assert copies.plan.provenance is not None
    assert copies.plan.provenance.strategy == "data_parallel"  # it has no bubble
    assert copies.baselines["pipeline"] is None or (
        copies.baselines["pipeline"] >= copies.result.step_time
    )
    heavy = layers([1e-2] * 8, parameters=100 * MiB, activation=80)
    stages = portfolio.plan(heavy, cluster, job, evaluations=300, settings=settings)
    assert stages.plan.provenance is not None
    assert stages.plan.provenance.strategy == "pipeline"
    assert stages.lower_bound <= stages.result.step_time


def test_a_pipeline_says_why_gpus_are_idle() -> None:
    graph = layers([1e-2] * 3, batch=7)
    cluster, job = mesh(*[GPU] * 4), Job(batch=7, optimizer="sgd", assume_linear=True)
    found = portfolio.plan(graph, cluster, job, strategy="pipeline", evaluations=30)
    record = plan_record(graph, cluster, job, found.plan, found.result, found.lower_bound)
    assert "Idle: d3 (3 of 4 GPUs" in record["explanation"]


def test_an_interruption_keeps_the_best_pipeline() -> None:
    graph = layers([1e-2] * 8)
    cluster, job = mesh(*[GPU] * 4), Job(batch=8, optimizer="sgd", assume_linear=True)

    def press(progress: portfolio.Progress) -> None:
        if progress.stage == "pipeline" and progress.evaluations > 20:
            raise KeyboardInterrupt

    found = portfolio.plan(
        graph, cluster, job, strategy="pipeline", evaluations=500, progress=press
    )
    assert found.interrupted
    assert found.feasible
    assert found.plan.is_pipeline


def test_no_pipeline_at_all_is_an_error_with_its_reason() -> None:
    job = Job(batch=8, optimizer="sgd", assume_linear=True)
    with pytest.raises(InfeasibleError, match="on mesh: needs two GPUs"):
        portfolio.plan(layers([1e-2] * 2), mesh(GPU, CPU), job, strategy="pipeline", evaluations=9)
    with pytest.raises(InfeasibleError, match="does not take 7 microbatches"):
        portfolio.plan(
            layers([1e-2] * 8, batch=7), mesh(*[GPU] * 2), job.replace(batch=7),
            strategy="pipeline", demands=Demands(schedule="interleaved", microbatches=7),
            evaluations=9,
        )  # fmt: skip


def test_what_runs_again_is_said() -> None:
    graph = layers([1.0] * 4, kept=16 * GiB)
    cluster, job = mesh(*[GPU] * 2), Job(batch=8, optimizer="sgd", assume_linear=True)
    demands = Demands(schedule="gpipe", microbatches=8)
    found = portfolio.plan(
        graph, cluster, job, strategy="pipeline", demands=demands, evaluations=30
    )
    record = plan_record(graph, cluster, job, found.plan, found.result, found.lower_bound)
    assert "Memory binds: stage0, stage1 run their forward again." in record["explanation"]
    assert [stage["recompute"] for stage in record["stages"]] == ["full", "full"]
