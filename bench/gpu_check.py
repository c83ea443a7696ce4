"""Predicted against measured on one GPU: ``python -m bench.gpu_check`` does all of it in 8 minutes.

First the machine is measured (`calibration.collect`): ops, launches, copies to and from the GPU,
alone and beside compute. Then, with the profile of this very run: steps of four models at two
batches, eager and as a CUDA graph, their times and peaks of memory; and a model whose last ops run
on a core of the CPU, since the GPU is given too little memory for all of it. A finished cell is
stored at once and skipped where it is stored; what there was no time for is listed as empty.

``--device cpu --tiny`` is a dry run of the same steps without a GPU; its times mean nothing.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from bench.run_study import note, stored_rows
from calibration.collect.collect import Effort as CollectEffort
from calibration.collect.collect import collect
from calibration.run.copies import CopyWork, EagerStep
from calibration.run.fleet import Fleet
from calibration.run.launch import Launch, ranks_of
from calibration.run.measure import Effort, measure
from calibration.run.result import machine
from calibration.run.work import Place, Step
from simcore.atomic import write_whole
from simcore.cluster import Cluster, resolve
from simcore.errors import RunError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import DEFAULT_BUCKETS, Plan, Ref, Settings
from simcore.simulation import simulate
from simcore.sources import load_graph

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "gpu_check.json"
MODELS = {"bert-base": (8, 16), "resnet-50": (32, 64), "gpt2": (4, 8), "gnmt-4": (32, 64)}
TINY = {"bench.run_models:flows_small": (4, 8)}
PLACED, PLACED_BATCH = "bench.run_models:gpt", 16  # light enough for one core of a CPU
LIMIT = 0.7  # of what the model needs on one device
WARM_STEPS = 3  # before a step is captured

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphedWork:
    """A step of one GPU that is captured once and replayed."""

    source: str
    job: Job
    seed: int

    def build(self, place: Place) -> Step:
        """Builds the model and captures its step; without a GPU it stays eager."""
        work = CopyWork(source=self.source, job=self.job, buckets=DEFAULT_BUCKETS, seed=self.seed)
        step = work.build(place)
        assert isinstance(step, EagerStep)
        return GraphedStep(step) if place.device.startswith("cuda") else step

    def describe(self, position: int) -> tuple[str, bool]:
        """Names the step."""
        return f"a captured step, part {position}", False


class GraphedStep:
    """Replays a captured step."""

    def __init__(self, eager: EagerStep) -> None:
        self.eager = eager
        self.losses: list[torch.Tensor] = []
        self.slices: list[Any] = []
        self.gradients: dict[str, Any] = {}
        for group in eager.optimizer.param_groups:
            group["capturable"] = True
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._run()

    def _run(self) -> torch.Tensor:
        eager = self.eager
        eager.optimizer.zero_grad(set_to_none=True)
        loss = eager.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        eager.optimizer.step()
        return loss.detach()

    def step(self, watch: Callable[[int], None], *, keeps_gradients: bool = False) -> None:
        """Replays."""
        del keeps_gradients
        watch(0)
        self.graph.replay()
        torch.cuda.synchronize()
        self.losses = [self.loss]


class Check:
    """Cells, stored as they are finished."""

    def __init__(self, path: Path, cluster: Cluster, device: str, effort: Effort) -> None:
        self.path, self.cluster, self.device, self.effort = path, cluster, device, effort
        self.rows = stored_rows(path)

    def graph(self, source: str, batch: int) -> tuple[OpGraph, Job]:
        graph, job, _ = load_graph(source, {"batch": batch})
        return graph, job

    def one_device(self, source: str, batch: int, launch: str) -> Row:
        """Runs a model on the first device, ``eager`` or as a ``graph``."""
        graph, job = self.graph(source, batch)
        settings = Settings(launch="graph" if launch == "graph" else "eager")
        name = self.cluster.device_names[0]
        plan = Plan.from_placement(
            graph, self.cluster, job, [self.cluster.device_index(name)] * graph.num_units,
            settings=settings,
        )  # fmt: skip
        work: CopyWork | GraphedWork = GraphedWork(source=source, job=job, seed=0)
        if launch == "eager":
            work = CopyWork(source=source, job=job, buckets=DEFAULT_BUCKETS, seed=0)
        torch_device = "cuda:0" if self.device == "cuda" else "cpu"
        with Fleet([torch_device], backend="gloo", timeout=120) as fleet:
            measured = measure(fleet, fleet.load([work]), self.effort)
        predicted = simulate(graph, self.cluster, job, plan)
        return self.row(f"{source} x{batch} {launch}", predicted, measured, [name])

    def placed(self, source: str, batch: int) -> Row:
        """Runs a model of which the second device has what the first has no room for."""
        graph, job = self.graph(source, batch)
        first, second = (self.cluster.device_index(n) for n in self.pair())
        limit = 0.0
        low, high = 0, graph.num_units
        while low < high:  # the most units, in program order, whose peak is within the limit
            count = (low + high + 1) // 2
            places = [first if unit < count else second for unit in range(graph.num_units)]
            plan = Plan.from_placement(graph, self.cluster, job, places)
            found = simulate(graph, self.cluster, job, plan)
            peak = {use.name: use.allocated for use in found.devices}[self.pair()[0]]
            limit = limit or LIMIT * self.whole_peak(graph, job, first)
            low, high = (count, high) if peak <= limit else (low, count - 1)
        places = [first if unit < low else second for unit in range(graph.num_units)]
        plan = Plan.from_placement(graph, self.cluster, job, places)
        plan = replace(plan, graph=Ref(name=graph.name, hash=plan.graph.hash, source=source))
        ranks = ranks_of(plan, graph, self.cluster, source, Launch(backend="gloo"))
        with ranks.fleet(120) as fleet:
            measured = measure(fleet, fleet.load(ranks.works), self.effort)
        predicted = simulate(graph, self.cluster, job, plan)
        row = self.row(f"{source} x{batch} in {LIMIT:.0%}", predicted, measured, ranks.names)
        return row | {"limit_bytes": int(limit), "units_on_first": low}

    def whole_peak(self, graph: OpGraph, job: Job, device: int) -> int:
        plan = Plan.from_placement(graph, self.cluster, job, [device] * graph.num_units)
        name = self.cluster.devices[device].name
        found = simulate(graph, self.cluster, job, plan)
        return {use.name: use.allocated for use in found.devices}[name]

    def pair(self) -> tuple[str, str]:
        """Returns the first device and the one that takes the rest: a core, beside a GPU."""
        names = self.cluster.device_names
        if len(names) < 2:
            raise RunError("no link to a second device was measured, so nothing can be placed")
        return names[0], "cpu0" if self.device == "cuda" else names[1]

    def row(self, name: str, predicted: Any, measured: Any, names: Sequence[str]) -> Row:
        peaks = {use.name: use.allocated for use in predicted.devices}
        return {
            "key": name,
            "predicted_s": predicted.step_time,
            "measured_s": measured.median,
            "spread": measured.spread,
            "drift": measured.drift,
            "predicted_peak_bytes": [peaks[name] for name in names],
            "measured_peak_bytes": [
                max(0, peak - bare)
                for peak, bare in zip(measured.peak_bytes, measured.bare_bytes, strict=True)
            ],
        }

    def save(self, keys: Sequence[str], empty: Sequence[str], copies: Row) -> Row:
        """Writes the cells of this run, what they come to, and cells stored before."""
        rows = [self.rows[key] for key in keys]
        content = {
            "machine": machine(),
            "device": device_words(self.device),
            "summary": summary(rows),
            "copies": copies,
            "cells": rows,
            "empty": list(empty),
            "others": [row for key, row in self.rows.items() if key not in keys],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, indent=1).encode() + b"\n")
        return content


def device_words(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "CPU, dry run"


def summary(rows: Sequence[Row]) -> Row:
    """Returns errors over all cells: of the time, and of the peak of the first device."""
    if not rows:
        return {}
    times = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    peaks = [
        abs(row["predicted_peak_bytes"][0] / max(1, row["measured_peak_bytes"][0]) - 1)
        for row in rows
    ]
    return {
        "cells": len(rows),
        "median_error": statistics.median(times),
        "worst_error": max(times),
        "median_peak_error": statistics.median(peaks),
        "worst_peak_error": max(peaks),
    }


def copies_of(folder: Path) -> Row:
    """Returns what was measured of copies between host and GPU, and of what they cost compute."""
    found: Row = {}
    for path in sorted(folder.glob("links/*.json")) + sorted(folder.glob("devices/*.json")):
        content = json.loads(path.read_text())
        keys = ("bandwidth_GBps", "latency_us", "slow_down")
        found[content["kind"]] = {key: content[key] for key in keys if key in content}
    return found


def measured_cluster(args: argparse.Namespace, models: dict[str, tuple[int, ...]]) -> Cluster:
    """Measures this machine, where that is not done, and returns the cluster ``local``."""
    os.environ["PLACEWRIGHT_HOME"] = str(args.profile)
    placed = PLACED if not args.tiny else next(iter(models))
    begin = time.monotonic()
    for device, share in (("cpu", 0.15), ("cuda", 0.6)):  # of all minutes, by when it is done
        if device == "cuda" and args.device == "cpu":
            continue
        on_core = {placed: (PLACED_BATCH,)}
        chosen = on_core if device == "cpu" else models | on_core
        if args.device == "cpu":
            chosen = models
        for model, batches in chosen.items():
            left = share * args.minutes - (time.monotonic() - begin) / 60
            effort = CollectEffort(
                minutes=left, device=device, allow_noise=args.allow_noise, progress=note
            )
            collect([model], args.profile, batches=batches, effort=effort)
    return resolve("local")


def cells(check: Check, models: dict[str, tuple[int, ...]], tiny: bool) -> Iterator[Any]:
    """Yields (name, what runs it) of all cells."""
    for source, batches in models.items():
        for batch in batches:
            for launch in ("eager", "graph"):
                name = f"{source} x{batch} {launch}"
                yield name, lambda s=source, b=batch, w=launch: check.one_device(s, b, w)
    source, batch = (next(iter(models)), 8) if tiny else (PLACED, PLACED_BATCH)
    yield f"{source} x{batch} in {LIMIT:.0%}", lambda: check.placed(source, batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, for a dry run")
    parser.add_argument("--minutes", type=float, default=7.5, help="of everything")
    parser.add_argument("--profile", type=Path, default=ROOT / "bench" / "results" / "gpu_profile")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--allow-noise", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        note("gpu_check: torch finds no CUDA device here; --device cpu --tiny is a dry run")
        return 1
    deadline = time.monotonic() + 60 * args.minutes
    models = TINY if args.tiny else MODELS
    cluster = measured_cluster(args, models)
    check = Check(args.out, cluster, args.device, Effort(args.steps, 3, args.allow_noise))
    keys: list[str] = []
    empty: list[str] = []
    for name, run in cells(check, models, args.tiny):
        try:
            if name not in check.rows and time.monotonic() < deadline:
                check.rows[name] = run()
        except RunError as error:
            note(f"{name}: {error}")
        (keys if name in check.rows else empty).append(name)
        content = check.save(keys, empty, copies_of(args.profile))
        if name in check.rows:
            row = check.rows[name]
            note(f"{name:40} {row['predicted_s']:.4f} s, measured {row['measured_s']:.4f} s")
    print(json.dumps(content["summary"], indent=1))
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
