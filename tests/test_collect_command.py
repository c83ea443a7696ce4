"""`placewright calibrate collect` as a user runs it, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.collect import collect as collecting
from calibration.collect.collect import Effort, Found, collect
from calibration.collect.host import CPU_KIND, Host
from calibration.collect.ledger import RECORDS, Ledger
from calibration.collect.probes import Launch
from calibration.collect.rows import Rows
from calibration.records import read_records
from simcore.cli import FAILED, OK, USAGE, main
from simcore.cluster import resolve
from simcore.errors import RunError
from simcore.profile_store import load_profile

HOST = Host("cpu", CPU_KIND, 1, "one core", 2**30)
LAYERS = "tests.collect_models:layers"


class Fleet:
    """Stands for the processes: a machine whose yardstick is as slow as it is told."""

    def __init__(self, yardsticks: list[float]) -> None:
        self.yardsticks = yardsticks

    def ask(self, question: str) -> list[float]:
        assert question == "yardstick"
        return [self.yardsticks.pop(0)]


def session(folder: Path, **effort: Any) -> collecting._Session:
    return collecting._Session(HOST, folder, Effort(**effort))


def counted(folder: Path) -> tuple[list[int], Callable[[object], Found]]:
    """Returns how often a block of measurements ran, and the block."""
    runs: list[int] = []
    rows = Rows(HOST.kind, HOST.software, on_gpu=False)

    def run(_fleet: object) -> Found:
        runs.append(1)
        return Found(rows.launch(Launch(1e-5, 5e-6, 9)), {})

    return runs, run


def test_a_measurement_is_repeated_where_the_yardstick_drifts(tmp_path: Path) -> None:
    runs, run = counted(tmp_path)
    one = session(tmp_path)
    one._block(Fleet([1.0, 1.5, 1.0, 1.05]), "block", run)
    assert len(runs) == 2
    assert one.drift == pytest.approx(0.0244, rel=0.01)
    assert len(Ledger(tmp_path, HOST.kind, HOST.software).records) == 2  # of the second run only


def test_a_noisy_machine_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    runs, run = counted(tmp_path)
    with pytest.raises(RunError, match=r"noisy machine.*block.*--allow-noise"):
        session(tmp_path)._block(Fleet([1.0, 1.5] * 3), "block", run)
    assert len(runs) == 3
    assert not (tmp_path / RECORDS).exists()


def test_noise_can_be_allowed(tmp_path: Path) -> None:
    runs, run = counted(tmp_path)
    session(tmp_path, allow_noise=True)._block(Fleet([1.0, 1.5]), "block", run)
    assert len(runs) == 1


def test_without_time_nothing_is_begun_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--minutes", "1e-9", "--models", LAYERS, "--batches", "1"]
    status = main(["calibrate", "collect", *arguments, "--out", str(tmp_path), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert status == FAILED
    assert f"{LAYERS} batch 1 adam" in data["skipped"]
    assert data["records"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "bert-huge"], "bert-huge"),
        (["--batches", "0"], "whole numbers"),
        (["--minutes", "-1"], "positive"),
        (["--passes", "0"], "at least 1"),
        (["--models", ","], "at least one model"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "collect", "--device", "cpu", *arguments]) == USAGE
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_collection_from_start_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "_MESSAGES", (1024, 2**20, 2**24))
    monkeypatch.setattr(collecting, "_BESIDE", (2**20,))
    monkeypatch.setattr(collecting, "_BUFFERS", (1024, 2**20))
    arguments = ["--device", "cpu", "--models", LAYERS, "--batches", "1", "--passes", "3"]
    command = ["calibrate", "collect", *arguments, "--out", str(tmp_path), "--allow-noise"]
    main([*command, "--check", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["skipped"] == []
    (check,) = data["check"]
    assert 0.3 < check["predicted"] / check["measured"] < 3  # plausible; times are not asserted
    records = list(read_records(tmp_path / RECORDS))
    assert {record.device for record in records} == {CPU_KIND}
    assert {record.target for record in records if record.dims} >= {"aten.addmm", "update"}
    monkeypatch.setenv("PLACEWRIGHT_HOME", str(tmp_path))
    cluster = resolve("local")
    assert cluster.num_devices == data["num_devices"]
    profile = load_profile(CPU_KIND)
    assert 0 < profile.launch_overhead < 1e-3
    assert 1e8 < profile.peak("fp32") < 1e13
    if cluster.num_devices > 1:
        assert 1e6 < cluster.route_bandwidth[0, 1] < 1e12
        assert profile.limits.slows
        kinds = {record.collective for record in records if record.kind == "collective"}
        assert len(kinds) == 5
    before = (tmp_path / RECORDS).read_bytes()
    again = collect([LAYERS], tmp_path, batches=[1], effort=Effort(device="cpu", passes=3))
    assert (tmp_path / RECORDS).read_bytes() == before  # all was there
    assert again.is_enough
    assert main([*command]) == OK
    assert "local-CPU-core" in capsys.readouterr().out
