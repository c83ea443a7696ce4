"""What every model factory returns, and makers of its example inputs.

The values are irrelevant (zeros); shapes and types are what a capture reads. Tensors are made at
call time and without naming a device, so an ambient fake mode or `torch.device("meta")` decides.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Inputs = Callable[[int], dict[str, Tensor]]


class Built(NamedTuple):
    """A model and how to feed it."""

    module: nn.Module  # module(**inputs(batch)) is a scalar loss
    inputs: Inputs  # batch size -> keyword arguments of the module's forward


def ids(*shape: int) -> Tensor:
    """Returns integers that are valid for any embedding or class target."""
    return torch.zeros(shape, dtype=torch.int64)


def images(batch: int, side: int) -> Tensor:
    """Returns square RGB images, [batch, 3, side, side]."""
    return torch.zeros(batch, 3, side, side)


def labelled_images(side: int) -> Inputs:
    """Returns the inputs of an image classifier for images of one side length in pixels."""
    return lambda batch: {"images": images(batch, side), "labels": ids(batch)}


def next_tokens(length: int) -> Inputs:
    """Returns the inputs of a language model; labels are the ids shifted by the loader."""
    return lambda batch: {"input_ids": ids(batch, length), "labels": ids(batch, length)}


def on_meta(factory: Callable[[int], Built], size: int) -> Built:
    """Returns what a factory builds, on the meta device."""
    with torch.device("meta"):
        return factory(size)
