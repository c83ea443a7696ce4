"""Names put into topological order, and the cycle named where there is none."""

import heapq
from collections.abc import Iterable, Mapping, Sequence

from simcore.errors import GraphError


def unique_names(pairs: Iterable[tuple[str, float]], name: str) -> dict[str, float]:
    """Returns the pairs as a dict, refusing a name that comes twice."""
    seconds: dict[str, float] = {}
    for op, value in pairs:
        if op in seconds:
            raise GraphError(f"{name}: two ops are named {op!r}")
        seconds[op] = value
    return seconds


def topological_order(successors: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """Returns the keys so that each comes before its successors, ties in the order given.

    Raises:
        GraphError: there is a cycle; it is named.
    """
    position = {op: index for index, op in enumerate(successors)}
    waiting = dict.fromkeys(successors, 0)
    for targets in successors.values():
        for target in targets:
            waiting[target] += 1
    ready = [position[op] for op, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    names, order = list(successors), []
    while ready:
        op = names[heapq.heappop(ready)]
        order.append(op)
        for target in successors[op]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, position[target])
    if len(order) < len(names):
        raise GraphError(f"{name}: cycle: {' -> '.join(_cycle(successors, waiting))}")
    return order


def _cycle(successors: Mapping[str, Sequence[str]], waiting: Mapping[str, int]) -> list[str]:
    """Follows ops that never became ready, backwards, until one repeats."""
    stuck = dict.fromkeys(op for op, count in waiting.items() if count > 0)
    before = {t: op for op in stuck for t in successors[op] if t in stuck}
    op, path = next(iter(stuck)), [""]
    while op not in path:
        path.append(op)
        op = before[op]
    loop = path[path.index(op) :]
    return [op, *reversed(loop)] if len(loop) <= 8 else [op, *reversed(loop[-8:]), "..."]
