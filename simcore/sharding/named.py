"""Well-known ways to share a model out, as lists of linkage groups, and their recognition by name.

- ``tensor parallel`` (Shoeybi et al., Megatron-LM, 2019): the heads of attention, the width of
  feed-forward blocks and the vocabulary along one axis; two all-reduces a layer and direction.
- ``sequence parallel`` (Korthikanti et al. 2022): the same, and what lies between (normalisation,
  dropout, sums) by position: all-reduces become reduce-scatter and all-gather.
- ``context parallel``: everything by position; attention gathers keys and values.
- ``expert parallel`` (Lepikhin et al., GShard, 2020): experts along an axis whose devices share the
  samples; tokens change places by all-to-all.

Data parallel is the axis ``dp`` of the mesh; ZeRO and FSDP are its optimizer sharding.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph, Phase, Role
from simcore.loops import LoopKind
from simcore.sharding.affine import at
from simcore.sharding.factors import NOT_SPLIT, AtomicLoop
from simcore.sharding.groups import BATCH, Linkage

STYLES = ("tensor", "sequence", "context", "expert")


class Roles(NamedTuple):
    """What the groups of a model are; numbers of groups, in program order."""

    batch: tuple[int, ...]
    position: tuple[int, ...]  # in the sequence
    heads: tuple[int, ...]
    widths: tuple[int, ...]  # between two products with weights, not across blocks
    vocabulary: tuple[int, ...]
    experts: tuple[int, ...]


def find_roles(graph: OpGraph, linkage: Linkage) -> Roles:
    """Returns what the groups of a model are, from the ops that run over them."""
    seen = _Seen(graph, linkage)
    batch = [number for number, group in enumerate(linkage.groups) if group.name == BATCH]
    position = [g for g in seen.loops(OpClass.ATTENTION, "q") if g not in batch]
    heads = [g for g in seen.loops(OpClass.ATTENTION, "h") if g not in batch]
    within: list[int] = []
    if not heads:
        heads, position, within = seen.products_of_attention(batch)
    experts = [g for g in seen.loops(OpClass.BATCHED_MATMUL, "b") if g in seen.weights]
    tables = seen.loops(OpClass.EMBEDDING, "v")  # rows of the table
    spread = seen.inner(OpClass.SOFTMAX) | seen.inner(OpClass.LOSS)
    wide = [g for g in seen.weights if g in spread or g in _largest(linkage, tables)]
    others = {*experts, *position}  # a router's softmax is over experts, attention's over positions
    vocabulary = [g for g in wide if g not in others]
    taken = {*batch, *position, *heads, *within, *experts, *vocabulary}
    taken |= seen.inner(OpClass.NORMALISATION)
    products = (OpClass.MATMUL, OpClass.BATCHED_MATMUL, OpClass.CONVOLUTION)
    made = {g for each in products for g in seen.sides(each, is_output=True)}
    read = {g for each in products for g in seen.sides(each, is_output=False)}
    widths = [g for g in seen.weights if g in made and g in read and g not in taken]
    return Roles(*(tuple(sorted(set(found))) for found in (
        batch, position, heads, widths, vocabulary, experts
    )))  # fmt: skip


def style_groups(style: str, roles: Roles) -> tuple[int, ...]:
    """Returns the groups that a well-known style splits along its axis.

    Args:
        style: one of `STYLES`.
        roles: what the groups of the model are.

    Raises:
        PlanError: an unknown style, or a model that has nothing to split so.
    """
    inside = (*roles.heads, *roles.widths, *roles.vocabulary)
    known = {
        "tensor": inside,
        "sequence": (*inside, *roles.position) if inside and roles.position else (),
        "context": roles.position,
        "expert": (*roles.experts, *roles.batch) if roles.experts else (),
    }
    if style not in known:
        raise PlanError(f"no way to shard called {style!r}; known: {', '.join(STYLES)}")
    if not known[style]:
        raise PlanError(f"the model has nothing that {style} parallelism splits")
    return known[style]


def style_of(groups: Sequence[int], roles: Roles) -> str:
    """Returns the style that splits these groups, "" where it has no name."""
    for style in STYLES:
        try:
            if tuple(groups) == style_groups(style, roles):
                return style
        except PlanError:
            continue
    return ""


class _Seen:
    """Which groups are seen where, in the forward."""

    def __init__(self, graph: OpGraph, linkage: Linkage) -> None:
        self.graph, self.linkage = graph, linkage
        self.forward = [op for op in range(graph.num_ops) if graph.phase[op] == Phase.F]
        held = graph.tensor_role == Role.PARAMETER
        storages = set(graph.tensor_storage[held].tolist())
        self.weights = [
            number
            for number, group in enumerate(linkage.groups)
            if any(storage in storages for storage, _ in group.places)
        ]

    def loops(self, op_class: OpClass, name: str) -> list[int]:
        """Returns the groups of the loops of a name in ops of a class."""
        found: dict[int, None] = {}
        for op in self._ops(op_class):
            for loop, group in self._pairs(op):
                if loop.name == name:
                    found[group] = None
        return list(found)

    def products_of_attention(self, batch: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Returns heads, positions and widths of attention that is products around a softmax.

        Its products read no weights; heads are the batches of products that have weights,
        positions what the softmax is over, and widths, of a head, the rest.
        """
        softmax = self.inner(OpClass.SOFTMAX)
        heads: dict[int, None] = {}
        position: dict[int, None] = {}
        within: dict[int, None] = {}
        for op in self._ops(OpClass.BATCHED_MATMUL):
            pairs = [(loop.dim, group) for loop, group in self._pairs(op) if group not in batch]
            over = [group for dim, group in pairs if dim != "b" and group in softmax]
            if over and not self._reads_weights(op):
                position.update(dict.fromkeys(over))
                heads.update({g: None for dim, g in pairs if dim == "b" and g in self.weights})
                within.update({g: None for dim, g in pairs if dim != "b" and g not in softmax})
        return list(heads), list(position), list(within)

    def _reads_weights(self, op: int) -> bool:
        read = self.graph.inputs[self.graph.first_input[op] : self.graph.first_input[op + 1]]
        return bool((self.graph.tensor_role[read] == Role.PARAMETER).any())

    def inner(self, op_class: OpClass) -> set[int]:
        """Returns the groups that ops of a class cannot split without communication."""
        return {
            group
            for op in self._ops(op_class)
            for loop, group in self._pairs(op)
            if loop.kind == LoopKind.INNER
        }

    def sides(self, op_class: OpClass, *, is_output: bool) -> set[int]:
        """Returns the groups of weights that ops of a class write, or sum over."""
        found = set()
        for op in self._ops(op_class):
            known = self.graph.loops_of(op)
            accesses = known.accesses if known is not None else ()
            for loop, group in self._pairs(op):
                places = zip(accesses, loop.factor, strict=True)
                written = any(a.is_output and f != NOT_SPLIT for a, f in places)
                if written == is_output and loop.kind == LoopKind.MAP:
                    found.add(group)
        return found

    def _ops(self, op_class: OpClass) -> list[int]:
        return [op for op in self.forward if self.graph.op_class[op] == op_class]

    def _pairs(self, op: int) -> Iterator[tuple[AtomicLoop, int]]:
        loops = self.linkage.factors.loops[op]
        return zip(loops, self.linkage.loop_group[op], strict=True)


def _largest(linkage: Linkage, groups: Sequence[int]) -> list[int]:
    """Returns the group of most iterations: tables of positions and segments are small."""
    if not groups:
        return []
    return [max(groups, key=lambda g: at(linkage.groups[g].size, 1))]
