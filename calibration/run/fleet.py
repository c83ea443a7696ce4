"""Processes of a run, one per device: started together, asked together, and ended whatever happens.

A rank that raises, is killed, or does not answer in time ends the run: all processes are killed and
waited for, the port is closed, and the error says which rank did what.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from calibration.run.work import BETWEEN, Place, StepReport, Work
from calibration.run.worker import HOST, STOP, Failure, Order, serve
from simcore.errors import RunError

START_TIMEOUT = 120.0  # s; importing torch and building a model take their time
_GRACE = 1.0  # s in which other ranks may tell the true cause of a failure
_STOPPING = 10.0  # s
_STARTING = -2  # the position of who is not ready


class Fleet:
    """The processes of one run; a context manager."""

    def __init__(self, devices: Sequence[str], *, backend: str, timeout: float) -> None:
        """Remembers what to start.

        Args:
            devices: torch's device of each rank.
            backend: ``gloo`` or ``nccl``.
            timeout: seconds after which a rank that has not answered is taken to hang.
        """
        self.devices, self.backend, self.timeout = devices, backend, timeout
        self._works: list[Sequence[Work]] = []  # [number][rank]
        self._number = -1  # of the work that runs
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None
        self._positions: Any = None

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes, [rank]."""
        return [process.pid or 0 for process in self._processes]

    @property
    def port(self) -> int:
        """Port on which the processes find each other, 0 = not started."""
        return 0 if self._store is None else int(self._store.port)

    def __enter__(self) -> "Fleet":
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._stop()
        self._end()

    def load(self, works: Sequence[Work]) -> int:
        """Makes works ready, one a rank, and returns the number by which they are run.

        Raises:
            RunError: a rank failed, died or did not answer; all processes have ended.
        """
        if len(works) != len(self._pipes):
            raise RunError(f"works for {len(works)} ranks; {len(self._pipes)} processes run")
        number = self._number = len(self._works)
        self._works.append(works)
        for rank, work in enumerate(works):
            self._send(rank, "load", {"number": number, "work": work})
        self._answers(START_TIMEOUT)
        return number

    def step(self, number: int, **options: bool) -> list[StepReport]:
        """Runs a step of what was loaded, and returns each rank's report, [rank]."""
        self._number = number
        return self.ask("step", number=number, **options)

    def ask(self, question: str, **options: Any) -> list[Any]:
        """Asks every rank and returns their answers, [rank].

        Args:
            question: a method of `Station`, or of what was loaded last.
            options: its arguments.

        Raises:
            RunError: a rank failed, died or did not answer; all processes have ended.
        """
        for rank in range(len(self._pipes)):
            self._send(rank, question, options)
        return self._answers(self.timeout)

    def _send(self, rank: int, question: str, options: dict[str, Any]) -> None:
        try:
            self._pipes[rank].send((question, options))
        except (BrokenPipeError, ConnectionResetError):
            self._fail(rank, self._ending(rank))

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        count = len(self.devices)
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._positions = context.RawArray("q", [_STARTING] * count)
        for rank, device in enumerate(self.devices):
            mine, theirs = context.Pipe()
            order = Order(
                place=Place(rank, count, device, self.backend),
                parent=os.getpid(),
                port=self._store.port,
                timeout=self.timeout,
            )
            process = context.Process(
                target=serve, args=(order, theirs, self._positions), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self._answers(START_TIMEOUT)

    def _answers(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in answers]
            ready = self._ready(waiting, deadline - time.monotonic())
            if not ready:
                self._hang(waiting, timeout)
            for rank in ready:
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(len(self._pipes))]

    def _ready(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Returns the ranks that have answered or ended within some seconds."""
        sources: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        sources |= {self._processes[rank].sentinel: rank for rank in ranks}
        found = wait(list(sources), max(0.0, seconds))
        return list(dict.fromkeys(sources[each] for each in found))

    def _receive(self, rank: int) -> Any:
        try:
            answer = self._pipes[rank].recv() if self._pipes[rank].poll() else None
            if answer is None and not self._processes[rank].is_alive():
                self._fail(rank, self._ending(rank))
        except (EOFError, ConnectionResetError):
            self._fail(rank, self._ending(rank))
        if isinstance(answer, Failure):
            self._fail(rank, answer)
        return answer

    def _ending(self, rank: int) -> Failure:
        """Returns why a process has ended without a word."""
        process = self._processes[rank]
        process.join(_GRACE)
        code = process.exitcode or 0
        if code >= 0:
            return Failure(reason=f"ended with status {code}", is_consequence=False)
        name = signal.Signals(-code).name
        more = " (a system that runs out of memory does that)" if name == "SIGKILL" else ""
        return Failure(reason=f"was killed by {name}{more}", is_consequence=False)

    def _fail(self, rank: int, failure: Failure) -> None:
        """Ends the run; where this rank only lost a connection, looks for the one that broke it."""
        deadline = time.monotonic() + _GRACE
        others = [each for each in range(len(self._pipes)) if each != rank]
        while failure.is_consequence and others and time.monotonic() < deadline:
            for each in self._ready(others, deadline - time.monotonic()):
                others.remove(each)
                found = self._last_word(each)
                if found is not None and not found.is_consequence:
                    rank, failure = each, found
        where = self._where(rank)[0]
        self._end()
        raise RunError(f"rank {rank} ({self.devices[rank]}) {failure.reason}, {where}")

    def _last_word(self, rank: int) -> Failure | None:
        try:
            answer = self._pipes[rank].recv() if self._pipes[rank].poll() else None
        except (EOFError, ConnectionResetError):
            answer = None
        if isinstance(answer, Failure):
            return answer
        return None if self._processes[rank].is_alive() else self._ending(rank)

    def _hang(self, ranks: Sequence[int], timeout: float) -> None:
        """Ends the run; names first who is not itself waiting for another rank."""
        where = {rank: self._where(rank) for rank in ranks}
        order = sorted(ranks, key=lambda rank: where[rank][1])
        words = "; ".join(f"rank {rank} ({self.devices[rank]}) {where[rank][0]}" for rank in order)
        self._end()
        raise RunError(f"no answer in {timeout:g} s: {words}")

    def _where(self, rank: int) -> tuple[str, bool]:
        position = int(self._positions[rank])
        if position == _STARTING:
            return "while it started", False
        if position == BETWEEN:
            return "between steps", True
        words, waits = self._works[self._number][rank].describe(position)
        return f"at: {words}", waits

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.send((STOP, {}))
        deadline = time.monotonic() + _STOPPING
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def _end(self) -> None:
        """Kills what is still there and gives everything back."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._store = None
