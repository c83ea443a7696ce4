"""The report on the study of learners: medians, arrivals, and ratios by model."""

import json
from pathlib import Path

from bench import learner_report


def cell(method: str, seed: int, seconds: float | None, **more: object) -> dict[str, object]:
    time = seconds or 9.0
    return {
        "model": "net",
        "cluster": "4xP100-PCIe",
        "method": method,
        "evaluations": 2000,
        "seed": seed,
        "step_time_s": seconds,
        "evaluations_made": 2000,
        "seconds": 4.0,
        "curve": [[0, 2 * time], [1000, time]],
    } | more


def test_the_report_has_medians_arrivals_and_ratios_of_one_budget(tmp_path: Path, capsys) -> None:
    cells = [cell("eagle", seed, 0.1) for seed in range(3)]
    cells += [cell("post", seed, 0.2) for seed in range(3)]
    cells += [cell("mars", 0, None), cell("eagle", 0, 0.001, evaluations=10_000)]
    path = tmp_path / "cells.json"
    path.write_text(json.dumps({"cells": cells}))
    learner_report.main(["--results", str(path), "--models", "net"])
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [[text.strip() for text in line if text.strip()] for line in lines]
    assert ["eagle", "100.0 (100.0 to 100.0)"] in rows
    assert ["mars", "none fits"] in rows
    assert ["eagle", "3", "0%", "1000, 2.0 s (3/3)", "1000, 2.0 s (3/3)"] in rows
    assert ["post", "3", "0%", "never (0/3)", "never (0/3)"] in rows
    assert ["eagle / post", "0.500 [0.500, 0.500]", "0.500 [0.500, 0.500]", "1 of 1"] in rows


def test_the_gap_to_the_bound_is_that_of_the_best() -> None:
    bound = learner_report.bound_of("gnmt-4", "4xP100-PCIe")
    cells = [cell("eagle", 0, 2 * bound, model="gnmt-4")]
    assert learner_report.gap_row(cells, ["gnmt-4"], "4xP100-PCIe")[1] == "100.0%"


def test_the_portfolio_is_held_against_the_best_method_of_every_cell() -> None:
    cells = [cell("anneal", 0, 0.100), cell("eagle", 0, 0.200), cell("portfolio", 0, 0.1)]
    cells += [cell("anneal", 1, 0.100), cell("portfolio", 1, 0.11), cell("portfolio", 2, 0.05)]
    line = learner_report.portfolio_line(cells)
    assert "<= 1.01 in 1 of 2 cells, median 1.050, most 1.100" in line
    assert learner_report.portfolio_line(cells[:2]) == ""
