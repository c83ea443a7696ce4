"""How many rewards a second: ``python -m bench.rewards --ops 1000 --devices 4 --json``.

A large one: ``--ops 100000 --devices 64 --topology star --plans 2 --slow 0``.

Speeds of one core are in processor time, so other work on the machine changes them little. An
event is one compute end or one transfer end. Step time, peak memory of every device and a status
are computed for every placement. The reference is the pure-Python simulator of the tests.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from bench.graphs import count_events, layered_dag, random_placements
from bench.yardstick import measure
from simcore import Cluster, Job, Problem, Settings, simulate_batch
from simcore.cluster import Device, Link
from simcore.kernel import Engine
from tests.reference import ReferenceProblem, simulate_reference


def mesh(num_devices: int) -> Cluster:
    """Returns V100s that are joined pairwise."""
    devices = [Device.of_kind(f"gpu{i}", "V100-SXM2-16GB") for i in range(num_devices)]
    links = [
        Link(a.name, b.name, "", 7.6e9, 25e-6)
        for i, a in enumerate(devices)
        for b in devices[i + 1 :]
    ]
    return Cluster(name=f"mesh-{num_devices}", devices=tuple(devices), links=tuple(links))


def star(num_devices: int) -> Cluster:
    """Returns V100s on one switch, so that what goes to or comes from one shares its port."""
    devices = [Device.of_kind(f"gpu{i}", "V100-SXM2-16GB") for i in range(num_devices)]
    links = [Link(device.name, "switch", "", 7.6e9, 12.5e-6) for device in devices]
    name = f"star-{num_devices}"
    return Cluster(name=name, devices=tuple(devices), switches=("switch",), links=tuple(links))


TOPOLOGIES = {"mesh": mesh, "star": star}


def seconds_per_plan(
    run: Callable[[], object],
    num_plans: int,
    repeats: int,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Returns the best of several repeats, after one warm call."""
    run()
    best = np.inf
    for _ in range(repeats):
        begin = clock()
        run()
        best = min(best, clock() - begin)
    return best / num_plans


def measure_all(args: argparse.Namespace) -> dict[str, object]:
    """Returns what the command prints."""
    graph, job = layered_dag(args.ops, args.seed), Job()
    cluster = TOPOLOGIES[args.topology](args.devices)
    plans = random_placements(args.plans, args.ops, np.arange(args.devices), args.seed)
    events = count_events(graph, plans[:20])
    yardstick = measure()
    settings = Settings(contention=args.contention)
    static = Problem.build(graph, cluster, job, settings)
    loop = replace(static, engine=Engine.EVENTS)
    sweep = replace(static, engine=Engine.SWEEP)
    fifo, fair = (
        Problem.build(graph, cluster, job, Settings(contention=name)) for name in ("fifo", "fair")
    )
    per_plan = {
        name: seconds_per_plan(
            partial(simulate_batch, problem, plans, threads=1), len(plans), args.repeats
        )
        for name, problem in (
            ("event_loop", loop),
            ("event_loop_fifo", fifo),
            ("event_loop_fair", fair),
            ("sweep", sweep),
            ("lanes", static),
        )
    }
    one, both = (
        seconds_per_plan(
            partial(simulate_batch, static, plans, threads=threads),
            len(plans), args.repeats, time.perf_counter,
        )
        for threads in (1, None)
    )  # fmt: skip
    slow = reference_seconds(static, plans[: args.slow]) if args.slow else None
    if slow is not None:
        per_plan["reference"] = slow
    rows = {
        name: {
            "ns_per_event_core": seconds / events * 1e9,
            "placements_per_second": 1 / seconds,
            "ratio_to_yardstick": seconds / events / yardstick,
            "times_reference": None if slow is None else slow / seconds,
        }
        for name, seconds in per_plan.items()
    }
    return {
        "ops": args.ops, "edges": len(graph.edges()[0]), "cluster": cluster.name,
        "events": events, "plans": len(plans), "contention": args.contention,
        "yardstick_ns": yardstick * 1e9, **rows,
        "all_cores_placements_per_second": 1 / both,
        "all_cores_gain": one / both,
        "peak_memory_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "fair_over_fifo": per_plan["event_loop_fair"] / per_plan["event_loop_fifo"],
    }  # fmt: skip


def reference_seconds(problem: Problem, plans: np.ndarray) -> float:
    """Returns seconds per placement of the pure-Python reference."""
    slow = ReferenceProblem.build(
        problem.graph, problem.cluster, problem.job, problem.settings, cost=problem.cost
    )
    begin = time.thread_time()
    for plan in plans:
        simulate_reference(slow, plan.tolist())
    return (time.thread_time() - begin) / len(plans)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--topology", choices=tuple(TOPOLOGIES), default="mesh")
    parser.add_argument("--contention", choices=("none", "port", "ordered"), default="port")
    parser.add_argument("--plans", type=int, default=1000, help="placements of a batch")
    parser.add_argument("--repeats", type=int, default=5, help="the best counts")
    parser.add_argument(
        "--slow", type=int, default=1, help="placements for the reference, 0 = none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    found = measure_all(parser.parse_args())
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
