"""VGG-16 and VGG-19 (Simonyan & Zisserman, 2015, arXiv:1409.1556), configurations D and E."""

from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, labelled_images

CLASSES = 1000
CHANNELS = (64, 128, 256, 512, 512)
DROPOUT = 0.5


def _features(repeats: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    features = 3
    for channels, count in zip(CHANNELS, repeats, strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(features, channels, 3, padding=1), nn.ReLU(inplace=True)]
            features = channels
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers)


class VGG(nn.Module):
    """Convolutions of 3 x 3 in five groups, then three large linear layers."""

    def __init__(self, repeats: tuple[int, ...]) -> None:
        super().__init__()
        self.features = _features(repeats)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(CHANNELS[-1] * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(DROPOUT),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(DROPOUT),
            nn.Linear(4096, CLASSES),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of images [batch, 3, side, side], a scalar."""
        states = self.avgpool(self.features(images)).flatten(1)
        return F.cross_entropy(self.classifier(states), labels)


def vgg_16(side: int) -> Built:
    """Returns VGG-16; `side` of the images in pixels."""
    return Built(VGG((2, 2, 3, 3, 3)), labelled_images(side))


def vgg_19(side: int) -> Built:
    """Returns VGG-19; `side` of the images in pixels."""
    return Built(VGG((2, 2, 4, 4, 4)), labelled_images(side))
