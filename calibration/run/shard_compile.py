"""A plan whose devices share a copy of the model -> the `ShardProgram` that its ranks run."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch

from calibration.run.layouts import LayoutError
from calibration.run.local_forms import MADE_WHOLE
from calibration.run.recording import Call, Recording, record
from calibration.run.shard_handles import Arguments, Handles, outputs_of
from calibration.run.shard_layouts import dimension_of, example_refs, find_layouts, whole_ref
from calibration.run.shard_ops import (
    Around,
    Uses,
    base_name,
    check_op,
    operands_like,
    share_of,
)
from calibration.run.shard_program import (
    Alias,
    ChangeState,
    GradientPlace,
    Home,
    Instruction,
    Operand,
    RunOp,
    ShardProgram,
    SumBucket,
    TakeInput,
    TakeLoss,
    UpdateParameter,
    last_uses,
)
from calibration.run.source import planned_source
from calibration.run.tape_tensors import TapeTensors
from simcore.buckets import fill_buckets
from simcore.errors import RunError
from simcore.frontends.torch_tape import ALL
from simcore.graph import OpClass, OpGraph
from simcore.mesh import DATA, Mesh
from simcore.plan import Plan
from simcore.sharding.local import LocalGraph, local_graph
from simcore.sharding.states import PARTIAL, Vector
from simcore.shards import linkage_of, make_axis


def shard_program(plan: Plan, graph: OpGraph, source: str) -> ShardProgram:
    """Returns what the ranks of a plan of one stage run.

    Args:
        plan: valid for the graph; its stage has a mesh.
        graph: captured from the source.
        source: a model by name or a factory.

    Raises:
        RunError: an op is split in a way that is not run for real: names the op and the reason.
        PlanError: the plan does not go together with its graph.
    """
    stage = plan.stages[0]
    mesh = Mesh.of(stage.mesh or {})
    if plan.job.batch is None or plan.job.batch % mesh.copies:
        raise RunError(f"a batch of {plan.job.batch} does not divide by {mesh.copies} copies")
    linkage = linkage_of(graph)
    axes = tuple(
        make_axis(linkage, name, size, stage.sharding.get(name, ()))
        for name, size in zip(mesh.names, mesh.sizes, strict=True)
        if name != DATA
    )
    local = local_graph(graph, linkage, [axes], np.zeros(graph.num_units, np.int32))
    batch = plan.job.batch // mesh.copies
    recording = record(planned_source(source, plan.job), batch)
    tensors = TapeTensors(graph, recording)
    around = Around(
        graph, linkage, local.states, mesh, batch, tensors,
        find_layouts(graph, linkage, local, axes, batch),
    )  # fmt: skip
    return _Compiler(plan, around, local, recording).program()


class _Compiler:
    """Goes through the ops of the local graph."""

    def __init__(self, plan: Plan, around: Around, local: LocalGraph, recording: Recording) -> None:
        self.plan, self.around, self.local, self.recording = plan, around, local, recording
        self.graph, self.states, self.tensors = around.graph, around.states, around.tensors
        self.handles = Handles(around, local)
        self.dtypes = example_refs(recording)
        self.instructions: list[Instruction] = []
        self.taken: dict[int, set[tuple[str, int]]] = {}  # of kept ops, by key
        self.gradients: dict[int, GradientPlace] = {}
        self.name = ""

    def program(self) -> ShardProgram:
        """Returns the program."""
        for tensor in range(int(self.graph.first_output[0])):
            self.handles.know(tensor, tensor, self.states.made[tensor])
        buckets = self._buckets()
        for op in range(self.local.graph.num_ops):
            self.name = self.local.graph.op_names[op]
            try:
                self._add(op)
            except LayoutError as error:
                raise RunError(f"{self.name}: {error}: it is not run for real") from None
            for number, bucket in buckets.get(op, ()):
                operands = tuple(self._gradient(handle) for handle in bucket)
                self.instructions.append(SumBucket(f"sum of bucket {number}", operands))
        homes = tuple(self._homes())
        kept = {handle for home in homes for handle in (home.handle, home.last)}
        return ShardProgram(
            mesh=self.around.mesh,
            instructions=tuple(self.instructions),
            frees=tuple(last_uses(self.instructions, kept)),
            homes=homes,
            gradients=self.gradients,
            constants=self.recording.constants,
            batch=self.around.batch,
        )

    def _buckets(self) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
        """Returns the buckets that are full after each op of the local graph."""
        if self.around.mesh.copies == 1:
            return {}
        graph = self.local.graph
        sizes = graph.at_batch(max(1, self.around.batch // self.local.samples)).tensor_bytes
        found = defaultdict(list)
        last = -1
        for number, bucket in enumerate(fill_buckets(graph, sizes, self.plan.buckets)):
            last = max(last, int(graph.tensor_producer[bucket].max()))
            found[last].append((number, tuple(bucket.tolist())))
        return found

    def _gradient(self, handle: int) -> Operand:
        """Returns all that a rank has of a gradient."""
        tensor, state = self.handles.info[handle]
        storage = self._storage(tensor)
        region = self.tensors.region(tensor, self.dtypes[storage])
        layout = self.around.layout(tensor)
        whole = whole_ref(layout, storage, self.dtypes[storage].dtype)
        return Operand(handle, layout.place(region or whole, state, ()))

    def _add(self, op: int) -> None:
        base = int(self.local.base[op])
        if op in self.local.changes:
            self._change(op)
        elif base >= 0:
            self._add_op(op, base)

    def _add_op(self, op: int, base: int) -> None:
        first, made = self.local.graph.first_output[op : op + 2].tolist()
        start = int(self.graph.first_output[base])
        for position, handle in enumerate(range(first, made)):
            tensor = start + position
            self.handles.know(handle, tensor, self.states.made[tensor])
        op_class = self.graph.op_class[base]
        if op_class == OpClass.UPDATE:
            self._update(op, base)
        elif self.tensors.item[base] < 0:
            reads = self.handles.reads(op)
            if op_class == OpClass.VIEW:
                self.handles.info[first] = (
                    self.handles.info[first][0],
                    self.handles.info[reads[0]][1],
                )
                self.instructions.append(Alias(reads[0], first))
        elif op_class == OpClass.INPUT:
            tensor, state = self.handles.info[first]
            layout = self.around.layout(tensor)
            self.instructions.append(
                TakeInput(self.name, self._storage(tensor), first, layout, layout.is_split(state))
            )
        else:
            self._run(op, base)

    def _storage(self, tensor: int) -> int:
        return self.tensors.storage[int(self.graph.tensor_storage[tensor])]

    def _run(self, op: int, base: int) -> None:
        """Adds an op that is called."""
        item = self.tensors.item[base]
        call, tape_op = self.recording.calls[item], self.recording.tape.ops[item]
        uses = Uses(base, self.around)
        check_op(uses, call, self.graph.op_targets[base], self.name)
        if uses.taken and any(isinstance(a, torch.Tensor) and a.dim() for a in call.args):
            raise RunError(f"{self.name} has a table among its arguments and is split: not run")
        self._check_kept(call, uses)
        made = outputs_of(self.handles, op, base, call)
        arguments = Arguments(self.handles, op, uses, made.shape)
        args = operands_like(call.args, arguments.operand)
        kwargs = operands_like(call.kwargs, arguments.operand)
        whole = None
        if call.key < 0 and uses.taken and base_name(call) in MADE_WHOLE:
            whole = self.around.layout(made.first)
        self.instructions.append(
            RunOp(
                name=self.name,
                function=call.function,
                args=args,
                kwargs=kwargs,
                outputs=tuple(
                    None if o is None or o.ref.storage in arguments.storages else o
                    for o in made.operands
                ),
                written=tuple(arguments.written),
                fresh=tuple(arguments.fresh),
                key=call.key,
                share=share_of(uses, call, self.name, made.shape),
                made_whole=whole,
            )
        )
        if any(value[:2] == self.recording.loss_value[:2] for value in tape_op.writes):
            self._loss(op, base)

    def _check_kept(self, call: Call, uses: Uses) -> None:
        """Refuses a backward that is split otherwise than the forward whose history it uses."""
        if call.key < 0:
            return
        mine = {(each.loop.name, each.axis) for each in uses.taken}
        if self.taken.setdefault(call.key, mine) != mine:
            raise RunError(f"{self.name} is split otherwise than its forward: it is not run")

    def _loss(self, op: int, base: int) -> None:
        tensor = self.tensors.tensor(base, self.recording.loss_value._replace(region=ALL))
        state = self.states.made[tensor]
        factor = 1.0
        for axis, each in enumerate(state, start=1):
            factor *= self.around.mesh.sizes[axis] if each == PARTIAL else 1
        loss = Operand(self.handles.made_by(op, base, tensor), self.recording.loss)
        self.instructions.append(TakeLoss("loss", loss, factor))

    def _update(self, op: int, base: int) -> None:
        owner = self.graph.op_names[base].rpartition(".")[0]
        number = next(n for n, each in enumerate(self.recording.trained) if each.name == owner)
        trained = self.recording.trained[number]
        found: dict[int, Operand] = {}
        for tensor, need in self.states.needs[base]:
            handle = self.handles.find(op, tensor, need)
            ref = trained.parameter
            if self._storage(tensor) == trained.gradient.storage:
                ref = trained.gradient
                layout = self.around.layout(tensor)
                split = layout.is_split(self.handles.info[handle][1])
                self.gradients[number] = GradientPlace(layout, split, ref)
            local = self.around.layout(tensor).place(ref, self.handles.info[handle][1], ())
            found[self._storage(tensor)] = Operand(handle, local)
        self.instructions.append(
            UpdateParameter(
                name=self.graph.op_names[base],
                owner=owner,
                number=number,
                parameter=found[trained.parameter.storage],
                gradient=found[trained.gradient.storage],
                target=int(self.local.graph.first_output[op]),
            )
        )

    def _change(self, op: int) -> None:
        """Adds a collective or a slice."""
        change = self.local.changes[op]
        (source,) = self.handles.reads(op)
        target = int(self.local.graph.first_output[op])
        self.handles.know(target, change.tensor, change.after)
        if self.handles.info[source] != (change.tensor, change.before):
            raise LayoutError(
                f"it is in the state {self.handles.info[source][1]}, not {change.before}"
            )
        layout = self.around.layout(change.tensor)
        storage = self._storage(change.tensor)
        region = self.tensors.region(change.tensor, self.dtypes[storage])
        what = self.local.communication.get(op)
        axis = change.axis + 1
        self.instructions.append(
            ChangeState(
                name=self.name,
                kind="slice" if what is None else what.kind,
                axis=axis,
                source=source,
                target=target,
                in_place=bool(
                    self.local.graph.tensor_storage[source]
                    == self.local.graph.tensor_storage[target]
                ),
                dtype=self.dtypes[storage].dtype,
                before=layout.local(change.before),
                after=layout.local(change.after),
                box=None if region is None else layout.box(region),
                gathered=dimension_of(layout, axis, change.before[change.axis]),
                split=dimension_of(layout, axis, change.after[change.axis]),
            )
        )

    def _homes(self) -> Iterator[Home]:
        """Yields parameters and buffers."""
        graph = self.graph
        newest: dict[int, int] = {}
        for tensor in range(graph.num_tensors):
            producer = int(graph.tensor_producer[tensor])
            if producer < 0 or graph.op_class[producer] != OpClass.VIEW:
                newest[int(graph.tensor_storage[tensor])] = tensor
        handles: dict[tuple[int, Vector], int] = {}
        for handle, key in self.handles.info.items():
            handles.setdefault(key, handle)
        for tensor in range(int(graph.first_output[0])):
            storage = self._storage(tensor)
            if storage not in self.recording.homes:
                continue
            state, layout = self.states.made[tensor], self.around.layout(tensor)
            last = handles.get((newest[int(graph.tensor_storage[tensor])], state))
            if last is None:
                name = graph.tensor_names[tensor]
                raise RunError(f"{name} ends the step split otherwise than it began: it is not run")
            ref = self.recording.homes[storage]
            yield Home(
                graph.tensor_names[tensor], tensor, last, layout, layout.is_split(state), ref
            )
