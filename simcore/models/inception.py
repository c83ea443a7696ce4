"""Inception-V3 with its auxiliary classifier (Szegedy et al., 2016, arXiv:1512.00567)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, labelled_images

CLASSES = 1000
DROPOUT = 0.5
AUXILIARY_WEIGHT = 0.4


class BasicConv2d(nn.Module):
    """Convolution, batch norm and ReLU; keeps the size unless it has a stride or is not padded."""

    def __init__(
        self,
        features: int,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padded: bool = True,
    ) -> None:
        super().__init__()
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (rows // 2, columns // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(features, channels, (rows, columns), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=0.001)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, features, side, side] to [batch, channels, side', side']."""
        return F.relu(self.bn(self.conv(states)), inplace=True)


class InceptionA(nn.Module):
    """35 x 35 module with 5 x 5 and double 3 x 3 branches."""

    def __init__(self, features: int, pool_channels: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(features, 64, 1)
        self.branch5x5 = nn.Sequential(BasicConv2d(features, 48, 1), BasicConv2d(48, 64, 5))
        self.branch3x3dbl = nn.Sequential(
            BasicConv2d(features, 64, 1), BasicConv2d(64, 96, 3), BasicConv2d(96, 96, 3)
        )
        self.branch_pool = nn.Sequential(
            nn.AvgPool2d(3, stride=1, padding=1), BasicConv2d(features, pool_channels, 1)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Concatenates the four branches over channels."""
        branches = (self.branch1x1, self.branch5x5, self.branch3x3dbl, self.branch_pool)
        return torch.cat([branch(states) for branch in branches], dim=1)


class InceptionB(nn.Module):
    """Reduction from 35 x 35 to 17 x 17."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(features, 384, 3, stride=2, padded=False)
        self.branch3x3dbl = nn.Sequential(
            BasicConv2d(features, 64, 1),
            BasicConv2d(64, 96, 3),
            BasicConv2d(96, 96, 3, stride=2, padded=False),
        )
        self.branch_pool = nn.MaxPool2d(3, stride=2)

    def forward(self, states: Tensor) -> Tensor:
        """Concatenates the three branches over channels."""
        branches = (self.branch3x3, self.branch3x3dbl, self.branch_pool)
        return torch.cat([branch(states) for branch in branches], dim=1)


class InceptionC(nn.Module):
    """17 x 17 module with factorised 7 x 7 branches."""

    def __init__(self, features: int, channels: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(features, 192, 1)
        self.branch7x7 = nn.Sequential(
            BasicConv2d(features, channels, 1),
            BasicConv2d(channels, channels, (1, 7)),
            BasicConv2d(channels, 192, (7, 1)),
        )
        self.branch7x7dbl = nn.Sequential(
            BasicConv2d(features, channels, 1),
            BasicConv2d(channels, channels, (7, 1)),
            BasicConv2d(channels, channels, (1, 7)),
            BasicConv2d(channels, channels, (7, 1)),
            BasicConv2d(channels, 192, (1, 7)),
        )
        self.branch_pool = nn.Sequential(
            nn.AvgPool2d(3, stride=1, padding=1), BasicConv2d(features, 192, 1)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Concatenates the four branches over channels."""
        branches = (self.branch1x1, self.branch7x7, self.branch7x7dbl, self.branch_pool)
        return torch.cat([branch(states) for branch in branches], dim=1)


class InceptionD(nn.Module):
    """Reduction from 17 x 17 to 8 x 8."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.branch3x3 = nn.Sequential(
            BasicConv2d(features, 192, 1), BasicConv2d(192, 320, 3, stride=2, padded=False)
        )
        self.branch7x7x3 = nn.Sequential(
            BasicConv2d(features, 192, 1),
            BasicConv2d(192, 192, (1, 7)),
            BasicConv2d(192, 192, (7, 1)),
            BasicConv2d(192, 192, 3, stride=2, padded=False),
        )
        self.branch_pool = nn.MaxPool2d(3, stride=2)

    def forward(self, states: Tensor) -> Tensor:
        """Concatenates the three branches over channels."""
        branches = (self.branch3x3, self.branch7x7x3, self.branch_pool)
        return torch.cat([branch(states) for branch in branches], dim=1)


class Fork(nn.Module):
    """A 1 x 3 and a 3 x 1 convolution side by side."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.wide = BasicConv2d(features, 384, (1, 3))
        self.tall = BasicConv2d(features, 384, (3, 1))

    def forward(self, states: Tensor) -> Tensor:
        """Concatenates both over channels."""
        return torch.cat([self.wide(states), self.tall(states)], dim=1)


class InceptionE(nn.Module):
    """8 x 8 module with forked branches."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(features, 320, 1)
        self.branch3x3 = nn.Sequential(BasicConv2d(features, 384, 1), Fork(384))
        self.branch3x3dbl = nn.Sequential(
            BasicConv2d(features, 448, 1), BasicConv2d(448, 384, 3), Fork(384)
        )
        self.branch_pool = nn.Sequential(
            nn.AvgPool2d(3, stride=1, padding=1), BasicConv2d(features, 192, 1)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Concatenates the four branches over channels."""
        branches = (self.branch1x1, self.branch3x3, self.branch3x3dbl, self.branch_pool)
        return torch.cat([branch(states) for branch in branches], dim=1)


class InceptionAux(nn.Module):
    """Auxiliary classifier on the last 17 x 17 features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(5, stride=3)
        self.conv0 = BasicConv2d(features, 128, 1)
        self.conv1 = BasicConv2d(128, 768, 5, padded=False)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(768, CLASSES)

    def forward(self, states: Tensor) -> Tensor:
        """Returns logits [batch, classes]."""
        states = self.conv1(self.conv0(self.pool(states)))
        logits: Tensor = self.fc(self.avgpool(states).flatten(1))
        return logits


class Inception3(nn.Module):
    """Image classifier whose loss adds 0.4 times that of the auxiliary one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            BasicConv2d(3, 32, 3, stride=2, padded=False),
            BasicConv2d(32, 32, 3, padded=False),
            BasicConv2d(32, 64, 3),
            nn.MaxPool2d(3, stride=2),
            BasicConv2d(64, 80, 1),
            BasicConv2d(80, 192, 3, padded=False),
            nn.MaxPool2d(3, stride=2),
        )
        self.mixed_5 = nn.Sequential(InceptionA(192, 32), InceptionA(256, 64), InceptionA(288, 64))
        self.mixed_6 = nn.Sequential(
            InceptionB(288),
            InceptionC(768, 128),
            InceptionC(768, 160),
            InceptionC(768, 160),
            InceptionC(768, 192),
        )
        self.aux_logits = InceptionAux(768)
        self.mixed_7 = nn.Sequential(InceptionD(768), InceptionE(1280), InceptionE(2048))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(DROPOUT)
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar."""
        states = self.mixed_6(self.mixed_5(self.stem(images)))
        auxiliary = F.cross_entropy(self.aux_logits(states), labels)
        pooled = self.dropout(self.avgpool(self.mixed_7(states))).flatten(1)
        return F.cross_entropy(self.fc(pooled), labels) + AUXILIARY_WEIGHT * auxiliary


def inception_v3(side: int) -> Built:
    """Returns Inception-V3; `side` of the images in pixels."""
    return Built(Inception3(), labelled_images(side))
