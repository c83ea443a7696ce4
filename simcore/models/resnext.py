"""ResNeXt-101 (32x4d; Xie et al., 2017, arXiv:1611.05431), plain and with squeeze and excitation.

The second form weighs the channels of each block's output by what two small layers make of their
means (Hu et al., 2018, arXiv:1709.01507).
"""

from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, labelled_images
from simcore.models.resnet import CLASSES

BLOCKS = (3, 4, 23, 3)
GROUPS = 32
GROUP_WIDTH = 4  # channels of a group in the first stage; each stage doubles them
SQUEEZE = 16  # times fewer features between the two small layers
_OUTPUTS = 2  # times the inner channels


class SqueezeExcitation(nn.Module):
    """Weighs channels by their means over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // SQUEEZE)
        self.excite = nn.Linear(channels // SQUEEZE, channels)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, channels, side, side] to the same shape."""
        hidden = F.relu(self.squeeze(states.mean((2, 3))))
        weights = F.sigmoid(self.excite(hidden))
        return states * weights[:, :, None, None]


class ResNeXtBlock(nn.Module):
    """Residual block of 1 x 1, grouped 3 x 3 and 1 x 1 convolutions."""

    def __init__(self, features: int, channels: int, stride: int, *, squeezes: bool) -> None:
        super().__init__()
        outputs = _OUTPUTS * channels
        self.conv1 = nn.Conv2d(features, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=GROUPS, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.weigh = SqueezeExcitation(outputs) if squeezes else nn.Identity()
        self.downsample = nn.Sequential()
        if stride > 1 or features != outputs:
            self.downsample.append(nn.Conv2d(features, outputs, 1, stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(outputs))

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, features, side, side] to [batch, 2 * channels, side', side']."""
        hidden = self.relu(self.bn1(self.conv1(states)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.weigh(self.bn3(self.conv3(hidden)))
        output: Tensor = self.relu(hidden + self.downsample(states))
        return output


class ResNeXt(nn.Module):
    """Image classifier."""

    def __init__(self, *, squeezes: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        features, blocks = 64, []
        for stage, count in enumerate(BLOCKS):
            channels = GROUPS * GROUP_WIDTH * 2**stage
            for number in range(count):
                stride = 2 if stage and number == 0 else 1
                blocks.append(ResNeXtBlock(features, channels, stride, squeezes=squeezes))
                features = _OUTPUTS * channels
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(features, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar."""
        states = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        return F.cross_entropy(self.fc(self.layers(states).mean((2, 3))), labels)


def resnext_101(side: int) -> Built:
    """Returns ResNeXt-101 (32x4d); `side` of the images in pixels."""
    return Built(ResNeXt(squeezes=False), labelled_images(side))


def se_resnext_101(side: int) -> Built:
    """Returns ResNeXt-101 (32x4d) with squeeze and excitation; `side` in pixels."""
    return Built(ResNeXt(squeezes=True), labelled_images(side))
