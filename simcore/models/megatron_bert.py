"""BERT as Megatron-LM computes it (Shoeybi et al., 2019): the blocks of its GPT, without a mask.

Pre-layer-norm blocks, token types, a masked-language head tied to the word embeddings over all
positions, and a binary head over a pooled first position. Modules are named as in Megatron.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simcore.models.attention import TiedHead
from simcore.models.inputs import Built, ids
from simcore.models.megatron import MegatronBlock, MegatronShape, split_vocabulary_loss


class BertEmbeddings(nn.Module):
    """Sum of word, position and token-type embeddings, sequence first."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.length, shape.width)
        self.tokentype_embeddings = nn.Embedding(2, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, input_ids: Tensor, token_types: Tensor) -> Tensor:
        """Embeds ids and token types [batch, length] as [length, batch, width]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        states = states + self.tokentype_embeddings(token_types)
        embedded: Tensor = self.dropout(states.transpose(0, 1).contiguous())
        return embedded


class MegatronBert(nn.Module):
    """Encoder with the two pre-training losses."""

    def __init__(self, shape: MegatronShape) -> None:
        super().__init__()
        width = shape.width
        self.embedding = BertEmbeddings(shape)
        self.layers = nn.Sequential(*(MegatronBlock(shape) for _ in range(shape.layers)))
        self.final_layernorm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, width)
        self.lm_norm = nn.LayerNorm(width)
        self.head = TiedHead()
        self.pooler = nn.Linear(width, width)
        self.binary_head = nn.Linear(width, 2)

    def forward(
        self, input_ids: Tensor, token_types: Tensor, labels: Tensor, is_next: Tensor
    ) -> Tensor:
        """Returns the sum of the two mean losses, a scalar; is_next is [batch]."""
        states = self.final_layernorm(self.layers(self.embedding(input_ids, token_types)))
        hidden = self.lm_norm(F.gelu(self.lm_head(states)))
        logits = self.head(hidden.transpose(0, 1), self.embedding.word_embeddings.weight)
        pooled = torch.tanh(self.pooler(states[0]))
        order = F.cross_entropy(self.binary_head(pooled).float(), is_next)
        return split_vocabulary_loss(logits, labels) + order


def sized(shape: MegatronShape) -> Built:
    """Returns a BERT of any size, on the meta device."""

    def inputs(batch: int) -> dict[str, Tensor]:
        names = ("input_ids", "token_types", "labels")
        tokens = {name: ids(batch, shape.length) for name in names}
        return tokens | {"is_next": ids(batch)}

    with torch.device("meta"):
        return Built(MegatronBert(shape), inputs)
