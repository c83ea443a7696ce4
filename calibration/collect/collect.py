"""Measures this machine: ops of models in situ, launches, memory, copies, messages, collectives.

What is finished is in the output folder at once, see `calibration.collect.ledger`; a collection
that was interrupted goes on where it stopped. From the records the profiles, curves and the cluster
``local`` are written, see `calibration.collect.profiles`.

Processes are those of `calibration.run`: spawned, on one core each, with one torch thread. A
yardstick is timed before, between and after; a measurement during which it drifts is repeated.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from calibration.collect.host import Host, find_host
from calibration.collect.ledger import BESIDE, COPIES, MESSAGES, PROBES, Ledger
from calibration.collect.models import Workload, workload
from calibration.collect.profiles import write_profiles
from calibration.collect.rows import COMPUTING, Rows
from calibration.collect.stations import OpsWork, TalkWork
from calibration.records import COLLECTIVES, Record
from calibration.run.fleet import Fleet
from calibration.run.yardstick import MOST_DRIFT, drift_of
from simcore.errors import RunError
from simcore.profile_store import home

DEFAULT_MODELS = ("bert-base@64", "resnet-50@96")
DEFAULT_BATCHES = (1, 2)
PASSES = 7
_LEAST_PASSES = 3
_TRIES = 3
_TIMEOUT = 300.0  # s, for one answer of a measuring process
_MESSAGES = tuple(4**power for power in range(5, 14))  # 1 kB to 64 MB
_BESIDE = (4**10, 4**12)
_BUFFERS = tuple(4**power for power in range(5, 13))
_SECONDS_OF_REPEATS = 0.4  # for one size
_SLOW_LINK = 1e9  # bytes/s, to choose how often a size is repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        minutes: after which no new measurement is begun.
        passes: timed steps of each workload.
        device: ``cpu``, ``cuda`` or ``auto``.
        allow_noise: take what was measured while the yardstick drifted.
        job: fields of the job that differ from a model's own.
        progress: is told what is done.
    """

    minutes: float = 10.0
    passes: int = PASSES
    device: str = "auto"
    allow_noise: bool = False
    job: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection has found.

    Attributes:
        host: what was measured.
        files: written, records first.
        records: of this host and software, those of earlier collections included.
        skipped: measurements that there was no time for.
        workloads: asked for.
        drift: greatest of the yardstick over a measurement that was kept, as a share.
    """

    host: Host
    files: tuple[Path, ...]
    records: tuple[Record, ...]
    skipped: tuple[str, ...]
    workloads: tuple[Workload, ...]
    drift: float

    @property
    def is_enough(self) -> bool:
        """Whether profiles could be written."""
        return len(self.files) > 1


def collect(
    models: Sequence[str] = DEFAULT_MODELS,
    out_dir: Path | None = None,
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    effort: Effort | None = None,
) -> Collected:
    """Measures this machine and writes its profiles and the cluster ``local``.

    Args:
        models: ``MODEL`` or ``MODEL@SIZE``, named or ``package.module:factory``.
        out_dir: where everything is written; None = the user's folder, where it is found.
        batches: at which each model is measured.
        effort: how much.

    Raises:
        UsageError: an unknown model, or a GPU where there is none.
        RunError: ``noisy machine``, or a measuring process failed; what is done is kept.
    """
    effort = effort or Effort()
    host = find_host(effort.device)
    folder = home() if out_dir is None else out_dir
    workloads = tuple(workload(model, batch, effort.job) for model in models for batch in batches)
    session = _Session(host, folder, effort)
    try:
        session.probe()
        session.talk()
        session.models(workloads)
    finally:
        files = write_profiles(host, session.ledger, folder) if session.is_enough else ()
    return Collected(
        host=host,
        files=(session.ledger.path, *files),
        records=tuple(session.ledger.records),
        skipped=tuple(session.skipped),
        workloads=workloads,
        drift=session.drift,
    )


class Found(NamedTuple):
    """What a block of measurements has found."""

    records: list[Record]
    findings: Mapping[str, float]  # what is no time


Block: TypeAlias = Callable[[Fleet], Found]
Blocks: TypeAlias = dict[str, Block]


class _Session:
    """One run of a collection."""

    def __init__(self, host: Host, folder: Path, effort: Effort) -> None:
        self.host, self.effort = host, effort
        self.ledger = Ledger(folder, host.kind, host.software)
        self.rows = Rows(host.kind, host.software, on_gpu=host.device == "cuda")
        self.backend = "nccl" if host.device == "cuda" else "gloo"
        self.skipped: list[str] = []
        self.drift = 0.0
        self._deadline = time.monotonic() + 60 * effort.minutes

    @property
    def is_enough(self) -> bool:
        """Whether there is what a profile cannot do without."""
        return self.ledger.has(PROBES)

    def probe(self) -> None:
        """Measures what one device can do."""
        blocks: Blocks = {PROBES: self._probes}
        if self.host.device == "cuda":
            blocks[COPIES] = self._copies
        self._run(blocks, 1, OpsWork())

    def talk(self) -> None:
        """Measures messages and collectives between devices."""
        if self.host.num_devices < 2:
            return
        blocks: Blocks = {MESSAGES: self._messages, BESIDE: self._messages_beside}
        for members in group_sizes(self.host.num_devices):
            for kind in COLLECTIVES:
                blocks[f"{kind} of {members}"] = partial(
                    self._collective, kind=kind, members=members
                )
        self._run(blocks, self.host.num_devices, TalkWork())

    def models(self, workloads: Sequence[Workload]) -> None:
        """Measures the ops of models."""
        blocks: Blocks = {work.label: partial(self._model, work=work) for work in workloads}
        self._run(blocks, 1, OpsWork())

    def _run(self, blocks: Blocks, num_ranks: int, work: Any) -> None:
        """Measures what is not finished, in processes started for it."""
        left = {name: run for name, run in blocks.items() if not self.ledger.has(name)}
        if not left or time.monotonic() > self._deadline:
            self.skipped += left
            return
        on_gpu = self.host.device == "cuda"
        devices = [f"cuda:{rank}" if on_gpu else "cpu" for rank in range(num_ranks)]
        with Fleet(devices, backend=self.backend, timeout=_TIMEOUT) as fleet:
            fleet.load([work] * num_ranks)
            for name, run in left.items():
                if time.monotonic() > self._deadline:
                    self.skipped.append(name)
                else:
                    self._block(fleet, name, run)

    def _block(self, fleet: Fleet, name: str, run: Block) -> None:
        """Measures one thing, again where the machine was noisy, and writes it down."""
        self.effort.progress(name)
        for _ in range(_TRIES):
            before = fleet.ask("yardstick")
            found = run(fleet)
            drift = drift_of([before, fleet.ask("yardstick")])
            if drift <= MOST_DRIFT or self.effort.allow_noise:
                break
            self.effort.progress(f"the yardstick drifted by {drift:.0%}: {name} again")
        else:
            raise RunError(
                f"noisy machine: the yardstick drifted by {drift:.0%} (over {MOST_DRIFT:.0%}) in "
                f"{_TRIES} tries of {name}; stop what else runs, or say --allow-noise"
            )
        self.drift = max(self.drift, drift)
        self.ledger.finish(name, found.records, found.findings)

    def _probes(self, fleet: Fleet) -> Found:
        dtypes = ("fp32", "bf16", "fp16") if self.host.device == "cuda" else ("fp32",)
        products = {dtype: _first(fleet, "product", dtype=dtype) for dtype in dtypes}
        records = [self.rows.product(dtype, *found) for dtype, found in products.items()]
        records += self.rows.copies(_first(fleet, "copies"))
        records += self.rows.launch(_first(fleet, "launch"))
        return Found(records, _first(fleet, "memory"))

    def _copies(self, fleet: Fleet) -> Found:
        times, beside = _first(fleet, "gpu_copies")
        records = [self.rows.copy(t.num_bytes, t.direction, t.seconds, t.spread) for t in times]
        return Found(records, beside._asdict())

    def _model(self, fleet: Fleet, work: Workload) -> Found:
        _first(fleet, "prepare", work=work)
        for number in range(max(_LEAST_PASSES, self.effort.passes)):
            step = _first(fleet, "one_pass")
            self.effort.progress(f"{work.label}: pass {number + 1}, step {step.wall:.3f} s")
            if time.monotonic() > self._deadline and number + 1 >= _LEAST_PASSES:
                break
        times, steps = _first(fleet, "result")
        records = self.rows.ops(work.label, times, len(steps))
        records += self.rows.step(work.label, steps, times.free)
        return Found(
            records,
            {"ops": len(times.ops), "unmatched_s": times.unmatched, "unseen_ops": times.missing},
        )

    def _messages(self, fleet: Fleet) -> Found:
        records = []
        for size in _MESSAGES:
            for direction, question in (("one", "ping_pong"), ("both", "both_ways")):
                found = _call(fleet, question, num_bytes=size, repeats=_repeats(size))
                records += self.rows.messages(size, direction, found, self.backend)
        return Found(records, {})

    def _messages_beside(self, fleet: Fleet) -> Found:
        records = []
        for size in _BESIDE:
            for computing, ranks in COMPUTING.items():
                found = _call(
                    fleet, "beside_compute",
                    num_bytes=size, busy=4 * size / _SLOW_LINK, computing=ranks, repeats=7,
                )  # fmt: skip
                records += self.rows.beside(size, computing, found[:2], self.backend)
        return Found(records, {})

    def _collective(self, fleet: Fleet, kind: str, members: int) -> Found:
        records = []
        for size in _BUFFERS:
            found = _call(
                fleet, "collective",
                kind=kind, num_bytes=size, members=members, repeats=_repeats(size),
            )  # fmt: skip
            records += self.rows.collective(kind, size, found[:members], self.backend)
        return Found(records, {})


def group_sizes(num_devices: int) -> list[int]:
    """Returns the sizes of the groups whose collectives are measured: powers of 2, and all."""
    powers = [2**power for power in range(1, num_devices.bit_length())]
    return sorted({size for size in (*powers, num_devices) if 2 <= size <= num_devices})


def _repeats(num_bytes: int) -> int:
    return max(7, min(60, int(_SECONDS_OF_REPEATS / (1e-3 + num_bytes / _SLOW_LINK))))


def _call(fleet: Fleet, name: str, **options: Any) -> list[Any]:
    return fleet.ask(name, **options)


def _first(fleet: Fleet, name: str, **options: Any) -> Any:
    return _call(fleet, name, **options)[0]
