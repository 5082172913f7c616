"""A small packed encoder and batches for it, shared by the tests of the step and the loop."""

import torch
from torch import nn

from sparton import packing
from sparton.types import TokenBatch, TrainBatch

VOCABULARY, WIDTH = 40, 16


class BagEncoder(nn.Module):
    """Mean of embeddings, projected to the vocabulary: small, packed, differentiable."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        hidden = self.dropout(self.embedding(tokens.input_ids))
        owners = packing.sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        sums = hidden.new_zeros(tokens.num_sequences, WIDTH).index_add(0, owners, hidden)
        return self.decoder(sums / tokens.cu_seqlens.diff()[:, None]).relu().log1p()


def random_batch(queries: int, negatives: int, seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)

    def sequences(count: int) -> TokenBatch:
        lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
        return TokenBatch.from_lists(
            [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        )

    return TrainBatch(sequences(queries), sequences(queries * (1 + negatives)))
