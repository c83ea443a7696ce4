"""Does the simulator say how long plans take: ``python -m bench.run_study`` runs them for real.

Two processes of one core each, joined by gloo over the loopback interface, are the machine. First
it is measured (`calibration.collect`), then each plan is predicted by that profile and run. A
finished cell is stored at once, and skipped where it is stored: its key has the plan and the
profile. ``--minutes`` runs what fits; what did not is listed as empty. Run it on a quiet machine:
a drifting yardstick stops a cell.

Ops of sharded plans have shapes of their own: what one device computes of a model is measured too.

Not verified here: more than two ranks, channels that several pairs share, GPUs.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from scipy.stats import spearmanr

from calibration.run.fleet import Fleet
from calibration.run.launch import Launch, ranks_of
from calibration.run.measure import Effort, measure
from calibration.run.result import machine, plan_hash
from simcore.atomic import write_whole
from simcore.cluster import Cluster, resolve
from simcore.errors import RunError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Plan, Ref, Settings, Stage
from simcore.sharding.named import STYLES
from simcore.shards import sharded_plan
from simcore.signature import Phase
from simcore.simulation import simulate
from simcore.sources import load_graph

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "run_study.json"
BATCH, MICROBATCHES = 16, (4, 8)
SETTINGS = Settings(host="per_rank")
PLACED = ("branches", "flows_small", "flows_large")
MODELS = ("gpt", "chain", *PLACED)
HALVES = ("gpt_half", "chain_half", "branches_half")
CHANNELS = ("2.weight:1", "4.weight:0")  # out of every other convolution
BLOCKS = {"gpt": ("blocks", 6), "chain": ("layers", 8)}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One plan.

    Attributes:
        model: function of `bench.run_models`.
        kind: a schedule by name, ``copies``, ``placement``, a style of sharding, or ``sharded``.
        cuts: blocks at which a stage begins, the first left out.
        microbatches: of a pipeline.
        second: beginnings of module paths whose units are on the second device.
        groups: linkage groups that are split where the kind is ``sharded``.
        flows: whether two tensors are under way at once by design.
    """

    model: str
    kind: str
    cuts: tuple[int, ...] = ()
    microbatches: int = 1
    second: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    flows: bool = False

    @property
    def name(self) -> str:
        parts = [self.model, self.kind, *(str(cut) for cut in self.cuts), *self.second]
        return " ".join(parts) + (f" x{self.microbatches}" if self.microbatches > 1 else "")


def cases() -> list[Case]:
    """Returns all plans of the study."""
    found = [
        Case(model, schedule, (cut,), count)
        for model, cuts in (("gpt", (2, 3, 4)), ("chain", (3, 4, 5)))
        for cut in cuts
        for count in MICROBATCHES
        for schedule in ("gpipe", "1f1b")
    ]
    found += [Case("gpt", "interleaved", (2, 3, 5), count) for count in MICROBATCHES]
    found += [Case("chain", "interleaved", (2, 4, 6), count) for count in MICROBATCHES]
    found += [Case(model, "copies") for model in ("gpt", "chain", "branches")]
    found += [
        Case("branches", "placement", second=second)
        for second in (("left",), ("right",), ("left.6", "left.8", "head"), ("right.4", "left.2"))
    ]
    found += [
        Case(model, "placement", second=second, flows=True)
        for model in ("flows_small", "flows_large")
        for second in (("near", "far"), ("one", "far"))
    ]
    found += [Case("gpt", style) for style in ("tensor", "sequence")]
    widths = tuple(f"layers.{layer}.0.weight:0" for layer in range(BLOCKS["chain"][1]))
    found.append(Case("chain", "sharded", groups=widths))
    channels = tuple(f"{side}.{conv}" for side in ("left", "right") for conv in CHANNELS)
    found.append(Case("branches", "sharded", groups=channels))
    return found


def plan_of(case: Case, graph: OpGraph, cluster: Cluster, job: Job) -> Plan:
    """Returns the plan of a case."""
    names = cluster.device_names[:2]
    if case.kind == "copies":
        return Plan.data_parallel(graph, cluster, job, names, settings=SETTINGS)
    if case.kind in STYLES:
        plan = sharded_plan(graph, cluster, job, names, {"tp": (case.kind, 2)})
        return replace(plan, settings=SETTINGS)
    if case.kind == "sharded":
        plan = Plan.data_parallel(graph, cluster, job, names, settings=SETTINGS)
        axis = {"mesh": {"dp": 1, "tp": 2}, "sharding": {"tp": case.groups}}
        return replace(plan, stages=(replace(plan.stages[0], **axis),))
    first = {unit: op for op, unit in reversed(list(enumerate(graph.unit.tolist())))}
    modules = [graph.op_modules[first[unit]] for unit in range(graph.num_units)]
    if case.kind == "placement":
        places = [int(any(within(m, path) for path in case.second)) for m in modules]
        return Plan.from_placement(graph, cluster, job, places, settings=SETTINGS)
    numbers = stage_numbers(case, graph)
    stages = tuple(
        Stage(
            name=f"stage{number}",
            devices=(names[number % 2],),
            ops=tuple(n for n, s in zip(graph.unit_names, numbers, strict=True) if s == number),
            mesh={"dp": 1},
        )
        for number in range(len(case.cuts) + 1)
    )
    whole = Plan.from_placement(graph, cluster, job, [0] * graph.num_units, settings=SETTINGS)
    return replace(whole, stages=stages, schedule=case.kind, microbatches=case.microbatches)


def within(module: str, path: str) -> bool:
    """Returns whether a module is another or a part of it."""
    return module == path or module.startswith(f"{path}.")


def stage_numbers(case: Case, graph: OpGraph) -> list[int]:
    """Returns the stage of each unit: program order, cut before the first op of each block."""
    name, _ = BLOCKS[case.model]
    forward = np.flatnonzero(graph.phase == Phase.F)
    order = {unit: n for n, unit in enumerate(dict.fromkeys(graph.unit[forward].tolist()))}
    begins = []
    for cut in case.cuts:
        op = next(op for op in forward if within(graph.op_modules[op], f"{name}.{cut}"))
        begins.append(order[int(graph.unit[op])])
    return [sum(order[unit] >= begin for begin in begins) for unit in range(graph.num_units)]


def collected(folder: Path, minutes: float, *, allow_noise: bool) -> Cluster:
    """Measures this machine, where that is not done, and returns the cluster ``local``."""
    from calibration.collect.collect import Effort as CollectEffort
    from calibration.collect.collect import collect

    os.environ["PLACEWRIGHT_HOME"] = str(folder)
    effort = CollectEffort(
        minutes=minutes, device="cpu", allow_noise=allow_noise,
        job={"optimizer": "momentum"}, progress=note,
    )  # fmt: skip
    begin = time.monotonic()
    halves = [f"bench.run_models:{model}" for model in HALVES]
    collect(halves, folder, batches=[BATCH], effort=effort)
    effort = dataclasses.replace(effort, minutes=minutes - (time.monotonic() - begin) / 60)
    sources = [f"bench.run_models:{model}" for model in MODELS]
    batches = sorted({BATCH, BATCH // 2, *(BATCH // count for count in MICROBATCHES)})
    collect(sources, folder, batches=batches, effort=effort)
    return resolve("local")


class Study:
    """Cells, stored as they are finished."""

    def __init__(self, path: Path, cluster: Cluster, effort: Effort) -> None:
        self.path, self.cluster, self.effort = path, cluster, effort
        self.rows = stored_rows(path)
        self.graphs: dict[str, tuple[OpGraph, Job]] = {}

    def plan(self, case: Case) -> tuple[OpGraph, Plan]:
        if case.model not in self.graphs:
            changes = {"batch": BATCH, "optimizer": "momentum"}
            self.graphs[case.model] = load_graph(f"bench.run_models:{case.model}", changes)[:2]
        graph, job = self.graphs[case.model]
        plan = plan_of(case, graph, self.cluster, job)
        source = f"bench.run_models:{case.model}"
        return graph, replace(plan, graph=Ref(name=graph.name, hash=plan.graph.hash, source=source))

    def key(self, plan: Plan, predicted: float) -> str:
        """Returns what changes with the plan and with what the profile says about it."""
        text = f"{plan_hash(plan)} {predicted:.9g}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def run(self, fleet: Fleet, case: Case) -> Row:
        graph, plan = self.plan(case)
        predicted = simulate(graph, self.cluster, plan.job, plan).step_time
        key = self.key(plan, predicted)
        if key in self.rows:
            return self.rows[key]
        ranks = ranks_of(plan, graph, self.cluster, plan.graph.source, Launch(device="cpu"))
        number = fleet.load(ranks.works)
        measured = measure(fleet, number, self.effort)
        fleet.ask("drop", number=number)
        row: Row = {
            "key": key, "case": case.name, "model": case.model, "kind": case.kind,
            "flows": case.flows, "predicted_s": predicted, "measured_s": measured.median,
            "spread": measured.spread, "drift": measured.drift, "steps": len(measured.seconds),
        }  # fmt: skip
        self.rows[key] = row
        return row

    def save(self, rows: Sequence[Row], empty: Sequence[str]) -> Row:
        """Writes the cells of this study, what they come to, and cells stored before."""
        mine = {row["key"] for row in rows}
        content = {
            "machine": machine(),
            "summary": summary(rows),
            "cells": list(rows),
            "empty": list(empty),
            "others": [row for key, row in self.rows.items() if key not in mine],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, indent=1).encode() + b"\n")
        return content


def stored_rows(path: Path) -> dict[str, Row]:
    """Returns the cells of a result file by their key."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    return {row["key"]: row for row in (*stored["cells"], *stored["others"])}


def summary(rows: Sequence[Row]) -> Row:
    """Returns errors over all cells, and rank correlation and regret inside each model."""
    if not rows:
        return {}
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row["model"].removesuffix("_small").removesuffix("_large")].append(row)
    return {
        "cells": len(rows),
        "median_error": statistics.median(errors),
        "p90_error": float(np.quantile(errors, 0.9)),
        "bias": statistics.median(row["predicted_s"] / row["measured_s"] - 1 for row in rows),
        "models": {model: ranking(of) for model, of in by_model.items() if len(of) > 2},
    }


def ranking(rows: Sequence[Row]) -> Row:
    """Returns how well plans of one model are ranked."""
    predicted = [row["predicted_s"] for row in rows]
    measured = [row["measured_s"] for row in rows]
    chosen = rows[int(np.argmin(predicted))]["measured_s"]
    return {
        "cells": len(rows),
        "spearman": float(spearmanr(predicted, measured).statistic),
        "regret": chosen / min(measured) - 1,
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def finished(study: Study, chosen: Sequence[Case], deadline: float) -> Iterator[Row | str]:
    """Yields each cell, or the name of one that there was no time or no quiet for."""
    with Fleet(["cpu", "cpu"], backend="gloo", timeout=120) as fleet:
        for case in chosen:
            if time.monotonic() > deadline:
                yield case.name
                continue
            try:
                row = study.run(fleet, case)
            except RunError as error:
                if "noisy machine" not in str(error):
                    raise
                note(f"{case.name}: {error}")
                yield case.name
                continue
            error = row["predicted_s"] / row["measured_s"] - 1
            note(
                f"{case.name:40} predicted {row['predicted_s']:.4f} s, measured "
                f"{row['measured_s']:.4f} s ({error:+.1%})"
            )
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40.0, help="of running plans")
    parser.add_argument("--collect-minutes", type=float, default=15.0)
    parser.add_argument("--profile", type=Path, default=ROOT / "build" / "run_profile")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--allow-noise", action="store_true")
    args = parser.parse_args()
    cluster = collected(args.profile, args.collect_minutes, allow_noise=args.allow_noise)
    study = Study(args.out, cluster, Effort(args.steps, 3, args.allow_noise))
    chosen = [case for case in cases() if args.only in case.name]
    rows: list[Row] = []
    empty: list[str] = []
    content: Row = {}
    for found in finished(study, chosen, time.monotonic() + 60 * args.minutes):
        (empty if isinstance(found, str) else rows).append(found)  # type: ignore[arg-type]
        content = study.save(rows, empty)
    print(json.dumps(content.get("summary", {}), indent=1))
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
