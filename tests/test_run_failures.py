"""A run that goes wrong ends in time, says why and where, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from calibration.run.fleet import Fleet
from simcore.errors import RunError
from tests.run_faults import Fault, FaultyWork

ROOT = Path(__file__).resolve().parents[1]


class Ended(NamedTuple):
    message: str
    processes: list[int]
    port: int


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    status = Path("/", "proc", str(process_id), "stat")
    return not status.exists() or status.read_text().split(") ")[1][0] != "Z"


def run_into(fault: Fault, rank: int, timeout: float, kill: int | None = None) -> Ended:
    """Runs a step with a fault; or a good one, then kills a rank, and another."""
    fleet = Fleet(["cpu", "cpu"], backend="gloo", timeout=timeout)
    try:
        with fleet:
            processes, port = fleet.process_ids, fleet.port
            number = fleet.load([FaultyWork(fault, rank)] * 2)
            fleet.step(number)
            if kill is not None:
                os.kill(processes[kill], signal.SIGKILL)
                fleet.step(number)
    except RunError as error:
        return Ended(str(error), processes, port)
    pytest.fail("the run went well")


@pytest.mark.parametrize(
    ("fault", "rank", "reason"),
    [
        ("raise", 1, "rank 1 (cpu) raised ValueError: a shape is wrong, at: making trouble"),
        ("die", 0, "rank 0 (cpu) was killed by SIGKILL"),
        pytest.param("memory", 1, "rank 1 (cpu) ran out of memory", marks=pytest.mark.slow),
        ("hang", 1, "no answer in 3 s: rank 1 (cpu) at: making trouble; rank 0 (cpu) at: waiting"),
    ],
)
def test_a_rank_that_fails_ends_the_run(fault: Fault, rank: int, reason: str) -> None:
    start = time.monotonic()
    ended = run_into(fault, rank, timeout=3.0)
    assert ended.message.startswith(reason)
    assert time.monotonic() - start < 60
    assert_nothing_is_left(ended)


def test_a_rank_that_is_killed_from_outside_between_steps_is_noticed() -> None:
    ended = run_into("none", 0, timeout=20.0, kill=1)
    assert ended.message.startswith("rank 1 (cpu) was killed by SIGKILL")
    assert_nothing_is_left(ended)


def assert_nothing_is_left(ended: Ended) -> None:
    assert not any(is_alive(process) for process in ended.processes)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", ended.port)) != 0  # nobody listens there any more


SCRIPT = """
import sys, time
from calibration.run.fleet import Fleet
from tests.run_faults import FaultyWork
if __name__ == "__main__":
    with Fleet(["cpu", "cpu"], backend="gloo", timeout=300) as fleet:
        number = fleet.load([FaultyWork("hang", 0)] * 2)
        print(*fleet.process_ids, flush=True)
        fleet.step(number)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, sent: int) -> None:
    script = tmp_path / "started.py"
    script.write_text(SCRIPT)
    command = f"import sys, runpy; sys.path[:0] = [{str(ROOT)!r}]; sys.argv = [{str(script)!r}]; "
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{command}runpy.run_path({str(script)!r}, run_name='__main__')"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    )  # fmt: skip
    assert parent.stdout is not None
    processes = [int(word) for word in parent.stdout.readline().split()]
    assert len(processes) == 2
    parent.send_signal(sent)
    parent.wait(timeout=30)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(process) for process in processes)
