"""A laid-out step of XLA ops -> OpGraph.

Views are no ops, as long as the elements stay where they are; what an update computes is one op, as
it is for captured models. Sizes are affine in the batch where the step allows it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from simcore.errors import GraphError
from simcore.frontends.hlo_batch import Growth, NotAffineError, find_batch, product
from simcore.frontends.hlo_cost import Cost, costs_of
from simcore.frontends.hlo_loops import (
    extents_of,
    op_loops,
    refresh_loops,
    update_loops,
    written_loops,
)
from simcore.frontends.hlo_nest import Nest
from simcore.frontends.hlo_ops import nest_of
from simcore.frontends.hlo_roles import Piece, Roles, Update, find_roles, links_of
from simcore.frontends.hlo_statistics import with_statistics
from simcore.frontends.hlo_step import VIEWS, Op, Step
from simcore.frontends.hlo_units import (
    bases_of,
    input_names,
    module_of,
    partners,
    piece_name,
    sequence_of,
    unique,
)
from simcore.frontends.hlo_views import Extent, View, dense, is_dense, merged, split
from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.job import Job, Optimizer
from simcore.signature import Affine, OpClass, Phase, Role, Signature

_OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "momentum", "adam")  # by states a parameter


class _Plain(NamedTuple):
    """What is known of a step before it is emitted."""

    step: Step
    roles: Roles
    nests: Sequence[Nest]
    growth: Growth
    costs: Sequence[Cost]


def graph_of_step(step: Step) -> tuple[OpGraph, Job]:
    """Returns the graph of a training step, and the job that it is.

    The job has the batch of the file, the optimizer by the number of states that each parameter
    has (none SGD, one momentum, two Adam), and the precision of the parameters.

    Raises:
        GraphError: no parameters are updated.
    """
    roles = find_roles(step)
    nests = with_statistics(
        step, links_of(step.ops), roles.phases, [nest_of(op, step) for op in step.ops]
    )
    given = [v for v in step.inputs if v not in _held(roles)]
    batch = find_batch(step, given)
    plain = _grown(step, roles, nests, given, batch)
    builder = GraphBuilder(step.source, batch=batch)
    graph = _Emission(plain, builder).build()
    kinds = {step.values[update.parameter].dtype for update in roles.updates}
    precision = next((kind for kind in ("bf16", "fp16") if kinds == {kind}), "fp32")
    states = max(len(update.states) for update in roles.updates)
    optimizer = _OPTIMIZERS[min(states, 2)]
    return graph, Job(batch=batch, optimizer=optimizer).replace(precision=precision)


def _held(roles: Roles) -> set[int]:
    trained = {update.parameter for update in roles.updates}
    return trained | roles.states | roles.carried


def _grown(
    step: Step, roles: Roles, nests: Sequence[Nest], given: Sequence[int], batch: int | None
) -> _Plain:
    """Returns the sizes of the step; of the file's batch alone where they are not affine in it."""
    links = links_of(step.ops)
    for seeds in (given, ()):
        try:
            growth = Growth(step, nests, seeds, batch)
            for nest in nests:
                _dims(nest, growth)
            for value in range(len(step.values)):
                growth.num_bytes(value)
            return _Plain(step, roles, nests, growth, costs_of(step, links, roles, growth))
        except NotAffineError:
            continue
    raise GraphError(f"{step.source}: its sizes are no numbers")


def _dims(nest: Nest, growth: Growth) -> tuple[tuple[str, int, int], ...]:
    """Returns the dimensions of an op's signature."""
    if not nest.dims:
        return (("elements", *growth.elements(nest.walked)),)
    sizes = growth.part_sizes(nest)
    found = {
        name: product([sizes[label] for label in labels if label in sizes])
        for name, labels in nest.dims.items()
    }
    found |= {name: (size, 0) for name, size in nest.given.items()}
    return tuple((name, *size) for name, size in found.items())


class _Emission:
    """Feeds one step to a builder."""

    def __init__(self, plain: _Plain, builder: GraphBuilder) -> None:
        self.step, self.roles, self.nests, self.growth, self.costs = plain
        self.builder = builder
        self.links = links_of(self.step.ops)
        self.base = bases_of(self.step, self.roles)
        self.partner = partners(self.step, self.links, self.roles, self.base)
        self.view: dict[int, View] = {}  # of an input of the batch, tensor is -1 - value
        self.loaded: dict[tuple[int, int], int] = {}  # (input, unit) -> tensor; unit -1 = to come
        self.fresh: list[int] = []  # input ops of the op to come
        self.names: dict[int, str] = {}
        self.handle: dict[int, int] = {}  # op of the step -> the builder's
        self.root: dict[int, int] = {}  # op -> first op of its unit, as the builder's handles
        self.first_user: dict[int, int] = {}  # value -> the builder's handle of an op
        self.users: dict[int, dict[int, None]] = {}  # parameter's tensor -> units that use it
        self.owner: dict[int, str] = {}  # parameter's tensor -> its module
        self.module = ""  # of the last forward op
        self.module_of_op: dict[int, str] = {}
        self.lonely: list[tuple[int, tuple[int, ...]]] = []  # ops that read nothing, their values
        self.taken: dict[str, int] = {}
        self.gradients = {
            self.base.get(value, value)
            for update in self.roles.updates
            for value in update.gradients
        }

    def build(self) -> OpGraph:
        """Emits inputs, ops and updates."""
        self._inputs()
        for number in range(len(self.step.ops)):
            if number not in self.roles.dropped:
                self._op(number)
        for update in self.roles.updates:
            for place, piece in enumerate(update.pieces):
                self._update(update, piece, place)
        for handle, values in self.lonely:
            users = [self.first_user[value] for value in values if value in self.first_user]
            if users:
                self.builder.merge_units(users[0], handle)
        return self.builder.build()

    # inputs

    def _inputs(self) -> None:
        """Adds parameters, buffers and what is given with every batch."""
        trained = {update.parameter: update for update in self.roles.updates}
        read = {value for number, op in enumerate(self.step.ops)
                if number not in self.roles.dropped for value in op.inputs}  # fmt: skip
        self.names = dict(zip(self.step.inputs, input_names(self.step), strict=True))
        for value, name in self.names.items():
            if value in trained:
                self._parameter(trained[value], name)
            elif value in read and value not in self.roles.states:
                if any(extent.size[1] for extent in self._extents(value)):
                    self.view[value] = View(-1 - value, self._extents(value))
                else:
                    kind = self.builder.buffer(name, self.growth.num_bytes(value))
                    self.view[value] = View(kind, self._extents(value))

    def _parameter(self, update: Update, name: str) -> None:
        for place, piece in enumerate(update.pieces):
            value = piece.values[0]
            own = piece_name(name, place, len(update.pieces))
            tensor = self.builder.parameter(own, self.growth.num_bytes(value))
            self.users[tensor] = {}
            self.owner[tensor] = own.rpartition(".")[0]
            for each in piece.values:
                self.view[each] = View(tensor, self._extents(value))

    def _seen(self, op: Op, joined: int | None) -> dict[int, View]:
        """Returns what an op reads; what comes with the batch is loaded for each unit anew."""
        found = {value: self.view[value] for value in op.inputs if value in self.view}
        for value, view in found.items():
            if view.tensor < 0:
                found[value] = view._replace(tensor=self._loaded(-1 - view.tensor, joined))
        return found

    def _loaded(self, value: int, joined: int | None) -> int:
        """Returns an input of the step on the device of a unit."""
        unit = -1 if joined is None else self.root[joined]
        if (value, unit) in self.loaded:
            return self.loaded[value, unit]
        extents, array = self._extents(value), self.step.values[value]
        handle = self.builder.op(
            unique(f"input.{self.names[value]}", self.taken), op_class=OpClass.INPUT,
            target="input", outputs=(Out(self.growth.num_bytes(value), role=Role.INPUT),),
            loops=written_loops(extents, array.shape, array.itemsize), unit_of=joined,
        )  # fmt: skip
        (tensor,) = self.builder.outputs(handle)
        self.loaded[value, unit] = tensor
        self.fresh.append(handle)
        return tensor

    def _settle(self, handle: int, joined: int | None) -> None:
        """Notes the unit of a new op; what was loaded for it joins that."""
        self.root[handle] = handle if joined is None else self.root[joined]
        for loaded in self.fresh:
            self.builder.merge_units(loaded, handle)
        self.fresh.clear()
        for value, unit in [key for key in self.loaded if key[1] < 0]:
            self.loaded[value, self.root[handle]] = self.loaded.pop((value, unit))

    def _extents(self, value: int) -> tuple[Extent, ...]:
        return extents_of(self.step, self.growth, value)

    def _sizes(self, value: int) -> list[Affine]:
        rank = len(self.step.values[value].shape)
        return [self.growth.dim(value, dim) for dim in range(rank)]

    # ops

    def _op(self, number: int) -> None:
        op = self.step.ops[number]
        if op.op in VIEWS and op.inputs[0] in self.view and self._is_view(number, op):
            return
        nest, cost = self.nests[number], self.costs[number]
        joined = self._unit(number)
        seen = self._seen(op, joined)
        inputs = list(dict.fromkeys(view.tensor for view in seen.values()))
        phase = self.roles.phases[number]
        signature = Signature(
            nest.op_class.name.lower(), self._dtype(op), _dims(nest, self.growth), nest.factor,
            cost.traffic,
        )  # fmt: skip
        module = self._module(number, op, inputs)
        name = sequence_of((module, op.op, "" if phase == Phase.F else "backward"))
        handle = self.builder.op(
            unique(name, self.taken), module=module, target=op.op, phase=phase,
            op_class=nest.op_class, signature=signature, inputs=inputs,
            outputs=[self._out(op, value) for value in op.outputs],
            unit_of=joined, kernels=cost.kernels,
            loops=op_loops(self.step, self.growth, seen, nest, op),
        )  # fmt: skip
        self.handle[number] = handle
        self._settle(handle, joined)
        for value, tensor in zip(op.outputs, self.builder.outputs(handle), strict=True):
            self.view[value] = View(tensor, self._extents(value))
        for value in op.inputs:
            self._note_use(value, handle)
        if not inputs:
            self.lonely.append((handle, op.outputs))

    def _module(self, number: int, op: Op, inputs: Sequence[int]) -> str:
        """Returns where an op is in the model.

        As the text says, else where the parameter is that it reads; without one, a forward op is
        where the one before it is, and a backward op where the op is that it belongs to.
        """
        module = module_of(op.label)
        if not module and self.roles.phases[number] == Phase.F:
            held = next((self.owner[t] for t in inputs if t in self.owner), self.module)
            module = self.module = held
        elif not module:
            module = self.module_of_op.get(self.partner[number], "")
        self.module_of_op[number] = module
        return module

    def _dtype(self, op: Op) -> str:
        return self.step.values[op.inputs[0] if op.op == "dot" else op.outputs[0]].dtype

    def _note_use(self, value: int, handle: int) -> None:
        base = self.base.get(value, value)
        self.first_user.setdefault(base, handle)
        if value in self.view and self.view[value].tensor in self.users:
            self.users[self.view[value].tensor][self.root[handle]] = None

    def _unit(self, number: int) -> int | None:
        partner = self.partner[number]
        return self.handle.get(partner) if partner != number else None

    def _out(self, op: Op, value: int) -> Out:
        role = Role.GRADIENT if value in self.gradients else Role.ACTIVATION
        shares = None
        if op.op == "dynamic_update_slice" and op.inputs[0] in self.links.maker:
            held = self.view.get(op.inputs[0])
            if held is not None and len(self.links.users[op.inputs[0]]) == 1:
                shares = held.tensor
        return Out(self.growth.num_bytes(value), storage_of=shares, role=role)

    def _is_view(self, number: int, op: Op) -> bool:
        """Makes the result a view of what the op reads, where no element has to move."""
        source, out = op.inputs[0], op.outputs[0]
        held, nest = self.view[source], self.nests[number]
        shapes = self.step.values[source].shape, self.step.values[out].shape
        sizes = self._sizes(out)
        if op.op == "slice":
            self.view[out] = self._slice(number, op, held, sizes)
            return True
        if op.op == "reshape" and is_dense(held.extents):
            self.view[out] = View(held.tensor, dense(sizes))
            return True
        pieces = split(
            held.extents, nest.uses[0].labels, self.growth.part_sizes(nest), shapes[0]
        )  # fmt: skip
        if op.op == "broadcast":
            known = {name: extent for piece in pieces for name, extent in piece}
            extents = [
                known.get(str(label), Extent(size, (0, 0)))
                for label, size in zip(nest.uses[1].labels, sizes, strict=True)
            ]
            self.view[out] = View(held.tensor, tuple(extents))
            return True
        moved = merged(pieces, nest.uses[1].labels, sizes, shapes[1])
        if moved is not None:
            self.view[out] = View(held.tensor, moved)
        return moved is not None

    def _slice(self, number: int, op: Op, held: View, sizes: Sequence[Affine]) -> View:
        """Returns a part of a value: all of it is the value, else a free op makes the view."""
        steps = op.attributes["stride"]
        extents = tuple(
            Extent(size, product((extent.stride, (step, 0))))
            for size, extent, step in zip(sizes, held.extents, steps, strict=True)
        )
        out = op.outputs[0]
        if self.step.values[out].shape == self.step.values[op.inputs[0]].shape:
            return View(held.tensor, extents)
        maker = self.links.maker.get(self.base.get(op.inputs[0], op.inputs[0]), -1)
        module, joined = module_of(op.label), self.handle.get(maker)
        tensor = self._seen(op, joined)[op.inputs[0]].tensor
        handle = self.builder.op(
            unique(sequence_of((module, "slice.view")), self.taken), module=module, target="view",
            phase=self.roles.phases[number], op_class=OpClass.VIEW, inputs=(tensor,),
            outputs=(Out(self.growth.num_bytes(out), storage_of=tensor),),
            unit_of=joined, kernels=0,
        )  # fmt: skip
        self._settle(handle, joined)
        self._note_use(op.inputs[0], handle)
        return View(self.builder.outputs(handle)[0], extents)

    # updates

    def _update(self, update: Update, piece: Piece, place: int) -> None:
        """Adds the update of a parameter in its first user's unit, and a refresh in each other."""
        held = self.view[piece.values[0]]
        name = piece_name(self.names[update.parameter], place, len(update.pieces))
        gradients = [self.view[value] for value in piece.gradients]
        numbers = [self.view[value].tensor for value in update.scalars if value in self.view]
        elements = product([extent.size for extent in held.extents])[0]
        array = self.step.values[update.parameter]
        users = list(self.users[held.tensor])
        handle = self.builder.op(
            unique(f"{name}.update", self.taken), module=name.rpartition(".")[0], target="update",
            phase=Phase.U, op_class=OpClass.UPDATE,
            signature=Signature("update", array.dtype, (("elements", elements, 0),)),
            inputs=(held.tensor, *(view.tensor for view in gradients), *numbers),
            outputs=(Out((elements * array.itemsize, 0), storage_of=held.tensor),),
            unit_of=users[0] if users else None, elements=elements,
            loops=update_loops(self.step, self.view, piece),
        )  # fmt: skip
        (updated,) = self.builder.outputs(handle)
        for number, user in enumerate(users[1:]):
            self.builder.op(
                unique(f"{name}.refresh.{number}", self.taken), target="refresh", phase=Phase.U,
                op_class=OpClass.COPY, inputs=(updated,), unit_of=user, kernels=0,
                loops=refresh_loops(self.step, self.view, piece, updated),
            )  # fmt: skip
