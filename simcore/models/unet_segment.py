"""Two U-Nets that mark objects: a small one of grey images, and one of volumes.

- `unet_tiny`: of surfaces of products, 512 x 512 pixels in NVIDIA's examples: 32 channels at
  first, three levels and a bottleneck of 256 channels, convolutions with bias and ReLU.
- `unet_volume`: 3D U-Net in the form of nnU-Net (Isensee et al., 2018, arXiv:1809.10486): volumes
  of four channels, six levels of 32 to 320 channels, which strided convolutions go down to, with
  instance norm and leaky ReLU.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, ids

TINY = (32, 32, 64, 128)  # channels of each level on the way down
BOTTOM = 256
VOLUME = (32, 64, 128, 256, 320, 320)
VOLUME_CHANNELS = 4
VOLUME_CLASSES = 4
SLOPE = 0.01


def _flat_pair(entering: int, inner: int, leaving: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(entering, inner, 3, padding=1), nn.ReLU(),
        nn.Conv2d(inner, leaving, 3, padding=1), nn.ReLU(),
    )  # fmt: skip


def _risen(entering: int, leaving: int) -> nn.Sequential:
    return nn.Sequential(nn.ConvTranspose2d(entering, leaving, 2, stride=2), nn.ReLU())


class TinyUNet(nn.Module):
    """Marks pixels of grey images."""

    def __init__(self) -> None:
        super().__init__()
        before = (1, *TINY[:-1])
        self.down = nn.ModuleList(map(_flat_pair, before, TINY, TINY))
        self.pool = nn.MaxPool2d(2)
        self.bottom = nn.Sequential(
            _flat_pair(TINY[-1], BOTTOM, BOTTOM), _risen(BOTTOM, BOTTOM // 2)
        )
        self.up = nn.ModuleList()
        entering = BOTTOM // 2
        for width in reversed(TINY[1:]):
            pair = _flat_pair(entering + width, width, width // 2)
            self.up.append(nn.Sequential(pair, _risen(width // 2, width // 2)))
            entering = width // 2
        self.output = nn.Sequential(
            _flat_pair(entering + TINY[0], TINY[0], TINY[0]), nn.Conv2d(TINY[0], 1, 1)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 1, side, side], a scalar."""
        kept: list[Tensor] = []
        states = images
        for pair in self.down:
            kept.append(pair(states))
            states = self.pool(kept[-1])
        states = self.bottom(states)
        for block, left in zip((*self.up, self.output), reversed(kept), strict=True):
            states = block(torch.cat([states, left], 1))
        marks = states.squeeze(1)
        return F.binary_cross_entropy_with_logits(marks, labels.to(marks.dtype))


def _solid(entering: int, leaving: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(entering, leaving, 3, stride, padding=1, bias=False),
        nn.InstanceNorm3d(leaving, affine=True),
        nn.LeakyReLU(SLOPE),
    )


class VolumeUNet(nn.Module):
    """Marks voxels of volumes."""

    def __init__(self) -> None:
        super().__init__()
        before = (VOLUME_CHANNELS, *VOLUME[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(_solid(entering, width, 2 if number else 1), _solid(width, width))
            for number, (entering, width) in enumerate(zip(before, VOLUME, strict=True))
        )
        self.rise = nn.ModuleList()
        self.up = nn.ModuleList()
        entering = VOLUME[-1]
        for width in reversed(VOLUME[:-1]):
            self.rise.append(nn.ConvTranspose3d(entering, width, 2, stride=2))
            self.up.append(nn.Sequential(_solid(2 * width, width), _solid(width, width)))
            entering = width
        self.output = nn.Conv3d(entering, VOLUME_CLASSES, 3, padding=1)

    def forward(self, volumes: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of volumes [batch, 4, side, side, side], a scalar."""
        kept: list[Tensor] = []
        states = volumes
        for pair in self.down:
            states = pair(states)
            kept.append(states)
        for rise, pair, left in zip(self.rise, self.up, reversed(kept[:-1]), strict=True):
            states = pair(torch.cat([rise(states), left], 1))
        return F.cross_entropy(self.output(states), labels)


def unet_tiny(side: int) -> Built:
    """Returns the small U-Net; `side` of the images in pixels."""

    def inputs(batch: int) -> dict[str, Tensor]:
        return {"images": torch.zeros(batch, 1, side, side), "labels": ids(batch, side, side)}

    return Built(TinyUNet(), inputs)


def unet_volume(side: int) -> Built:
    """Returns 3D U-Net; `side` of the volumes in voxels."""

    def inputs(batch: int) -> dict[str, Tensor]:
        volumes = torch.zeros(batch, VOLUME_CHANNELS, side, side, side)
        return {"volumes": volumes, "labels": ids(batch, side, side, side)}

    return Built(VolumeUNet(), inputs)
