"""How long the first use takes: ``python -m bench.compile_time`` (cold and from the cache).

Each figure is that of a fresh process; cold means an empty cache folder.
"""

import json
import os
import subprocess
import sys
import tempfile

IMPORT = "import time; t = time.perf_counter(); import simcore, simcore.kernel"
FIRST = """
import time
import numpy as np
from simcore import Cluster, Job, OpGraph, Problem, Settings, simulate_batch
graph = OpGraph.from_edges({"a": 1.0, "b": 1.0}, [("a", "b", 8)])
cluster = Cluster.preset("4xV100-NVLink")
t, c = time.perf_counter(), time.process_time()
for contention in ("none", "fair"):  # what plan trains on there, and judges by
    problem = Problem.build(graph, cluster, Job(), Settings(contention=contention))
    simulate_batch(problem, np.zeros((1, 2), int))
print(time.perf_counter() - t, time.process_time() - c)
"""


def run(code: str, cache: str) -> list[float]:
    """Returns the numbers that a fresh process prints."""
    env = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    return [float(number) for number in done.stdout.split()]


def main() -> None:
    """Prints the figures as one JSON object."""
    with tempfile.TemporaryDirectory() as cache:
        cold_wall, cold_cpu = run(FIRST, cache)
        warm_wall, _ = run(FIRST, cache)
        imports = min(run(f"{IMPORT}; print(time.perf_counter() - t)", cache)[0] for _ in range(3))
    print(
        json.dumps({
            "cold_compile_s": cold_wall,
            "cold_compile_cpu_s": cold_cpu,
            "from_cache_s": warm_wall,
            "import_simcore_and_kernel_s": imports,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
