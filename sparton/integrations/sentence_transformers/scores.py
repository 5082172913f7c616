"""The scores of sentence-transformers' multi-vector losses, by the fused MaxSim.

Names, arguments and results are those of ``sentence_transformers.multi_vector_encoder.scoring``, so
that each takes the place of its namesake as the ``similarity_fct`` of a loss.

Q queries, G groups of K documents, L tokens, E embedding.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from sentence_transformers.multi_vector_encoder import scoring
from torch import Tensor

from sparton.ops import maxsim, maxsim_pairs

Embeddings = Tensor | NDArray | list
Scored = TypeVar("Scored")

# What sentence-transformers gives documents of which no token takes part.
_NOTHING_TO_SCORE = -1e9


def colbert_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Every query with every document of every group.

    Args:
        queries_embeddings: ``[Q, Lq, E]``.
        documents_embeddings: ``[G, K, Ld, E]``.
        queries_mask: ``[Q, Lq]``, nonzero at tokens that take part; where None, rows of zeros are
            taken for padding.
        documents_mask: ``[G, K, Ld]`` likewise.
        chunk_elements: has no effect, as no similarities are held.
        length_normalize: divide by the number of tokens of the query.

    Returns:
        fp32 ``[Q, G * K]``, group after group: where group q belongs to query q, its first document
        is column ``q * K``.
    """
    queries, query_mask = _side(queries_embeddings, queries_mask)
    documents, document_mask = (
        x.flatten(0, 1) for x in _side(documents_embeddings, documents_mask)
    )
    scores = maxsim(queries, documents, query_mask, document_mask)
    return _finished(scores, query_mask[:, None], document_mask, length_normalize)


def colbert_kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Every query with the documents of its own group.

    Args:
        queries_embeddings: ``[Q, Lq, E]``.
        documents_embeddings: ``[Q, K, Ld, E]``.
        queries_mask, documents_mask, chunk_elements, length_normalize: see :func:`colbert_scores`.

    Returns:
        fp32 ``[Q, K]``.
    """
    queries, query_mask = _side(queries_embeddings, queries_mask)
    documents, document_mask = _side(documents_embeddings, documents_mask)
    scores = maxsim(queries, documents, query_mask, document_mask)
    return _finished(scores, query_mask[:, None], document_mask, length_normalize)


def colbert_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Query p with document p.

    Args:
        queries_embeddings: ``[P, Lq, E]``.
        documents_embeddings: ``[P, Ld, E]``.
        queries_mask, documents_mask, chunk_elements, length_normalize: see :func:`colbert_scores`.

    Returns:
        fp32 ``[P]``.
    """
    queries, query_mask = _side(queries_embeddings, queries_mask)
    documents, document_mask = _side(documents_embeddings, documents_mask)
    scores = maxsim_pairs(queries, documents, query_mask, document_mask)
    return _finished(scores, query_mask, document_mask, length_normalize)


def mean_colbert_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """:func:`colbert_scores`, divided by the number of tokens of the query."""
    sides = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
    return colbert_scores(*sides, length_normalize=length_normalize)


def mean_colbert_kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """:func:`colbert_kd_scores`, divided by the number of tokens of the query."""
    sides = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
    return colbert_kd_scores(*sides, length_normalize=length_normalize)


def mean_colbert_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """:func:`colbert_scores_pairwise`, divided by the number of tokens of the query."""
    sides = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
    return colbert_scores_pairwise(*sides, length_normalize=length_normalize)


_FUSED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    scoring.colbert_scores: colbert_scores,
    scoring.colbert_kd_scores: colbert_kd_scores,
    scoring.colbert_scores_pairwise: colbert_scores_pairwise,
    scoring.mean_colbert_scores: mean_colbert_scores,
    scoring.mean_colbert_kd_scores: mean_colbert_kd_scores,
    scoring.mean_colbert_scores_pairwise: mean_colbert_scores_pairwise,
}


def fuse_scores(loss: Scored) -> Scored:
    """Let a loss of sentence-transformers score with the fused MaxSim, in place; returns it.

    Args:
        loss: with a ``similarity_fct`` of the ColBERT family, set by hand or by default.

    Raises:
        ValueError: it has none, or another, such as XTR's.
    """
    given: Any = getattr(loss, "similarity_fct", None)
    inner = given.func if isinstance(given, functools.partial) else given
    fused = inner if inner in _FUSED.values() else _FUSED.get(inner)
    if fused is None:
        name = getattr(inner, "__name__", type(inner).__name__)
        raise ValueError(
            f"{type(loss).__name__} scores with {name if given is not None else 'nothing'}: of "
            "similarity functions the ColBERT family can be fused, such as colbert_scores"
        )
    if isinstance(given, functools.partial):
        fused = functools.partial(fused, *given.args, **given.keywords)
    loss.similarity_fct = fused  # type: ignore[attr-defined]
    return loss


def _side(embeddings: Embeddings, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Floating-point embeddings, and a mask of booleans."""
    tokens = torch.as_tensor(embeddings)
    if not tokens.is_floating_point():
        tokens = tokens.float()
    return tokens, tokens.any(-1) if mask is None else torch.as_tensor(mask) != 0


def _finished(
    scores: Tensor, query_mask: Tensor, document_mask: Tensor, length_normalize: bool
) -> Tensor:
    """Scores of any shape; the masks have its axes, and tokens as a last one."""
    scores = scores.masked_fill(~document_mask.any(-1), _NOTHING_TO_SCORE)
    return scores / query_mask.sum(-1).clamp(min=1) if length_normalize else scores
