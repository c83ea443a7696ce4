"""The best plan of the additive objective as an integer linear program, solved by HiGHS.

A binary for each value of each decision, and one for each entry of each table; an entry is chosen
where all its values are. That is the linearisation of products that Alpa (Zheng et al., OSDI 2022)
uses for costs on edges, over tables of any number of decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix, csr_matrix

from agents.automap.additive import Additive, Table
from simcore.errors import PlanError
from simcore.shard_space import WHOLE

MOST_ENTRIES = 12_000  # of all tables; HiGHS does not keep to its time with many more


class IlpSolution(NamedTuple):
    """What HiGHS says.

    Attributes:
        row: the plan, [decision].
        value: what it adds up to.
        bound: what no plan that is left goes below.
        is_proven: whether the two are the same.
    """

    row: NDArray[np.int8]  # [decision] axis
    value: float
    bound: float
    is_proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What plans must keep to.

    Attributes:
        kept: bytes that a device may keep all the time, inf = any.
        excluded: plans that are out, [decision] each.
        uses_all: every axis splits something.
        seconds: for HiGHS.
    """

    kept: float = np.inf
    excluded: tuple[NDArray[np.int8], ...] = ()  # [plan][decision] axis
    uses_all: bool = False
    seconds: float = 20.0


ANYTHING = Limits()


def solve(additive: Additive, tables: Sequence[Table], limits: Limits = ANYTHING) -> IlpSolution:
    """Returns the plan that adds up to the least.

    Args:
        additive: the space.
        tables: what is added up, [table][value of each decision of its scope].
        limits: what plans must keep to.

    Raises:
        PlanError: no plan keeps to the limits, none was found in time, or the tables are too large.
    """
    entries = sum(table.size for table in tables)
    if entries > MOST_ENTRIES:
        raise PlanError(f"tables of {entries:,} entries are too many for an integer program")
    model = _Model(additive, tables)
    model.link()
    model.limit(limits)
    scale = max(1e-12, float(np.abs(model.cost).max()))
    found = milp(
        model.cost / scale,
        constraints=LinearConstraint(model.matrix(), model.low, model.high),
        integrality=model.integral,
        bounds=Bounds(0.0, 1.0),
        options={"time_limit": limits.seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise PlanError(f"no sharding keeps to the limits ({found.message})")
    places = model.places(found.x)
    row = additive.row(places)
    value = float(additive.cost(tables, row[None])[0])
    bound = value if found.status == 0 else float(found.mip_dual_bound) * scale
    return IlpSolution(row, value, min(value, bound), found.status == 0)


class _Model:
    """Rows and columns of the program."""

    def __init__(self, additive: Additive, tables: Sequence[Table]) -> None:
        self.additive = additive
        counts = [len(values) for values in additive.values]
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        self.entry = self.first[-1] + np.concatenate(
            [[0], np.cumsum([table.size for table in tables])]
        ).astype(int)
        self.cost = np.concatenate([np.zeros(self.first[-1]), *(t.reshape(-1) for t in tables)])
        self.integral = np.zeros(len(self.cost))
        self.integral[: self.first[-1]] = 1  # entries follow from these
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, columns: Sequence[int], values: Sequence[float], low: float, high: float) -> None:
        """Adds a row."""
        row = len(self.low)
        self.entries += [(row, int(c), v) for c, v in zip(columns, values, strict=True)]
        self.low.append(low)
        self.high.append(high)

    def link(self) -> None:
        """Says that each decision has one value, and that entries agree with it."""
        for begin, end in zip(self.first[:-1], self.first[1:], strict=True):
            self.add(range(begin, end), [1.0] * (end - begin), 1.0, 1.0)
        for number, scope in enumerate(self.additive.scopes):
            shape = tuple(len(self.additive.values[d]) for d in scope)
            columns = self.entry[number] + np.arange(int(np.prod(shape))).reshape(shape)
            if not scope:
                self.add([int(columns)], [1.0], 1.0, 1.0)
            for place, decision in enumerate(scope):
                for value in range(shape[place]):
                    mine = np.take(columns, value, axis=place).reshape(-1)
                    chosen = self.first[decision] + value
                    self.add([*mine, chosen], [1.0] * len(mine) + [-1.0], 0.0, 0.0)

    def limit(self, limits: Limits) -> None:
        """Adds what plans must keep to."""
        if np.isfinite(limits.kept):
            kept = np.concatenate([table.reshape(-1) for table in self.additive.kept()])
            scale = max(1.0, limits.kept)
            columns = np.arange(self.first[-1], len(self.cost))
            self.add(columns.tolist(), (kept / scale).tolist(), -np.inf, limits.kept / scale)
        for row in limits.excluded:
            columns = np.array([
                self.first[d] + np.searchsorted(values, row[d])
                for d, values in enumerate(self.additive.values)
            ])  # fmt: skip
            self.add(columns.tolist(), [1.0] * len(columns), -np.inf, len(columns) - 1.0)
        for axis in range(self.additive.num_axes if limits.uses_all else 0):
            mine = [
                self.first[d] + place
                for d, values in enumerate(self.additive.values)
                for place, value in enumerate(values)
                if value == axis and value != WHOLE
            ]
            self.add(mine, [1.0] * len(mine), 1.0, np.inf)

    def matrix(self) -> csr_matrix:
        """Returns the rows."""
        rows, columns, values = zip(*self.entries, strict=True)
        shape = (len(self.low), len(self.cost))
        return coo_matrix((values, (rows, columns)), shape=shape).tocsr()

    def places(self, x: NDArray[np.float64]) -> list[int]:
        """Returns the place of each decision's value."""
        pairs = zip(self.first[:-1], self.first[1:], strict=True)
        return [int(np.argmax(x[begin:end])) for begin, end in pairs]
