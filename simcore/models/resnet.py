"""ResNet-50 (He et al., 2016, arXiv:1512.03385) in its v1.5 form: the stride is in the 3 x 3."""

from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, labelled_images

CLASSES = 1000
EXPANSION = 4
BLOCKS = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """Residual block of 1 x 1, 3 x 3 and 1 x 1 convolutions."""

    def __init__(self, features: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        outputs = EXPANSION * channels
        self.conv1 = nn.Conv2d(features, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride > 1 or features != outputs:
            self.downsample.append(nn.Conv2d(features, outputs, 1, stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(outputs))

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, features, side, side] to [batch, 4 * channels, side', side']."""
        hidden = self.relu(self.bn1(self.conv1(states)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        output: Tensor = self.relu(hidden + self.downsample(states))
        return output


class ResNetTrunk(nn.Module):
    """ResNet-50 up to its last feature map."""

    width = 2048

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        features, stages = 64, []
        for number, count in enumerate(BLOCKS):
            channels, stride = 64 * 2**number, 1 if number == 0 else 2
            blocks = [Bottleneck(features, channels, stride)]
            features = EXPANSION * channels
            blocks += [Bottleneck(features, channels) for _ in range(count - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [batch, 3, side, side] to [batch, 2048, side / 32, side / 32]."""
        states = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(states))))
        return features


class ResNet(nn.Module):
    """Image classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = ResNetTrunk()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(ResNetTrunk.width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar."""
        pooled = self.avgpool(self.trunk(images)).flatten(1)
        return F.cross_entropy(self.fc(pooled), labels)


def resnet_50(side: int) -> Built:
    """Returns ResNet-50; `side` of the images in pixels."""
    return Built(ResNet(), labelled_images(side))
