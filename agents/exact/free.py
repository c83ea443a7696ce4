"""The best free placement: simulated annealing from several starts, then a mixed-integer program.

HiGHS cannot be given a placement to begin with, so it gets its load as a limit, and the better of
the two answers counts. A contiguous split is a free placement too and is one of the starts.
"""

import math
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_moves import Pieces, State, anneal, restart
from agents.exact.contiguous import Listener, Progress, Solution, best_contiguous
from agents.exact.load_bounds import work_bound
from agents.exact.max_load import MaxLoadProblem, objective
from agents.exact.milp import solve_milp
from agents.exact.units import Units, free_units

DEFAULT_SECONDS = 60.0
_STEPS = 100_000  # of one call into compiled code
_LEGS = 8  # calls from hot to cold
_HOT, _COLD = 0.03, 1e-5  # temperatures relative to the largest load
_HEURISTIC_SHARE = 0.3  # of the time; the rest is the solver's
_FEW_UNITS = 20


class _Search:
    """The best placement and bound so far."""

    def __init__(self, problem: MaxLoadProblem, seconds: float, listener: Listener | None) -> None:
        self.problem, self.listener = problem, listener
        self.started, self.seconds = time.perf_counter(), seconds
        small = free_units(problem, merge_leaves=False)
        fits = problem.memory.sum() <= problem.capacity  # then merged leaves change nothing
        self.units = free_units(problem, merge_leaves=True) if fits else small
        self.load, self.method = math.inf, "none"
        self.bound = work_bound(problem, self.units)
        self.device: NDArray[np.int64] | None = None

    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.started)

    def keep(self, device: NDArray[np.int64], method: str) -> None:
        """Keeps a placement of the units, [unit], if it is better; its load is computed anew."""
        load = objective(self.problem, device[self.units.node_unit])
        if load < self.load:
            self.load, self.device, self.method = load, device, method

    def tell(self, stage: str) -> None:
        if self.listener is not None:
            self.listener(Progress(stage=stage, load=self.load, bound=self.bound))

    def is_done(self) -> bool:
        return self.load <= self.bound * (1 + 1e-9) or not math.isfinite(self.bound)


def best_free(
    problem: MaxLoadProblem, *, seconds: float | None = None, listener: Listener | None = None
) -> Solution:
    """Returns the placement with the smallest largest load, contiguous or not.

    Args:
        problem: the problem.
        seconds: how long to search; None is `DEFAULT_SECONDS`. It ends sooner with a proof.
        listener: is told the progress.

    Returns:
        The solution; Ctrl-C ends the search early and keeps the best.
    """
    search = _Search(problem, DEFAULT_SECONDS if seconds is None else seconds, listener)
    interrupted = False
    try:
        _run(search)
    except KeyboardInterrupt:
        interrupted = True
    placement = None if search.device is None else search.device[search.units.node_unit]
    return Solution(
        load=search.load,
        bound=min(search.bound, search.load),
        placement=placement,
        method=search.method,
        interrupted=interrupted,
    )


def _run(search: _Search) -> None:
    if search.is_done():
        return
    search.tell("contiguous splits")
    split = best_contiguous(search.problem, seconds=search.seconds * _HEURISTIC_SHARE / 2)
    if split.interrupted:
        raise KeyboardInterrupt
    if split.placement is not None:
        search.keep(_of_units(search.units, split.placement), "contiguous split")
    until = search.left() * (1 - _HEURISTIC_SHARE)
    for device in _annealed(search, until):
        search.keep(device, "simulated annealing")
        search.tell("annealing")
        if search.is_done():
            return
    search.tell("mixed-integer program")
    window = (search.bound, search.load)
    answer = solve_milp(search.problem, search.units, search.left(), window)
    search.bound = max(search.bound, answer.bound)
    if answer.unit_device is not None:
        search.keep(answer.unit_device, "mixed-integer program")


def _of_units(units: Units, placement: NDArray[np.int64]) -> NDArray[np.int64]:
    device = np.zeros(units.num_units, np.int64)
    device[units.node_unit] = placement
    return device


def _annealed(search: _Search, until: float) -> Iterator[NDArray[np.int64]]:
    """Yields placements until only so many seconds are left; each start is annealed once."""
    pieces = _pieces(search.problem, search.units)
    state = _state(search.problem, search.units)
    rng = np.random.default_rng(0)
    rounds = 0
    while rounds < 2 or search.left() > until:
        start = search.device if rounds % 2 == 0 else None
        if start is None:
            start = _packed(search.problem, search.units, rng)
        rounds += 1
        restart(pieces, state, start)
        if not np.isfinite(state.load).all():
            continue  # an operator has no device left that holds it
        heats = np.geomspace(_HOT / 10 if rounds % 2 else _HOT, _COLD, _LEGS + 1).tolist()
        for leg in range(_LEGS):
            anneal(pieces, state, _steps(search.units), (heats[leg], heats[leg + 1]))
            if rounds > 1 and search.left() <= until:
                break
        yield state.best.copy()
        if rounds >= 4 and search.units.num_units <= _FEW_UNITS:
            return  # the solver proves such small ones at once


def _steps(units: Units) -> int:
    return _STEPS if units.num_units > _FEW_UNITS else 200 * units.num_units


def _packed(problem: MaxLoadProblem, units: Units, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns a placement by work and memory alone: longest first, where there is most room."""
    load = np.zeros(problem.num_devices)
    memory = np.zeros(problem.num_devices)
    device = np.zeros(units.num_units, np.int64)
    is_cpu = np.arange(problem.num_devices) >= problem.num_accelerators
    weight = np.where(np.isfinite(units.accelerator), units.accelerator, units.cpu)
    hold = units.memory / max(problem.capacity, 1.0)
    for unit in np.argsort(-(weight / weight.max(initial=1e-300) + hold)).tolist():
        after = load + np.where(is_cpu, units.cpu[unit], units.accelerator[unit])
        full = ~is_cpu & (memory + units.memory[unit] > problem.capacity)
        score = np.where(full, 1e30, after) * rng.uniform(1.0, 1.05, len(after))
        device[unit] = int(score.argmin())
        load[device[unit]] = after[device[unit]]
        memory[device[unit]] += units.memory[unit]
    return device


def _pieces(problem: MaxLoadProblem, units: Units) -> Pieces:
    return Pieces(
        units.accelerator,
        units.cpu,
        units.memory,
        units.tensor_cost,
        units.tensor_readers,
        units.first_use,
        units.use_tensor,
        units.use_writes,
        problem.num_accelerators,
        problem.capacity,
    )


def _state(problem: MaxLoadProblem, units: Units) -> State:
    return State(
        np.zeros(units.num_units, np.int64),
        np.zeros(len(units.tensor_cost), np.int64),
        np.zeros((len(units.tensor_cost), problem.num_devices), np.int64),
        np.zeros(problem.num_devices),
        np.zeros(problem.num_devices),
        np.zeros(units.num_units, np.int64),
        np.full(1, np.inf),
        np.ones(1, np.uint64),
    )
