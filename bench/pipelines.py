"""How many pipeline plans a second: ``python -m bench.pipelines --stages 8 --microbatches 32``.

Stage tables are given; each plan has other costs. An event is one task end or one transfer end. One
core. ASTRA-sim's analytical backend plays 138,000 trace nodes a second of this case (8 stages, 32
microbatches, 1F1B), a figure from another machine.
"""

import argparse
import itertools
import json
import time
from dataclasses import replace

import numpy as np

from bench.yardstick import measure
from simcore.cluster import Cluster, Device, Link
from simcore.job import Job
from simcore.kernel import STAGE_COST, STAGE_SIZE, Engine, StageBatch, make_records
from simcore.pipeline_batch import PipelineProblem, simulate_pipelines
from simcore.plan import Settings
from simcore.schedule_names import SCHEDULE_NAMES, make_schedule
from simcore.signature import Phase


def chain_of_gpus(count: int) -> Cluster:
    """Returns V100s, each joined with the next."""
    devices = [Device.of_kind(f"gpu{i}", "V100-SXM2-16GB") for i in range(count)]
    links = [Link(a.name, b.name, "", 50e9, 5e-6) for a, b in itertools.pairwise(devices)]
    return Cluster(name=f"chain-{count}", devices=tuple(devices), links=tuple(links))


def random_stages(problem: PipelineProblem, count: int, seed: int) -> StageBatch:
    """Returns plans whose stages cost and hold random amounts."""
    rng = np.random.default_rng(seed)
    stages, kinds = problem.schedule.num_stages, len(problem.kinds)
    edges = len(problem.schedule.edges)
    costs = make_records((count, stages, len(Phase), kinds), STAGE_COST)
    costs["seconds"] = rng.uniform(1e-3, 3e-3, costs.shape)
    costs["ahead"], costs["trail"] = 8e-6, 1e-4
    sizes = make_records((count, stages), STAGE_SIZE)
    for key in ("freed", "shared", "gradient", "held"):
        sizes[key] = rng.integers(1, 10**8, sizes.shape)
    return StageBatch(
        costs=costs,
        adding=np.zeros((count, stages, len(Phase), kinds)),
        sizes=sizes,
        extra=rng.integers(1, 10**8, (count, stages, len(Phase))),
        added=np.zeros((count, stages, len(Phase)), np.int64),
        forward=rng.integers(10**6, 10**7, (count, edges)),
        backward=rng.integers(10**6, 10**7, (count, edges)),
        ties=np.zeros((count, 0), np.int64),
        devices=np.tile(np.arange(stages, dtype=np.int32), (count, 1)),
    )


def measure_all(args: argparse.Namespace) -> dict[str, object]:
    """Returns what the command prints."""
    cluster, job = chain_of_gpus(args.stages), Job(batch=args.microbatches)
    schedule = make_schedule(args.schedule, args.stages, args.microbatches)
    found: dict[str, object] = {}
    yardstick = measure()
    rows = (("port", Engine.SWEEP), ("port", Engine.EVENTS), ("fifo", None), ("fair", None))
    for contention, engine in rows:
        settings = Settings(host="per_rank", contention=contention)
        problem = PipelineProblem.build(cluster, job, schedule, settings)
        if engine is not None:
            problem = replace(problem, problem=replace(problem.problem, engine=engine))
        stages = random_stages(problem, args.plans, args.seed)
        name = f"{problem.problem.engine.name.lower()} {contention}"
        graph = problem.problem.graph
        sent = sum(rule["size_of"] > 4 for rule in problem.template.rules)
        events = graph.num_ops + sent
        simulate_pipelines(problem, stages, threads=1)
        best = np.inf
        for _ in range(args.repeats):
            begin = time.perf_counter()
            simulate_pipelines(problem, stages, threads=1)
            best = min(best, time.perf_counter() - begin)
        per_plan = best / args.plans
        found[name] = {
            "plans_per_second": 1 / per_plan,
            "events_per_second": events / per_plan,
            "ns_per_event": per_plan / events * 1e9,
            "ratio_to_yardstick": per_plan / events / yardstick,
        }
        found["tasks"], found["transfers"] = graph.num_ops, int(sent)
    return {"schedule": args.schedule, "yardstick_ns": yardstick * 1e9, **found}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b")
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5, help="the best counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure_all(args)
    if args.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
