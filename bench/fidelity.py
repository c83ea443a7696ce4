"""Which contention discipline is good enough to train on: ``python -m bench.fidelity``.

Per cluster preset, placements of several models are simulated under every discipline and compared
with the fullest one (`fair`): Spearman rank correlation, and the regret of the best plan in the
cheap discipline's top decile once it is re-simulated at full fidelity (finalists always are). The
placements are random ones, planners' ones and the walk of an annealer, a third each.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from agents.planners.anneal import Anneal
from agents.planners.chain_split import ChainSplit
from agents.planners.heft import Heft
from agents.planners.m_etf import MEtf
from agents.planners.m_topo import MTopo
from agents.planners.recorder import Budget, Recorder, Scores
from agents.planners.space import PlacementSpace
from bench.graphs import layered_dag
from simcore import Cluster, Job, OpGraph, Problem, Settings, simulate_batch
from simcore.cluster import presets
from simcore.sources import load_graph

FULL = "fair"
CHEAP = ("none", "port", "ordered", "fifo")
MODELS = ("gnmt-4", "inception-v3", "multi-modal")
MIN_SPEARMAN, MAX_REGRET = 0.95, 0.01
RESULTS = Path(__file__).parent / "results" / "fidelity.json"


class Walk:
    """Keeps the placements that an annealer evaluates."""

    def __init__(self, space: PlacementSpace) -> None:
        self.space = space
        self.seen: list[np.ndarray] = []

    def evaluate(self, unit_placements: np.ndarray) -> Scores:
        self.seen.extend(np.array(unit_placements))
        return self.space.evaluate(unit_placements)

    def complexity(self, unit_placement: np.ndarray) -> tuple[int, int]:
        return self.space.complexity(unit_placement)


def draw(space: PlacementSpace, count: int, seed: int) -> np.ndarray:
    """Returns placements of the three kinds, int32 [plan, unit]."""
    rng = np.random.default_rng(seed)
    units, devices = space.num_units, np.array(space.devices)
    plain = rng.choice(devices, size=(count // 6, units))
    cuts = [np.sort(rng.choice(units, size=rng.integers(1, 12), replace=False)) for _ in plain]
    runs = np.stack([
        rng.choice(devices, size=len(cut) + 1)[np.searchsorted(cut, np.arange(units), "right")]
        for cut in cuts
    ])  # fmt: skip
    walk = Walk(space)
    recorder = Recorder(space=walk)
    for planner in (ChainSplit(), Heft(), MEtf(), MTopo()):
        planner.search(space, rng, Budget(evaluations=count), recorder)
    made = np.stack(walk.seen)
    near = made[rng.integers(len(made), size=count // 3)].copy()
    for row in near:  # neighbours of what planners make
        row[rng.integers(units, size=3)] = rng.choice(devices, size=3)
    walk.seen.clear()
    Anneal().search(space, rng, Budget(evaluations=4 * count), recorder)
    walked = np.stack(walk.seen)
    steps = np.linspace(0, len(walked) - 1, count // 3).astype(int)
    return space.repair(np.concatenate([plain, runs, made, near, walked[steps]]))


def compare(graph: OpGraph, cluster: Cluster, job: Job, count: int, seed: int) -> dict[str, Any]:
    """Returns Spearman and regret of every cheap discipline on one graph and cluster."""
    full = Problem.build(graph, cluster, job, Settings(contention=FULL))
    space = PlacementSpace.build(full)
    plans = full.expand(draw(space, count, seed))
    truth = simulate_batch(full, plans).step_time
    found: dict[str, Any] = {"plans": len(plans)}
    for discipline in CHEAP:
        problem = Problem.build(graph, cluster, job, Settings(contention=discipline))
        cheap = simulate_batch(problem, plans).step_time
        decile = np.argsort(cheap, kind="stable")[: max(1, len(plans) // 10)]
        found[discipline] = {
            "spearman": float(spearmanr(cheap, truth).statistic),
            "regret": float(truth[decile].min() / truth.min() - 1),
            "regret_of_first": float(truth[decile[0]] / truth.min() - 1),
        }
    return found


def choose(rows: list[dict[str, Any]]) -> str:
    """Returns the cheapest discipline that is good enough on every graph."""
    for discipline in CHEAP:
        if all(
            row[discipline]["spearman"] >= MIN_SPEARMAN and row[discipline]["regret"] <= MAX_REGRET
            for row in rows
        ):
            return discipline
    return FULL


def main() -> None:
    """Measures all presets and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", nargs="*", default=presets())
    parser.add_argument("--plans", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    graphs = [load_graph(model)[:2] for model in MODELS] + [
        (layered_dag(1000), Job(assume_linear=True))
    ]
    table: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "full": FULL, "clusters": {}}
    for name in args.clusters:
        cluster = Cluster.preset(name)
        if len(cluster.gpu_indices) < 2:
            continue
        rows = []
        for graph, job in graphs:
            row = {"graph": graph.name, **compare(graph, cluster, job, args.plans, args.seed)}
            rows.append(row)
            cells = [f"{d} {row[d]['spearman']:.3f}/{row[d]['regret']:.1%}" for d in CHEAP]
            print(f"{name:18s} {graph.name:14s} {row['plans']:5d} plans  {'  '.join(cells)}")
        table["clusters"][name] = {"train_on": choose(rows), "graphs": rows}
        print(f"{name:18s} train on {table['clusters'][name]['train_on']}", flush=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
