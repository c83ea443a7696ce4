"""Three branches, fused: ResNet-50 for pictures, transformers for text and for sound.

Not one published network but the usual shape of one: modality encoders whose tokens a joint
transformer reads (VATT, Akbari et al., 2021, arXiv:2104.11178; MBT, Nagrani et al., 2021,
arXiv:2107.00135). Sound is a log-mel spectrogram in 16 x 16 patches (AST, Gong et al., 2021,
arXiv:2104.01778). The classes are those of VGGSound. The branches share nothing until the fusion.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.bert import BertEmbeddings, BertLayer
from simcore.models.inputs import Built, ids, images
from simcore.models.resnet import ResNetTrunk

WIDTH = 768
HEADS = 12
BRANCH_LAYERS = 6
FUSION_LAYERS = 4
CLASSES = 309
SIDE = 224
MELS = 128
FRAMES = 512
PATCH = 16


def _encoder(layers: int) -> nn.Sequential:
    return nn.Sequential(*(BertLayer(WIDTH, HEADS) for _ in range(layers)))


class VisionBranch(nn.Module):
    """ResNet-50 whose last feature map becomes 49 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = ResNetTrunk()
        self.proj = nn.Linear(ResNetTrunk.width, WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps images [batch, 3, 224, 224] to [batch, 49, width]."""
        tokens: Tensor = self.proj(self.trunk(pixels).flatten(2).transpose(1, 2))
        return tokens


class TextBranch(nn.Module):
    """Half a BERT-base."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(WIDTH)
        self.encoder = _encoder(BRANCH_LAYERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids [batch, length] to [batch, length, width]."""
        states: Tensor = self.encoder(self.embeddings(tokens, torch.zeros_like(tokens)))
        return states


class AudioBranch(nn.Module):
    """Transformer over the patches of a spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        count = (MELS // PATCH) * (FRAMES // PATCH)
        self.positional_embedding = nn.Parameter(torch.zeros(count, WIDTH))
        self.encoder = _encoder(BRANCH_LAYERS)

    def forward(self, spectrograms: Tensor) -> Tensor:
        """Maps [batch, 1, mels, frames] to [batch, 256, width]."""
        patches = self.patches(spectrograms).flatten(2).transpose(1, 2)
        states: Tensor = self.encoder(patches + self.positional_embedding)
        return states


class MultiModal(nn.Module):
    """Classifier of clips that have a picture, a text and a sound."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = VisionBranch()
        self.text = TextBranch()
        self.audio = AudioBranch()
        self.fusion = _encoder(FUSION_LAYERS)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(
        self, images: Tensor, input_ids: Tensor, spectrograms: Tensor, labels: Tensor
    ) -> Tensor:
        """Returns the mean loss, a scalar."""
        branches = [self.vision(images), self.text(input_ids), self.audio(spectrograms)]
        states = self.fusion(torch.cat(branches, dim=1))
        return F.cross_entropy(self.classifier(states.mean(dim=1)), labels)


def multi_modal(length: int) -> Built:
    """Returns the three-branch model; `length` of the text in tokens."""

    def inputs(batch: int) -> dict[str, Tensor]:
        return {
            "images": images(batch, SIDE),
            "input_ids": ids(batch, length),
            "spectrograms": torch.zeros(batch, 1, MELS, FRAMES),
            "labels": ids(batch),
        }

    return Built(MultiModal(), inputs)
