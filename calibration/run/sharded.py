"""A rank of a sharded plan: runs a `ShardProgram` on its part of the model, without autograd."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibration.run.executor import Slice, tensors_of
from calibration.run.layouts import Layout, strides_of
from calibration.run.local_forms import FORMS, INNER_FORMS, Form, Piece
from calibration.run.memory import lies_as, same_memory
from calibration.run.mesh_axes import MeshAxes
from calibration.run.optimizers import make_optimizer
from calibration.run.recording import Ref
from calibration.run.shard_program import (
    Alias,
    ChangeState,
    Operand,
    RunOp,
    ShardProgram,
    SumBucket,
    TakeInput,
    TakeLoss,
    UpdateParameter,
)
from calibration.run.source import cut_samples, named_tensors, real_model
from calibration.run.whole_ops import cut_attention
from calibration.run.work import Place, Step
from simcore.errors import RunError
from simcore.job import Job
from simcore.mesh import DATA_AXIS

Tensor = torch.Tensor
_SHOWN = (RunOp, ChangeState, SumBucket, UpdateParameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWork:
    """One rank of a mesh that shares a model."""

    program: ShardProgram = field(repr=False)
    source: str
    job: Job
    seed: int

    def build(self, place: Place) -> Step:
        """Builds the model, keeps this rank's part, and opens its groups."""
        mesh = MeshAxes(self.program.mesh, place.rank)
        return ShardStep(self, mesh, torch.device(place.device))

    def describe(self, position: int) -> tuple[str, bool]:
        """Names the instruction, and whether ranks wait for each other in it."""
        each = self.program.instructions[position]
        is_shared = isinstance(each, ChangeState | SumBucket) or (
            isinstance(each, RunOp) and bool(each.share.inner)
        )
        name = "a view" if isinstance(each, Alias) else each.name
        return name, is_shared


class ShardStep:
    """The steps of one rank."""

    def __init__(self, work: ShardWork, mesh: MeshAxes, device: torch.device) -> None:
        self.work, self.program, self.mesh, self.device = work, work.program, mesh, device
        self.losses: list[Tensor] = []
        self.slices: list[Slice] = []
        self.gradients: dict[str, NDArray[np.float64]] = {}
        self.values: dict[int, Tensor] = {}  # by handle: memory that begins with the storage
        self.homes: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}  # by handle
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.context: dict[int, Any] = {}  # of kept ops
        self.sums: list[tuple[Callable[[], object], Tensor, SumBucket]] = []
        self.functions = [
            _function(each) if isinstance(each, RunOp) else None
            for each in self.program.instructions
        ]
        self.actions: dict[type, Callable[[Any, int], None]] = {
            RunOp: self._run,
            TakeInput: self._input,
            Alias: self._alias,
            ChangeState: self._change,
            SumBucket: self._sum,
            UpdateParameter: self._update,
            TakeLoss: self._loss,
        }
        self._load()

    def step(self, watch: Callable[[int], None], *, keeps_gradients: bool = False) -> None:
        """Runs one training step.

        Args:
            watch: is told the instruction that begins.
            keeps_gradients: whether `gradients` has those of this step afterwards, put together.
        """
        self.losses, self.slices, self.gradients = [], [], {}
        self.keeps_gradients = keeps_gradients
        self.mesh.next_step()
        self.values = dict(self.homes)
        pairs = zip(self.program.instructions, self.program.frees, strict=True)
        with torch.no_grad():
            for position, (instruction, frees) in enumerate(pairs):
                watch(position)
                start = time.perf_counter()
                self.actions[type(instruction)](instruction, position)
                if isinstance(instruction, _SHOWN):
                    end = time.perf_counter()
                    self.slices.append(Slice(instruction.name, _what(instruction), 0, start, end))
                for handle in frees:
                    self.values.pop(handle, None)
            self._bring_home()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.values = {}
        self.context.clear()

    def close(self) -> None:
        """Gives the groups back."""
        self.mesh.close()

    # before the first step

    def _load(self) -> None:
        batch = self.work.job.batch or 1
        model = real_model(self.work.source, self.work.job, batch, self.work.seed)
        tensors = named_tensors(model)
        for home in self.program.homes:
            whole = tensors[home.name].detach()
            flat = torch.empty(_count(home.ref), dtype=whole.dtype)
            _view(flat, home.ref).copy_(whole)
            mine = self._part(flat, home.layout, home.split)
            self.homes[home.handle] = mine.to(self.device, copy=True)
        begin = self.mesh.coordinates[DATA_AXIS] * self.program.batch
        for each in self.program.instructions:
            if isinstance(each, TakeInput):
                self.inputs[each.handle] = self._sample(each, tensors, batch, begin)

    def _sample(
        self, each: TakeInput, tensors: dict[str, Tensor], batch: int, begin: int
    ) -> Tensor:
        """Returns this rank's part of an input or a constant."""
        if each.storage in self.program.constants:
            value = self.program.constants[each.storage]
        elif each.name in tensors:
            value = cut_samples(tensors[each.name], batch, begin, begin + self.program.batch)
            value = value.clone(memory_format=torch.contiguous_format)
        else:
            raise RunError(f"{each.name}: memory that nothing has a value for")
        if any(each.split):
            value = self._part(value.contiguous().view(-1), each.layout, each.split)
        return value.to(self.device)

    def _part(self, flat: Tensor, layout: Layout, split: Sequence[bool]) -> Tensor:
        """Returns this rank's part of a whole storage."""
        if not any(split):
            return flat
        part = flat.view(layout.sizes)[self._places(layout, split)]
        return part.clone(memory_format=torch.contiguous_format)

    def _places(self, layout: Layout, split: Sequence[bool]) -> tuple[slice, ...]:
        at = self.mesh.coordinates
        return tuple(
            slice(at[axis], at[axis] + 1) if is_split else slice(None)
            for axis, is_split in zip(layout.axes, split, strict=True)
        )

    # instructions

    def _run(self, op: RunOp, position: int) -> None:
        for handle, num_bytes in op.fresh:
            self.values[handle] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        args = [self._argument(each) for each in op.args]
        if op.key >= 0:
            results = self._run_kept(op, args)
        else:
            kwargs = {key: self._argument(each) for key, each in op.kwargs.items()}
            results = self._call(op, position, args, kwargs)
        for before, after in op.written:
            self.values[after] = self.values[before]
        for number, output in enumerate(op.outputs):
            if output is not None:
                result = results[number] if number < len(results) else None
                self._put(op, output, result)

    def _call(
        self, op: RunOp, position: int, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Tensor | None]:
        run, form, is_random = self.functions[position]  # type: ignore[misc]
        if is_random:
            self._seed(op)
        if form is None:
            result = run(*args, **kwargs)
        else:
            result = form(Piece(run, args, kwargs, op.share, self.mesh))
        made: list[Tensor | None] = list(tensors_of(result))
        if op.made_whole is not None:
            made = [self._own(op, tensor) for tensor in made if tensor is not None]
        return made

    def _own(self, op: RunOp, whole: Tensor) -> Tensor:
        """Returns this rank's part of what was made whole."""
        layout, output = op.made_whole, op.outputs[0]
        if layout is None or output is None:
            return whole
        axes = {axis for _, axis in op.share.loops}
        split = [axis in axes for axis in layout.axes]
        return self._part(whole.reshape(-1), layout, split).view(output.ref.size)

    def _seed(self, op: RunOp) -> None:
        axes = [] if op.made_whole is not None else sorted({axis for _, axis in op.share.loops})
        self.mesh.seed(op.name, [DATA_AXIS, *axes])

    def _run_kept(self, op: RunOp, args: list[Any]) -> Sequence[Tensor | None]:
        function = op.function
        if isinstance(function, str):
            raise TypeError(function)
        self._seed(op)
        if op.share.spread:
            queries, keys = (spread.places(self.mesh.coordinates) for spread in op.share.spread)
            function, args = cut_attention(function, args, queries, keys)
        results: Sequence[Tensor | None] = function(self.context, op.key, args)
        return results

    def _put(self, op: RunOp, output: Operand, result: Tensor | None) -> None:
        """Keeps a result as the memory of its storage."""
        ref = output.ref
        if result is None:
            self.values[output.handle] = torch.empty(
                _count(ref), dtype=ref.dtype, device=self.device
            )
            return
        if tuple(result.shape) != ref.size:
            raise RunError(f"{op.name}: a part of {list(ref.size)} came out {list(result.shape)}")
        if not lies_as(result, ref):
            flat = torch.empty(_count(ref), dtype=ref.dtype, device=self.device)
            _view(flat, ref).copy_(result)
            result = flat
        self.values[output.handle] = result

    def _argument(self, value: Any) -> Any:
        """Returns an argument as the op gets it."""
        if isinstance(value, Operand):
            if value.handle < 0:
                return torch.empty(value.ref.size, dtype=value.ref.dtype, device=self.device)
            held = self.values[value.handle]
            return held if lies_as(held, value.ref) else _view(held, value.ref)
        if type(value) in {list, tuple}:
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, Tensor):
            return value.to(self.device) if value.dim() else value
        return value

    def _input(self, each: TakeInput, _: int) -> None:
        self.values[each.handle] = self.inputs[each.handle]

    def _alias(self, each: Alias, _: int) -> None:
        self.values[each.target] = self.values[each.source]

    def _change(self, change: ChangeState, _: int) -> None:
        held = _view(
            self.values[change.source],
            Ref(-1, change.dtype, change.before, strides_of(change.before), 0),
        )
        box = tuple(slice(first, first + count) for first, count in change.box or ())
        if change.in_place:
            part = held[box].contiguous()
            self.mesh.all_reduce(part, change.axis)
            if not same_memory(part, held):
                held[box].copy_(part)
            self.values[change.target] = self.values[change.source]
            return
        made = torch.empty(change.after, dtype=change.dtype, device=self.device)
        made[_resized(box, change)].copy_(self._changed(change, held[box]))
        self.values[change.target] = made

    def _changed(self, change: ChangeState, held: Tensor) -> Tensor:
        """Returns what comes of a tensor, by its storage's dimensions."""
        mesh, axis, gathered, split = self.mesh, change.axis, change.gathered, change.split
        if change.kind == "slice":
            return held.narrow(split, mesh.coordinates[axis], 1)
        if change.kind == "all_reduce":
            return mesh.all_reduce(held.clone(memory_format=torch.contiguous_format), axis)
        if change.kind == "all_gather":
            return mesh.gather(held, axis).movedim(0, gathered).squeeze(gathered + 1)
        parts = held.movedim(split, 0).contiguous()
        if change.kind == "reduce_scatter":
            return mesh.reduce_scatter(parts, axis).unsqueeze(split)
        received = mesh.all_to_all(parts.unsqueeze(split + 1), axis)
        return received.movedim(0, gathered).squeeze(gathered + 1)

    def _sum(self, bucket: SumBucket, _: int) -> None:
        parts = [self._argument(operand) for operand in bucket.gradients]
        flat = torch.cat([part.reshape(-1) for part in parts])
        flat.div_(self.mesh.sizes[DATA_AXIS])
        self.sums.append((self.mesh.start_sum(flat, DATA_AXIS), flat, bucket))

    def _finish_sums(self) -> None:
        """Waits for the sums over copies and puts them where the updates read."""
        for wait, flat, bucket in self.sums:
            wait()
            begin = 0
            for operand in bucket.gradients:
                part = self._argument(operand)
                part.copy_(flat[begin : begin + part.numel()].view(part.shape))
                begin += part.numel()
        self.sums = []

    def _update(self, update: UpdateParameter, _: int) -> None:
        self._finish_sums()
        parameter = self._argument(update.parameter)
        gradient = self._argument(update.gradient)
        if self.keeps_gradients:
            self.gradients[update.owner] = self._whole_gradient(update)
        if update.number not in self.optimizers:
            is_home = update.parameter.handle in self.homes
            kept = parameter if is_home else parameter.clone()
            self.optimizers[update.number] = make_optimizer(self.work.job, [kept])
        optimizer = self.optimizers[update.number]
        kept = optimizer.param_groups[0]["params"][0]
        if not same_memory(kept, parameter):
            kept.copy_(parameter)
        kept.grad = gradient
        optimizer.step()
        kept.grad = None
        self.values[update.target] = kept

    def _whole_gradient(self, update: UpdateParameter) -> NDArray[np.float64]:
        """Returns a gradient put together from all parts."""
        place = self.program.gradients[update.number]
        layout, state = place.layout, list(place.split)
        sizes = tuple(1 if cut else n for n, cut in zip(layout.sizes, state, strict=True))
        held = self.values[update.gradient.handle]
        part = _view(held, Ref(-1, place.ref.dtype, sizes, strides_of(sizes), 0)).contiguous()
        for dim, is_split in enumerate(state):
            if is_split:
                parts = self.mesh.gather(part, layout.axes[dim])
                part = parts.movedim(0, dim).squeeze(dim + 1).contiguous()
        whole = _view(part, place.ref)
        return whole.double().cpu().numpy().copy()

    def _loss(self, each: TakeLoss, _: int) -> None:
        self.losses.append(self._argument(each.loss) * each.factor)

    def _bring_home(self) -> None:
        """Lets updated parameters and buffers be found by the next step."""
        self._finish_sums()
        for home in self.program.homes:
            last = self.values.get(home.last)
            kept = self.homes[home.handle]
            if last is not None and not same_memory(last, kept):
                kept.view(-1).copy_(last.reshape(-1))


def _function(op: RunOp) -> tuple[Callable[..., Any], Form | None, bool] | None:
    """Returns what runs an op, in which form, and whether it draws at random."""
    if not isinstance(op.function, str):
        return None
    namespace, packet, overload = op.function.rsplit(".", 2)
    run = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    is_random = torch.Tag.nondeterministic_seeded in run.tags
    name = packet if packet in FORMS or packet in INNER_FORMS else packet.removesuffix("_")
    form = None
    if op.share.loops:
        form = INNER_FORMS.get(name) if op.share.inner else FORMS.get(name)
    return run, form, is_random


def _resized(box: tuple[slice, ...], change: ChangeState) -> tuple[slice, ...]:
    """Returns the same part in the memory after a change."""
    return tuple(
        slice(None) if dim in {change.gathered, change.split} else each
        for dim, each in enumerate(box)
    )


def _what(instruction: object) -> str:
    if isinstance(instruction, UpdateParameter):
        return "update"
    return "run" if isinstance(instruction, RunOp) else "communicate"


def _count(ref: Ref) -> int:
    """Returns the elements of the storage of a tensor that covers it."""
    pairs = zip(ref.size, ref.stride, strict=True)
    return 0 if 0 in ref.size else ref.offset + 1 + sum((n - 1) * s for n, s in pairs)


def _view(base: Tensor, ref: Ref) -> Tensor:
    memory = base.untyped_storage()
    empty = torch.empty(0, dtype=ref.dtype, device=base.device)
    return empty.set_(memory, ref.offset, ref.size, ref.stride)
