"""The study of learners: its cells are stored, skipped, redone when due, and shown when empty."""

import json
from pathlib import Path

import pytest

from bench import learners
from bench.graphs import layered_dag
from bench.intervals import Interval, evaluations_to, ratio
from simcore.graph_file import encode_graph

TINY = ["--cluster", "4xV100-NVLink", "--evaluations", "40", "--methods", "constructive", "anneal"]


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    path.write_bytes(encode_graph(layered_dag(30)))
    return str(path)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The cells that are run, not skipped."""
    cells: list[tuple[str, int]] = []
    run_cell = learners.run_cell

    def counted(ground, empty):
        cells.append((empty["method"], empty["seed"]))
        return run_cell(ground, empty)

    monkeypatch.setattr(learners, "run_cell", counted)
    return cells


def study(graph: str, out: Path, *options: str) -> list[learners.Cell]:
    learners.main(["--models", graph, "--out", str(out), *TINY, *options])
    return learners.read(out)


def test_a_study_stores_every_cell_and_prints_medians_and_ratios(graph, tmp_path, capsys):
    cells = study(graph, tmp_path / "out.json", "--seeds", "2")
    assert [(c["method"], c["seed"]) for c in cells] == [
        ("anneal", 0),
        ("anneal", 1),
        ("constructive", 0),
        ("constructive", 1),
    ]
    assert {c["evaluations_made"] for c in cells if c["method"] == "anneal"} == {40}
    assert {c["evaluations_made"] for c in cells if c["method"] == "constructive"} == {0}
    assert all(c["step_time_s"] > 0 for c in cells)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["model", "constructive", "anneal"]
    assert lines[2].startswith("layered-30")
    assert "(1.000)" in lines[2]


def test_what_is_stored_is_skipped_and_more_seeds_are_added(graph, tmp_path, ran):
    out = tmp_path / "out.json"
    first = study(graph, out, "--seeds", "1")
    ran.clear()
    again = study(graph, out, "--seeds", "2")
    assert ran == [("constructive", 1), ("anneal", 1)]
    assert [cell for cell in again if cell["seed"] == 0] == first


def test_a_cell_whose_method_changed_is_run_again_and_replaced(graph, tmp_path, ran, monkeypatch):
    out = tmp_path / "out.json"
    study(graph, out, "--seeds", "1")
    ran.clear()
    code_of = learners.code_of
    monkeypatch.setattr(
        learners, "code_of", lambda method: "new" if method == "anneal" else code_of(method)
    )
    assert len(study(graph, out, "--seeds", "1")) == 2
    assert ran == [("anneal", 0)]


def test_without_minutes_left_nothing_runs_and_cells_are_empty(graph, tmp_path, ran, capsys):
    out = tmp_path / "out.json"
    assert study(graph, out, "--seeds", "1", "--minutes", "0") == []
    assert not ran
    assert capsys.readouterr().out.splitlines()[2].split() == ["layered-30"]


def test_an_interruption_keeps_the_cells_before_it(graph, tmp_path, monkeypatch, capsys):
    run_cell = learners.run_cell

    def pressed(ground, empty):
        if empty["method"] == "anneal":
            raise KeyboardInterrupt
        return run_cell(ground, empty)

    monkeypatch.setattr(learners, "run_cell", pressed)
    cells = study(graph, tmp_path / "out.json", "--seeds", "1")
    assert [cell["method"] for cell in cells] == ["constructive"]
    assert "layered-30" in capsys.readouterr().out


SLOW = {"hierarchical", "reinforce"}  # whose decoders go group by group
METHODS = [
    pytest.param(method, marks=pytest.mark.slow if method in SLOW else ())
    for method in learners.USUAL
    if method != "constructive"
]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_spends_all_and_is_no_worse_than_its_start(graph, tmp_path, method):
    out = tmp_path / "out.json"
    cells = study(graph, out, "--seeds", "1", "--methods", "constructive", method)
    found = {cell["method"]: cell for cell in cells}
    once = not learners.METHODS[method][-1].repeats
    made = found[method]["evaluations_made"]
    assert 1 <= made <= 3 if once else made == 40
    assert found[method]["step_time_s"] <= found["constructive"]["step_time_s"]


def test_the_same_seed_finds_the_same(graph, tmp_path):
    first, again = (study(graph, tmp_path / name, "--seeds", "1") for name in ("a", "b"))
    assert [c | {"seconds": 0} for c in first] == [c | {"seconds": 0} for c in again]


def test_seconds_are_a_budget_of_their_own(graph, tmp_path):
    out = tmp_path / "out.json"
    study(graph, out, "--seeds", "1", "--methods", "anneal")
    cells = study(graph, out, "--seeds", "1", "--methods", "anneal", "--seconds", "0.2")
    assert sorted((c["evaluations"] or 0, c["budget_seconds"] or 0) for c in cells) == [
        (0, 0.2),
        (40, 0),
    ]
    assert all(c["evaluations_made"] > 0 for c in cells)


def test_intervals_hold_the_ratio_and_are_points_where_seeds_agree():
    def cells(method: str, *times: float) -> list[learners.Cell]:
        return [{"model": "net", "method": method, "seed": seed, "step_time_s": time}
                for seed, time in enumerate(times)]  # fmt: skip

    equal = ratio(cells("a", 2.0, 2.0, 2.0) + cells("b", 1.0, 1.0), ["net"], "a", "b")
    assert equal == pytest.approx(Interval(2.0, 2.0, 2.0))
    spread = ratio(cells("a", 1.0, 2.0, 3.0) + cells("b", 1.0, 1.0), ["net"], "a", "b")
    assert spread is not None
    assert spread.value == 2.0
    assert (spread.low, spread.high) == pytest.approx((1.0, 3.0))
    assert ratio(cells("a", 1.0), ["net"], "a", "b") is None


def test_evaluations_count_until_near_the_best_that_any_cell_knows():
    def cell(method: str, *curve: tuple[int, float]) -> learners.Cell:
        return {"model": "net", "method": method, "step_time_s": 1.0, "curve": curve}

    cells = [cell("a", (0, 2.0), (10, 1.04), (50, 1.0)), cell("b", (0, 2.0), (7, 1.02))]
    assert evaluations_to(cells, ["net"], "a", 0.05) == [10.0]
    assert evaluations_to(cells, ["net"], "b", 0.05) == [7.0]
    assert evaluations_to(cells, ["net"], "b", 0.01) == [float("inf")]


def test_the_key_of_a_method_has_all_the_modules_it_uses():
    found = learners.sources("agents.planners.policy_gradient")
    assert {"agents.ppo", "agents.losses", "agents.task", "agents.planners.grouping"} <= found
    assert "agents.planners.moves" not in found
    assert "agents.planners.moves" in learners.sources("agents.planners.anneal")
    codes = {learners.code_of(method) for method in learners.METHODS}
    assert len(codes) == len(learners.METHODS)


def test_the_table_shows_what_is_missing_and_what_never_fits():
    def cell(method: str, seed: int, seconds: float | None) -> learners.Cell:
        return {
            "model": "net", "method": method, "seed": seed, "step_time_s": seconds, "seconds": 1.0
        }  # fmt: skip

    done = [cell("anneal", 0, 0.2), cell("anneal", 1, 0.3), cell("ppo", 0, 0.4), cell("m", 0, None)]
    lines = learners.table(done, ["net", "other"], ["anneal", "ppo", "m"], 2).splitlines()
    assert lines[1].split("  ")[0] == "net"
    assert "250.0 (1.000)" in lines[1]
    assert "400.0 (1.600) 1/2" in lines[1]
    assert "none fits 1/2" in lines[1]
    assert lines[2] == "other"
    assert lines[3].split() == ["geometric", "mean", "(1.000)", "(1.600)"]


def test_the_file_has_one_cell_a_line(graph, tmp_path):
    out = tmp_path / "out.json"
    study(graph, out, "--seeds", "1")
    lines = out.read_text().splitlines()
    assert (lines[0], lines[-1]) == ('{"cells": [', "]}")
    assert [json.loads(line.rstrip(","))["method"] for line in lines[1:-1]] == [
        "anneal",
        "constructive",
    ]
