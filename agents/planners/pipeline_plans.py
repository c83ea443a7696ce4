"""Pipelines for the portfolio: whether there are any, the search, the best plan and what to say."""

from dataclasses import dataclass
from typing import NamedTuple

from agents.planners.pipeline_bound import pipeline_bound
from agents.planners.pipeline_chain import Chain
from agents.planners.pipeline_layouts import Demands, Layout, layouts
from agents.planners.pipeline_search import Listener, PipelineSearch, Tried
from agents.planners.recorder import Budget
from agents.planners.space import Overflow, PlacementSpace
from simcore.errors import JobError, PlanError, UsageError
from simcore.pipeline_build import ASYNCHRONOUS
from simcore.plan import SEMANTICS_BATCH_NORM, Plan
from simcore.profile import suggestion
from simcore.schedule_names import SCHEDULE_NAMES, make_schedule
from simcore.steady_state import SEMANTICS_ASYNC
from simcore.units import format_seconds

# what --allow says -> what a plan says
CHANGES = {"asynchronous": SEMANTICS_ASYNC, "batch-norm": SEMANTICS_BATCH_NORM}
_TOO_FEW = "needs two GPUs"


class Found(NamedTuple):
    """The best pipeline."""

    plan: Plan
    step_time: float  # s


def check_demands(demands: Demands, batch: int | None) -> None:
    """Refuses demands that no pipeline can meet.

    Args:
        demands: what the user asks.
        batch: samples of a step, None = unknown.

    Raises:
        UsageError: an unknown schedule, one that changes the mathematics without leave, a number of
            microbatches that does not divide the batch.
    """
    name, count = demands.schedule, demands.microbatches
    if name is not None and name not in SCHEDULE_NAMES:
        known = ", ".join(SCHEDULE_NAMES)
        hint = suggestion(name, list(SCHEDULE_NAMES))
        raise UsageError(f"--schedule {name}: no such schedule{hint}; there are {known}")
    if name == ASYNCHRONOUS and SEMANTICS_ASYNC not in demands.allow:
        raise UsageError(
            f"--schedule {name} changes the mathematics ({SEMANTICS_ASYNC}); it needs --allow "
            "asynchronous"
        )
    if count is not None and count < 1:
        raise UsageError(f"--microbatches {count}: must be at least 1")
    if count is not None and batch is not None and batch % count and name != ASYNCHRONOUS:
        raise UsageError(f"--microbatches {count}: a batch of {batch} does not divide by it")


@dataclass(slots=True, kw_only=True)
class Pipelines:
    """The pipelines of a space; may be read while the search goes on.

    Attributes:
        search: None where there is nothing to search.
        bound: seconds that no pipeline can beat that may be chosen; inf where there is none.
        least: the same of all that are tried.
        reason: why there is nothing to search.
        num_gpus: GPUs that may be used.
    """

    search: PipelineSearch | None = None
    bound: float = float("inf")
    least: float = float("inf")
    reason: str = ""
    num_gpus: int = 0

    @classmethod
    def build(
        cls,
        space: PlacementSpace,
        demands: Demands,
        *,
        reserve_memory: int = 0,
        listener: Listener | None = None,
    ) -> "Pipelines":
        """Returns the pipelines of a space, nothing tried yet.

        Args:
            space: gives the graph, the job, the settings and the devices that may be used.
            demands: what may not be chosen freely.
            reserve_memory: bytes to leave free on every GPU.
            listener: called after each simulation.
        """
        num_gpus = len(space.devices)
        if num_gpus < 2:
            return cls(reason=_TOO_FEW, num_gpus=num_gpus)
        if space.problem.job.batch is None:
            return cls(reason="the batch is unknown, so it cannot be divided (--batch)")
        tried = layouts(space, demands)
        if not tried:
            return cls(reason=_why_no_layout(space, demands), num_gpus=num_gpus)
        try:
            search = PipelineSearch(
                chain=Chain.build(space),
                layouts=tried,
                allow=demands.allow,
                reserve_memory=reserve_memory,
                listener=listener,
            )
            bound = pipeline_bound(search.chain, search.allowed)
            least = pipeline_bound(search.chain, tried)
        except (PlanError, JobError) as error:
            return cls(reason=str(error), num_gpus=num_gpus)
        return cls(search=search, bound=bound, least=least, num_gpus=num_gpus)

    def run(self, budget: Budget) -> None:
        """Searches until the budget is spent; at least one pipeline is tried."""
        if self.search is not None:
            self.search.run(budget)

    @property
    def best(self) -> Found | None:
        """The best pipeline that fits and may be chosen."""
        return self._found(None if self.search is None else self.search.best)

    @property
    def nearest(self) -> Found | None:
        """The one that is least over where none fits."""
        return self._found(None if self.search is None else self.search.nearest)

    def _found(self, tried: Tried | None) -> Found | None:
        if self.search is None or tried is None:
            return None
        return Found(self.search.plan(tried.candidate), tried.step_time)

    @property
    def why_none(self) -> str:
        """Why no pipeline was found that fits."""
        if self.search is None:
            return self.reason
        if self.worst is not None:
            return str(self.worst)
        if not self.search.allowed:
            return "every pipeline changes the mathematics"
        return "no cut of the model into stages can be run"

    @property
    def note(self) -> str:
        """What is to be said about the best pipeline, or why there is none."""
        notes = [] if self.search is not None and self.search.best else [self.why_none]
        if self.search is not None:
            best = float("inf") if self.search.best is None else self.search.best.step_time
            notes += [*self._idle(self.search), *self.notes_beside(best)]
        return "; ".join(notes)

    def notes_beside(self, step_time: float) -> list[str]:
        """Names the best pipeline that changes the mathematics, if it is faster than a plan.

        Args:
            step_time: of the plan, s.
        """
        other = None if self.search is None else self.search.apart
        if other is None or step_time <= other.step_time:
            return []
        words = {change: word for word, change in CHANGES.items()}
        leave = " ".join(f"--allow {words[change]}" for change in other.semantics)
        return [f"{format_seconds(other.step_time)} with {', '.join(other.semantics)} ({leave})"]

    @property
    def is_untried(self) -> bool:
        """Whether there are pipelines and none was simulated."""
        return self.search is not None and not self.search.tried

    @property
    def worst(self) -> Overflow | None:
        """Where the nearest plan does not fit."""
        if self.search is None or self.search.nearest is None:
            return None
        return self.search.nearest.worst

    def _idle(self, search: PipelineSearch) -> list[str]:
        """Says why the best pipeline leaves GPUs idle."""
        if search.best is None or search.best.candidate.layout.num_devices == self.num_gpus:
            return []
        used = search.best.candidate.layout.num_devices
        says = f"{used} of {self.num_gpus} GPUs"
        on_all = [
            tried
            for tried in search.tried
            if tried.candidate.layout.num_devices == self.num_gpus
            and set(tried.semantics) <= search.allow
        ]
        if on_all:
            best = min(on_all, key=lambda tried: tried.rank)
            took = format_seconds(best.step_time) if not best.overflow else f"{best.worst}"
            return [f"{says}; on all: {took}"]
        if any(layout.num_devices == self.num_gpus for layout in search.layouts):
            return [f"{says}; none on all was tried"]
        batch = search.chain.space.problem.job.batch
        return [f"{says}: a batch of {batch} does not divide among all"]


def _why_no_layout(space: PlacementSpace, demands: Demands) -> str:
    """Returns why no number of stages, copies and microbatches goes with the demands."""
    batch = space.problem.job.batch
    name, count = demands.schedule or "1f1b", demands.microbatches
    try:
        layout = Layout(devices=((0,), (1,)), microbatches=count or batch or 1, schedule=name)
        make_schedule(name, 2, layout.microbatches, stages_per_rank=layout.per_rank)
    except PlanError as error:
        return str(error)
    return f"no pipeline on {len(space.devices)} GPUs goes with a batch of {batch}"
