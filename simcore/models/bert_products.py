"""BERT as before fused attention: two batched products, with a mask and a softmax between.

The sizes of Devlin et al. (2019, arXiv:1810.04805), trained on two kinds of task: pre-training, of
words at predicted positions and of the order of two sentences, and tagging, of each word in one of
a few classes (spans of answers are two classes). All else is `simcore.models.bert`'s.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.attention import Attention, merge_heads, split_heads, token_loss
from simcore.models.bert import (
    DROPOUT,
    MASKED_SHARE,
    BertEmbeddings,
    BertForPreTraining,
    BertLayer,
)
from simcore.models.inputs import Built, ids

ANSWER_CLASSES = 2  # start and end of an answer
ENTITY_CLASSES = 12  # inside, outside and borders of names of chemicals, with BERT's own marks


class ProductAttention(Attention):
    """Attention of two batched products; scores are scaled and masked by kernels of their own."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, dropout=DROPOUT)
        self.mask: Tensor
        self.register_buffer("mask", torch.zeros(1, 1, 1, length))

    def forward(
        self, states: Tensor, memory: Tensor | None = None, position_bias: Tensor | None = None
    ) -> Tensor:
        """Maps [batch, length, width] to the same shape; there is neither memory nor bias."""
        query, key, value = (
            split_heads(part(states), self.heads) for part in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        weights = torch.softmax(scores + self.mask, -1)
        mixed = torch.matmul(F.dropout(weights, self.dropout, self.training), value)
        output: Tensor = self.output(merge_heads(mixed))
        return output


class BertTagger(nn.Module):
    """Encoder with one linear layer over all positions."""

    def __init__(self, layers: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(width)
        self.encoder = nn.Sequential(*(BertLayer(width, heads) for _ in range(layers)))
        self.outputs = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of labels [batch, length], a scalar."""
        states = self.encoder(self.embeddings(input_ids, token_type_ids))
        return token_loss(self.outputs(states), labels)


def _with_products(encoder: nn.Sequential, width: int, heads: int, length: int) -> None:
    for layer in encoder:
        layer.attention = ProductAttention(width, heads, length)


def pre_training(length: int, layers: int, width: int, heads: int) -> Built:
    """Returns a BERT for pre-training, of any size; `length` in tokens."""
    predictions = math.ceil(MASKED_SHARE * length)

    def inputs(batch: int) -> dict[str, Tensor]:
        words = {name: ids(batch, length) for name in ("input_ids", "token_type_ids")}
        masked = {name: ids(batch, predictions) for name in ("masked_positions", "masked_labels")}
        return words | masked | {"next_sentence_labels": ids(batch)}

    model = BertForPreTraining(layers, width, heads)
    _with_products(model.bert.encoder, width, heads, length)
    return Built(model, inputs)


def tagger(length: int, layers: int, width: int, heads: int, classes: int) -> Built:
    """Returns a BERT that tells words apart, of any size; `length` in tokens."""

    def inputs(batch: int) -> dict[str, Tensor]:
        names = ("input_ids", "token_type_ids", "labels")
        return {name: ids(batch, length) for name in names}

    model = BertTagger(layers, width, heads, classes)
    _with_products(model.encoder, width, heads, length)
    return Built(model, inputs)


def bert_large_words(length: int) -> Built:
    """Returns BERT-large for pre-training; `length` in tokens."""
    return pre_training(length, layers=24, width=1024, heads=16)


def bert_base_words(length: int) -> Built:
    """Returns BERT-base for pre-training; `length` in tokens."""
    return pre_training(length, layers=12, width=768, heads=12)


def bert_large_answers(length: int) -> Built:
    """Returns BERT-large that finds answers in texts; `length` in tokens."""
    return tagger(length, layers=24, width=1024, heads=16, classes=ANSWER_CLASSES)


def bert_base_entities(length: int) -> Built:
    """Returns BERT-base that finds names in texts; `length` in tokens."""
    return tagger(length, layers=12, width=768, heads=12, classes=ENTITY_CLASSES)
