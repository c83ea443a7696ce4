"""What policies are trained on: the study's choice where it holds, full fidelity elsewhere."""

import json
from pathlib import Path

import pytest

from agents.fidelity import FULL, training_settings
from simcore.cluster import Cluster, presets
from simcore.plan import Settings

STUDY = json.loads((Path(__file__).parents[1] / "bench" / "results" / "fidelity.json").read_text())


@pytest.mark.parametrize("name", presets())
def test_a_studied_cluster_is_trained_on_what_the_study_chose(name: str) -> None:
    chosen = STUDY["clusters"].get(name, {"train_on": FULL})["train_on"]
    assert training_settings(Cluster.preset(name), Settings()) == Settings(contention=chosen)


def test_the_study_compares_with_the_fullest_discipline() -> None:
    assert STUDY["full"] == FULL == Settings().contention


def test_other_settings_and_other_clusters_keep_what_they_have() -> None:
    studied = Cluster.preset("4xV100-NVLink")
    for settings in (Settings(order="ready"), Settings(contention="fifo")):
        assert training_settings(studied, settings) == settings
    changed = Cluster(
        name=studied.name,
        devices=studied.devices[:2],
        switches=studied.switches,
        links=[link for link in studied.links if not {link.a, link.b} & {"gpu2", "gpu3", "cpu0"}],
    )
    assert training_settings(changed, Settings()) == Settings()
