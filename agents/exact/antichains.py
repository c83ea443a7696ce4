"""The states of PipeDream's planner, in its order: antichains of the layer graph.

A state is the set of a graph's last done layers. From it one goes on by a layer that follows one of
them, or follows a layer before one of them that is read beyond it. The order is the authors': their
plans count states. Sets of layers are bits of an int.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from simcore.errors import GraphError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """Layers by number, topological."""

    follows: list[list[int]]  # [layer] direct successors
    before: list[int]  # [layer] bits of all ancestors
    after: list[int]  # [layer] bits of all descendants


def make_dag(count: int, arcs: Sequence[tuple[int, int]]) -> Dag:
    """Returns the graph of the arcs (layer, later layer)."""
    follows: list[list[int]] = [[] for _ in range(count)]
    for one, other in sorted(arcs):
        follows[one].append(other)
    before, after = [0] * count, [0] * count
    for layer in range(count):
        for other in follows[layer]:
            before[other] |= before[layer] | 1 << layer
    for layer in reversed(range(count)):
        for other in follows[layer]:
            after[layer] |= after[other] | 1 << other
    return Dag(follows=follows, before=before, after=after)


State = tuple[int, ...]  # layers


def list_states(dag: Dag, limit: int) -> tuple[list[State], list[State]]:
    """Returns (antichains, the same with the earlier layers that are read beyond them).

    Raises:
        GraphError: there are more than `limit`.
    """
    first = next(layer for layer, ancestors in enumerate(dag.before) if not ancestors)
    start: State = (first,)
    found = {start: start}  # sorted -> as first met
    next_states: dict[State, list[State]] = {}
    queue = [start]
    for state in queue:
        opened = []
        for other in _next(dag, state):
            key = tuple(sorted(other))
            if key not in found:
                found[key] = other
                queue.append(other)
            opened.append(key)
        next_states[tuple(sorted(state))] = list(dict.fromkeys(opened))
        if len(found) > limit:
            raise GraphError(f"more than {limit} states; PipeDream's program would not end")
    order = _reverse_postorder(start, next_states)
    return order, [_augmented(dag, found[key]) for key in order]


def _augmented(dag: Dag, state: State) -> State:
    """Returns the earlier layers that are read beyond a layer of the state, then the state."""
    extra = {
        earlier
        for layer in state
        for earlier in _layers(dag.before[layer])
        if any(
            other != layer and not dag.before[layer] >> other & 1 for other in dag.follows[earlier]
        )
    }
    return (*sorted(extra), *state)


def _next(dag: Dag, state: State) -> list[State]:
    augmented = _augmented(dag, state)
    bits = sum(1 << layer for layer in set(augmented))
    found = []
    for layer in augmented:
        for other in dag.follows[layer]:
            if other not in state and not dag.after[other] & bits:
                swapped = [other if kept == layer else kept for kept in augmented]
                found.append(_last_ones(dag, swapped))
    return found


def _last_ones(dag: Dag, layers: list[int]) -> State:
    """Returns the layers that no other of them comes after, once each."""
    bits = sum(1 << layer for layer in set(layers))
    return tuple(dict.fromkeys(layer for layer in layers if not dag.after[layer] & bits))


def _reverse_postorder(start: State, next_states: dict[State, list[State]]) -> list[State]:
    done: list[State] = []
    seen = {start}
    stack = [(start, iter(next_states[start]))]
    while stack:
        state, others = stack[-1]
        other = next((o for o in others if o not in seen), None)
        if other is None:
            done.append(state)
            stack.pop()
        else:
            seen.add(other)
            stack.append((other, iter(next_states[other])))
    return done[::-1]


def _layers(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def members(dag: Dag, state: State) -> int:
    """Returns the bits of all layers that are done in a state."""
    bits = 0
    for layer in state:
        bits |= dag.before[layer] | 1 << layer
    return bits
