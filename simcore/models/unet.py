"""U-Net (Ronneberger et al., 2015) as torchgpipe benchmarks it (Kim et al., 2020, 2004.09910).

The size (B, C) is the number of convolutions of a block and the channels of the first block. Five
blocks go down, one is the bottom, five go up, each of which also reads what the block of its size
on the way down made. A convolution is followed by dropout of whole channels, instance norm and
leaky ReLU; what goes up is enlarged by repeating pixels. All is one chain of modules, `layers`, so
that stages can be said by how many they have (241 at B = 5); none of their names is a number, as a
module alone is nothing to recompute. (6, 72) has 362.2 million parameters, (11, 128) 2.21 billion.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, Inputs, ids, images

DEPTH = 5
DROPOUT = 0.1
SLOPE = 0.01


class Keep(nn.Identity):
    """What leaves a block on the way down; the block of its size on the way up reads it too."""


class Join(nn.Module):
    """Puts a kept feature map beside what goes up, padded to its size."""

    def forward(self, states: Tensor, kept: Tensor) -> Tensor:
        """Concatenates [batch, channels, side, side] over channels."""
        missing = kept.shape[-1] - states.shape[-1]
        if missing:
            states = F.pad(states, (0, missing, 0, missing))
        return torch.cat([states, kept], dim=1)


def _block(entering: int, inner: int, leaving: int, convolutions: int) -> list[nn.Module]:
    """Returns the modules of a block, four a convolution."""
    channels = [entering, *[inner] * (convolutions - 1), leaving]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.Dropout2d(DROPOUT),
            nn.InstanceNorm2d(after),
            nn.LeakyReLU(SLOPE),
        ]
    return layers


class UNet(nn.Module):
    """Marks the pixels of images that belong to an object."""

    def __init__(self, convolutions: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        wide = [channels * 2**level for level in range(DEPTH)]
        for before, after in zip([3, *wide[:-1]], wide, strict=True):
            layers += [*_block(before, after, after, convolutions), Keep(), nn.MaxPool2d(2)]
        layers += _block(wide[-1], 2 * wide[-1], wide[-1], convolutions)
        for width in reversed(wide):
            layers += [nn.Upsample(scale_factor=2), Join()]
            layers += _block(2 * width, width // 2, width // 2, convolutions)
        layers.append(nn.Conv2d(channels // 2, 1, 1, bias=False))
        self.layers = nn.ModuleDict({f"part{n}": layer for n, layer in enumerate(layers)})

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar.

        Args:
            images: to be marked.
            labels: 0 or 1 of each pixel, [batch, side, side].
        """
        kept: list[Tensor] = []
        states = images
        for layer in self.layers.values():
            states = layer(states, kept.pop()) if isinstance(layer, Join) else layer(states)
            if isinstance(layer, Keep):
                kept.append(states)
        marks = states.squeeze(1)
        return F.binary_cross_entropy_with_logits(marks, labels.to(marks.dtype))


def _inputs(side: int) -> Inputs:
    return lambda batch: {"images": images(batch, side), "labels": ids(batch, side, side)}


def unet(side: int) -> Built:
    """Returns U-Net (5, 64); `side` of the images in pixels."""
    return Built(UNet(5, 64), _inputs(side))
