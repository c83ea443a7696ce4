"""Published training runs: read, described, predicted, scored."""

import csv
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.published import rows
from calibration.published.assumptions import FITTED, GAP, HOST_FLOOR, UNALIGNED, Residual
from calibration.published.cause_kernels import TORCH
from calibration.published.clusters import cluster_of, machine_of
from calibration.published.models import GRAPHS, GPTSize, graph_of
from calibration.published.plans import Layout, plan_of, stage_ops
from calibration.published.prediction import Prediction, Step, published_run
from calibration.published.reading import Described, NotExpressible, describe_run
from calibration.published.residuals import fit_gap, fit_host_floor, fit_unaligned
from calibration.published.rows import Run, read_runs
from calibration.published.score import RunScore, inside_cells, score_each, scored
from calibration.regression_baseline import (
    ONE_NODE,
    SEVERAL_NODES,
    TERMS,
    baseline_seconds,
    fit_baseline,
)
from simcore.errors import MeasurementError
from simcore.profile_store import home, home_at
from simcore.simulation import simulate

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
RUN = Run(
    id="e2e-1", source="VIA-Research/vTrain", part="single", task="train", model="GPT",
    parameters=0.0, layers=4, hidden=256, heads=4, length=128, gpu="A100", num_gpus=4, per_node=4,
    precision="", global_batch=8, micro_batch=1, tp=2, pp=2, dp=1, vpp=0, cp=0, ep=0, sharding="",
    recompute="", schedule="", placement="", seconds=0.1, notes="",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps captured graphs out of the user's folder."""
    with home_at(tmp_path_factory.mktemp("home")):
        yield


def seconds(run: Run, **more: float) -> float:
    found = published_run(run, factors=FITTED._replace(**more))
    assert isinstance(found, Prediction)
    return found.seconds


def changed(**fields: Any) -> Run:
    return dataclasses.replace(RUN, **fields)


def write_rows(folder: Path, *changes: dict[str, str]) -> Path:
    """Writes an e2e folder with one row for each change of a plain one."""
    plain = {column: "" for column in rows._COLUMNS.split()} | {
        "id": "e2e-1", "source_repo": "VIA-Research/vTrain", "task": "train", "model": "GPT",
        "source_file": "data/ground_truth_single.csv", "layers": "4", "hidden": "256",
        "heads": "4", "seq_len": "128", "gpu": "A100", "n_gpus": "4", "gpus_per_node": "4",
        "global_batch": "8", "micro_batch_per_gpu": "1", "tp": "2", "pp": "2", "dp": "1",
        "step_time_ms": "100",
    }  # fmt: skip
    folder.mkdir()
    with (folder / "train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, plain)
        writer.writeheader()
        writer.writerows(plain | change for change in changes)
    return folder


def test_a_row_is_read_with_its_part_and_what_is_not_stated_is_zero(tmp_path: Path) -> None:
    (run,) = read_runs(write_rows(tmp_path / "e2e", {}))
    assert run == RUN
    assert run.key == "e2e/VIA-Research/vTrain/single"


def test_a_row_with_a_number_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "e2e", {}, {"layers": "many"})
    with pytest.raises(MeasurementError, match=r"train\.csv:3: layers: 'many'"):
        list(read_runs(folder))


def test_a_folder_without_the_file_has_no_runs(tmp_path: Path) -> None:
    assert list(read_runs(tmp_path)) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"source": "someone/else"}, "no model family"),
        ({"seconds": 0.0}, "no step time"),
        ({"ep": 2}, "expert parallel"),
        ({"dp": 2}, "not the number of GPUs"),
        ({"global_batch": 9, "micro_batch": 2}, "does not divide"),
        ({"heads": 3}, "heads do not divide"),
        ({"layers": 1}, "fewer layers than stages"),
    ],
)
def test_a_run_that_cannot_be_expressed_says_why(fields: dict[str, object], reason: str) -> None:
    found = describe_run(changed(**fields))
    assert isinstance(found, NotExpressible)
    assert reason in found.reason


def test_a_gpu_without_a_machine_is_not_expressible() -> None:
    found = published_run(changed(gpu="Z80"))
    assert found == NotExpressible("no machine known for Z80")


def test_the_graph_is_captured_once_and_then_read_from_the_users_folder() -> None:
    size = GPTSize(layers=2, width=64, heads=4, length=32, vocabulary=1024)
    graph = graph_of.__wrapped__(size, "fp16")
    (path,) = (home() / GRAPHS).glob("gpt-2x64-*.json")
    stamp = path.stat().st_mtime_ns
    assert graph_of.__wrapped__(size, "fp16").content_hash() == graph.content_hash()
    assert path.stat().st_mtime_ns == stamp


def test_layers_are_dealt_out_to_stages_in_order_and_the_ends_go_with_them() -> None:
    size = GPTSize(layers=4, width=64, heads=4, length=32, vocabulary=1024)
    first, second = stage_ops(graph_of(size, "fp16"), 2)
    assert {unit.split(".")[1] for unit in first if unit.startswith("layers.")} == {"0", "1"}
    assert {unit.split(".")[1] for unit in second if unit.startswith("layers.")} == {"2", "3"}
    assert any(unit.startswith("embedding.word_embeddings") for unit in first)
    assert any(unit.startswith("head") for unit in second)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, dp=2), Layout(tp=2, pp=2, sequence=True)])
def test_the_prediction_is_what_the_simulator_says_of_the_whole_plan(layout: Layout) -> None:
    run = changed(num_gpus=layout.num_devices, per_node=8, dp=layout.dp, global_batch=16)
    machine, described = machine_of(run), describe_run(run)
    assert machine is not None
    assert isinstance(described, Described)
    described = described._replace(layout=layout, kernels=TORCH)
    cluster = cluster_of(run, machine)
    graph = graph_of(described.size, described.job.precision)
    plan = plan_of(graph, cluster, described.job, layout)
    whole = simulate(graph, cluster, described.job, plan)
    assert Step(cluster, described, 0.0).seconds() == pytest.approx(whole.step_time, rel=1e-12)


def test_more_work_takes_longer_and_more_gpus_less() -> None:
    plain = seconds(RUN)
    assert seconds(changed(global_batch=16)) > plain
    assert seconds(changed(part="multi")) > plain  # recompute
    assert seconds(changed(hidden=512)) > plain
    assert seconds(changed(dp=2, num_gpus=8)) < plain


def test_the_hosts_floor_is_the_time_of_small_work() -> None:
    free, slow = seconds(RUN, floor=0.0), seconds(RUN, floor=1e-3)
    assert seconds(RUN) > 2 * free
    assert slow / seconds(RUN) == pytest.approx(1e-3 / HOST_FLOOR.value, rel=0.3)


@pytest.mark.parametrize("factor", [HOST_FLOOR, GAP, UNALIGNED])
def test_a_residual_factor_has_a_standard_error_below_half(factor: Residual) -> None:
    assert 0 < factor.relative_error < 0.5


def test_a_floor_needs_two_contrasts() -> None:
    plain = [changed(layers=layers, tp=1, pp=1, num_gpus=1) for layers in (2, 4)]
    one = [dataclasses.replace(run, seconds=seconds(run)) for run in plain]
    with pytest.raises(MeasurementError, match="floor: 1 contrasts"):
        fit_host_floor(one)


FITS = [
    (fit_host_floor, "floor", 1e-4, 2),
    (fit_gap, "gap", 4e-5, 1),
    (fit_unaligned, "unaligned", 1.8, 1),
]


@pytest.mark.parametrize(("fit", "factor", "value", "tp"), FITS)
def test_the_factor_that_made_the_rows_is_found_again(
    fit: Callable[[list[Run]], tuple[float, float]], factor: str, value: float, tp: int
) -> None:
    plain = [
        changed(layers=layers, tp=tp, pp=1, num_gpus=tp, micro_batch=micro, hidden=hidden,
                heads=16, length=1024)
        for layers in (2, 4)
        for hidden in (1024, 2048)
        for micro in (1, 4, 8)
    ]  # fmt: skip
    found, error = fit(
        [dataclasses.replace(run, seconds=seconds(run, **{factor: value})) for run in plain]
    )
    assert found == pytest.approx(value, rel=0.02)
    assert error < 0.02


def test_perfect_predictions_have_rank_one_and_no_regret() -> None:
    runs = [changed(seconds=value) for value in (1.0, 2.0, 3.0, 4.0)]
    found = scored(runs, [1.0, 2.0, 3.0, 4.0])
    assert (found["cells"], found["rank_correlation"], found["regret"]) == (1, 1.0, 0.0)
    assert found["mean"] == 0


def test_regret_is_what_the_favourite_takes_above_the_best() -> None:
    runs = [changed(seconds=value) for value in (1.0, 1.5, 3.0, 4.0)]
    found = scored(runs, [2.0, 1.0, 3.0, 4.0])
    assert found["regret"] == pytest.approx(0.5)
    assert found["worst_regret"] == pytest.approx(0.5)
    assert 0 < found["rank_correlation"] < 1


def test_small_cells_and_other_batches_are_not_ranked_together() -> None:
    runs = [changed(global_batch=batch) for batch in (8, 8, 8, 16, 16, 16)]
    found = inside_cells(runs, np.ones(6), np.ones(6))
    assert found == {"cells": 0, "rank_correlation": None, "regret": None, "worst_regret": None}


def test_a_score_counts_what_could_not_be_expressed() -> None:
    (score,) = score_each([RUN, changed(ep=2)]).values()
    result = score.result()
    assert (result["cases"], result["coverage"]) == (1, 0.5)
    assert result["not_expressible"] == {"expert parallel": 1}
    assert result["baseline"]["cases"] == 1


def test_a_score_without_cases_has_no_errors() -> None:
    result = RunScore().result()
    assert (result["cases"], result["coverage"], result["mean"]) == (0, 0.0, None)


def test_the_closed_form_finds_the_coefficients_that_made_its_rows() -> None:
    several = [changed(global_batch=batch, micro_batch=micro, layers=layers, hidden=width)
               for batch in (8, 16, 32) for micro in (1, 2, 4) for layers in (4, 8)
               for width in (256, 512)]  # fmt: skip
    runs = [dataclasses.replace(run, seconds=baseline_seconds(run)) for run in several]
    assert fit_baseline(runs) @ np.ones(len(TERMS)) > 0
    refitted = scored(runs, [baseline_seconds(run) for run in runs])
    assert refitted["mean"] == pytest.approx(0)


def published(key: str) -> list[Run]:
    if not (DATA / rows.FOLDER).is_dir():
        pytest.skip(f"no published runs: {DATA / rows.FOLDER} is absent")
    return [run for run in read_runs(DATA / rows.FOLDER) if run.key == key]


@pytest.mark.parametrize(("part", "frozen"), [("single", ONE_NODE), ("multi", SEVERAL_NODES)])
def test_the_frozen_closed_form_is_what_the_rows_say(part: str, frozen: np.ndarray) -> None:
    runs = published(f"e2e/VIA-Research/vTrain/{part}")
    np.testing.assert_allclose(fit_baseline(runs), frozen, rtol=1e-4, atol=1e-9)


def test_every_run_of_the_training_rows_is_read_and_most_sources_have_a_part() -> None:
    runs = published("e2e/VIA-Research/vTrain/single")
    assert len(runs) == 900
    assert all(isinstance(describe_run(run), Described) for run in runs)


FROZEN = [
    (fit_host_floor, HOST_FLOOR),
    (fit_gap, GAP),
    (fit_unaligned, UNALIGNED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fit", "frozen"), FROZEN)
def test_a_frozen_factor_is_what_the_rows_say(
    fit: Callable[[list[Run]], tuple[float, float]], frozen: Residual
) -> None:
    value, error = fit(published("e2e/VIA-Research/vTrain/single"))
    assert value == pytest.approx(frozen.value, rel=frozen.relative_error / 2)
    assert error == pytest.approx(frozen.relative_error, abs=0.02)


@pytest.mark.slow
def test_steps_of_one_node_are_nearer_than_those_of_the_closed_form() -> None:
    (score,) = score_each(published("e2e/VIA-Research/vTrain/single")).values()
    result = score.result()
    assert result["coverage"] == 1
    assert result["mean"] < 0.06
    for figure in ("mean", "p90"):
        assert result[figure] < result["baseline"][figure]
    known = result["baseline"]["rank_correlation"]
    assert result["rank_correlation"] > known - 0.01  # what single traces wander


@pytest.mark.slow
def test_steps_that_nothing_was_fitted_to_are_near() -> None:
    (score,) = score_each(published("e2e/calculon-ai/calculon/all")).values()
    assert score.result()["mean"] < 0.04
