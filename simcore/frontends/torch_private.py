"""The interfaces of torch that capture needs and that torch does not promise to keep: all are here.

Tried with torch 2.6 to 2.13; what is missing in another release fails at import, by name.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DATA_DEPENDENT",
    "NO_FAKE",
    "FakeTensorMode",
    "TorchDispatchMode",
    "compiled_composite",
    "composite_kernels",
    "current_node",
    "device_shortcut",
    "fake_mode",
    "newest_sequence",
    "quiet",
    "sequence_of",
    "storage_address",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
NO_FAKE = (UnsupportedOperatorException,)
_LEAF_SEQUENCE = 2**64 - 1  # autograd's number of the nodes that hand gradients to parameters


def fake_mode() -> FakeTensorMode:
    """Returns a mode in which tensors have shapes but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging and warning about what `CaptureError` says in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def device_shortcut(func: Any, args: Any) -> torch.device | None:
    """Returns a fake tensor's device where that is all torch asks for: most of all calls."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def storage_address(tensor: torch.Tensor) -> int:
    """Returns what is equal for tensors that share memory, as long as one of them lives."""
    address: int = tensor.untyped_storage()._cdata
    return address


def newest_sequence() -> int:
    """Returns the number of the autograd node made last, -1 = none yet."""
    return torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]


def current_node() -> Any:
    """Returns the autograd node that runs now, None outside a backward."""
    return torch._C._current_autograd_node()


def sequence_of(node: Any) -> int | None:
    """Returns a node's number; None: the node hands ``.variable``, a parameter, its gradient."""
    sequence: int = node._sequence_nr()
    return None if sequence == _LEAF_SEQUENCE else sequence


@contextmanager
def composite_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replaces ops that torch takes apart above autograd, in the whole process, while active.

    Args:
        kernels: op of ``aten`` with overload -> what runs instead on CPU tensors. Where that
            returns NotImplemented, torch's own decomposition runs.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, kernel in kernels.items():
            library.impl(  # type: ignore[no-untyped-call]
                name, _or_decomposed(name, kernel), "AutogradCPU"
            )
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def compiled_composite(name: str) -> Callable[..., Any]:
    """Returns torch's own compiled kernel of an op that it takes apart above autograd.

    It is what runs outside `composite_kernels`; ``op.decompose`` may be a slower one in Python.

    Args:
        name: op of ``aten``, with overload where it has several.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return run


def _or_decomposed(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        return op.decompose(*args, **kwargs) if result is NotImplemented else result

    return run
