"""Sums that are statistics: of a norm, of a softmax.

A sum over a dimension that is spread over the same dimension again (a mean that is subtracted, a
total that is divided by) is not left as a sum of parts: the parts settle it at once, inside, since
all of them need it. What is settled so tells a norm from other sums, and a softmax.
"""

from collections.abc import Sequence

from simcore.frontends.hlo_nest import Nest, Special
from simcore.frontends.hlo_roles import Links
from simcore.frontends.hlo_step import POINTWISE, VIEWS, Step
from simcore.loops import LoopKind
from simcore.signature import OpClass, Phase

_FAR = 64  # ops that a statistic may go through before it is spread


def with_statistics(
    step: Step, links: Links, phases: Sequence[Phase], nests: Sequence[Nest]
) -> list[Nest]:
    """Returns the nests of all ops, with sums and maxima that are statistics as such."""
    found = list(nests)
    for number, op in enumerate(step.ops):
        if op.op != "reduce" or len(op.outputs) != 1:
            continue
        data, out = op.inputs[0], op.outputs[0]
        readers = _spread(step, links, out, step.values[data].shape)
        if not readers:
            continue
        nest = nests[number]
        kept = {label for use in nest.uses if use.is_output for label in use.labels}
        gone = [label for use in nest.uses[:1] for label in use.labels if label not in kept]
        uses = tuple(use._replace(whole=True) if use.is_output else use for use in nest.uses)
        op_class = OpClass.REDUCTION
        if phases[number] == Phase.F:
            maker = step.ops[links.maker[data]].op if data in links.maker else ""
            is_softmax = "exponential" in {maker, *readers}
            op_class = OpClass.SOFTMAX if is_softmax else OpClass.NORMALISATION
        found[number] = nest._replace(
            uses=uses, op_class=op_class, is_linear=False,
            special={str(label): Special(LoopKind.INNER, out) for label in gone},
        )  # fmt: skip
    return found


def _spread(step: Step, links: Links, value: int, shape: tuple[int, ...]) -> frozenset[str]:
    """Returns the ops at which a value comes to a shape again, and those right behind them."""
    pending, seen = [value], {value}
    met: set[str] = set()
    while pending and len(seen) < _FAR:
        for user in links.users.get(pending.pop(), ()):
            op = step.ops[user]
            if op.op not in POINTWISE | VIEWS:
                continue
            for made in op.outputs:
                if step.values[made].shape == shape and op.op in POINTWISE:
                    met.add(op.op)
                    met |= {step.ops[after].op for after in links.users.get(made, ())}
                elif made not in seen:
                    seen.add(made)
                    pending.append(made)
    return frozenset(met)
