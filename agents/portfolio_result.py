"""What a search says while it goes on, and what it found."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

import msgspec

from agents.planners.recorder import Recorder
from agents.planners.shard_reasons import Reasons
from agents.portfolio_why import Why
from simcore.cluster import Cluster
from simcore.plan import Plan, Predicted
from simcore.profile_store import load_profile
from simcore.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands."""

    stage: str  # compile, or the name of a planner
    best: float | None  # s, step time of the best plan that fits
    finder: str | None
    evaluations: int
    spent: float  # fraction of the budget
    seconds_left: float | None  # None: the budget is in evaluations


Listener: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortfolioResult:
    """What a search found.

    Attributes:
        plan: the best plan; where nothing fits, the one that is least over.
        result: its simulation.
        lower_bound: seconds that no plan of the plan spaces in use can beat.
        baselines: step time of each strategy on its own, None where it has no plan that fits.
        notes: why a baseline is None, or what else is to be said about it.
        recorder: all that the search over placements kept.
        interrupted: whether the search was cut short.
        reason: why nothing fits; None where the plan does.
        why: why the plan won, and over what; None where nothing fits.
        sharding: what a sharded plan splits and why; None where the plan is none.
    """

    plan: Plan
    result: Result
    lower_bound: float
    baselines: Mapping[str, float | None]
    notes: Mapping[str, str]
    recorder: Recorder
    interrupted: bool = False
    reason: str | None = None
    why: Why | None = None
    sharding: Reasons | None = None

    @property
    def feasible(self) -> bool:
        """Whether the plan fits the memory."""
        return self.result.feasible


def predicted(cluster: Cluster, result: Result, bound: float) -> Predicted:
    """Returns what a plan file says that the simulator said.

    Args:
        cluster: the cluster.
        result: the simulation of the plan.
        bound: seconds that no plan of its plan space can beat.
    """
    kinds = sorted({device.kind for device in cluster.devices})
    return Predicted(
        step_time_s=result.step_time,
        throughput_samples_per_s=result.throughput,
        peak_memory_bytes={use.name: use.reserved for use in result.devices},
        lower_bound_s=bound,
        simulator=f"placewright {_version()}",
        profiles={kind: _profile_hash(kind) for kind in kinds},
    )


def _profile_hash(kind: str) -> str:
    content = msgspec.json.encode(load_profile(kind), order="sorted")
    return hashlib.sha256(content).hexdigest()[:16]


def _version() -> str:
    try:
        return version("placewright")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
