"""Compiled: Piper's dynamic program over downsets, devices and data-parallel degrees."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_options import compiled

_LEAST = 1e-9  # seconds or bytes that count


class Layers(NamedTuple):
    """Configurations of nodes; axes node, degree (of tensor parallelism), config."""

    num_configs: NDArray[np.int64]  # [node, degree]
    time: NDArray[np.float64]  # [node, degree, config] s
    parameter: NDArray[np.float64]  # [node, degree, config] bytes
    per_batch: NDArray[np.float64]  # [node, degree, config] bytes per microbatch in flight
    fixed: NDArray[np.float64]  # [node, degree, config] bytes
    first_edge: NDArray[np.int64]  # [node + 1] edges in and out of each node
    edge_other: NDArray[np.int64]  # [edge] the other end
    edge_bytes: NDArray[np.float64]  # [edge, degree, config] moved if the other end is elsewhere


class Machine(NamedTuple):
    """The devices."""

    degree: NDArray[np.int64]  # [degree] of tensor parallelism
    devices: int
    memory: float  # bytes
    bandwidth: float  # bytes/s
    batches: int  # microbatches in a batch
    most: int  # the sum of data-parallel degrees is at most this


class Lattice(NamedTuple):
    """For each downset those that lack one node of it."""

    first_down: NDArray[np.int64]  # [downset + 1]
    down_node: NDArray[np.int32]  # [link] rising
    down_set: NDArray[np.int32]  # [link] the smaller downset


class Tables(NamedTuple):
    """Seconds per sample of a downset on so many devices with so large a sum of degrees."""

    best: NDArray[np.float64]  # [downset, devices + 1, most + 1] s
    drops: NDArray[np.int32]  # [downset, devices + 1, most + 1] sums at which it falls
    num_drops: NDArray[np.int64]  # [downset, devices + 1]


@compiled
def _edge_bytes(layers: Layers, is_inside: NDArray[np.bool_], node: int, t: int, c: int) -> float:
    total = 0.0
    for e in range(layers.first_edge[node], layers.first_edge[node + 1]):
        if not is_inside[layers.edge_other[e]]:
            total += layers.edge_bytes[e, t, c]
    return total


@compiled
def cost_configs(
    layers: Layers,
    machine: Machine,
    nodes: NDArray[np.int64],
    is_inside: NDArray[np.bool_],
    degrees: tuple[int, int],
) -> NDArray[np.float64]:
    """Returns seconds per sample of each configuration of a stage's nodes, [node, config]."""
    t, d = degrees
    cost = np.full((len(nodes), layers.time.shape[2]), np.inf)
    for i in range(len(nodes)):
        node = nodes[i]
        for c in range(layers.num_configs[node, t]):
            moved = _edge_bytes(layers, is_inside, node, t, c) / d
            moved += 4.0 * (d - 1) * layers.parameter[node, t, c] / d / machine.batches
            cost[i, c] = moved / machine.bandwidth + layers.time[node, t, c] / d
    return cost


@compiled
def _memory(
    layers: Layers, nodes: NDArray[np.int64], t: int, in_flight: int, i: int, c: int
) -> float:
    return float(layers.per_batch[nodes[i], t, c] * in_flight + layers.fixed[nodes[i], t, c])


@compiled
def choose_configs(
    layers: Layers,
    machine: Machine,
    nodes: NDArray[np.int64],
    cost: NDArray[np.float64],
    t_flight: tuple[int, int],
) -> NDArray[np.int64]:
    """Returns the configuration of each node, [node], by Piper's heuristic; [-1] if none fits.

    The fastest everywhere; where that does not fit, changes that save memory are made in the order
    of seconds per byte saved until it does.
    """
    t, in_flight = t_flight
    chosen = np.zeros(len(nodes), np.int64)
    over, least = -machine.memory, -machine.memory
    for i in range(len(nodes)):
        count = layers.num_configs[nodes[i], t]
        lightest = np.inf
        for c in range(count):
            if cost[i, c] < cost[i, chosen[i]]:
                chosen[i] = c
            lightest = min(lightest, _memory(layers, nodes, t, in_flight, i, c))
        over += _memory(layers, nodes, t, in_flight, i, chosen[i])
        least += lightest
    if over <= 0:
        return chosen
    if least > 0:
        return np.full(1, -1, np.int64)
    most = layers.time.shape[2]
    ratio = np.full(len(nodes) * most, np.inf)
    saving = np.zeros(len(nodes) * most)
    for i in range(len(nodes)):
        for c in range(layers.num_configs[nodes[i], t]):
            saved = _memory(layers, nodes, t, in_flight, i, chosen[i])
            saved -= _memory(layers, nodes, t, in_flight, i, c)
            if saved > _LEAST:
                ratio[i * most + c] = (cost[i, c] - cost[i, chosen[i]]) / saved
                saving[i * most + c] = saved
    for change in np.argsort(ratio, kind="mergesort"):
        if over < _LEAST or not np.isfinite(ratio[change]):
            break
        over -= saving[change]
        chosen[change // most] = change % most
    return chosen


@compiled
def stage_seconds(
    layers: Layers,
    machine: Machine,
    nodes: NDArray[np.int64],
    is_inside: NDArray[np.bool_],
    degrees: tuple[int, int],
) -> NDArray[np.float64]:
    """Returns seconds per sample of a stage by microbatches in flight, [in flight]; 0 = unused."""
    t, d = degrees
    seconds = np.full(machine.most // d + 2, np.inf)
    cost = cost_configs(layers, machine, nodes, is_inside, degrees)
    for in_flight in range(1, len(seconds)):
        chosen = choose_configs(layers, machine, nodes, cost, (t, in_flight))
        if chosen[0] < 0:
            break
        seconds[in_flight] = 0.0
        for i in range(len(nodes)):
            seconds[in_flight] += cost[i, chosen[i]]
    return seconds


@compiled
def _improve(
    machine: Machine, tables: Tables, above_below: tuple[int, int], used: tuple[int, int],
    seconds: NDArray[np.float64],
) -> None:  # fmt: skip
    """Improves a downset by a first stage on t x d devices over a smaller downset."""
    above, below = above_below
    t, d = used
    for k in range(t * d, machine.devices + 1):
        rest = k - t * d
        for j in range(tables.num_drops[below, rest]):
            total = tables.drops[below, rest, j] + d
            if total > machine.most:
                break
            worst = max(tables.best[below, rest, total - d], seconds[(total + d - 1) // d])
            tables.best[above, k, total] = min(tables.best[above, k, total], worst)


@compiled
def _close(machine: Machine, tables: Tables, downset: int) -> None:
    """More devices and larger sums never hurt; notes where more of the latter helps."""
    best = tables.best[downset]
    for k in range(machine.devices + 1):
        count = 0
        for s in range(machine.most + 1):
            if k > 0:
                best[k, s] = min(best[k, s], best[k - 1, s])
            if s > 0:
                best[k, s] = min(best[k, s], best[k, s - 1])
            if best[k, s] < np.inf and (s == 0 or best[k, s] < best[k, s - 1]):
                tables.drops[downset, k, count] = s
                count += 1
        tables.num_drops[downset, k] = count


@compiled
def _has_degree(layers: Layers, nodes: NDArray[np.int64], t: int) -> bool:
    return bool((layers.num_configs[nodes, t] > 0).all())


@compiled
def _try_stage(
    layers: Layers,
    machine: Machine,
    tables: Tables,
    above_below: tuple[int, int],
    stage: tuple[NDArray[np.int64], NDArray[np.bool_]],
) -> None:
    nodes, is_inside = stage
    for t in range(len(machine.degree)):
        degree = machine.degree[t]
        if degree > machine.devices or not _has_degree(layers, nodes, t):
            continue
        for d in range(1, min(machine.devices // degree, machine.most) + 1):
            if machine.batches % d == 0:
                seconds = stage_seconds(layers, machine, nodes, is_inside, (t, d))
                if seconds[1] < np.inf:
                    _improve(machine, tables, above_below, (degree, d), seconds)


@compiled
def below(lattice: Lattice, top: int, num_nodes: int) -> NDArray[np.int64]:
    """Returns all smaller downsets of one, each once."""
    seen = np.zeros(top + 1, np.bool_)
    found = np.zeros(top + 1, np.int64)
    seen[top] = True
    found[0] = top
    count, k = 1, 0
    while k < count:
        for link in range(lattice.first_down[found[k]], lattice.first_down[found[k] + 1]):
            smaller = lattice.down_set[link]
            if not seen[smaller]:
                seen[smaller] = True
                found[count] = smaller
                count += 1
        k += 1
    return found[1:count].copy()


@compiled
def fill_downset(
    layers: Layers,
    machine: Machine,
    lattice: Lattice,
    tables: Tables,
    members: NDArray[np.bool_],
    top: int,
) -> None:
    """Finds the best pipelines of a downset from all smaller ones, which are done."""
    for smaller in below(lattice, top, members.shape[1]):
        is_inside = members[top] & ~members[smaller]
        nodes = np.flatnonzero(is_inside)
        _try_stage(layers, machine, tables, (top, smaller), (nodes, is_inside))
    _close(machine, tables, top)
