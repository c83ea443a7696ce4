"""Two towers, image and text, trained by contrast: CLIP ViT-B/32.

The towers are CLIP's (Radford et al., 2021, arXiv:2103.00020). The contrast is with a bank of
negatives, as MoCo's queue (He et al., 2020, arXiv:1911.05722), instead of the batch: logits within
the batch grow with its square and would mix the samples of different replicas. The bank is
refreshed between steps. The text feature is that of the last position, as captions are taken to be
full.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.attention import Attention
from simcore.models.inputs import Built, ids, images

VOCABULARY = 49_408
CAPTION = 77
SIDE = 224
PATCH = 32
LAYERS = 12
EMBEDDING = 512
NEGATIVES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one tower."""

    width: int
    heads: int
    causal: bool


class ResidualAttentionBlock(nn.Module):
    """One pre-norm layer with the sigmoid form of GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape.width, shape.heads, causal=shape.causal)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        states = states + self.attn(self.ln_1(states))
        hidden = self.c_fc(self.ln_2(states))
        mixed: Tensor = states + self.c_proj(hidden * torch.sigmoid(1.702 * hidden))
        return mixed


def _layers(shape: Shape) -> nn.Sequential:
    return nn.Sequential(*(ResidualAttentionBlock(shape) for _ in range(LAYERS)))


class VisionTower(nn.Module):
    """ViT-B/32: patches of 32 x 32 pixels and a class token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.conv1 = nn.Conv2d(3, width, PATCH, stride=PATCH, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2 + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = _layers(shape)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Linear(width, EMBEDDING, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps images [batch, 3, 224, 224] to features [batch, 512]."""
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)  # [batch, 49, width]
        token = self.class_embedding.expand(patches.shape[0], 1, -1)
        states = torch.cat([token, patches], dim=1) + self.positional_embedding
        states = self.transformer(self.ln_pre(states))
        features: Tensor = self.proj(self.ln_post(states[:, 0]))
        return features


class TextTower(nn.Module):
    """Causal transformer; its last position stands for the caption."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.positional_embedding = nn.Parameter(torch.zeros(CAPTION, shape.width))
        self.transformer = _layers(shape)
        self.ln_final = nn.LayerNorm(shape.width)
        self.text_projection = nn.Linear(shape.width, EMBEDDING, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids [batch, length] to features [batch, 512]."""
        positions = self.positional_embedding[: tokens.shape[1]]
        states = self.transformer(self.token_embedding(tokens) + positions)
        features: Tensor = self.text_projection(self.ln_final(states[:, -1]))
        return features


class TwoTower(nn.Module):
    """Two independent encoders that meet in a contrastive loss."""

    image_bank: Tensor
    text_bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.visual = VisionTower(Shape(width=768, heads=12, causal=False))
        self.text = TextTower(Shape(width=512, heads=8, causal=True))
        self.logit_scale = nn.Parameter(torch.full((), math.log(1 / 0.07)))
        self.register_buffer("image_bank", torch.zeros(NEGATIVES, EMBEDDING))
        self.register_buffer("text_bank", torch.zeros(NEGATIVES, EMBEDDING))

    def contrast(self, anchor: Tensor, positive: Tensor, bank: Tensor) -> Tensor:
        """Returns logits [batch, 1 + negatives]; the positive comes first."""
        match = (anchor * positive).sum(dim=1, keepdim=True)
        return torch.cat([match, anchor @ bank.t()], dim=1) * self.logit_scale.exp()

    def forward(self, images: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean of the two contrastive losses, a scalar; labels [batch] are 0."""
        pictures = F.normalize(self.visual(images), dim=1)
        captions = F.normalize(self.text(input_ids), dim=1)
        by_image = F.cross_entropy(self.contrast(pictures, captions, self.text_bank), labels)
        by_text = F.cross_entropy(self.contrast(captions, pictures, self.image_bank), labels)
        return (by_image + by_text) / 2


def two_tower(length: int) -> Built:
    """Returns the two-tower model; `length` of the captions in tokens."""

    def inputs(batch: int) -> dict[str, Tensor]:
        return {
            "images": images(batch, SIDE),
            "input_ids": ids(batch, length),
            "labels": ids(batch),
        }

    return Built(TwoTower(), inputs)
