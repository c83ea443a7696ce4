"""GNMT (Wu et al., 2016, arXiv:1609.08144) in the v2 form of the MLPerf reference.

Encoder: one bidirectional LSTM layer, then unidirectional ones; decoder: LSTM layers, the first of
which drives one additive attention (Bahdanau, normalised) whose context feeds every later layer.
Residual connections from the third layer on, hidden size 1024, one embedding of 32,320 joint BPE
tokens shared by both sides, dropout 0.2, label smoothing 0.1. Each LSTM layer is one `nn.LSTM`.
Sentences are full length, so there is no packing and no mask. With four layers this is the
reference's 160,671,297 parameters; with eight, the depth of the paper.
"""

import math

import torch
from torch import Tensor, nn

from simcore.models.attention import token_loss
from simcore.models.inputs import Built, ids

VOCABULARY = 32_320
WIDTH = 1024
DROPOUT = 0.2
LABEL_SMOOTHING = 0.1


def _lstm(features: int, *, bidirectional: bool = False) -> nn.LSTM:
    return nn.LSTM(features, WIDTH, batch_first=True, bidirectional=bidirectional)


class Encoder(nn.Module):
    """Stack of LSTM layers, the first bidirectional."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPOUT)
        self.rnn_layers = nn.ModuleList(
            [_lstm(WIDTH, bidirectional=True), _lstm(2 * WIDTH)]
            + [_lstm(WIDTH) for _ in range(layers - 2)]
        )

    def forward(self, states: Tensor) -> Tensor:
        """Maps embeddings [batch, source, width] to the same shape."""
        for number, layer in enumerate(self.rnn_layers):
            output, _ = layer(self.dropout(states))
            states = output + states if number >= 2 else output
        return states


class BahdanauAttention(nn.Module):
    """Additive attention with a normalised score vector (Bahdanau et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear_k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear_att = nn.Parameter(torch.full((WIDTH,), 1 / math.sqrt(WIDTH)))
        self.normalize_scalar = nn.Parameter(torch.full((1,), 1 / math.sqrt(WIDTH)))
        self.normalize_bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Returns the context [batch, target, width] of keys [batch, source, width]."""
        projected = self.linear_k(keys) + self.normalize_bias
        pairs = self.linear_q(query).unsqueeze(2) + projected.unsqueeze(1)
        score = self.linear_att / self.linear_att.norm() * self.normalize_scalar
        scores = torch.tanh(pairs) @ score  # [batch, target, source]
        return torch.bmm(scores.softmax(dim=-1), keys)


class Decoder(nn.Module):
    """Stack of LSTM layers that all see the attention context of the first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPOUT)
        self.att_rnn = _lstm(WIDTH)
        self.attention = BahdanauAttention()
        self.rnn_layers = nn.ModuleList([_lstm(2 * WIDTH) for _ in range(layers - 1)])

    def forward(self, states: Tensor, memory: Tensor) -> Tensor:
        """Maps embeddings [batch, target, width] to the same shape."""
        states, _ = self.att_rnn(self.dropout(states))
        context = self.attention(states, memory)
        for number, layer in enumerate(self.rnn_layers):
            output, _ = layer(self.dropout(torch.cat([states, context], dim=2)))
            states = output + states if number >= 1 else output
        return states


class GNMT(nn.Module):
    """Translation model; the target is fed as given (teacher forcing)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedder = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = Encoder(layers)
        self.decoder = Decoder(layers)
        self.classifier = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source_ids: Tensor, target_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean smoothed loss of predicting labels [batch, target], a scalar."""
        memory = self.encoder(self.embedder(source_ids))
        states = self.decoder(self.embedder(target_ids), memory)
        return token_loss(self.classifier(states), labels, LABEL_SMOOTHING)


def _gnmt(length: int, layers: int) -> Built:
    def inputs(batch: int) -> dict[str, Tensor]:
        names = ("source_ids", "target_ids", "labels")
        return {name: ids(batch, length) for name in names}

    return Built(GNMT(layers), inputs)


def gnmt_4(length: int) -> Built:
    """Returns GNMT with 4 + 4 layers; `length` in tokens of source and of target."""
    return _gnmt(length, layers=4)


def gnmt_8(length: int) -> Built:
    """Returns GNMT with 8 + 8 layers; `length` in tokens of source and of target."""
    return _gnmt(length, layers=8)
