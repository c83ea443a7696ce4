"""A graph cut into pipeline stages: what each op does for its stage, and what goes between them.

A stage owns placement units. Two rules move single ops:

- A sum of input gradients stands where the fewest messages are needed, as in eager PyTorch: a stage
  adds up its own gradients of what it received before it sends one back; gradients of branches are
  added where the tensor was made.
- What sums a parameter's gradients over stages (tied embeddings) belongs to the update: it runs
  once a step, not once a microbatch.

Where the backward sends what no activation went along (the gradient of a residual addition is that
of both its terms, so it passes the addition's stage by), the two stages are joined by an edge that
carries nothing forward.
"""

from functools import lru_cache
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError
from simcore.graph import OpGraph, Role
from simcore.schedule import Edges
from simcore.signature import Phase
from simcore.stage_sums import RANK, Uses, find_sums, move_sums, reaches, uses_of


class Messages(NamedTuple):
    """Tensors that go along edges of stages, each once to a stage."""

    tensor: NDArray[np.int64]  # [message]
    source: NDArray[np.int64]  # [message] stage
    target: NDArray[np.int64]  # [message] stage


class Cut(NamedTuple):
    """A graph whose ops are on stages."""

    num_stages: int
    stage: NDArray[np.int64]  # [op]
    phase: NDArray[np.uint8]  # [op] Phase: F, I, W or U
    edges: Edges  # who sends activations to whom, or is sent gradients only
    update_edges: Edges  # whose update needs what from whom: ties
    forward: Messages  # along edges, every microbatch
    backward: Messages  # against edges, every microbatch
    update: Messages  # along update edges, once a step


@lru_cache(maxsize=4)  # a search cuts one graph again and again
def backward_phases(graph: OpGraph) -> NDArray[np.uint8]:
    """Returns the phase of each op, [op], with the backward split into I and W.

    W is what leads to gradients of parameters only, without the backward of another placement
    unit: an op of the backward whose outputs only update ops read, W ops of its own unit, or W ops
    that sum what the backward made (the gradients of a tied parameter). One that nobody reads is W
    if it writes a parameter's gradient. Every other one is I; no I op needs a W op.
    """
    uses = uses_of(graph)
    producer, consumer = uses.producer, uses.consumer
    whole = graph.phase == Phase.B
    found = whole.copy()  # known to be I: first those that nobody reads
    found[producer] = False
    made = graph.tensor_producer[graph.tensor_role == Role.GRADIENT]
    found[made[made >= 0]] = False
    sums = find_sums(graph)
    inner = whole[consumer] & ((graph.unit[producer] == graph.unit[consumer]) | sums[consumer])
    late = np.isin(graph.phase[consumer], (Phase.W, Phase.U))
    found[producer[whole[producer] & ~inner & ~late]] = True
    order = np.argsort(consumer[inner], kind="stable")
    first = np.searchsorted(consumer[inner][order], np.arange(graph.num_ops + 1)).tolist()
    sources = producer[inner][order].tolist()
    known = (found | ~whole).tolist()
    pending = np.flatnonzero(found).tolist()
    while pending:
        op = pending.pop()
        for source in sources[first[op] : first[op + 1]]:
            if not known[source]:
                known[source] = True
                pending.append(source)
    phases = np.where(whole, np.where(known, Phase.I, Phase.W), graph.phase).astype(np.uint8)
    phases.setflags(write=False)
    return phases


def stage_edges(graph: OpGraph, stage: NDArray[np.integer]) -> Edges:
    """Returns the pairs (i, j) of stages such that a forward op of j reads a tensor of one of i.

    A cut may have more, see `Cut.edges`.

    Args:
        graph: the graph.
        stage: of each placement unit, [unit].

    Raises:
        PlanError: the array does not have one stage per unit, or a stage is empty.
    """
    return _edges(graph.phase, _stage_of_ops(graph, stage), uses_of(graph))


def check_stages(graph: OpGraph, stage: NDArray[np.integer]) -> None:
    """Refuses stages that no pipeline can run.

    Args:
        graph: the graph.
        stage: of each placement unit, [unit].

    Raises:
        PlanError: an empty stage, stages that feed each other, a gradient that would go where no
            activation came from, or ops that are in no order of forward, backward and update. The
            ops are named.
    """
    cut_graph(graph, stage)


def cut_graph(graph: OpGraph, stage: NDArray[np.integer]) -> Cut:
    """Returns the graph cut into stages.

    Args:
        graph: the graph.
        stage: of each placement unit, [unit].

    Raises:
        PlanError: as `check_stages` does.
    """
    stage, uses, phase = _stage_of_ops(graph, stage), uses_of(graph), backward_phases(graph)
    _check_phases(graph, uses)
    edges = _edges(phase, stage, uses)
    _check_acyclic(graph, stage, uses, _within(phase, uses, Phase.F))
    num_stages = int(stage.max()) + 1
    is_edge = np.eye(num_stages, dtype=np.bool_)
    is_edge[tuple(np.array(edges, np.int64).reshape(-1, 2).T)] = True
    stage = move_sums(graph, uses, phase, stage, is_edge)
    phase = _defer_ties(graph, uses, phase, stage)
    _check_acyclic(graph, stage, uses, _within(phase, uses, Phase.U))
    source, target = stage[uses.producer], stage[uses.consumer]
    made_first, read_last = phase[uses.producer] == Phase.F, phase[uses.consumer] == Phase.U
    forward = (source != target) & made_first & ~read_last
    backward = (source != target) & ~made_first & ~read_last
    update = (source != target) & read_last
    early, late = np.where(made_first, [source, target], [target, source])
    stray = (forward | backward) & ~is_edge[early, late]
    if stray.any():
        _check_backward(graph, stage, uses, stray & ~reaches(is_edge)[early, late])
    return Cut(
        num_stages=num_stages,
        stage=stage,
        phase=phase,
        edges=tuple(sorted({*edges, *_pairs(early, late, stray)})),
        update_edges=_pairs(source, target, update),
        forward=_messages(graph, stage, uses, forward),
        backward=_messages(graph, stage, uses, backward),
        update=_messages(graph, stage, uses, update),
    )


def _stage_of_ops(graph: OpGraph, stage: NDArray[np.integer]) -> NDArray[np.int64]:
    """Returns the stage of each op, [op], from those of the units, checked."""
    given = np.asarray(stage)
    if given.shape != (graph.num_units,) or given.dtype.kind not in "iu":
        raise PlanError(
            f"{graph.name}: stages must be whole numbers, [{graph.num_units} units], not "
            f"{given.dtype} {list(given.shape)}"
        )
    if given.min() < 0:
        unit = int(given.argmin())
        raise PlanError(f"{graph.name}: unit {graph.unit_names[unit]!r}: stage is {given[unit]}")
    filled = np.unique(given)
    missing = np.setdiff1d(np.arange(min(int(filled[-1]), len(filled)) + 1), filled)
    if missing.size:
        raise PlanError(f"{graph.name}: stage {missing[0]} of {int(filled[-1]) + 1} has no ops")
    return given.astype(np.int64)[graph.unit]


def _pairs(source: NDArray[np.int64], target: NDArray[np.int64], kept: NDArray[np.bool_]) -> Edges:
    """Returns the distinct pairs, ascending."""
    size = int(max(source.max(initial=0), target.max(initial=0))) + 1
    found = np.unique(source[kept] * size + target[kept])
    return tuple(zip((found // size).tolist(), (found % size).tolist(), strict=True))


def _edges(phase: NDArray[np.uint8], stage: NDArray[np.int64], uses: Uses) -> Edges:
    source, target = stage[uses.producer], stage[uses.consumer]
    return _pairs(source, target, _within(phase, uses, Phase.F) & (source != target))


def _messages(
    graph: OpGraph, stage: NDArray[np.int64], uses: Uses, kept: NDArray[np.bool_]
) -> Messages:
    size = int(stage.max(initial=0)) + 1
    found = np.unique(uses.tensor[kept] * size + stage[uses.consumer[kept]])
    tensor = found // size
    return Messages(tensor, stage[graph.tensor_producer[tensor]], found % size)


def _defer_ties(
    graph: OpGraph, uses: Uses, phase: NDArray[np.uint8], stage: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Returns the phases, [op], with sums of parameter gradients of several stages in the update.

    What reads such a sum is put off with it.
    """
    phase, sums = phase.copy(), find_sums(graph)
    crosses = stage[uses.producer] != stage[uses.consumer]
    tied = crosses & (sums[uses.consumer] | (phase[uses.producer] == Phase.W))
    while True:
        put_off = (phase[uses.consumer] == Phase.W) & (tied | (phase[uses.producer] == Phase.U))
        if not put_off.any():
            return phase
        phase[uses.consumer[put_off]] = Phase.U


def _check_phases(graph: OpGraph, uses: Uses) -> None:
    early = RANK[graph.phase[uses.consumer]] < RANK[graph.phase[uses.producer]]
    if early.any():
        ops = int(uses.consumer[early][0]), int(uses.producer[early][0])
        reader, maker = (
            f"{graph.op_names[op]!r} (phase {Phase(graph.phase[op]).name})" for op in ops
        )
        raise PlanError(f"{graph.name}: {reader} reads what {maker} makes: not a training step")


def _within(phase: NDArray[np.uint8], uses: Uses, only: Phase) -> NDArray[np.bool_]:
    """Returns which tensors are both made and read in one phase, [use]."""
    both: NDArray[np.bool_] = (phase[uses.producer] == only) & (phase[uses.consumer] == only)
    return both


def _check_acyclic(
    graph: OpGraph, stage: NDArray[np.int64], uses: Uses, counts: NDArray[np.bool_]
) -> None:
    """Refuses stages that wait for each other in a cycle, by the uses that count."""
    source, target = stage[uses.producer], stage[uses.consumer]
    digraph = nx.DiGraph(_pairs(source, target, counts & (source != target)))
    if nx.is_directed_acyclic_graph(digraph):
        return
    parts = []
    for a, b in nx.find_cycle(digraph):
        use = int(np.argmax(counts & (source == a) & (target == b)))
        maker, reader = graph.op_names[uses.producer[use]], graph.op_names[uses.consumer[use]]
        parts.append(f"{maker!r} (stage {a}) feeds {reader!r} (stage {b})")
    raise PlanError(f"{graph.name}: stages feed each other in a cycle: {', '.join(parts)}")


def _check_backward(
    graph: OpGraph, stage: NDArray[np.int64], uses: Uses, stray: NDArray[np.bool_]
) -> None:
    """Refuses what the backward would send between stages that no activation goes between."""
    if not stray.any():
        return
    use = int(np.argmax(stray))
    maker, reader = int(uses.producer[use]), int(uses.consumer[use])
    source, target = int(stage[maker]), int(stage[reader])
    forward = graph.phase[maker] == Phase.F
    missing = (source, target) if forward else (target, source)
    raise PlanError(
        f"{graph.name}: {graph.op_names[reader]!r} (stage {target}) reads what "
        f"{graph.op_names[maker]!r} (stage {source}) makes in the "
        f"{'forward' if forward else 'backward'}, but no forward op of stage {missing[1]} reads a "
        f"tensor of stage {missing[0]}"
    )
