"""Free placement as a mixed-integer program, solved by HiGHS: a placement and a proven bound.

Variables: unit u on device d (binary), tensor t crosses the border of accelerator d (0 to 1), the
largest load. A tensor crosses where its writer is there and a reader is not, or the other way
round. Accelerators are alike, so the i-th longest unit may use the first i of them only.
"""

import threading
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from agents.exact.max_load import MaxLoadProblem
from agents.exact.units import Units

MAX_VARIABLES = 60_000  # beyond this not even the relaxation comes back in minutes
_INFEASIBLE = 2  # scipy's status


class Answer(NamedTuple):
    """What HiGHS found."""

    bound: float  # proven, file's unit
    unit_device: NDArray[np.int64] | None  # [unit]; None where it found none


class _Rows:
    """Sparse constraints, row by row: low <= row x <= high."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            if value:
                self.row.append(len(self.low))
                self.column.append(column)
                self.value.append(value)
        self.low.append(low)
        self.high.append(high)

    def constraint(self, num_columns: int) -> LinearConstraint:
        matrix = csr_array(
            (self.value, (self.row, self.column)), shape=(len(self.low), num_columns)
        )
        return LinearConstraint(matrix, self.low, self.high)


def solve_milp(
    problem: MaxLoadProblem, units: Units, seconds: float, window: tuple[float, float]
) -> Answer:
    """Returns the best placement that HiGHS finds and the bound that it proves.

    Args:
        problem: the problem.
        units: its free units.
        seconds: time limit; Ctrl-C raises KeyboardInterrupt at once.
        window: a proven lower bound and the load of a known placement, in the file's unit.
    """
    low, high = window
    columns = units.num_units * problem.num_devices
    total = columns + len(units.tensor_cost) * problem.num_accelerators + 1
    if total > MAX_VARIABLES or seconds <= 0 or not low < high:
        return Answer(low, None)
    upper = np.ones(total)
    upper[:columns] = _allowed(problem, units).ravel()
    upper[-1] = high
    lower = np.zeros(total)
    lower[-1] = low
    objective = np.zeros(total)
    objective[-1] = 1.0
    outcome = _in_thread(
        {
            "c": objective,
            "constraints": _rows(problem, units).constraint(total),
            "integrality": np.concatenate((np.ones(columns), np.zeros(total - columns))),
            "bounds": Bounds(lower, upper),
            "options": {"time_limit": seconds, "mip_rel_gap": 1e-7},
        },
        seconds,
    )
    return _answer(outcome, (units.num_units, problem.num_devices), window)


def _answer(outcome: Any, shape: tuple[int, int], window: tuple[float, float]) -> Answer:
    low, high = window
    if outcome is None:
        return Answer(low, None)
    if outcome.status == _INFEASIBLE:  # nothing is as good as what was known
        return Answer(high, None)
    bound = low if outcome.mip_dual_bound is None else max(low, outcome.mip_dual_bound)
    if outcome.x is None:
        return Answer(min(bound, high), None)
    chosen = outcome.x[: shape[0] * shape[1]].reshape(shape).argmax(axis=1)
    return Answer(min(bound, high), chosen.astype(np.int64))


def _allowed(problem: MaxLoadProblem, units: Units) -> NDArray[np.bool_]:
    """Returns where a unit may be, [unit, device]."""
    allowed = np.ones((units.num_units, problem.num_devices), bool)
    accelerators = slice(0, problem.num_accelerators)
    runs = np.isfinite(units.accelerator) & (units.memory <= problem.capacity)
    allowed[~runs, accelerators] = False
    longest = np.argsort(np.where(runs, -units.accelerator, np.inf), kind="stable")
    for rank, unit in enumerate(longest[: problem.num_accelerators].tolist()):
        allowed[unit, rank + 1 : problem.num_accelerators] = False
    return allowed


def _rows(problem: MaxLoadProblem, units: Units) -> _Rows:
    rows = _Rows()
    devices, accelerators = problem.num_devices, problem.num_accelerators
    columns = units.num_units * devices
    load = columns + len(units.tensor_cost) * accelerators
    work = np.where(np.isfinite(units.accelerator), units.accelerator, 0.0).tolist()
    for unit in range(units.num_units):
        rows.add([(unit * devices + d, 1.0) for d in range(devices)], 1, 1)
    for d in range(devices):
        times = work if d < accelerators else units.cpu.tolist()
        terms = [(unit * devices + d, time_) for unit, time_ in enumerate(times)]
        if d < accelerators:
            terms += [
                (columns + tensor * accelerators + d, cost)
                for tensor, cost in enumerate(units.tensor_cost.tolist())
            ]
            kept = [(u * devices + d, m) for u, m in enumerate(units.memory.tolist())]
            scale = problem.capacity or 1.0
            rows.add([(c, m / scale) for c, m in kept], 0, problem.capacity / scale)
        rows.add([*terms, (load, -1.0)], -np.inf, 0)
    for tensor, writer, reader in _links(units):
        for d in range(accelerators):
            crosses = columns + tensor * accelerators + d
            one, other = writer * devices + d, reader * devices + d
            rows.add([(crosses, 1.0), (one, -1.0), (other, 1.0)], 0, np.inf)
            rows.add([(crosses, 1.0), (one, 1.0), (other, -1.0)], 0, np.inf)
    return rows


def _links(units: Units) -> list[tuple[int, int, int]]:
    """Returns (tensor, unit that writes it, unit that reads it)."""
    unit = np.repeat(np.arange(units.num_units), np.diff(units.first_use))
    writer = np.zeros(len(units.tensor_cost), np.int64)
    writer[units.use_tensor[units.use_writes]] = unit[units.use_writes]
    reads = ~units.use_writes
    return [
        (tensor, int(writer[tensor]), reader)
        for tensor, reader in zip(
            units.use_tensor[reads].tolist(), unit[reads].tolist(), strict=True
        )
    ]


def _in_thread(arguments: dict[str, Any], seconds: float) -> Any:
    """Runs the solver beside this thread, which can be interrupted; None where it does not end."""
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(milp(arguments.pop("c"), **arguments)), daemon=True
    )
    thread.start()
    end = time.perf_counter() + 2 * seconds + 10  # it looks at its clock now and then only
    while thread.is_alive() and time.perf_counter() < end:
        thread.join(0.2)
    return found[0] if found else None
