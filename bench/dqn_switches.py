"""What each switch of the DQN is worth: ``python -m bench.dqn_switches``.

One space (linkage groups of a model on one mesh), the same number of evaluations for all, several
seeds. An arm changes one switch of the configuration as it ships; annealing and random search stand
beside them. Printed is how far the best plan is above the best that any arm found, per seed, and
after how many evaluations it was found. A finished arm is stored at once and skipped where it is
stored.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.automap.operators import OperatorPartition
from agents.automap.planner import device_sets
from agents.automap.search import Found, anneal, random_search
from agents.dqn import Config, train
from simcore.atomic import write_whole
from simcore.cluster import Cluster
from simcore.sources import load_graph

RESULTS = Path(__file__).resolve().parent / "results" / "dqn_switches.json"
ARMS: dict[str, Mapping[str, Any]] = {
    "as it ships": {},
    "means": {"expectile": 0.5},
    "not double": {"double": False},
    "dueling": {"dueling": True},
    "not prioritized": {"prioritized": False},
    "noisy": {"noisy": True},
    "distributional": {"distributional": True},
    "1 step": {"n_step": 1},
    "3 steps": {"n_step": 3},
}
PEERS = {"annealing": anneal, "random": random_search}


def run(problem: OperatorPartition, arm: str, evaluations: int, seed: int) -> Found:
    """Returns what one arm finds."""
    if arm in PEERS:
        return PEERS[arm](problem, evaluations, seed=seed)
    return train(Config(evaluations=evaluations, seed=seed, **ARMS[arm]), problem).found


def show(stored: Mapping[str, Any]) -> None:
    """Prints the table."""
    best = min((cell["step_time_s"] for cell in stored.values()), default=0.0)
    rows: dict[str, list[str]] = {}
    for key, cell in stored.items():
        text = f"{cell['step_time_s'] / best - 1.0:7.2%} after {cell['found_at']:4d}"
        rows.setdefault(key.rpartition(" ")[0], []).append(text)
    print(f"best of all {1e3 * best:.4g} ms")
    for name, cells in rows.items():
        print(f"{name:56} {'  '.join(cells)}")


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--cluster", default="2x8xV100")
    parser.add_argument("--mesh", type=json.loads, default={"dp": 4, "x": 2, "y": 2})
    parser.add_argument("--evaluations", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--file", type=Path, default=RESULTS)
    args = parser.parse_args()
    graph, job, _ = load_graph(args.model, None)
    cluster = Cluster.preset(args.cluster)
    task = (graph, cluster, job, device_sets(cluster)[0])
    problem = OperatorPartition.build(*task, args.mesh)
    stored = json.loads(args.file.read_text()) if args.file.exists() else {}
    where = f"{args.model} {args.cluster} {json.dumps(args.mesh)} {args.evaluations}"
    for arm in (*ARMS, *PEERS):
        for seed in range(args.seeds):
            key = f"{where} {arm} {seed}"
            if key in stored:
                continue
            begin = time.process_time()
            found = run(problem, arm, args.evaluations, seed)
            stored[key] = {
                "step_time_s": found.step_time,
                "found_at": found.found_at,
                "seconds": time.process_time() - begin,
            }
            print(f"{key}: {found.step_time:.5f} s", file=sys.stderr, flush=True)
            write_whole(args.file, f"{json.dumps(stored, indent=1)}\n".encode())
    show({key: cell for key, cell in stored.items() if key.startswith(where)})


if __name__ == "__main__":
    main()
