"""The fused MaxSim as the ``score_metric`` of PyLate's losses, and in its reranking.

    loss = losses.Contrastive(model, score_metric=contrastive_scores)
    loss = losses.CachedContrastive(model, score_metric=contrastive_scores)
    loss = losses.Distillation(model, score_metric=colbert_kd_scores)
    rerank(documents_ids, queries_embeddings, documents_embeddings)  # as pylate.rank.rerank

Results are PyLate's wherever the best token of a document has a similarity above zero. PyLate lets
a masked token take part with a similarity of zero; here it does not take part at all.

It needs nothing of PyLate, whose versions of transformers differ from this project's.

Q queries, G groups of K documents, L tokens, E embedding.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.ops import maxsim, maxsim_varlen
from sparton.representations import TokenVectors

Embeddings = Tensor | NDArray | list


class RerankResult(TypedDict):
    """A document of a ranking."""

    id: int | str
    score: float


def contrastive_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
) -> Tensor:
    """The scores of every query with every document of every group, as
    ``pylate.scores.ColBERTScores`` gives them.

    Args:
        queries_embeddings: ``[Q, Lq, E]``.
        documents_embeddings: ``[G, K, Ld, E]``.
        queries_mask: ``[Q, Lq]``, nonzero at tokens that take part; None for all.
        documents_mask: ``[G, K, Ld]``, nonzero at tokens that take part; None for all.

    Returns:
        fp32 ``[Q, G * K]``, group after group.
    """
    documents = _floats(documents_embeddings).flatten(0, 1)
    mask = _mask(documents_mask)
    mask = None if mask is None else mask.flatten(0, 1)
    return maxsim(_floats(queries_embeddings), documents, _mask(queries_mask), mask)


def colbert_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The scores of every query with every document, as ``pylate.scores.colbert_scores`` gives
    them.

    Args:
        queries_embeddings: ``[Q, Lq, E]``.
        documents_embeddings: ``[N, Ld, E]``.
        queries_mask, documents_mask: ``[Q, Lq]`` and ``[N, Ld]``, nonzero at tokens that take part.
        backend: has no effect.

    Returns:
        fp32 ``[Q, N]``.
    """
    queries, documents = _floats(queries_embeddings), _floats(documents_embeddings)
    return maxsim(queries, documents, _mask(queries_mask), _mask(documents_mask))


def colbert_kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The scores of every query with documents of its own, as ``pylate.scores.colbert_kd_scores``
    gives them.

    Args:
        queries_embeddings: ``[Q, Lq, E]``.
        documents_embeddings: ``[Q, K, Ld, E]``.
        queries_mask, documents_mask, backend: see :func:`colbert_scores`.

    Returns:
        fp32 ``[Q, K]``.
    """
    return colbert_scores(queries_embeddings, documents_embeddings, queries_mask, documents_mask)


def colbert_scores_pairwise(
    queries_embeddings: Embeddings, documents_embeddings: Embeddings, backend: str | None = None
) -> Tensor:
    """The score of query p with document p, as ``pylate.scores.colbert_scores_pairwise`` gives it:
    ``[P, Lq, E]`` and ``[P, Ld, E]``, or lists of ``[L, E]`` of any lengths, to fp32 ``[P]``."""
    queries, documents = map(_end_to_end, (queries_embeddings, documents_embeddings))
    return maxsim_varlen(
        queries.values,
        documents.values,
        queries.cu_seqlens,
        documents.cu_seqlens,
        pairing="pairs",
        query_max_seqlen=queries.max_seqlen,
        document_max_seqlen=documents.max_seqlen,
    )


def rerank(
    documents_ids: Sequence[Sequence[int | str]],
    queries_embeddings: Sequence[Embeddings] | Tensor | NDArray,
    documents_embeddings: Sequence[Sequence[Embeddings] | Tensor | NDArray],
    device: str | None = None,
) -> list[list[RerankResult]]:
    """The documents of each query, best first, as ``pylate.rank.rerank``; nothing is padded.

    Args:
        documents_ids: of each query's documents.
        queries_embeddings: ``[L, E]`` of each query.
        documents_embeddings: ``[L, E]`` of each of a query's documents.
        device: where scores are computed; by default where the embeddings of a query are.

    Raises:
        ValueError: numbers of queries, of their documents or of ids that differ.
    """
    sides = (documents_ids, queries_embeddings, documents_embeddings)
    if len({len(side) for side in sides}) > 1:
        raise ValueError(
            f"{len(queries_embeddings)} queries need as many lists of documents and of their ids, "
            f"got {len(documents_embeddings)} and {len(documents_ids)}"
        )
    return [
        _ranked(ids, _floats(query).to(device), [_floats(document) for document in documents])
        for ids, query, documents in zip(*sides, strict=True)
    ]


def _ranked(ids: Sequence[int | str], query: Tensor, documents: list[Tensor]) -> list[RerankResult]:
    if len(ids) != len(documents):
        raise ValueError(f"a query has {len(documents)} documents and {len(ids)} ids of them")
    if not documents:
        return []
    packed = _end_to_end([document.to(query) for document in documents])
    scores = maxsim_varlen(
        query,
        packed.values,
        torch.tensor([0, len(query)], dtype=torch.int32, device=query.device),
        packed.cu_seqlens,
        document_max_seqlen=packed.max_seqlen,
    )
    best = scores[0].sort(descending=True, stable=True)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [RerankResult(id=ids[place], score=score) for place, score in pairs]


def _end_to_end(texts: Embeddings) -> TokenVectors:
    """The vectors of texts ``[L, E]``, of unequal lengths perhaps, without padding."""
    parts = [_floats(text) for text in texts]
    values, lengths = torch.cat(parts), [len(part) for part in parts]
    bounds = cu_seqlens_of(torch.tensor(lengths), torch.int32).to(values.device)
    return TokenVectors(values, bounds, max_seqlen=max(lengths))


def _floats(embeddings: Embeddings) -> Tensor:
    tokens = _stacked(embeddings)
    return tokens if tokens.is_floating_point() else tokens.float()


def _mask(mask: Tensor | None) -> Tensor | None:
    """PyLate's masks may be of floats."""
    return None if mask is None else _stacked(mask) != 0


def _stacked(values: Embeddings) -> Tensor:
    """One tensor of what may be lists of tensors, or of lists of them."""
    if isinstance(values, list) and values and isinstance(values[0], list | Tensor | np.ndarray):
        return torch.stack([_stacked(each) for each in values])
    return torch.as_tensor(values)
