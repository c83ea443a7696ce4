"""Placewright's simulator: a graph, a cluster, a job and a plan in; a step time out.

Names are loaded when first used, so that ``import simcore`` costs nothing before it is needed.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simcore.cluster import Cluster
    from simcore.errors import PlacewrightError
    from simcore.graph import GraphBuilder, OpGraph
    from simcore.job import Job
    from simcore.kernel import Status
    from simcore.lower import Problem
    from simcore.plan import Plan, Settings
    from simcore.result import Result
    from simcore.simulation import BatchResult, simulate, simulate_batch

__all__ = [
    "BatchResult",
    "Cluster",
    "GraphBuilder",
    "Job",
    "OpGraph",
    "PlacewrightError",
    "Plan",
    "Problem",
    "Result",
    "Settings",
    "Status",
    "simulate",
    "simulate_batch",
]

_HOME = {
    "BatchResult": "simulation",
    "Cluster": "cluster",
    "GraphBuilder": "graph",
    "Job": "job",
    "OpGraph": "graph",
    "PlacewrightError": "errors",
    "Plan": "plan",
    "Problem": "lower",
    "Result": "result",
    "Settings": "plan",
    "Status": "kernel",
    "simulate": "simulation",
    "simulate_batch": "simulation",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'simcore' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"simcore.{_HOME[name]}"), name)
    globals()[name] = value
    return value
