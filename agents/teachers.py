"""Plans to imitate: what annealing finds on a task, said in one way."""

import itertools

import numpy as np
from numpy.typing import NDArray

from agents.planners.anneal import Anneal
from agents.planners.recorder import Budget, Recorder
from agents.planners.single_device import SingleDevice
from agents.task import Evaluation, PlacementTask

KEPT = 8  # of the best plans
MOST_DEVICES = 5  # in a plan that is renumbered; the orders of more are too many to try


def annealed(
    task: PlacementTask, evaluations: int, seed: int
) -> tuple[NDArray[np.int64], Evaluation]:
    """Returns the best that annealing met, as actions [plan, group], and what they are worth.

    Args:
        task: the task.
        evaluations: placements simulated, all in all.
        seed: of the walk.
    """
    space, grouping = task.grouping.space, task.grouping
    recorder, budget = Recorder(space=space), Budget(evaluations=evaluations)
    rng = np.random.default_rng(seed)
    for planner in (SingleDevice(), Anneal()):
        planner.search(space, rng, budget, recorder)
    finds = recorder.curve[-KEPT:] or list(recorder.by_finder.values())
    actions = np.stack([grouping.summarise(found.placement) for found in finds]).astype(np.int64)
    return actions, task.evaluate(actions)


def renumbered(task: PlacementTask, actions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns plans, [plan, group], with equal devices in the order of their first group.

    Which of several equal devices a plan names is chance, and a policy cannot learn chance. A plan
    stays as it is where no order of equal devices makes it as fast and puts them in order.
    """
    kinds = [device.kind for device in task.grouping.space.problem.cluster.devices]
    return np.stack([_first_in_order(task, plan, kinds) for plan in actions])


def _first_in_order(
    task: PlacementTask, plan: NDArray[np.int64], kinds: list[str]
) -> NDArray[np.int64]:
    used = list(dict.fromkeys(plan.tolist()))
    if len(used) > MOST_DEVICES:
        return plan
    same = [[d for d, kind in enumerate(kinds) if kind == kinds[device]] for device in used]
    names = sorted(choice for choice in itertools.product(*same) if len(set(choice)) == len(choice))
    table = np.tile(np.arange(len(kinds)), (len(names), 1))
    for row, choice in enumerate(names):
        table[row, used] = choice
    candidates = table[:, plan]  # in lexicographic order
    found = task.evaluate(candidates)
    own = float(task.evaluate(plan[None]).step_time[0])
    equal = np.flatnonzero(found.fits & (found.step_time <= own * (1 + 1e-9)))
    best: NDArray[np.int64] = candidates[equal[0]] if len(equal) else plan
    return best
