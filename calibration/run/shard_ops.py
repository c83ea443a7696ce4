"""One op of a sharded plan -> what a rank runs: its arguments on the rank's part, and its form."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from calibration.run.layouts import Layout, LayoutError, Spread
from calibration.run.local_forms import FORMS, INNER_FORMS, MADE_WHOLE, PLAIN, Share
from calibration.run.recording import Call, Ref
from calibration.run.tape_tensors import TapeTensors
from simcore.errors import RunError
from simcore.graph import OpGraph
from simcore.loops import Access, LoopKind, OpLoops
from simcore.mesh import Mesh
from simcore.sharding.affine import at
from simcore.sharding.factors import NOT_SPLIT, AtomicLoop
from simcore.sharding.groups import Linkage
from simcore.sharding.states import States, Vector

_KEPT = {"attention": ("b", "h", "g", "q"), "recurrent": ("b",)}  # loops of kept ops that are split
_ONCE = {
    "convolution_backward": ("c",), "nll_loss_forward": ("c",), "nll_loss2d_forward": ("c",),
}  # fmt: skip
_LOOKED_UP = {
    "embedding": 0, "nll_loss_forward": 0, "nll_loss2d_forward": 0, "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
}  # fmt: skip


class Taken(NamedTuple):
    """A loop that is split, and by what."""

    loop: AtomicLoop
    axis: int  # of the mesh
    size: int


class Uses:
    """The tensors of one op: in which state it uses each, and how they lie there."""

    def __init__(self, op: int, around: "Around") -> None:
        self.op, self.around = op, around
        self.known: OpLoops | None = around.graph.loops_of(op)
        self.loops = around.linkage.factors.loops[op]
        self.choice = around.states.choice[op]
        self._left = list(range(len(self.known.accesses))) if self.known is not None else []
        sizes = around.mesh.sizes
        self.taken = [
            Taken(self.loops[number], axis, sizes[axis])
            for axis, number in enumerate(self.choice, start=1)
            if number >= 0
        ]

    def read(self, tensor: int, ref: Ref) -> tuple[Vector, tuple[int, ...]]:
        """Returns the state in which an argument is wanted, and its expanded local sizes."""
        place = self._match(tensor, ref)
        if place is None:
            return self.around.states.settled[tensor], self._expanded(None, ref)
        return self.state(place), self._expanded(self.accesses[place], ref)

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The tensors that it reads and writes."""
        return self.known.accesses if self.known is not None else ()

    def _match(self, tensor: int, ref: Ref) -> int | None:
        """Returns the access that an argument is; the first that lies as it does."""
        mine = [
            place
            for place, access in enumerate(self.accesses)
            if access.tensor == tensor and not access.is_output
        ]
        left = [place for place in mine if place in self._left]
        lying = [place for place in left if self._lies(self.accesses[place], ref)]
        if lying:
            self._left.remove(lying[0])
            return lying[0]
        if mine and len({self.state(place) for place in mine}) > 1:
            raise LayoutError("one tensor is read in two states")
        return mine[0] if mine else None

    def _lies(self, access: Access, ref: Ref) -> bool:
        try:
            list(self._dims(access, ref))
        except LayoutError:
            return False
        return True

    def _dims(self, access: Access, ref: Ref) -> Iterator[tuple[int, list[str]]]:
        """Yields each dimension of an argument of more than one element: its number, its loops."""
        dims = [
            (at(dim.size, self.around.batch), at(dim.stride, self.around.batch), dim.loop)
            for dim in access.dims
        ]
        loops = self.known.loops if self.known is not None else ()
        for number, (size, stride) in enumerate(zip(ref.size, ref.stride, strict=True)):
            count, names, last = 1, [], stride
            while count < size and dims:
                part, last, loop = dims.pop(0)
                count *= part
                names += [loops[loop].name] if loop >= 0 else []
            if count != size or (size > 1 and last != stride):
                raise LayoutError("a tensor lies otherwise than its loops say")
            if size > 1:
                yield number, names

    def _expanded(self, access: Access | None, ref: Ref) -> tuple[int, ...]:
        repeats = [n for n, size in enumerate(ref.size) if size > 1 and ref.stride[n] == 0]
        if not repeats:
            return ()
        if access is None or not self._lies(access, ref):
            if self.taken:
                raise LayoutError("it repeats elements along an unknown loop")
            return tuple(ref.size[n] for n in repeats)
        names = dict(self._dims(access, ref))
        sizes = []
        for number in repeats:
            parts = 1
            for each in self.taken:
                parts *= each.size if each.loop.name in names[number] else 1
            sizes.append(ref.size[number] // parts)
        return tuple(sizes)

    def state(self, place: int) -> Vector:
        """Returns the state in which an access uses its tensor."""
        return tuple(
            number if number < 0 else self.loops[number].factor[place] for number in self.choice
        )

    def lost(self) -> list[list[Taken]]:
        """Returns, for each output, the splits along which it is a sum of parts."""
        found = []
        for place, access in enumerate(self.accesses):
            if access.is_output:
                sums = {LoopKind.MAP, LoopKind.HALO}
                found.append(
                    [
                        each
                        for each in self.taken
                        if each.loop.factor[place] == NOT_SPLIT
                        and not access.whole
                        and each.loop.kind in sums
                    ]
                )
        return found


class Around(NamedTuple):
    """What all ops of a program have in common."""

    graph: OpGraph
    linkage: Linkage
    states: States
    mesh: Mesh
    batch: int
    tensors: TapeTensors
    layouts: dict[int, Layout]  # by storage of the graph

    def layout(self, tensor: int) -> Layout:
        """Returns the layout of a tensor's storage."""
        return self.layouts[int(self.graph.tensor_storage[tensor])]


def base_name(call: Call) -> str:
    """Returns ``addmm`` of ``aten.addmm.default``, without the mark of writing in place."""
    name = str(call.function).split(".")[1]
    known = name in FORMS or name in PLAIN or name in MADE_WHOLE
    return name if known else name.removesuffix("_")


def check_op(uses: Uses, call: Call, target: str, name: str) -> None:
    """Refuses what no form is known for.

    Raises:
        RunError: names the op and the reason.
    """
    for each in uses.taken:
        reason = _reason(each, call, target)
        if reason:
            raise RunError(f"{name} is split along its loop {each.loop.name!r}: {reason}")


def _reason(each: Taken, call: Call, target: str) -> str:
    """Returns why an op is not run with a loop split, "" = it is."""
    kind, loop = each.loop.kind, each.loop.name
    if call.key >= 0:
        which = "attention" if target.startswith("attention") else "recurrent"
        is_lead = loop.rstrip("0123456789") in _KEPT[which]
        return "" if is_lead else f"parts of {which} layers along it are not run for real"
    name = base_name(call)
    if kind == LoopKind.HALO or (loop.startswith("out") and name.startswith("max_pool")):
        return "neighbours' borders are simulated, but not exchanged for real"
    if name == "argmax" and kind == LoopKind.INNER and (len(call.args) < 2 or call.args[1] is None):
        return "the largest of all elements is simulated, but not looked for in parts"
    if kind == LoopKind.INNER and name not in INNER_FORMS:
        return "the sums inside it are simulated, but not run for real"
    if name in FORMS or name in PLAIN or name in MADE_WHOLE or _is_pointwise(call):
        by_count = name == "embedding_dense_backward" and len(call.args) > 4 and call.args[4]
        return "gradients divided by counts are not run for real" if by_count else ""
    return "how its parts are called is not known"


def _is_pointwise(call: Call) -> bool:
    namespace, packet, overload = str(call.function).rsplit(".", 2)
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return torch.Tag.pointwise in function.tags


def share_of(uses: Uses, call: Call, name: str, shape: Sequence[int]) -> Share:
    """Returns which part of an op a rank runs.

    Args:
        uses: its tensors.
        call: what runs it.
        name: of the op.
        shape: local shape of its first output.
    """
    lost = uses.lost()
    base = "" if call.key >= 0 else base_name(call)
    once = _ONCE.get(base, ())
    if base == "convolution_backward" and call.args[7]:
        once = ("k",)
    inner = [each.axis for each in uses.taken if each.loop.kind == LoopKind.INNER]
    return Share(
        name=name,
        loops=tuple((each.loop.name, each.axis) for each in uses.taken),
        lost=tuple(each.axis for each in lost[0]) if lost else (),
        once=tuple(
            tuple(each.axis for each in of if number and each.loop.name in once)
            for number, of in enumerate(lost)
        ),
        inner=tuple(inner),
        shape=tuple(shape),
        spread=_spreads(uses, call, base),
    )


def _spreads(uses: Uses, call: Call, base: str) -> tuple[Spread, ...]:
    """Returns the places of what is looked up."""
    if base in _LOOKED_UP:
        scores = call.args[_LOOKED_UP[base]]
        return (_spread(uses, scores, 0 if base == "embedding" else min(1, len(scores.size) - 1)),)
    if base == "argmax" and len(call.args) > 1 and call.args[1] is not None:
        return (_spread(uses, call.args[0], call.args[1]),)
    if base == "embedding_dense_backward":
        table = call.outputs[0]
        assert table is not None
        return (_spread(uses, table, 0, is_output=True),)
    if call.key >= 0 and uses.around.graph.op_targets[uses.op] == "attention":
        return tuple(_spread(uses, ref, -2) for ref in call.args[:2])
    return ()


def _spread(uses: Uses, ref: Ref, dim: int, *, is_output: bool = False) -> Spread:
    around = uses.around
    tensors = around.tensors
    if is_output:
        value = next(
            v
            for v in tensors.recording.tape.ops[tensors.item[uses.op]].writes
            if v.storage == ref.storage
        )
        tensor = tensors.tensor(uses.op, value)
        return around.layout(tensor).spread(ref, dim, around.states.made[tensor])
    found = tensors.read(uses.op, ref)
    if found is None:
        raise LayoutError("a tensor that it does not read")
    tensor = tensors.tensor(uses.op, found)
    state = next(
        uses.state(place)
        for place, access in enumerate(uses.accesses)
        if access.tensor == tensor and not access.is_output
    )
    return around.layout(tensor).spread(ref, dim, state)


def operands_like(value: Any, change: Any) -> Any:
    """Returns nested arguments with every Ref changed."""
    if isinstance(value, Ref):
        return change(value)
    if type(value) in {list, tuple}:
        return type(value)(operands_like(item, change) for item in value)
    if isinstance(value, dict):
        return {key: operands_like(item, change) for key, item in value.items()}
    return value
