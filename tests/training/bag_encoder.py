"""A small packed encoder and batches for it, shared by the tests of the step and the loop;
what it learns, and its gradients."""

import torch
from torch import nn

from sparton.kernels.boundaries import sequence_ids
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops, l1
from sparton.models.encoder import Encoder
from sparton.representations import Representations, TokenVectors
from sparton.types import Side, TokenBatch, TokenRows, TrainBatch

VOCABULARY, WIDTH = 40, 16


class BagEncoder(Encoder):
    """Mean of embeddings, projected to the vocabulary, the embeddings themselves where ``kinds``
    has tokens, and their mean where it has dense beside these: small, packed, differentiable."""

    def __init__(self, dropout: float = 0.0, kinds: tuple[str, ...] = ("sparse",)):
        super().__init__(tokenizer=None, max_length=None)
        self.kinds = kinds
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        return self.decoder(self.means(tokens)).relu().log1p()

    def means(self, tokens: TokenBatch) -> torch.Tensor:
        hidden, tokens = tokens.to_pool(self.dropout(self.embedding(tokens.input_ids)))
        owners = sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        sums = hidden.new_zeros(tokens.num_sequences, WIDTH).index_add(0, owners, hidden)
        return sums / tokens.cu_seqlens.diff()[:, None]

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        sparse = self(tokens) if "sparse" in self.kinds else None
        if "tokens" not in self.kinds:
            return Representations(sparse)
        values = self.dropout(self.embedding(tokens.input_ids))
        mask = tokens.input_ids % 5 > 0 if side == "document" else None
        vectors = TokenVectors(values, tokens.cu_seqlens, mask, tokens.max_seqlen)
        owners = sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        square = values.new_zeros(tokens.num_sequences).index_add(0, owners, values.square().sum(1))
        dense = TokenVectors.of_texts(self.means(tokens)) if "dense" in self.kinds else None
        return Representations(sparse, vectors, dense, {"square": square})


def objective(kinds: tuple[str, ...] = ("sparse",)) -> Objective:
    """Of an encoder of these ``kinds``, with a penalty of each."""
    own = {"square": 0.01} if "tokens" in kinds else {}
    penalties = {"l1": Regularizer(l1, 0.01)}, {"flops": Regularizer(flops, 0.1)}
    return Objective(InfoNCE(), *penalties, own)


def gradients(encoder: BagEncoder) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in encoder.parameters()])


def random_batch(queries: int, negatives: int, seed: int) -> TrainBatch:
    """Of texts with several tokens the first is not pooled."""
    generator = torch.Generator().manual_seed(seed)

    def sequences(count: int) -> TokenBatch:
        lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
        tokens = TokenBatch.from_lists(
            [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        )
        alone = torch.repeat_interleave(tokens.cu_seqlens.diff() == 1, tokens.cu_seqlens.diff())
        rows = torch.nonzero(tokens.position_ids.bool() | alone).flatten()
        counts = torch.tensor([max(n - 1, 1) for n in lengths], dtype=torch.int32)
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        return tokens._replace(pooled=TokenRows(rows, bounds, 8))

    return TrainBatch(sequences(queries), sequences(queries * (1 + negatives)))
