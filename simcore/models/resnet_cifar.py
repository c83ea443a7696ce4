"""ResNet-18 for 32 x 32 images (He et al., 2016), as the CIFAR-10 examples of Pollux and Gavel.

A 3 x 3 stem without pooling, four stages of two basic blocks; 11,173,962 parameters.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, labelled_images

CLASSES = 10
CHANNELS = (64, 128, 256, 512)
BLOCKS = 2


class BasicBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions."""

    def __init__(self, features: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(features, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride > 1 or features != channels:
            self.shortcut.append(nn.Conv2d(features, channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, features, side, side] to [batch, channels, side / stride, side / stride]."""
        hidden = F.relu(self.bn1(self.conv1(states)))
        hidden = self.bn2(self.conv2(hidden))
        return F.relu(hidden + self.shortcut(states))


class CifarResNet(nn.Module):
    """Image classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, CHANNELS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS[0])
        blocks, features = [], CHANNELS[0]
        for number, channels in enumerate(CHANNELS):
            for block in range(BLOCKS):
                stride = 2 if number and not block else 1
                blocks.append(BasicBlock(features, channels, stride))
                features = channels
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(features, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar."""
        states = self.layers(F.relu(self.bn1(self.conv1(images))))
        pooled = F.adaptive_avg_pool2d(states, 1).flatten(1)
        return F.cross_entropy(self.fc(pooled), labels)


def resnet_18(side: int) -> Built:
    """Returns ResNet-18; `side` of the images in pixels."""
    return Built(CifarResNet(), labelled_images(side))
