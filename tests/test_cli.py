"""The command line's promises: answers, errors and exit statuses, for every command alike."""

import argparse
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from simcore import cli
from simcore.cli import Answer, Subparsers
from simcore.errors import InfeasibleError, PlanError, UsageError
from simcore.units import format_seconds

ROOT = Path(__file__).resolve().parents[1]
PROFILE = """\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=8.0, parameter_size=0.0
node2 -- Linear(2, 1) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=4.0, parameter_size=12.0
\tnode1 -- node2
"""  # noqa: E501 - the format has long lines


class Command(NamedTuple):
    """What `importlib.metadata.EntryPoint` is to the command line."""

    name: str
    register: Callable[[Subparsers], None]

    def load(self) -> Callable[[Subparsers], None]:
        return self.register


def install(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], Answer]) -> None:
    """Makes `run` the only command, under the name ``do``."""

    def register(subparsers: Subparsers) -> None:
        parser = subparsers.add_parser("do", help="do it")
        parser.add_argument("--number", type=int)
        parser.set_defaults(run=run)

    monkeypatch.setattr(cli, "entry_points", lambda group: [Command("do", register)])


def fail(error: BaseException) -> Callable[[argparse.Namespace], Answer]:
    def run(_: argparse.Namespace) -> Answer:
        raise error

    return run


def answer(_: argparse.Namespace) -> Answer:
    print("a library that talks")
    data = {"time_s": np.float64(1.5), "all": np.array([1, 2]), "none": float("nan")}
    return Answer(data=data, show=lambda: print("1.5 s"), status=1)


def test_an_answer_is_shown_to_a_person(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, answer)
    assert cli.main(["do"]) == 1
    assert capsys.readouterr().out == "a library that talks\n1.5 s\n"


@pytest.mark.parametrize("arguments", [["do", "--json"], ["--json", "do"]])
def test_with_json_standard_output_is_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    install(monkeypatch, answer)
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"time_s": 1.5, "all": [1, 2], "none": None}
    assert err == "a library that talks\n"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (PlanError("op 'a': no device"), 1, "placewright: error: op 'a': no device"),
        (UsageError("--pin a: no such module"), 2, "placewright: error: --pin a: no such module"),
        (KeyboardInterrupt(), 130, "placewright: interrupted"),
        (
            FileNotFoundError(2, "No such file", "x.json"),
            1,
            "placewright: error: x.json: No such file",
        ),
        (MemoryError(), 1, "placewright: error: out of memory"),
        (
            ModuleNotFoundError("no", name="pymetis"),
            1,
            "placewright: error: the Python package 'pymetis' is not installed",
        ),
        (
            ZeroDivisionError("1 / 0"),
            1,
            "placewright: error: internal error: ZeroDivisionError: 1 / 0 (--debug shows where)",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    line: str,
) -> None:
    install(monkeypatch, fail(error))
    assert cli.main(["do"]) == status
    assert capsys.readouterr() == ("", line + "\n")


def test_an_error_with_json_is_an_object_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, fail(InfeasibleError("needs 20 GiB, there are 16")))
    assert cli.main(["do", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "error": "needs 20 GiB, there are 16",
        "type": "InfeasibleError",
        "feasible": False,
    }


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, fail(PlanError("wrong")))
    assert cli.main(["do", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_warning_is_one_line_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> Answer:
        warnings.simplefilter("default")
        warnings.warn("measured on an unknown device", stacklevel=1)
        return Answer(data={}, show=lambda: None)

    install(monkeypatch, run)
    assert cli.main(["do"]) == 0
    assert capsys.readouterr().err == "placewright: warning: measured on an unknown device\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no command given"),
        (["dance"], "invalid choice: 'dance'"),
        (["do", "--number", "x"], "invalid int value: 'x'"),
        (["do", "--num", "1"], "unrecognized arguments: --num 1"),
        (["do", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_wrong_usage_is_status_2_with_the_usage_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    install(monkeypatch, answer)
    assert cli.main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert reason in json.loads(out)["error"]
    assert err.startswith("usage: placewright")
    assert reason in err


def test_a_command_that_cannot_be_loaded_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(NamedTuple):
        name: str = "broken"

        def load(self) -> Callable[[Subparsers], None]:
            raise ImportError("no module named 'ray'")

    install(monkeypatch, answer)
    commands = [*cli.entry_points(group=""), Broken()]
    monkeypatch.setattr(cli, "entry_points", lambda group: commands)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    out, err = capsys.readouterr()
    assert exit_.value.code == 0
    assert "do it" in out
    assert "command 'broken' cannot be loaded" in err
    assert cli.main(["broken"]) == 1


TALKS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)"


def test_with_json_programs_that_a_factory_starts_do_not_reach_standard_output(
    tmp_path: Path,
) -> None:
    (tmp_path / "talks.py").write_text(f"{TALKS}\nraise ValueError('no')\n")
    done = subprocess.run(
        [sys.executable, "-m", "simcore.cli", "graph", "talks:net", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["type"] == "CaptureError"
    assert done.stderr.startswith("capturing talks:net ...\n1\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_that_the_encoding_lacks_are_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    install(monkeypatch, lambda _: Answer(data={}, show=lambda: print("\u0433")))
    assert cli.main(["do"]) == 0
    assert out.buffer.getvalue() == b"\\u0433\n"  # type: ignore[attr-defined]
    assert out.errors == "strict"


def test_a_closed_standard_output_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, lambda _: Answer(data={}, show=lambda: print("lost")))
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["do"]) == 0
    assert capsys.readouterr().err == ""


def test_a_full_disk_under_standard_output_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    install(monkeypatch, lambda _: Answer(data={}, show=lambda: None))
    monkeypatch.setattr(cli, "print", lambda *a, file=None, **k: file or full(), raising=False)
    monkeypatch.setattr(cli, "note", lambda text: sys.stderr.write(f"{text}\n"))
    assert cli.main(["do", "--json"]) == 1
    assert capsys.readouterr().err == "placewright: error: No space left on device\n"


def test_a_closed_pipe_ends_quietly() -> None:
    code = "import sys; from simcore.cli import main; sys.exit(main(['clusters', '--json']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom simcore.cli import main\n"
        "try:\n    main(['--help'])\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    for command in ("clusters", "graph", "plan", "simulate"):
        assert f"\n    {command} " in done.stdout
    assert not {"torch", "numba", "numpy", "rich", "scipy"}.intersection(done.stderr.split())
    assert "placewright: warning" not in done.stderr


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == "placewright 0.1.0\n"


# graph


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, object]:
    status = cli.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    found: dict[str, object] = json.loads(out)
    return found


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "net.txt"
    path.write_text(PROFILE)
    return path


def test_graph_counts_ops_units_and_bytes(
    capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    found = run_json(capsys, "graph", profile)
    assert (found["ops"], found["units"], found["edges"]) == (4, 2, 4)
    assert found["ops_by_phase"] == {"F": 2, "B": 1, "I": 0, "W": 0, "U": 1}
    assert (found["parameter_bytes"], found["trained_parameters"]) == (12, 3)
    assert found["activation_bytes"] == 4
    assert found["measured_s"] == pytest.approx(3e-3)
    groups = found["groups"]
    assert isinstance(groups, list)
    assert [group["name"] for group in groups] == ["input", "matmul", "update"]
    assert [group["ops"] for group in groups] == [1, 2, 1]


def test_graph_writes_its_own_format_and_reads_it_again(
    capsys: pytest.CaptureFixture[str], profile: Path, tmp_path: Path
) -> None:
    first = run_json(capsys, "graph", profile, "--out", tmp_path / "net.json")
    second = run_json(capsys, "graph", tmp_path / "net.json")
    assert first["hash"] == second["hash"]


def test_graph_shows_a_table(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    assert cli.main(["graph", str(profile)]) == 0
    out = capsys.readouterr().out
    assert "4 ops (2 F, 1 B, 1 U), 2 placement units, 4 edges" in out
    assert "matmul" in out


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ([], 2, "give a MODEL"),
        (["x", "--depth", "2"], 2, "--depth goes with --by module"),
        (["x", "--batch", "0"], 2, "'0' is not a whole number of at least 1"),
        (["x", "--out", "graph.txt"], 2, "must end in .json"),
        (["bert-bose"], 1, "bert-base"),
        (["absent.json"], 1, "absent.json: No such file"),
        (["no_such_package:model"], 1, "no_such_package"),
    ],
)
def test_graph_refuses_with_a_reason(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, reason: str
) -> None:
    assert cli.main(["graph", *arguments]) == status
    assert reason in capsys.readouterr().err


# clusters


def test_a_large_cluster_is_shown_by_kinds_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clusters", "8x8xV100"]) == 0
    shown = capsys.readouterr().out
    pairs = [line for line in shown.splitlines() if "server" in line]
    counts = [int(line.split()[-1].replace(",", "")) for line in pairs if "V100" in line]
    assert sum(counts) >= 64 * 63  # and those with the hosts
    assert any("another server" in line for line in pairs)
    assert max(map(len, shown.splitlines())) < 120


def test_clusters_lists_presets_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "clusters")["clusters"]
    assert isinstance(listed, list)
    assert "4xV100-NVLink" in [row["name"] for row in listed]
    shown = run_json(capsys, "clusters", "4xV100-NVLink")
    routes = shown["route_bandwidth_GBps"]
    assert isinstance(routes, dict)
    assert set(routes["gpu0"]) == {"gpu1", "gpu2", "gpu3", "cpu0"}
    assert cli.main(["clusters", "4xV100-NVLink"]) == 0
    text = capsys.readouterr().out
    assert "GB/s from row to column" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_an_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clusters", "9xV100"]) == 1
    assert "unknown cluster '9xV100'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(999.7e-9, "1000 ns"), (1e-6, "1 us"), (0.0413, "41.3 ms"), (0.0, "0 s")]
)
def test_seconds_are_written_without_an_exponent(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
