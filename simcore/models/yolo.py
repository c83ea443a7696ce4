"""YOLOv3 (Redmon and Farhadi, 2018, arXiv:1804.02767): Darknet-53 and heads at three scales.

With the 20 classes of PASCAL VOC; with the 80 of COCO it has the published 61,949,149 parameters.
The loss is a squared error on boxes and a cross entropy on objects and classes, of dense targets.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.inputs import Built, images

ANCHORS = 3
VOC_CLASSES = 20
STAGES = ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4))  # channels, residual blocks
STRIDES = (32, 16, 8)  # of the heads


class Convolution(nn.Sequential):
    """Convolution, batch norm and leaky ReLU."""

    def __init__(self, features: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(features, channels, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.1, inplace=True),
        )


class Residual(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = Convolution(channels, channels // 2, 1)
        self.expand = Convolution(channels // 2, channels, 3)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, channels, side, side] to the same shape."""
        output: Tensor = states + self.expand(self.squeeze(states))
        return output


class Head(nn.Module):
    """Five convolutions, then the predictions of one scale and what the next scale gets."""

    def __init__(self, features: int, width: int, outputs: int) -> None:
        super().__init__()
        sizes = [(features, width, 1), (width, 2 * width, 3), (2 * width, width, 1),
                 (width, 2 * width, 3), (2 * width, width, 1)]  # fmt: skip
        self.neck = nn.Sequential(*(Convolution(*size) for size in sizes))
        self.wide = Convolution(width, 2 * width, 3)
        self.predict = nn.Conv2d(2 * width, outputs, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns predictions [batch, outputs, side, side] and states [batch, width, ...]."""
        states = self.neck(states)
        return self.predict(self.wide(states)), states


class YOLO(nn.Module):
    """Object detector."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.stem = Convolution(3, 32, 3)
        features, stages = 32, []
        for channels, blocks in STAGES:
            residuals = [Residual(channels) for _ in range(blocks)]
            stages.append(nn.Sequential(Convolution(features, channels, 3, 2), *residuals))
            features = channels
        self.layers = nn.Sequential(*stages)
        outputs = ANCHORS * (5 + classes)
        self.heads = nn.ModuleList(
            [Head(1024, 512, outputs), Head(768, 256, outputs), Head(384, 128, outputs)]
        )
        self.links = nn.ModuleList([Convolution(512, 256, 1), Convolution(256, 128, 1)])

    def forward(self, images: Tensor, **targets: Tensor) -> Tensor:
        """Returns the loss of images [batch, 3, side, side], a scalar.

        The targets are ``coarse``, ``middle`` and ``fine``, each [batch, 3 * (5 + classes), ...].
        """
        states, taken = self.stem(images), []
        for stage in self.layers:
            states = stage(states)
            taken.append(states)
        losses = []
        for number, target in enumerate(targets.values()):
            if number:
                above = F.interpolate(self.links[number - 1](states), scale_factor=2.0)
                states = torch.cat([above, taken[-1 - number]], 1)
            said, states = self.heads[number](states)
            losses.append(self._loss(said, target))
        return losses[0] + losses[1] + losses[2]

    def _loss(self, said: Tensor, target: Tensor) -> Tensor:
        batch, _, side, _ = said.shape
        shape = (batch, ANCHORS, 5 + self.classes, side, side)
        said, target = said.view(shape), target.view(shape)
        boxes = F.mse_loss(said[:, :, :4].sigmoid(), target[:, :, :4])
        rest = F.binary_cross_entropy_with_logits(said[:, :, 4:], target[:, :, 4:])
        return boxes + rest


def _yolo(side: int, classes: int) -> Built:
    def inputs(batch: int) -> dict[str, Tensor]:
        outputs = ANCHORS * (5 + classes)
        names = zip(("coarse", "middle", "fine"), STRIDES, strict=True)
        shapes = {name: (batch, outputs, side // step, side // step) for name, step in names}
        return {"images": images(batch, side)} | {n: torch.zeros(s) for n, s in shapes.items()}

    return Built(YOLO(classes), inputs)


def yolov3_voc(side: int) -> Built:
    """Returns YOLOv3 for PASCAL VOC; `side` of the images in pixels, a multiple of 32."""
    return _yolo(side, VOC_CLASSES)


def yolov3_coco(side: int) -> Built:
    """Returns YOLOv3 for COCO; `side` of the images in pixels, a multiple of 32."""
    return _yolo(side, 80)
