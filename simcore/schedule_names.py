"""Pipeline schedules by name, and which of them a framework takes."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from simcore.errors import PlanError
from simcore.schedule import Action, Edges, Schedule, chain, depths
from simcore.signature import Phase

MAX_ACTIONS = 2**22
TARGETS = ("torch", "megatron")


class _Shape(NamedTuple):
    """What a schedule is made for."""

    ranks: int
    microbatches: int
    per_rank: int  # stages
    depth: list[int]  # of each stage, where a rank has one


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    edges: Edges | None = None,
) -> Schedule:
    """Returns a schedule by name.

    - ``gpipe``: all forwards, then all backwards.
    - ``1f1b``: a stage runs as many forwards ahead as there are stages below it on the longest
      path, then alternates (DAPPLE's early backward; over a DAG of stages as GraphPipe does).
    - ``interleaved``: 1F1B with at least two stages per rank, in torch's order.
    - ``zb-h1``, ``zb-h2``: the backward is split; H1 keeps the memory of 1F1B, H2 runs twice as
      many forwards ahead and no longer waits (arXiv 2401.10241, section 2). With several stages
      per rank, ``zb-h1`` is torch's interleaved zero-bubble schedule.
    - ``zbv``: zero bubble with two stages per rank in a V, in torch's order.
    - ``pipedream``: 1F1B without a flush; each microbatch is a minibatch with its own update, and
      a stage keeps a version of its weights for each one in flight.

    Args:
        name: one of `SCHEDULE_NAMES`.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of a step, or minibatches of ``pipedream``.
        stages_per_rank: stages on each rank; stage s is on rank s mod `num_ranks`, but ``zbv``.
        edges: the DAG of the stages, a chain where none is given; needs one stage per rank.

    Raises:
        PlanError: no such name, or it cannot be made for these numbers.
    """
    if name not in _MAKERS:
        raise PlanError(f"no schedule {name!r}; there are {', '.join(SCHEDULE_NAMES)}")
    maker, lowest, highest = _MAKERS[name]
    if min(num_ranks, num_microbatches, stages_per_rank) < 1:
        raise PlanError(
            f"{name}: {num_ranks} ranks, {num_microbatches} microbatches and {stages_per_rank} "
            "stages per rank; each must be at least 1"
        )
    if not lowest <= stages_per_rank <= highest:
        wants = f"at least {lowest}" if highest > lowest else f"{lowest}"
        raise PlanError(f"{name} needs stages_per_rank {wants}, not {stages_per_rank}")
    if edges and stages_per_rank > 1:
        raise PlanError(f"{name} with {stages_per_rank} stages per rank runs a chain, not a DAG")
    if 3 * num_ranks * stages_per_rank * num_microbatches > MAX_ACTIONS:
        raise PlanError(f"{name}: more than 2**22 actions")
    if name == "interleaved" or (name == "zb-h1" and stages_per_rank > 1):
        reason = refusal(name, "torch", num_ranks, num_microbatches)
        if reason:
            raise PlanError(reason)
    num_stages = num_ranks * stages_per_rank
    stages = edges or chain(num_stages)
    shape = _Shape(num_ranks, num_microbatches, stages_per_rank, depths(num_stages, stages))
    loop = range(num_stages)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        stage_rank=tuple(
            min(s, num_stages - 1 - s) if name == "zbv" else s % num_ranks for s in loop
        ),
        actions=tuple(tuple(maker(shape, rank)) for rank in range(num_ranks)),
        asynchronous=name == "pipedream",
        edges=stages,
    )


Work = Sequence[tuple[int, int]]  # (stage, microbatch)


def _row(
    forwards: Work, backwards: Work, warm_up: int, weight_delay: int | None = None
) -> list[Action]:
    """Returns forwards ahead, then one forward and one backward in turn, then what is left.

    Args:
        forwards: in order.
        backwards: in order.
        warm_up: forwards before the first backward, the one of the first pair not counted.
        weight_delay: None for whole backwards; else input gradients run in their place, and the
            weight gradient of each after this many more of them.
    """
    backward = Phase.B if weight_delay is None else Phase.I
    delay = len(backwards) if weight_delay is None else weight_delay
    row = [Action(stage, Phase.F, microbatch) for stage, microbatch in forwards[:warm_up]]
    for number, (stage, microbatch) in enumerate(backwards):
        ahead = forwards[warm_up + number : warm_up + number + 1]
        row += [Action(other, Phase.F, later) for other, later in ahead]
        row.append(Action(stage, backward, microbatch))
        if number >= delay:
            row.append(_weight(backwards[number - delay]))
    if weight_delay is not None:
        row += [_weight(work) for work in backwards[max(0, len(backwards) - delay) :]]
    return row


def _weight(work: tuple[int, int]) -> Action:
    return Action(work[0], Phase.W, work[1])


def _one_stage(shape: _Shape, stage: int) -> Work:
    return [(stage, microbatch) for microbatch in range(shape.microbatches)]


def _gpipe(shape: _Shape, rank: int) -> list[Action]:
    work = _one_stage(shape, rank)
    return _row(work, work, len(work))


def _1f1b(shape: _Shape, rank: int) -> list[Action]:
    work = _one_stage(shape, rank)
    return _row(work, work, shape.depth[rank])


def _rounds(ranks: int, microbatches: int) -> int:
    """Returns torch's number of rounds of an interleaved schedule."""
    return max(1, microbatches // ranks)


def _looped(shape: _Shape, rank: int) -> tuple[Work, Work, int]:
    """Returns forwards and backwards of a rank with several stages, and the size of a round."""
    size = shape.microbatches // _rounds(shape.ranks, shape.microbatches)
    rounds = range(0, shape.microbatches, size)
    stages = range(rank, shape.ranks * shape.per_rank, shape.ranks)
    forwards = [(s, k) for start in rounds for s in stages for k in range(start, start + size)]
    backwards = [
        (s, k) for start in rounds for s in reversed(stages) for k in range(start, start + size)
    ]
    return forwards, backwards, size


def _interleaved(shape: _Shape, rank: int) -> list[Action]:
    forwards, backwards, size = _looped(shape, rank)
    return _row(forwards, backwards, (shape.per_rank - 1) * size + 2 * (shape.ranks - 1 - rank))


def _zb_h1(shape: _Shape, rank: int) -> list[Action]:
    if shape.per_rank > 1:
        forwards, backwards, size = _looped(shape, rank)
        warm_up = (shape.per_rank - 1) * size + shape.ranks - 1 - rank
        return _row(forwards, backwards, warm_up, weight_delay=rank)
    work, depth = _one_stage(shape, rank), shape.depth[rank]
    return _row(work, work, depth, weight_delay=max(shape.depth) - depth)


def _zb_h2(shape: _Shape, rank: int) -> list[Action]:
    work, depth = _one_stage(shape, rank), shape.depth[rank]
    return _row(work, work, 2 * depth, weight_delay=2 * (max(shape.depth) - depth))


def _zbv(shape: _Shape, rank: int) -> list[Action]:
    """Returns torch's order; it is made for a full pipeline and cut to the microbatches."""
    full = max(2 * shape.ranks - 1, shape.microbatches)
    down, up = rank, 2 * shape.ranks - 1 - rank
    row: list[Action] = []
    count: Counter[tuple[int, Phase]] = Counter()

    def run(stage: int, *phases: Phase) -> None:
        for phase in phases:
            row.append(Action(stage, phase, count[stage, phase]))
            count[stage, phase] += 1

    for _ in range(2 * (shape.ranks - rank) - 1):
        run(down, Phase.F)
    for _ in range(rank):
        run(up, Phase.F)
        run(down, Phase.F)
    for _ in range(shape.ranks - rank):
        run(up, Phase.F, Phase.I, Phase.W)
    while count[up, Phase.F] < full:
        if count[down, Phase.F] < full:
            run(down, Phase.F)
        run(down, Phase.I, Phase.W)
        run(up, Phase.F, Phase.I, Phase.W)
    for _ in range(rank):
        run(down, Phase.I)
        run(up, Phase.I)
    for _ in range(shape.ranks - rank):
        run(down, Phase.I, Phase.W)
    for stage in (up, down):
        while count[stage, Phase.W] < full:
            run(stage, Phase.W)
    return [action for action in row if action.microbatch < shape.microbatches]


# name -> actions of a rank, and the least and the largest number of stages per rank
_MAKERS: dict[str, tuple[Callable[[_Shape, int], list[Action]], int, int]] = {
    "gpipe": (_gpipe, 1, 1),
    "1f1b": (_1f1b, 1, 1),
    "interleaved": (_interleaved, 2, MAX_ACTIONS),
    "zb-h1": (_zb_h1, 1, MAX_ACTIONS),
    "zb-h2": (_zb_h2, 1, 1),
    "zbv": (_zbv, 2, 2),
    "pipedream": (_1f1b, 1, 1),
}
SCHEDULE_NAMES = tuple(_MAKERS)


def accepts(name: str, target: str, num_ranks: int, num_microbatches: int) -> bool:
    """Returns whether a framework's own schedule of this name takes the numbers; see `refusal`."""
    return not refusal(name, target, num_ranks, num_microbatches)


def refusal(name: str, target: str, num_ranks: int, num_microbatches: int) -> str:
    """Returns why a framework refuses a schedule, with the nearest counts it takes; "" if it does.

    ``torch`` is torch.distributed.pipelining 2.13: its classes by the rules they state, and
    ``zb-h2``, for which it has none, as action lists from a file. ``megatron`` is Megatron-LM,
    which knows 1F1B and interleaved 1F1B. torch's runtime takes any legal action list, so a count
    that its class refuses still runs from a file.

    Raises:
        PlanError: no such schedule or target.
    """
    if name not in _MAKERS or target not in TARGETS:
        raise PlanError(f"no rule for schedule {name!r} of {target!r}")
    rule, words = _RULES.get((target, name), (None, ""))
    if rule is None:
        return f"{target} has no schedule {name!r}"
    if rule(num_ranks, num_microbatches):
        return ""
    below = (m for m in range(num_microbatches - 1, 0, -1) if rule(num_ranks, m))
    above = (m for m in range(max(num_microbatches, 0) + 1, MAX_ACTIONS) if rule(num_ranks, m))
    counts = " or ".join(str(m) for m in (next(below, None), next(above, None)) if m)
    return (
        f"{target}'s {name} on {num_ranks} ranks does not take {num_microbatches} microbatches: "
        f"{words}; take {counts}"
    )


def _any(ranks: int, microbatches: int) -> bool:
    return microbatches >= 1


def _fills(ranks: int, microbatches: int) -> bool:
    return microbatches >= ranks


def _whole_rounds(ranks: int, microbatches: int) -> bool:
    return microbatches >= 1 and microbatches % _rounds(ranks, microbatches) == 0


def _multiple(ranks: int, microbatches: int) -> bool:
    return microbatches >= 1 and microbatches % ranks == 0


_ROUNDS = "they must be a multiple of the rounds, max(1, microbatches // ranks)"
_RULES: dict[tuple[str, str], tuple[Callable[[int, int], bool], str]] = {
    ("torch", "gpipe"): (_any, ""),
    ("torch", "1f1b"): (_fills, "they must not be fewer than the stages"),
    ("torch", "interleaved"): (_whole_rounds, _ROUNDS),
    ("torch", "zb-h1"): (_whole_rounds, _ROUNDS),
    ("torch", "zb-h2"): (_any, ""),
    ("torch", "zbv"): (_any, ""),
    ("megatron", "1f1b"): (_any, ""),
    ("megatron", "interleaved"): (_multiple, "they must be a multiple of the ranks"),
}
