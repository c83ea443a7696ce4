"""MPT (MosaicML, 2023): a GPT with fused attention, and one kernel for the loss of 16-bit logits.

With 50,368 words the sizes of llm-foundry's benchmarks have the parameters that they state
(0.125311, 0.760471, 1.31595, 6.65886, 29.9752 and 64.8624 billion at 2,048 positions).
"""

import torch
from torch import Tensor

from simcore.models.attention import token_loss
from simcore.models.inputs import Built, next_tokens
from simcore.models.megatron import MegatronGPT, MegatronShape


class MPT(MegatronGPT):
    """Decoder-only language model."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of predicting labels [batch, length], a scalar."""
        states = self.final_layernorm(self.layers(self.embedding(input_ids)))
        logits = self.head(states.transpose(0, 1), self.embedding.word_embeddings.weight)
        return token_loss(logits, labels)


def sized(shape: MegatronShape) -> Built:
    """Returns an MPT of any size, on the meta device."""
    with torch.device("meta"):
        return Built(MPT(shape), next_tokens(shape.length))
