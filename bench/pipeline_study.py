"""Pipelines by learning and by planning: ``python -m bench.pipeline_study --minutes 60``.

A cell is a model, a cluster, a method and a seed. All methods have the same number of simulations
and are rated by the same simulator, as synchronous training. A finished cell is stored at once and
skipped where it is stored (its key has a hash of the problem and of the sources of `agents`);
``--minutes`` runs what fits. Methods without chance have seed 0 only. ``--report`` prints what is
stored: ratios to PipeDream's stages and to data parallelism, and the gap to the bound.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents import pipeline_agent
from agents.pipelines.anneal import Best, anneal
from agents.pipelines.bound import dag_bound
from agents.pipelines.env import PipelineTask
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.pipelines.published import dapple_best, pipedream_best
from agents.planners.data_parallel import data_parallel
from agents.planners.pipeline_chain import Chain
from agents.planners.pipeline_layouts import Demands, layouts
from agents.planners.pipeline_plans import Pipelines
from agents.planners.pipeline_search import PipelineSearch
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from agents.planners.stage_dag_plans import plan_stage_dag
from simcore import Problem
from simcore.atomic import write_whole
from simcore.cluster import resolve
from simcore.errors import PlacewrightError
from simcore.plan import SEMANTICS_BATCH_NORM
from simcore.sources import load_graph

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "pipeline_study.json"
MODELS = ("two-tower", "multi-modal", "bert-base", "vgg-16", "resnet-50", "gnmt-4", "bert-large")
CLUSTERS = ("4xP100-PCIe", "8xV100-NVLink", "2xA100+4xT4")
ALLOW = frozenset({SEMANTICS_BATCH_NORM})  # microbatches see their own statistics, as in GPipe


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """What all methods work on."""

    space: PlacementSpace
    simulator: Simulator  # over the agent's nodes
    evaluations: int

    @classmethod
    def of(cls, model: str, cluster: str, evaluations: int) -> "Ground":
        """Returns the ground of a model and a cluster by name."""
        graph, job, _ = load_graph(model)
        space = PlacementSpace.build(Problem.build(graph, resolve(cluster), job))
        return cls(
            space=space,
            simulator=Simulator(nodes=NodeGraph.build(space), allow=ALLOW),
            evaluations=evaluations,
        )

    @property
    def task(self) -> PipelineTask:
        """The agent's space."""
        return PipelineTask.build(self.simulator)

    @property
    def identity(self) -> str:
        """Hex digits that change with the problem."""
        problem = self.space.problem
        parts = (problem.graph, problem.cluster, problem.job)
        return "".join(part.content_hash()[:6] for part in parts)


def _data_parallel(ground: Ground, seed: int) -> float:
    best = data_parallel(ground.space).best
    return math.inf if best is None else best.result.step_time


def _equal_split(ground: Ground, seed: int) -> float:
    """Equal stages, one per GPU, 1F1B, the best number of microbatches: the rule of experts."""
    chain, best = Chain.build(ground.space), math.inf
    wanted = len(ground.space.devices)
    search = PipelineSearch(chain=chain, layouts=(), allow=ALLOW)
    for layout in layouts(ground.space, Demands(schedule="1f1b", allow=ALLOW)):
        if layout.num_ranks == wanted and layout.copies == 1:
            candidate = chain.cut(layout)
            even = None if candidate is None else chain.evenly(candidate)
            found = None if even is None else search.simulate(even, Budget())
            if found is not None and not found.overflow:
                best = min(best, found.step_time)
    return best


def _pipedream(ground: Ground, seed: int) -> float:
    return _or_copies(ground, pipedream_best(ground.task))


def _dapple(ground: Ground, seed: int) -> float:
    return _or_copies(ground, dapple_best(ground.task))


def _or_copies(ground: Ground, best: Best | None) -> float:
    """Returns the step time of a planner's stages; one stage is copies of the whole model."""
    if best is None:
        return _data_parallel(ground, 0)
    return best.score.step_time if best.score.fits else math.inf


def _chain(ground: Ground, seed: int) -> float:
    pipelines = Pipelines.build(ground.space, Demands(allow=ALLOW))
    pipelines.run(Budget(evaluations=ground.evaluations))
    return math.inf if pipelines.best is None else pipelines.best.step_time


def _stage_dag(ground: Ground, seed: int) -> float:
    budget = Budget(evaluations=ground.evaluations)
    return plan_stage_dag(ground.space, Demands(allow=ALLOW), budget).step_time


def _anneal(ground: Ground, seed: int) -> float:
    best = anneal(ground.task, Budget(evaluations=ground.evaluations), seed)
    return best.score.step_time if best is not None and best.score.fits else math.inf


def _agent(**changes: Any) -> Callable[[Ground, int], float]:
    def run(ground: Ground, seed: int) -> float:
        config = pipeline_agent.Config(evaluations=ground.evaluations, seed=seed, **changes)
        task = PipelineTask.build(ground.simulator, pipeline_agent.freedom_of(config))
        found = pipeline_agent.train(config, task).finalists
        return found[0].step_time if found and found[0].fits else math.inf

    return run


METHODS: dict[str, Callable[[Ground, int], float]] = {
    "data_parallel": _data_parallel,
    "equal_split": _equal_split,
    "pipedream": _pipedream,
    "dapple": _dapple,
    "chain": _chain,
    "stage_dag": _stage_dag,
    "anneal": _anneal,
    "agent": _agent(),
    "agent_symmetrised": _agent(direction="symmetrised"),
    "agent_fixed_stages": _agent(stages=4),
    "agent_no_copies": _agent(copies=False),
}
SEEDED = ("anneal", "agent", "agent_symmetrised", "agent_fixed_stages", "agent_no_copies")


def code_hash() -> str:
    """Returns hex digits that change with the sources that decide a cell."""
    files = [*(ROOT / "agents" / "pipelines").glob("*.py"), ROOT / "agents" / "pipeline_agent.py"]
    files += (ROOT / "agents" / "planners").glob("*stage_dag*.py")
    files += (ROOT / "agents" / "planners").glob("pipeline_*.py")
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Yields (model, cluster, method, seed), whole models first."""
    for cluster in args.clusters:
        for model in args.models:
            for method in args.methods:
                for seed in range(args.seeds if method in SEEDED else 1):
                    yield model, cluster, method, seed


def run(args: argparse.Namespace, stored: dict[str, Any]) -> None:
    """Runs cells that are not stored until the minutes are spent."""
    end = time.monotonic() + 60 * args.minutes
    code, ground, of = code_hash(), None, ("", "")
    for model, cluster, method, seed in cells(args):
        if time.monotonic() > end:
            return
        if of != (model, cluster):
            ground, of = Ground.of(model, cluster, args.evaluations), (model, cluster)
        assert ground is not None
        cell = "/".join((model, cluster, method, str(seed), str(args.evaluations)))
        identity = f"{ground.identity}-{code}"
        if stored.get(cell, {}).get("identity") == identity:
            continue
        ground.simulator.known.clear()
        begin, error = time.perf_counter(), ""
        try:
            step_time = METHODS[method](ground, seed)
        except PlacewrightError as reason:
            step_time, error = math.inf, str(reason)
        stored[cell] = {
            "step_time_s": step_time if math.isfinite(step_time) else None,
            "bound_s": dag_bound(ground.task),
            "seconds": round(time.perf_counter() - begin, 1),
            "identity": identity,
            "error": error,
        }
        write_whole(args.results, f"{json.dumps(stored, indent=1)}\n".encode())
        print(f"{cell}: {stored[cell]['step_time_s']}", file=sys.stderr)


def report(args: argparse.Namespace, stored: dict[str, Any]) -> None:
    """Prints medians over seeds in ms, and over PipeDream's stages in brackets."""
    for cluster in args.clusters:
        for model in args.models:
            found = {m: _median(args, stored, model, cluster, m) for m in METHODS}
            if all(value is None for value in found.values()):
                continue
            base = found["pipedream"]
            words = [
                f"{m} {v * 1e3:.1f}" + (f" ({v / base:.3f})" if base else "")
                for m, v in found.items()
                if v is not None
            ]
            print(f"{model} on {cluster}: " + ", ".join(words))


def _median(
    args: argparse.Namespace, stored: dict[str, Any], model: str, cluster: str, method: str
) -> float | None:
    times = []
    for seed in range(args.seeds):
        cell = stored.get("/".join((model, cluster, method, str(seed), str(args.evaluations))), {})
        if cell.get("step_time_s") is not None:
            times.append(float(cell["step_time_s"]))
    return statistics.median(times) if times else None


def main() -> None:
    """Runs the study, or prints what is stored."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    stored = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.report:
        run(args, stored)
    report(args, stored)


if __name__ == "__main__":
    main()
