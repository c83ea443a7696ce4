"""How far a simulated step time may be off: draws of what costs may really be, and their deciles.

An op's seconds are uncertain by the standard error of its class in the hardware profile
(`CostTable.relative_error`). Part of it is the same for all ops of a class on a kind of device, as
a curve that is too low is so for all of them; the rest is each op's own. Links and the state of the
machine (clocks, temperature, other users) are one more factor each:

    log(real / simulated) = class + op + link + machine

Ops of one signature are one op here: layers that repeat are wrong in the same way. The shares come
from residuals that no fit has seen. Of 922 op curves of GPUs that were left out, the bias of a
curve has 17 % of the variance of its cases. Profiles state how far a curve is off at shapes that
were left out of its own measurements; of 22 curves whose device another source or another program
measured too, the median is off by 20 %, where they state 6 %: `Spread.transfer` comes on top. Links
are those of collectives between nodes; the machine's is what published runs (vTrain on one node,
Megatron-LM's tests; 19 of them) are off by beyond ops, hosts and links, half of it their own:
repeated runs of one plan differ by 5 %.

`total_error` is the same to the first order, without draws, for a sum of ops.

A draw multiplies the seconds of every op and is simulated like any plan. Links act on the part of
the critical path that is communication, which is exact as long as the path stays the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.cost import CostTable, cost_table, kinds_of
from simcore.errors import UsageError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.op_curves import CostSource
from simcore.plan import Plan, Settings
from simcore.result import Result
from simcore.simulation import Options, simulate_checked

LEAST_SAMPLES = 10  # for deciles
MOST_ERROR = 5.0  # of a logarithm: one draw in three is off by a factor of 150
MOST_SAMPLES = 1_000_000  # more change no decile that anyone reads
DECILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Standard errors of logarithms, and how they are shared.

    Attributes:
        shared: part of the variance of an op's error that all ops of its class have in common.
        transfer: of an op in another program than its curve was measured in.
        link: of communication.
        machine: of everything at once.

    Raises:
        UsageError: a share outside 0 to 1, an error that is negative or not finite.
    """

    shared: float = 0.17
    transfer: float = 0.2
    link: float = 0.1
    machine: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.shared <= 1:
            raise UsageError(f"spread: shared must be from 0 to 1, not {self.shared}")
        for name in ("transfer", "link", "machine"):
            value = getattr(self, name)
            if not 0 <= value <= MOST_ERROR:
                raise UsageError(f"spread: {name} must be from 0 to {MOST_ERROR:g}, not {value}")


class Interval(NamedTuple):
    """Deciles of a step time, s."""

    p10: float
    p50: float
    p90: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What is drawn.

    Attributes:
        samples: how many times; each draw is simulated.
        seed: of the draws.
        spread: of the errors.

    Raises:
        UsageError: fewer than ten samples, or more than a million.
    """

    samples: int
    seed: int = 0
    spread: Spread = Spread()

    def __post_init__(self) -> None:
        if self.samples < LEAST_SAMPLES:
            raise UsageError(f"deciles need at least {LEAST_SAMPLES} samples, not {self.samples}")
        if self.samples > MOST_SAMPLES:
            raise UsageError(f"at most {MOST_SAMPLES:,} samples can be drawn, not {self.samples}")


def sampled(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    plan: Plan,
    draws: Draws,
    *,
    settings: Settings | None = None,
) -> Interval:
    """Returns the deciles of the step time of a plan.

    Args:
        graph: the graph the plan is for.
        cluster: the cluster it is for.
        job: the job it is for.
        plan: a plan that `simulate` takes.
        draws: how many, and of what.
        settings: how to simulate; None = as the plan says.

    Raises:
        PlanError: a plan that cannot be simulated.
    """
    samples, spread = draws.samples, draws.spread
    random = np.random.default_rng(draws.seed)
    options = Options.of(plan, settings)
    error = op_errors(cost_table(graph, job, kinds_of(cluster), (None,)), spread)
    seconds = np.empty(samples)
    for number in range(samples):
        scale = draw_scales(graph, error, spread, random)
        result = simulate_checked(graph, cluster, job, plan, _with_scale(options, scale))
        link, machine = random.normal(size=2) * (spread.link, spread.machine)
        exposed = communication_share(result)
        seconds[number] = result.step_time * (1 + exposed * np.expm1(link)) * np.exp(machine)
    p10, p50, p90 = (float(value) for value in np.quantile(seconds, DECILES))
    return Interval(p10, p50, p90, samples)


def op_errors(cost: CostTable, spread: Spread) -> NDArray[np.float64]:
    """Returns standard errors / seconds of ops, [op, kind].

    Args:
        cost: has those that its profiles state: of shapes that were left out of a curve.
        spread: has what is added to what a curve or a roofline says of another program.
    """
    modelled = np.isin(cost.source, (CostSource.CURVE, CostSource.ROOFLINE))
    stated = np.log1p(cost.relative_error)
    error: NDArray[np.float64] = np.where(modelled, np.hypot(stated, spread.transfer), stated)
    return np.expm1(error)


def draw_scales(
    graph: OpGraph,
    relative_error: NDArray[np.float64],
    spread: Spread,
    random: np.random.Generator,
) -> NDArray[np.float64]:
    """Returns what the seconds of each op are multiplied by in one draw, [op, kind].

    Args:
        graph: the graph.
        relative_error: standard error / seconds, [op, kind].
        spread: how errors are shared.
        random: drawn from, in a fixed order.
    """
    classes = int(graph.op_class.max()) + 1
    together = random.normal(size=(classes, relative_error.shape[1]))[graph.op_class]
    own = np.where(graph.signature >= 0, graph.signature, len(graph.signatures))
    alone = random.normal(size=(len(graph.signatures) + 1, relative_error.shape[1]))[own]
    mixed = np.sqrt(spread.shared) * together + np.sqrt(1 - spread.shared) * alone
    scales: NDArray[np.float64] = np.exp(np.log1p(relative_error) * mixed)
    return scales


def total_error(
    seconds: NDArray[np.float64],
    relative_error: NDArray[np.float64],
    op_class: NDArray[np.integer],
    signature: NDArray[np.integer],
    shared: float,
) -> float:
    """Returns the relative standard error of the seconds of all ops together.

    Args:
        seconds: of each op, times how often it runs, [op].
        relative_error: standard error / seconds, [op].
        op_class: what has a part of the error in common, [op].
        signature: what has all of it in common, [op].
        shared: see `Spread`.
    """
    total = float(seconds.sum())
    if total <= 0:
        return 0.0
    errors = seconds * np.log1p(relative_error) / total
    by_class = np.bincount(op_class - op_class.min(), errors)
    by_signature = np.bincount(signature - signature.min(), errors)
    together, alone = float((by_class**2).sum()), float((by_signature**2).sum())
    return float(np.sqrt(shared * together + (1 - shared) * alone))


def communication_share(result: Result) -> float:
    """Returns the part of the step in which the critical path waits for communication."""
    if not result.step_time:
        return 0.0
    waits = (s.end - s.start for s in result.critical_path if s.kind in ("transfer", "collective"))
    return min(1.0, sum(waits) / result.step_time)


def _with_scale(options: Options, scale: NDArray[np.float64]) -> Options:
    return Options(
        settings=options.settings,
        reserve_memory=options.reserve_memory,
        priorities=options.priorities,
        scale=scale,
    )
