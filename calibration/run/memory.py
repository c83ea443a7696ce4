"""The memory of one rank: storages by number and microbatch, and tensors that lie in them."""

from typing import NamedTuple

import torch

from calibration.run.recording import Ref, is_persistent
from calibration.run.script import STEP, Message
from simcore.frontends.torch_tape import Storage

Tensor = torch.Tensor
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Held(NamedTuple):
    """A storage, as the tensor that was put there."""

    tensor: Tensor
    ref: Ref | None  # what the tensor is; None = bytes


class Memory:
    """Storages of a rank, on one device."""

    def __init__(self, storages: list[Storage], device: torch.device) -> None:
        self.device = device
        self._sizes = [storage.bytes for storage in storages]
        self._persistent = [is_persistent(storage.role) for storage in storages]
        self._held: dict[tuple[int, int], _Held] = {}

    def put(self, ref: Ref, microbatch: int, tensor: Tensor) -> None:
        """Makes a tensor's memory that of a storage; copies it where it is laid out differently."""
        key = self._key(ref.storage, microbatch)
        held = self._held.get(key)
        if held is not None and same_memory(held.tensor, tensor):
            return
        if not lies_as(tensor, ref):
            fresh = self._view(self._bytes(ref.storage), ref)
            fresh.copy_(tensor)
            tensor = fresh
        self._held[key] = _Held(tensor, ref)

    def tensor(self, ref: Ref, microbatch: int) -> Tensor:
        """Returns a tensor; memory that nobody has written yet is made."""
        key = self._key(ref.storage, microbatch)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(self._bytes(ref.storage), None)
        return held.tensor if held.ref == ref else self._view(held.tensor, ref)

    def settle(self, ref: Ref, microbatch: int) -> None:
        """Adds a storage of a microbatch to what earlier ones have summed."""
        total = self._held.get((ref.storage, STEP))
        if total is None:
            self._held[ref.storage, STEP] = self._held[ref.storage, microbatch]
            return
        flat = self._whole(ref)
        self.tensor(flat, STEP).add_(self.tensor(flat, microbatch))

    def free(self, storage: int, microbatch: int) -> None:
        """Lets go of a storage."""
        self._held.pop((storage, microbatch), None)

    def clear(self) -> None:
        """Lets go of all that does not outlive a step."""
        self._held = {key: held for key, held in self._held.items() if self._persistent[key[0]]}

    def payload(self, message: Message) -> Tensor:
        """Returns what a message carries, as flat bytes or words."""
        tensor = self.tensor(_part(message, self._sizes[message.storage]), message.microbatch)
        tensor = tensor.contiguous()
        return tensor.clone() if message.is_overwritten else tensor

    def buffer(self, message: Message) -> Tensor:
        """Returns room for what a message carries."""
        ref = _part(message, self._sizes[message.storage])
        return torch.empty(ref.size, dtype=ref.dtype, device=self.device)

    def install(self, message: Message, payload: Tensor) -> None:
        """Puts what has come where its readers look for it."""
        ref = _part(message, self._sizes[message.storage])
        key = self._key(message.storage, message.microbatch)
        if not message.region and key not in self._held:
            self._held[key] = _Held(payload, ref)
        else:
            self.tensor(ref, message.microbatch).copy_(payload)

    def _whole(self, ref: Ref) -> Ref:
        count = self._sizes[ref.storage] // ref.dtype.itemsize
        return Ref(ref.storage, ref.dtype, (count,), (1,), 0)

    def _key(self, storage: int, microbatch: int) -> tuple[int, int]:
        return storage, STEP if self._persistent[storage] else microbatch

    def _bytes(self, storage: int) -> Tensor:
        return torch.empty(self._sizes[storage], dtype=torch.uint8, device=self.device)

    def _view(self, base: Tensor, ref: Ref) -> Tensor:
        memory = base.untyped_storage()
        empty = torch.empty(0, dtype=ref.dtype, device=self.device)
        return empty.set_(memory, ref.offset, ref.size, ref.stride)


def _part(message: Message, num_bytes: int) -> Ref:
    """Returns the part of a storage that a message carries."""
    if not message.region:
        return Ref(message.storage, torch.uint8, (num_bytes,), (1,), 0)
    offset, size, *axes = message.region
    return Ref(message.storage, _WORDS[size], tuple(axes[1::2]), tuple(axes[::2]), offset // size)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors lie in one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and b.numel() > 0


def lies_as(tensor: Tensor, ref: Ref) -> bool:
    """Returns whether a tensor has the recorded layout in memory of its own."""
    return (
        tensor.dtype == ref.dtype
        and tuple(tensor.shape) == ref.size
        and tuple(tensor.stride()) == ref.stride
        and tensor.storage_offset() == ref.offset
    )
