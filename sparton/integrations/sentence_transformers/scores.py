"""The scores of sentence-transformers' multi-vector losses, by the fused MaxSim.

Names, arguments and results are those of ``sentence_transformers.multi_vector_encoder.scoring``, so
that each takes the place of its namesake as the ``similarity_fct`` of a loss.

Q queries, G groups of K documents, L tokens, E embedding.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.multi_vector_encoder import scoring
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The scores of every query with every document of every group.

    Args:
        queries_embeddings: ``[Q, Lq, E]``.
        documents_embeddings: ``[G, K, Ld, E]``.
        queries_mask: ``[Q, Lq]``, nonzero at tokens that take part; where None, rows of zeros are
            taken for padding.
        documents_mask: ``[G, K, Ld]``, the same of documents.
        chunk_elements: has no effect, as no similarities are held.
        length_normalize: divide by the number of tokens of the query.
        dtype: of the products, where it is not that of the embeddings. Trainers leave autocast
            before they score: embeddings then are float32, and bfloat16 would use tensor cores.

    Returns:
        fp32 ``[Q, G * K]``, group after group: where group q belongs to query q, its first document
        is column ``q * K``.
    """
    queries, query_mask = _side(queries_embeddings, queries_mask, dtype)
    documents, document_mask = (
        x.flatten(0, 1) for x in _side(documents_embeddings, documents_mask, dtype)
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
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The scores of every query with the documents of its own group.

    Args:
        queries_embeddings: ``[Q, Lq, E]``.
        documents_embeddings: ``[Q, K, Ld, E]``.
        queries_mask, documents_mask, chunk_elements, length_normalize, dtype: see
            :func:`colbert_scores`.

    Returns:
        fp32 ``[Q, K]``.
    """
    queries, query_mask = _side(queries_embeddings, queries_mask, dtype)
    documents, document_mask = _side(documents_embeddings, documents_mask, dtype)
    scores = maxsim(queries, documents, query_mask, document_mask)
    return _finished(scores, query_mask[:, None], document_mask, length_normalize)


def colbert_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The score of query p with document p, for every p.

    Args:
        queries_embeddings: ``[P, Lq, E]``, or a list of ``[L, E]`` of any lengths.
        documents_embeddings: ``[P, Ld, E]``, or such a list.
        queries_mask, documents_mask, chunk_elements, length_normalize, dtype: see
            :func:`colbert_scores`.

    Returns:
        fp32 ``[P]``.
    """
    queries, query_mask = _side(queries_embeddings, queries_mask, dtype)
    documents, document_mask = _side(documents_embeddings, documents_mask, dtype)
    scores = maxsim_pairs(queries, documents, query_mask, document_mask)
    return _finished(scores, query_mask, document_mask, length_normalize)


def _mean_of(scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of this module, divided by the number of tokens of the query."""

    def mean(
        queries_embeddings: Embeddings,
        documents_embeddings: Embeddings,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
        chunk_elements: int | None = None,
        length_normalize: bool = True,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        sides = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
        return scores(*sides, length_normalize=length_normalize, dtype=dtype)

    mean.__name__ = mean.__qualname__ = f"mean_{scores.__name__}"
    mean.__doc__ = f":func:`{scores.__name__}`, divided by the number of tokens of the query."
    return mean


mean_colbert_scores = _mean_of(colbert_scores)
mean_colbert_kd_scores = _mean_of(colbert_kd_scores)
mean_colbert_scores_pairwise = _mean_of(colbert_scores_pairwise)

_FUSED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    scoring.colbert_scores: colbert_scores,
    scoring.colbert_kd_scores: colbert_kd_scores,
    scoring.colbert_scores_pairwise: colbert_scores_pairwise,
    scoring.mean_colbert_scores: mean_colbert_scores,
    scoring.mean_colbert_kd_scores: mean_colbert_kd_scores,
    scoring.mean_colbert_scores_pairwise: mean_colbert_scores_pairwise,
}


def fuse_scores(loss: Scored, dtype: torch.dtype | None = None) -> Scored:
    """Let a loss of sentence-transformers score with the fused MaxSim, in place; returns it.

    Args:
        loss: with a ``similarity_fct`` of the ColBERT family, set by hand or by default.
        dtype: see :func:`colbert_scores`.

    Raises:
        ValueError: it has none, or another, such as XTR's.
    """
    given = getattr(loss, "similarity_fct", None)
    if given is None:
        raise ValueError(f"{type(loss).__name__} has no similarity_fct")
    partial = given if isinstance(given, functools.partial) else functools.partial(given)
    fused = partial.func if partial.func in _FUSED.values() else _FUSED.get(partial.func)
    if fused is None:
        name = getattr(partial.func, "__name__", type(partial.func).__name__)
        raise ValueError(
            f"{type(loss).__name__} scores with {name}: of similarity functions the ColBERT family "
            "can be fused, such as colbert_scores"
        )
    settings = partial.keywords if dtype is None else {**partial.keywords, "dtype": dtype}
    if partial.args or settings:
        fused = functools.partial(fused, *partial.args, **settings)
    loss.similarity_fct = fused  # type: ignore[attr-defined]
    return loss


def _side(
    embeddings: Embeddings, mask: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Floating-point embeddings, and a mask of booleans."""
    tokens = _padded(embeddings)
    mask = tokens.any(-1) if mask is None else torch.as_tensor(mask) != 0
    if dtype is None:
        dtype = tokens.dtype if tokens.is_floating_point() else torch.float32
    return tokens.to(dtype), mask


def _padded(embeddings: Embeddings) -> Tensor:
    """One tensor; of a list of texts that have unequally many tokens, with rows of zeros."""
    of_texts = isinstance(embeddings, list) and embeddings
    if not of_texts or not isinstance(embeddings[0], Tensor | np.ndarray):
        return torch.as_tensor(embeddings)
    parts = [torch.as_tensor(each) for each in embeddings]
    return pad_sequence(parts, batch_first=True) if parts[0].ndim == 2 else torch.stack(parts)


def _finished(
    scores: Tensor, query_mask: Tensor, document_mask: Tensor, length_normalize: bool
) -> Tensor:
    """Scores of any shape; the masks have its axes, and tokens as a last one."""
    scores = scores.masked_fill(~document_mask.any(-1), _NOTHING_TO_SCORE)
    return scores / query_mask.sum(-1).clamp(min=1) if length_normalize else scores
