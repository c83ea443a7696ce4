"""BERT with its two pre-training heads (Devlin et al., 2019, arXiv:1810.04805).

As published: post-layer-norm encoder, dropout 0.1 everywhere including the attention weights, and a
masked-language head that sees only the predicted positions (15 % of the sequence). Sequences are
full, as in packed pre-training data, so there is no padding mask.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.attention import Attention, TiedHead, token_loss
from simcore.models.inputs import Built, ids

VOCABULARY = 30_522
POSITIONS = 512
DROPOUT = 0.1
NORM_EPSILON = 1e-12
MASKED_SHARE = 0.15


class BertEmbeddings(nn.Module):
    """Sum of word, position and segment embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, width)
        self.position_embeddings = nn.Embedding(POSITIONS, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.layer_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Embeds ids [batch, length] as [batch, length, width]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        states = self.layer_norm(states + self.position_embeddings(positions))
        embedded: Tensor = self.dropout(states)
        return embedded


class BertLayer(nn.Module):
    """One post-norm encoder layer: self-attention, then a feed-forward network of 4 x width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout=DROPOUT)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.intermediate = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, states: Tensor) -> Tensor:
        """Maps [batch, length, width] to the same shape."""
        states = self.attention_norm(states + self.dropout(self.attention(states)))
        hidden = self.output(F.gelu(self.intermediate(states)))
        mixed: Tensor = self.output_norm(states + self.dropout(hidden))
        return mixed


class BertModel(nn.Module):
    """The trunk: embeddings, encoder and pooler; 109,482,240 parameters in the base size."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(width)
        self.encoder = nn.Sequential(*(BertLayer(width, heads) for _ in range(layers)))
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns states [batch, length, width] and the pooled first one [batch, width]."""
        states = self.encoder(self.embeddings(input_ids, token_type_ids))
        return states, torch.tanh(self.pooler(states[:, 0]))


class MaskedLanguageHead(nn.Module):
    """Predicts the words at chosen positions; its decoder is tied to the word embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.layer_norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.decoder = TiedHead()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, states: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        """Returns logits [batch, predictions, vocabulary] at positions [batch, predictions]."""
        index = positions.unsqueeze(-1).expand(-1, -1, states.shape[-1])
        chosen = states.gather(1, index)  # [batch, predictions, width]
        chosen = self.layer_norm(F.gelu(self.transform(chosen)))
        logits: Tensor = self.decoder(chosen, weight, self.bias)
        return logits


class BertForPreTraining(nn.Module):
    """BERT with the masked-language and the next-sentence loss."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.bert = BertModel(layers, width, heads)
        self.predictions = MaskedLanguageHead(width)
        self.seq_relationship = nn.Linear(width, 2)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        masked_positions: Tensor,
        masked_labels: Tensor,
        next_sentence_labels: Tensor,
    ) -> Tensor:
        """Returns the sum of the two mean losses, a scalar."""
        states, pooled = self.bert(input_ids, token_type_ids)
        words = self.bert.embeddings.word_embeddings.weight
        logits = self.predictions(states, masked_positions, words)
        next_sentence = F.cross_entropy(self.seq_relationship(pooled), next_sentence_labels)
        return token_loss(logits, masked_labels) + next_sentence


class BertForAnswers(nn.Module):
    """BERT-base that finds the answer to a question in a text, as fine-tuned for SQuAD."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(768)
        self.encoder = nn.Sequential(*(BertLayer(768, 12) for _ in range(12)))
        self.outputs = nn.Linear(768, 2)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, starts: Tensor, ends: Tensor
    ) -> Tensor:
        """Returns the mean of the two losses, a scalar; starts and ends are [batch]."""
        states = self.encoder(self.embeddings(input_ids, token_type_ids))
        start, end = self.outputs(states).unbind(-1)  # [batch, length] each
        return (F.cross_entropy(start, starts) + F.cross_entropy(end, ends)) / 2


def bert_answers(length: int) -> Built:
    """Returns BERT-base for question answering; `length` in tokens."""

    def inputs(batch: int) -> dict[str, Tensor]:
        tokens = {name: ids(batch, length) for name in ("input_ids", "token_type_ids")}
        return tokens | {name: ids(batch) for name in ("starts", "ends")}

    return Built(BertForAnswers(), inputs)


def _bert(length: int, layers: int, width: int, heads: int) -> Built:
    predictions = math.ceil(MASKED_SHARE * length)

    def inputs(batch: int) -> dict[str, Tensor]:
        return {
            "input_ids": ids(batch, length),
            "token_type_ids": ids(batch, length),
            "masked_positions": ids(batch, predictions),
            "masked_labels": ids(batch, predictions),
            "next_sentence_labels": ids(batch),
        }

    return Built(BertForPreTraining(layers, width, heads), inputs)


def bert_base(length: int) -> Built:
    """Returns BERT-base: 12 layers, width 768, 12 heads; `length` in tokens."""
    return _bert(length, layers=12, width=768, heads=12)


def bert_large(length: int) -> Built:
    """Returns BERT-large: 24 layers, width 1024, 16 heads; `length` in tokens."""
    return _bert(length, layers=24, width=1024, heads=16)
