"""AmoebaNet-D (Real et al., 2018, arXiv:1802.01548), the model of GPipe (arXiv:1811.06965).

The size (L, D) is the number of normal cells and of filters. A normal cell puts four of its states
together as in GPipe, which gives GPipe's counts: (18, 208) has 81.5 million parameters, (18, 416)
319.0 million. As in torchgpipe's benchmark, whose runs are in our data, "max pooling" over 3 x 3
averages. All is one chain of modules, `layers`: each cell reads the outputs of the two before it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, labelled_images

CLASSES = 1000
_SQUARE, _ROW, _COLUMN, _POINT = (3, 3), (1, 7), (7, 1), (1, 1)


def _step(
    entering: int, leaving: int, kernel: tuple[int, int] = _POINT, stride: tuple[int, int] = (1, 1)
) -> list[nn.Module]:
    """Returns ReLU, convolution and batch norm."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(entering, leaving, kernel, stride, padding, bias=False)
    return [nn.ReLU(), convolution, nn.BatchNorm2d(leaving)]


class FactorisedReduction(nn.Module):
    """Halves a feature map by two 1 x 1 convolutions on its even and its odd pixels."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(entering, leaving // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(entering, leaving // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(leaving)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, entering, side, side] to [batch, leaving, side / 2, side / 2]."""
        states = states.relu()
        shifted = F.pad(states[:, :, 1:, 1:], (0, 1, 0, 1))
        halved: Tensor = self.norm(torch.cat([self.even(states), self.odd(shifted)], dim=1))
        return halved


def _same(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorisedReduction(channels, channels)


def _average(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)


def _greatest(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride=stride, ceil_mode=True)  # odd sides round up as elsewhere


def _point(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_step(channels, channels, stride=(stride, stride)))


def _square(channels: int, stride: int) -> nn.Module:
    few = channels // 4
    inner = _step(few, few, _SQUARE, (stride, stride))
    return nn.Sequential(*_step(channels, few), *inner, *_step(few, channels))


def _cross(channels: int, stride: int) -> nn.Module:
    few = channels // 4
    inner = [*_step(few, few, _ROW, (1, stride)), *_step(few, few, _COLUMN, (stride, 1))]
    return nn.Sequential(*_step(channels, few), *inner, *_step(few, channels))


Operation = Callable[[int, int], nn.Module]  # channels, stride -> module
# Each state from the third on adds two operations on earlier states: (state, operation) twice.
_NORMAL: tuple[tuple[int, Operation], ...] = (
    (1, _point), (1, _average),
    (1, _same), (0, _cross),
    (0, _point), (0, _cross),
    (2, _average), (2, _same),
    (1, _average), (5, _point),
)  # fmt: skip
_NORMAL_OUT = (0, 3, 4, 6)  # states that are put together
_REDUCING: tuple[tuple[int, Operation], ...] = (
    (0, _greatest), (0, _average),
    (2, _same), (1, _square),
    (2, _cross), (2, _average),
    (3, _same), (1, _greatest),
    (2, _average), (3, _point),
)  # fmt: skip
_REDUCING_OUT = (4, 5, 6)


class Cell(nn.Module):
    """Reads the outputs of the two cells before it; the latest one is state 0."""

    def __init__(
        self, earlier: int, latest: int, channels: int, *, reduces: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        table = _REDUCING if reduces else _NORMAL
        self.sources = [source for source, _ in table]
        self.out = _REDUCING_OUT if reduces else _NORMAL_OUT
        self.latest = nn.Sequential(*_step(latest, channels))
        self.earlier = _adjusted(earlier, channels, halves=after_reduction)
        self.operations = nn.ModuleList(
            [make(channels, 2 if reduces and source < 2 else 1) for source, make in table]
        )

    def forward(self, earlier: Tensor, latest: Tensor) -> Tensor:
        """Returns [batch, len(out) * channels, side, side], half the side where it reduces."""
        states = [self.latest(latest), self.earlier(earlier)]
        for place in range(0, len(self.sources), 2):
            first, second = (
                self.operations[number](states[self.sources[number]])
                for number in (place, place + 1)
            )
            states.append(first + second)
        return torch.cat([states[place] for place in self.out], dim=1)


def _adjusted(entering: int, channels: int, *, halves: bool) -> nn.Module:
    if halves:
        return FactorisedReduction(entering, channels)
    same = entering == channels
    return nn.Identity() if same else nn.Sequential(*_step(entering, channels))


class Stem(nn.Sequential):
    """ReLU, a convolution that halves the image, and batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(*_step(3, channels, _SQUARE, (2, 2)))


class Classifier(nn.Module):
    """Mean over all pixels and a linear layer."""

    def __init__(self, entering: int) -> None:
        super().__init__()
        self.fc = nn.Linear(entering, CLASSES)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, entering, side, side] to logits [batch, class]."""
        logits: Tensor = self.fc(states.mean(dim=(2, 3)))
        return logits


class AmoebaNet(nn.Module):
    """Image classifier."""

    def __init__(self, cells: int, filters: int) -> None:
        super().__init__()
        channels = filters // 4
        layers: list[nn.Module] = [Stem(channels)]
        earlier = latest = channels
        after_reduction = False
        for reduces in _plan(cells):
            channels *= 2 if reduces else 1
            layers.append(
                Cell(earlier, latest, channels, reduces=reduces, after_reduction=after_reduction)
            )
            leaving = channels * len(_REDUCING_OUT if reduces else _NORMAL_OUT)
            earlier, latest, after_reduction = latest, leaving, reduces
        layers.append(Classifier(latest))
        self.layers = nn.ModuleList(layers)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar."""
        stem, *cells, classifier = self.layers
        earlier = latest = stem(images)
        for cell in cells:
            earlier, latest = latest, cell(earlier, latest)
        return F.cross_entropy(classifier(latest), labels)


def _plan(cells: int) -> list[bool]:
    """Returns whether each cell reduces, in order: two of the stem, then three groups."""
    group = [False] * (cells // 3)
    return [True, True, *group, True, *group, True, *group]


def amoebanet_d(side: int) -> Built:
    """Returns AmoebaNet-D (18, 256); `side` of the images in pixels."""
    return Built(AmoebaNet(18, 256), labelled_images(side))
