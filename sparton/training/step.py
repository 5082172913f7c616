"""One training step whose gradient is exact on the global batch.

In-batch negatives and FLOPS do not add up over parts of a batch, so the objective is evaluated once,
on the representations of all ranks and micro-batches (Gao et al., arXiv 2101.06983):

1. encode the micro-batches without a graph;
2. gather the representations, evaluate the objective, and differentiate it with respect to them;
3. encode each micro-batch again with a graph and push its slice of that gradient through;
4. add up the parameter gradients of all ranks.

When one micro-batch is the whole local batch, the encoding of 1 keeps its graph and 3 disappears.

Q queries and N documents of the global batch, V vocabulary terms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparton.losses.objective import Objective
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.types import TokenBatch, TrainBatch

_SEED_STRIDE = 1_000_003


class StepOutput(NamedTuple):
    """What a step leaves for the log, on the device: the loss, its parts, the representations."""

    loss: Tensor
    parts: dict[str, Tensor]
    queries: Tensor
    documents: Tensor


class _Chunk(NamedTuple):
    """A run of sequences encoded together: the queries or the documents of one micro-batch."""

    tokens: TokenBatch
    seed: int


@dataclass
class ExactStep:
    """Accumulates into ``.grad`` the gradient of the objective on the global batch.

    Attributes:
        encoder: ``TokenBatch -> reps [n, V]``.
        micro_batch: queries encoded at once on each rank; None for the whole local batch.
        seed: dropout is a pure function of (seed, step, rank, micro-batch), so the second encoding
            repeats the first and a resumed run repeats an uninterrupted one.
        scale: multiplies the gradient, for fp16 loss scaling.
    """

    encoder: nn.Module
    objective: Objective
    world: World
    precision: Precision
    micro_batch: int | None = None
    seed: int = 0
    scale: Callable[[Tensor], Tensor] = lambda loss: loss

    def __call__(self, batch: TrainBatch, step: int) -> StepOutput:
        """
        Args:
            batch: this rank's share; every rank's has the same number of queries.
            step: decides the regularizers' weights and the dropout.
        """
        chunks = self._chunks(batch, step)
        direct = len(chunks) == 1
        with torch.set_grad_enabled(direct):
            encoded = [
                (self._encode(queries), self._encode(documents)) for queries, documents in chunks
            ]
        queries, documents = (
            torch.cat(side) if len(side) > 1 else side[0] for side in zip(*encoded)
        )
        output, query_gradient, document_gradient = self._differentiate(queries, documents, step)
        if direct:
            torch.autograd.backward([queries, documents], [query_gradient, document_gradient])
        else:
            self._replay(chunks, query_gradient, document_gradient)
        self.world.sum_gradients(p for p in self.encoder.parameters() if p.requires_grad)
        return output

    def _chunks(self, batch: TrainBatch, step: int) -> list[tuple[_Chunk, _Chunk]]:
        total, per_query = batch.queries.num_sequences, batch.documents_per_query
        size = self.micro_batch or total
        seed = (self.seed * _SEED_STRIDE + step) * _SEED_STRIDE + self.world.rank
        device = self.world.device
        chunks = []
        for index, start in enumerate(range(0, total, size)):
            stop = min(start + size, total)
            if size >= total:
                sides = (batch.queries, batch.documents)
            else:
                sides = (
                    batch.queries.select(start, stop),
                    batch.documents.select(start * per_query, stop * per_query),
                )
            query_tokens, document_tokens = (side.to(device, non_blocking=True) for side in sides)
            chunk_seed = (seed * _SEED_STRIDE + 2 * index) % 2**62
            chunks.append(
                (_Chunk(query_tokens, chunk_seed), _Chunk(document_tokens, chunk_seed + 1))
            )
        return chunks

    def _encode(self, chunk: _Chunk) -> Tensor:
        torch.manual_seed(chunk.seed)
        with self.precision.autocast():
            return self.encoder(chunk.tokens)

    def _differentiate(
        self, queries: Tensor, documents: Tensor, step: int
    ) -> tuple[StepOutput, Tensor, Tensor]:
        """The objective on the global batch and its gradient for this rank's rows."""
        world = self.world
        all_queries = world.gather(queries.detach()).requires_grad_()
        all_documents = world.gather(documents.detach()).requires_grad_()
        value = self.objective(all_queries, all_documents, step)
        gradients = torch.autograd.grad(self.scale(value.loss), [all_queries, all_documents])
        own_queries, own_documents = (
            gradient.chunk(world.size)[world.rank] for gradient in gradients
        )
        output = StepOutput(
            value.loss.detach(), value.parts, all_queries.detach(), all_documents.detach()
        )
        return output, own_queries, own_documents

    def _replay(
        self, chunks: list[tuple[_Chunk, _Chunk]], query_gradient: Tensor, document_gradient: Tensor
    ) -> None:
        query_start = document_start = 0
        for queries, documents in chunks:
            query_stop = query_start + queries.tokens.num_sequences
            document_stop = document_start + documents.tokens.num_sequences
            self._encode(queries).backward(query_gradient[query_start:query_stop])
            self._encode(documents).backward(document_gradient[document_start:document_stop])
            query_start, document_start = query_stop, document_stop
