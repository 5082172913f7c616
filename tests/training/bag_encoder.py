"""A small packed encoder and batches for it, shared by the tests of the step and the loop."""

import torch
from torch import nn

from sparton import packing
from sparton.models.encoder import Encoder
from sparton.representations import Representations, TokenVectors
from sparton.types import DocumentCounts, Side, TokenBatch, TrainBatch

VOCABULARY, WIDTH = 40, 16


class BagEncoder(Encoder):
    """Mean of embeddings, projected to the vocabulary, and the embeddings themselves where
    ``kinds`` has tokens: small, packed, differentiable."""

    def __init__(self, dropout: float = 0.0, kinds: tuple[str, ...] = ("sparse",)):
        super().__init__(tokenizer=None, max_length=None)
        self.kinds = kinds
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        hidden = self.dropout(self.embedding(tokens.input_ids))
        owners = packing.sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        sums = hidden.new_zeros(tokens.num_sequences, WIDTH).index_add(0, owners, hidden)
        return self.decoder(sums / tokens.cu_seqlens.diff()[:, None]).relu().log1p()

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        sparse = self(tokens) if "sparse" in self.kinds else None
        if "tokens" not in self.kinds:
            return Representations(sparse)
        values = self.dropout(self.embedding(tokens.input_ids))
        mask = tokens.input_ids % 5 > 0 if side == "document" else None
        vectors = TokenVectors(values, tokens.cu_seqlens, mask, tokens.max_seqlen)
        owners = packing.sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        square = values.new_zeros(tokens.num_sequences).index_add(0, owners, values.square().sum(1))
        return Representations(sparse, vectors, {"square": square})


def random_batch(queries: int, negatives: int, seed: int) -> TrainBatch:
    sequences = _random_sequences(queries, queries * (1 + negatives), seed=seed)
    return TrainBatch(*sequences)


def uneven_batch(counts: list[int], seed: int) -> TrainBatch:
    """Queries with so many documents each, of two sources in turn."""
    sides = _random_sequences(len(counts), sum(counts), seed=seed)
    sources = torch.arange(len(counts)) % 2
    return TrainBatch(*sides, None, DocumentCounts(torch.tensor(counts), max(counts)), sources)


def part_of(batch: TrainBatch, start: int, stop: int) -> TrainBatch:
    """Some of a batch's queries, with their documents and all that belongs to them."""
    bounds = batch.bounds()
    counts, sources, teacher = batch.counts, batch.sources, batch.teacher_scores
    return TrainBatch(
        batch.queries.select(start, stop),
        batch.documents.select(bounds[start], bounds[stop]),
        None if teacher is None else teacher[start:stop],
        counts and counts._replace(each=counts.each[start:stop]),
        None if sources is None else sources[start:stop],
    )


def _random_sequences(*counts: int, seed: int) -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for count in counts:
        lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
        ids = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        made.append(TokenBatch.from_lists(ids))
    return made
