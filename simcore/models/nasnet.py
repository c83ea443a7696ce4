"""NASNet-A (Zoph et al., 2018, arXiv:1707.07012): cells found by search, with many small branches.

Mobile is 4 @ 1056 (5,289,978 parameters), large 6 @ 4032 (88,753,150 parameters). Scheduled drop
path and the auxiliary head, which the published counts exclude, are left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, labelled_images

CLASSES = 1000
NORM_EPSILON = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one NASNet-A."""

    cells: int  # normal cells of each of the three groups
    penultimate: int  # features before the classifier
    stem: int  # channels of the first convolution
    skip_reduction: bool  # a cell after a reduction sees past it
    dropout: float

    @property
    def channels(self) -> int:
        """Channels of each branch in the first group of cells."""
        return self.penultimate // 24


@dataclass(frozen=True, slots=True)
class Source:
    """Shape of a feature map a cell reads."""

    channels: int
    halvings: int  # times the side was halved since the first convolution


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=NORM_EPSILON)


class Separable(nn.Sequential):
    """Two rounds of ReLU, separable convolution and batch norm; the first may change the size."""

    def __init__(self, features: int, channels: int, kernel: int, *, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for entering, step in ((features, stride), (channels, 1)):
            depthwise = nn.Conv2d(
                entering, entering, kernel, step, kernel // 2, groups=entering, bias=False
            )
            pointwise = nn.Conv2d(entering, channels, 1, bias=False)
            layers += [nn.ReLU(), depthwise, pointwise, _norm(channels)]
        super().__init__(*layers)


class Squeeze(nn.Sequential):
    """ReLU, 1 x 1 convolution and batch norm."""

    def __init__(self, features: int, channels: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(features, channels, 1, bias=False), _norm(channels))


class FactorisedReduction(nn.Module):
    """Halves a feature map by two 1 x 1 convolutions on its even and its odd pixels."""

    def __init__(self, features: int, channels: int) -> None:
        super().__init__()
        self.path_1 = nn.Conv2d(features, channels // 2, 1, stride=2, bias=False)
        self.path_2 = nn.Conv2d(features, channels // 2, 1, stride=2, bias=False)
        self.norm = _norm(channels)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, features, side, side] to [batch, channels, side / 2, side / 2]."""
        states = states.relu()
        shifted = F.pad(states, (0, 1, 0, 1))[:, :, 1:, 1:]
        halves = torch.cat([self.path_1(states), self.path_2(shifted)], dim=1)
        output: Tensor = self.norm(halves)
        return output


def _adjust(earlier: Source | None, latest: Source, channels: int) -> nn.Module:
    """Returns what gives the earlier feature map the latest one's size and the cell's channels.

    The first cell has no earlier one and reads the stem twice, once as it is.
    """
    if earlier is None:
        return nn.Identity()
    if earlier.halvings != latest.halvings:
        return FactorisedReduction(earlier.channels, channels)
    return Squeeze(earlier.channels, channels) if earlier.channels != channels else nn.Identity()


class NormalCell(nn.Module):
    """Keeps the size; 6 x channels out."""

    def __init__(self, earlier: Source | None, latest: Source, channels: int) -> None:
        super().__init__()
        self.adjust = _adjust(earlier, latest, channels)
        self.squeeze = Squeeze(latest.channels, channels)
        self.block1_left = Separable(channels, channels, 5)
        self.block1_right = Separable(channels, channels, 3)
        self.block2_left = Separable(channels, channels, 5)
        self.block2_right = Separable(channels, channels, 3)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.block5_left = Separable(channels, channels, 3)

    def forward(self, earlier: Tensor, latest: Tensor) -> Tensor:
        """Concatenates the earlier map and five sums of two branches over channels."""
        before, now = self.adjust(earlier), self.squeeze(latest)
        sums = [
            self.block1_left(now) + self.block1_right(before),
            self.block2_left(before) + self.block2_right(before),
            self.pool(now) + before,
            self.pool(before) + self.pool(before),
            self.block5_left(now) + now,
        ]
        return torch.cat([before, *sums], dim=1)


class ReductionCell(nn.Module):
    """Halves the size; 4 x channels out."""

    def __init__(self, earlier: Source | None, latest: Source, channels: int) -> None:
        super().__init__()
        self.adjust = _adjust(earlier, latest, channels)
        self.squeeze = Squeeze(latest.channels, channels)
        before = latest.channels if earlier is None else channels
        self.block1_left = Separable(channels, channels, 5, stride=2)
        self.block1_right = Separable(before, channels, 7, stride=2)
        self.block2_right = Separable(before, channels, 7, stride=2)
        self.block3_right = Separable(before, channels, 5, stride=2)
        self.max_pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.average_pool = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.block5_left = Separable(channels, channels, 3)

    def forward(self, earlier: Tensor, latest: Tensor) -> Tensor:
        """Concatenates four sums of two branches over channels."""
        before, now = self.adjust(earlier), self.squeeze(latest)
        first = self.block1_left(now) + self.block1_right(before)
        second = self.max_pool(now) + self.block2_right(before)
        third = self.average_pool(now) + self.block3_right(before)
        fourth = self.pool(first) + second
        fifth = self.block5_left(first) + self.max_pool(now)
        return torch.cat([second, third, fourth, fifth], dim=1)


class NASNet(nn.Module):
    """Image classifier; each cell reads the outputs of two earlier ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.skip_reduction = shape.skip_reduction
        self.conv0 = nn.Conv2d(3, shape.stem, 3, stride=2, bias=False)
        self.norm0 = _norm(shape.stem)
        self.cells = nn.ModuleList()
        earlier, latest = None, Source(shape.stem, 0)
        for halves, channels in _plan(shape):
            if halves:
                self.cells.append(ReductionCell(earlier, latest, channels))
                output = Source(4 * channels, latest.halvings + 1)
            else:
                self.cells.append(NormalCell(earlier, latest, channels))
                output = Source(6 * channels, latest.halvings)
            if not self.skips(self.cells[-1], latest.halvings):
                earlier = latest
            latest = output
        self.dropout = nn.Dropout(shape.dropout)
        self.fc = nn.Linear(shape.penultimate, CLASSES)

    def skips(self, cell: nn.Module, halvings: int) -> bool:
        """Whether the cell after this one reads past it instead of its input.

        The two reductions of the stem never are skipped.
        """
        return self.skip_reduction and isinstance(cell, ReductionCell) and halvings >= 2

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar."""
        earlier = latest = self.norm0(self.conv0(images))
        halvings = 0
        for cell in self.cells:
            output = cell(earlier, latest)
            if not self.skips(cell, halvings):
                earlier = latest
            halvings += isinstance(cell, ReductionCell)
            latest = output
        pooled = self.dropout(latest.relu().mean(dim=(2, 3)))
        return F.cross_entropy(self.fc(pooled), labels)


def _plan(shape: Shape) -> list[tuple[bool, int]]:
    """Returns (whether it halves, channels) of every cell in order."""
    channels = shape.channels
    plan = [(True, channels // 4), (True, channels // 2)]
    for group in range(3):
        if group:
            plan.append((True, channels * 2**group))
        plan += [(False, channels * 2**group)] * shape.cells
    return plan


def nasnet_mobile(side: int) -> Built:
    """Returns NASNet-A 4 @ 1056; `side` of the images in pixels."""
    shape = Shape(cells=4, penultimate=1056, stem=32, skip_reduction=False, dropout=0.5)
    return Built(NASNet(shape), labelled_images(side))


def nasnet_large(side: int) -> Built:
    """Returns NASNet-A 6 @ 4032; `side` of the images in pixels."""
    shape = Shape(cells=6, penultimate=4032, stem=96, skip_reduction=True, dropout=0.5)
    return Built(NASNet(shape), labelled_images(side))
