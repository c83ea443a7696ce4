"""How many sharded plans a second, and how many there are: ``python -m bench.sharding gpt2``.

Random plans on a mesh, in processor time of one core; ``--folded``: all layers of a stack alike.
``--space`` prints instead, for every named model (or those given), how many ways there are to shard
it, as powers of ten: deciding op by op (each op takes one of its loops or none), by linkage group,
and by linkage group of one layer of each stack, along one axis.
"""

import argparse
import json
import math
import sys
import time

import numpy as np

from bench.yardstick import KEYS, PUSH_POPS, push_pops
from simcore.cluster import Cluster
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.models import model_names
from simcore.shard_batch import FoldedSpace, simulate_folded, simulate_shardings
from simcore.shard_fold import KEPT, find_repeats, fold, merged_groups
from simcore.shard_space import ShardSpace
from simcore.shards import linkage_of
from simcore.sources import load_graph

TARGET = 5000  # sharded plans a second and core at 1,000 ops


def measure_yardstick() -> float:
    """Returns processor seconds per push-pop."""
    times, items = np.arange(KEYS, dtype=np.float64), np.arange(KEYS)
    push_pops(times.copy(), items.copy(), 10)
    begin = time.thread_time()
    push_pops(times, items, PUSH_POPS)
    return (time.thread_time() - begin) / PUSH_POPS


def measure_speed(
    graph: OpGraph, job: Job, mesh: dict[str, int], args: argparse.Namespace
) -> dict[str, object]:
    """Returns plans a second of processor time."""
    cluster = Cluster.preset(args.cluster)
    names = [device.name for device in cluster.devices if not device.kind.startswith("CPU")]
    devices = names[: math.prod(mesh.values())]
    yardstick = measure_yardstick()
    if args.folded:
        folded = FoldedSpace.build(graph, cluster, job, devices, mesh)
        space, num_ops = folded.spaces[0], folded.num_ops
    else:
        space = ShardSpace.build(graph, cluster, job, devices, mesh)
        num_ops = graph.num_ops
    shape = (args.plans, space.num_decisions)
    rng = np.random.default_rng(args.seed)
    plans = rng.integers(-1, len(space.axes), shape).astype(np.int8)

    def run(count: int) -> float:
        begin = time.thread_time()
        if args.folded:
            simulate_folded(folded, plans[:count], threads=1)
        else:
            simulate_shardings(space, plans[:count], threads=1)
        return time.thread_time() - begin

    run(2)
    per_plan = min(run(args.plans) for _ in range(args.repeats)) / args.plans
    per_op = per_plan / num_ops
    return {
        "mesh": mesh,
        "ops_of_the_model": graph.num_ops,
        "ops_simulated": num_ops,
        "decisions": space.num_decisions,
        "plans_per_second": 1 / per_plan,
        "plans_per_second_at_1000_ops": 1 / (1000 * per_op),
        "target": TARGET,
        "ns_per_op": per_op * 1e9,
        "yardstick_ns": yardstick * 1e9,
        "ratio_to_yardstick": per_op / yardstick,
    }


def measure_space(graph: OpGraph) -> dict[str, object]:
    """Returns how many ways there are to shard a graph along one axis, as powers of ten."""
    linkage = linkage_of(graph)
    by_op = sum(math.log10(1 + len(loops)) for loops in linkage.factors.loops)
    repeats = find_repeats(graph)
    left = fold(graph, repeats, {repeat.stack: KEPT for repeat in repeats}).graph
    decisions = len(merged_groups(left, linkage_of(left)))
    return {
        "ops": graph.num_ops,
        "ops_folded": left.num_ops,
        "groups": len(linkage.groups),
        "groups_folded": decisions,
        "log10_by_op": by_op,
        "log10_by_group": len(linkage.groups) * math.log10(2),
        "log10_folded": decisions * math.log10(2),
    }


def print_spaces(args: argparse.Namespace) -> None:
    """Prints a row for every model."""
    rows: dict[str, dict[str, object]] = {}
    columns = ["ops", "folded", "groups", "folded", "by-op", "by-group", "folded"]
    if not args.json:
        print(f"{'model':18}" + "".join(f"{column:>10}" for column in columns))
    for name in args.model or model_names():
        print(f"{name} …", end="\r", file=sys.stderr, flush=True)
        rows[name] = measure_space(load_graph(name)[0])
        if not args.json:
            values = rows[name].values()
            cells = [f"{v:10.1f}" if isinstance(v, float) else f"{v:10}" for v in values]
            print(f"{name:18}" + "".join(cells), flush=True)
    if args.json:
        print(json.dumps(rows))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="named models; without --space the first counts")
    parser.add_argument("--space", action="store_true", help="print how large the spaces are")
    parser.add_argument("--folded", action="store_true", help="simulate one layer of each stack")
    parser.add_argument("--cluster", default="8xA100-NVSwitch")
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5, help="the best counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.space:
        print_spaces(args)
        return
    graph, job, _ = load_graph(args.model[0] if args.model else "gpt2")
    meshes = ({"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2})
    found = [measure_speed(graph, job, mesh, args) for mesh in meshes]
    if args.json:
        print(json.dumps(found))
        return
    for row in found:
        print(*(f"{key}: {value}" for key, value in row.items()), "", sep="\n")


if __name__ == "__main__":
    main()
