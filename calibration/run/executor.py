"""A script, a recording and values -> training steps of one rank, op by op, without autograd."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from calibration.run.links import Copies, Links
from calibration.run.memory import Memory
from calibration.run.optimizers import make_optimizer
from calibration.run.recording import Call, Recording, Ref
from calibration.run.script import STEP, Do, Instruction, Script
from calibration.run.source import RealModel, cut_samples, named_tensors
from simcore.errors import RunError
from simcore.job import Job

Tensor = torch.Tensor


class Slice(NamedTuple):
    """One thing that a rank did, on the clock of the machine."""

    name: str
    what: str  # run, update, receive
    microbatch: int
    start: float  # s
    end: float  # s


class Executor:
    """Runs the steps of one rank."""

    def __init__(
        self, script: Script, recording: Recording, job: Job, links: Links, device: torch.device
    ) -> None:
        self.script, self.recording, self.job, self.links = script, recording, job, links
        self.device = device
        self.memory = Memory(recording.tape.storages, device)
        self.inputs: dict[tuple[int, int], Tensor] = {}  # storage, microbatch
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.contexts: dict[int, dict[int, Any]] = {}  # microbatch -> of kept ops
        self.losses: list[Tensor] = []
        self.slices: list[Slice] = []
        self.num_microbatches = 1
        self._functions: dict[str, Callable[..., Any]] = {}
        self._actions: dict[Do, Callable[[Instruction], None]] = {
            Do.RUN: self._run,
            Do.INPUT: self._input,
            Do.SETTLE: self._settle,
            Do.UPDATE: self._update,
            Do.LOSS: self._loss,
            Do.POST: self._post,
            Do.TAKE: self._take,
            Do.SEND: self._send,
            Do.SUM: self._sum,
            Do.FREE: lambda each: self.memory.free(each.what, each.microbatch),
        }
        self._refs = _made_refs(recording)
        self.copies = Copies(script)

    def load(self, model: RealModel, batch: int, num_microbatches: int) -> None:
        """Takes the parameters, buffers and samples that this rank uses.

        Args:
            model: with its inputs at the batch of the job.
            batch: of the job.
            num_microbatches: equal slices of it.
        """
        self.num_microbatches = num_microbatches
        wanted = self._used_storages()
        tensors = named_tensors(model)
        size = batch // num_microbatches
        for storage in sorted(wanted):
            name = self.recording.tape.storages[storage].name
            if name.startswith("input."):
                for number in range(num_microbatches):
                    part = cut_samples(tensors[name], batch, number * size, (number + 1) * size)
                    self.inputs[storage, number] = part.to(self.device)
            elif storage in self.recording.constants:
                value = self.recording.constants[storage].to(self.device)
                self.inputs |= {(storage, number): value for number in range(num_microbatches)}
            elif storage in self.recording.homes:
                value = tensors[name].detach().to(self.device, copy=True)
                self.memory.put(self.recording.homes[storage], STEP, value)
        for instruction in self.script.instructions:
            if instruction.do == Do.UPDATE:
                parameter = self.recording.trained[instruction.what].parameter
                tensor = self.memory.tensor(parameter, STEP)
                self.optimizers[instruction.what] = make_optimizer(self.job, [tensor])

    def step(self, watch: Callable[[int], None], *, keeps_gradients: bool = False) -> None:
        """Runs one training step.

        Args:
            watch: is told the instruction that begins.
            keeps_gradients: whether `gradients` has those of this step afterwards.
        """
        self.losses, self.slices = [], []
        self.gradients: dict[str, NDArray[np.float64]] = {}
        self.keeps_gradients = keeps_gradients
        actions = self._actions
        with torch.no_grad():
            for position, instruction in enumerate(self.script.instructions):
                watch(position)
                start = time.perf_counter()
                actions[instruction.do](instruction)
                if instruction.do in _SHOWN:
                    end = time.perf_counter()
                    self.slices.append(
                        Slice(instruction.name, _SHOWN[instruction.do], instruction.microbatch,
                              start, end)
                    )  # fmt: skip
            self.links.finish()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.memory.clear()
        self.contexts.clear()

    def _run(self, instruction: Instruction) -> None:
        if instruction.what < 0:
            return
        call, microbatch = self.recording.calls[instruction.what], instruction.microbatch
        if call.key >= 0:
            context = self.contexts.setdefault(microbatch, {})
            tensors = [self._value(ref, microbatch) for ref in call.args]
            results: Sequence[Tensor | None] = _function(call)(context, call.key, tensors)
        else:
            results = tensors_of(self._call(call, microbatch))
        for ref, result in zip(call.outputs, results, strict=False):
            if ref is not None and result is not None:
                self.memory.put(ref, microbatch, result)
        if instruction.what == self.recording.seed and self.num_microbatches > 1:
            self.memory.tensor(call.outputs[0], microbatch).fill_(1 / self.num_microbatches)  # type: ignore[arg-type]

    def _call(self, call: Call, microbatch: int) -> Any:
        function = self._functions.get(str(call.function))
        if function is None:
            function = self._functions[str(call.function)] = _overload(str(call.function))
        args = [self._value(each, microbatch) for each in call.args]
        kwargs = {key: self._value(each, microbatch) for key, each in call.kwargs.items()}
        return function(*args, **kwargs)

    def _value(self, value: Any, microbatch: int) -> Any:
        """Returns an argument as the op gets it."""
        if isinstance(value, Ref):
            return self.memory.tensor(value, microbatch)
        if isinstance(value, list | tuple) and type(value) in {list, tuple}:
            return type(value)(self._value(item, microbatch) for item in value)
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, Tensor):
            return value.to(self.device) if value.dim() else value
        return value

    def _input(self, instruction: Instruction) -> None:
        value = self.recording.tape.ops[instruction.what].writes[0]
        tensor = self.inputs.get((value.storage, max(instruction.microbatch, 0)))
        if tensor is None:
            raise RunError(f"{instruction.name}: memory that nothing has a value for")
        offset = int(tensor.storage_offset())
        ref = Ref(value.storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)
        self.memory.put(ref, instruction.microbatch, tensor)

    def _settle(self, instruction: Instruction) -> None:
        self.memory.settle(self._refs[instruction.what], instruction.microbatch)

    def _sum(self, instruction: Instruction) -> None:
        numbers = self.script.sums[instruction.what]
        found = [self.memory.tensor(self.recording.trained[n].gradient, STEP) for n in numbers]
        self.copies.start(found)

    def _update(self, instruction: Instruction) -> None:
        self.copies.finish()
        trained = self.recording.trained[instruction.what]
        parameter = self.optimizers[instruction.what].param_groups[0]["params"][0]
        gradient = self.memory.tensor(trained.gradient, instruction.microbatch)
        if self.keeps_gradients:
            self.gradients[trained.name] = gradient.double().cpu().numpy().copy()
        parameter.grad = gradient
        self.optimizers[instruction.what].step()
        parameter.grad = None

    def _loss(self, instruction: Instruction) -> None:
        loss = self.memory.tensor(self.recording.loss, instruction.microbatch)
        self.losses.append(loss.clone())

    def _post(self, instruction: Instruction) -> None:
        message = self.script.messages[instruction.what]
        self.links.post(instruction.what, message, self.memory.buffer(message))

    def _take(self, instruction: Instruction) -> None:
        message = self.script.messages[instruction.what]
        payload = self.links.take(instruction.what).to(self.device)
        self.memory.install(message, payload)

    def _send(self, instruction: Instruction) -> None:
        message = self.script.messages[instruction.what]
        self.links.send(instruction.what, message, self.memory.payload(message))

    def _used_storages(self) -> set[int]:
        """Returns the storages that this rank's ops read or write."""
        ops = self.recording.tape.ops
        used: set[int] = set()
        for each in self.script.instructions:
            if each.do == Do.UPDATE:
                used.add(self.recording.trained[each.what].parameter.storage)
            elif each.do in {Do.RUN, Do.INPUT} and each.what >= 0:
                op = ops[each.what]
                used |= {value.storage for value in (*op.reads, *op.writes)}
                if each.do == Do.RUN:
                    used |= {ref.storage for ref in _refs_in(self.recording.calls[each.what].args)}
        used |= {m.storage for m in self.script.messages if m.target == self.script.rank}
        return used


_SHOWN = {Do.RUN: "run", Do.UPDATE: "update", Do.TAKE: "receive"}


def _function(call: Call) -> Callable[..., Any]:
    if isinstance(call.function, str):
        raise TypeError(call.function)
    return call.function


def _overload(name: str) -> Callable[..., Any]:
    """Returns ``aten.mm.default`` and its like."""
    namespace, packet, overload = name.rsplit(".", 2)
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def tensors_of(result: Any) -> list[Tensor]:
    """Returns the tensors that an op returned, in order."""
    if isinstance(result, Tensor):
        return [result]
    items = result if isinstance(result, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def _refs_in(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    items = value if isinstance(value, list | tuple) else ()
    return [ref for item in items for ref in _refs_in(item)]


def _made_refs(recording: Recording) -> dict[int, Ref]:
    """Returns one tensor of each storage that an op makes."""
    calls = recording.calls.values()
    return {ref.storage: ref for call in calls for ref in call.outputs if ref is not None}
