"""The study of pre-training: ratios of medians over paired seeds, and cells that are kept."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import pretraining
from bench.graphs import layered_dag
from simcore.graph_file import encode_graph


def test_ratios_are_of_medians_and_certain_where_all_seeds_agree() -> None:
    logs = pretraining.ratios([[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]])
    assert np.exp(logs) == pytest.approx(0.5)
    assert pretraining.said(logs) == "0.500 [0.500, 0.500]"
    spread = np.exp(pretraining.ratios([[1.0, 2.0, 3.0], [1.0, 1.0, 6.0]]))
    assert spread[0] == pytest.approx(0.5)
    assert spread.max() == pytest.approx(2.0)  # of draws in which the third seed wins


def test_what_is_measured_is_kept_and_not_measured_again(tmp_path: Path, capsys) -> None:
    graph, out = tmp_path / "graph.json", tmp_path / "out.json"
    graph.write_bytes(encode_graph(layered_dag(20)))
    options = ["--graphs", str(graph), "--out", str(out), "--seeds", "2", "--steps", "1"]
    pretraining.main([*options, "--evaluations", "64"])
    first = json.loads(out.read_text())
    assert np.isfinite(first[str(graph)]).all()
    out.write_text(json.dumps({str(graph): [[2.0, 2.0], [1.0, 1.0]]}))
    pretraining.main([*options, "--evaluations", "64"])
    assert "geometric mean: 0.500 [0.500, 0.500]" in capsys.readouterr().out
