"""All pipelines for the portfolio: chains of equally copied stages, and DAGs of stages.

The first have several stages on a device and asynchronous updates, the second branches side by
side, unequal numbers of copies and more orders of the devices. One budget is shared out among them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from agents.planners.pipeline_layouts import Demands
from agents.planners.pipeline_plans import Found, Pipelines
from agents.planners.recorder import Budget
from agents.planners.space import Overflow, PlacementSpace
from agents.planners.stage_dag_plans import StageDags
from simcore.units import format_seconds

CHAINS = 0.5  # of the budget; what DAGs leave goes to chains again


@dataclass(slots=True, kw_only=True)
class AllPipelines:
    """The pipelines of a space; may be read while the search goes on.

    Attributes:
        chains: stages in a chain, all with as many copies.
        dags: stages that form a DAG, any numbers of copies.
    """

    chains: Pipelines
    dags: StageDags

    @classmethod
    def build(
        cls,
        space: PlacementSpace,
        demands: Demands,
        *,
        reserve_memory: int = 0,
        listener: Callable[[Budget], None] | None = None,
    ) -> "AllPipelines":
        """Returns the pipelines of a space, nothing tried yet; arguments as `Pipelines.build`."""
        chains = Pipelines.build(space, demands, reserve_memory=reserve_memory, listener=listener)
        dags = StageDags(reason=chains.reason)
        if chains.search is not None:
            dags = StageDags.build(space, demands, reserve_memory=reserve_memory, listener=listener)
        return cls(chains=chains, dags=dags)

    @property
    def bound(self) -> float:
        """Seconds that no pipeline can beat that may be chosen; inf where there is none."""
        return min(self.chains.bound, self.dags.bound)

    @property
    def least(self) -> float:
        """The same of all that are tried."""
        return min(self.chains.least, self.dags.bound)

    def run(self, budget: Budget) -> None:
        """Searches until the budget is spent; called again, it goes on."""
        self.chains.run(budget.part(CHAINS if self.dags.search is not None else 1.0))
        self.dags.run(budget)
        if budget.left():
            self.chains.run(budget)

    @property
    def _is_dag(self) -> bool:
        """Whether the best plan is a DAG of stages, and better than any chain that was found."""
        chain, dag = self.chains.search, self.dags.search
        if dag is None or dag.best is None:
            return False
        best = None if chain is None else chain.best
        return best is None or dag.best[0].step_time < best.step_time

    @property
    def best(self) -> Found | None:
        """The best pipeline that fits and may be chosen; of equal ones a chain."""
        return self.dags.best if self._is_dag else self.chains.best

    @property
    def best_time(self) -> float | None:
        """Step time of the best pipeline in s, None where none fits."""
        chain, dag = self.chains.search, self.dags.search
        if self._is_dag and dag is not None and dag.best is not None:
            return dag.best[0].step_time
        return None if chain is None or chain.best is None else chain.best.step_time

    @property
    def _is_nearer(self) -> bool:
        """Whether a DAG of stages is less over the memory than any chain that was found."""
        over = self.dags.overflow
        chain = None if self.chains.search is None else self.chains.search.nearest
        return over is not None and (chain is None or over < chain.overflow)

    @property
    def nearest(self) -> Found | None:
        """The one that is least over where none fits."""
        return self.dags.nearest if self._is_nearer else self.chains.nearest

    @property
    def worst(self) -> Overflow | None:
        """Where the nearest plan does not fit."""
        return self.dags.worst if self._is_nearer else self.chains.worst

    @property
    def is_untried(self) -> bool:
        """Whether there are pipelines and none was simulated."""
        return self.chains.is_untried and not (self.dags.search and self.dags.search.seen)

    @property
    def note(self) -> str:
        """What is to be said about the best pipeline, or why there is none."""
        found = self.dags.best if self._is_dag else None
        if found is None:
            return self.chains.note
        notes = self.chains.notes_beside(found.step_time)
        chain = self.chains.best
        if chain is not None:
            notes.append(f"the best chain of equal stages: {format_seconds(chain.step_time)}")
        used = len({name for stage in found.plan.stages for name in stage.devices})
        if used < self.chains.num_gpus:
            notes.insert(0, f"{used} of {self.chains.num_gpus} GPUs")
        return "; ".join(notes)
