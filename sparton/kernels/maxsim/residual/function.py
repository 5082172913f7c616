"""Late interaction with compressed documents, and with their centroids alone.

Q queries, N documents, L tokens, T packed document tokens, W packed query tokens, E embedding,
C centroids, P bytes of a token's residual.
"""

import torch
from torch import Tensor

from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec
from sparton.kernels.maxsim.residual.operands import ResidualOperands, check_operands
from sparton.kernels.maxsim.residual.operators import centroid_scores, residual_scores


def maxsim_residual(
    queries: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    normalize: bool = True,
) -> Tensor:
    """Late-interaction scores against padded compressed documents, never decompressed in memory.

    ``scores[q, n]`` is the sum over the query's tokens s of the maximum over the document's tokens
    t of ``query[s] . (centroid[code[t]] + residual[t])``. Tokens that a mask leaves out take no
    part; a document or query without any scores 0. Of equal similarities the first token wins and
    gets the gradient. Products with the centroids are made in fp32, those with the residuals in the
    dtype of the queries with sums in fp32. Results and gradients are bitwise reproducible on one
    kind of device. Under torch.autocast the queries are cast to its dtype.

    Args:
        queries: ``[Q, Lq, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        documents: codes int32 or int64 ``[N, Ld]``, residuals uint8 ``[N, Ld, P]`` in the layout of
            ColBERTv2 (see codec.py), inverse_norms ``[N, Ld]`` or None. Codes must be centroid ids
            at padding, too.
        codec: what the documents were compressed with.
        query_mask, document_mask: bool ``[Q, Lq]`` and ``[N, Ld]``, True for tokens that take part,
            with any holes; None for all.
        normalize: L2-normalise the queries and the restored document tokens. Without
            ``documents.inverse_norms``, their norms are computed first, in a pass of its own; see
            :func:`~sparton.kernels.maxsim.codec.with_inverse_norms`.

    Returns:
        fp32 ``[Q, N]``, differentiable once with respect to the queries.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    if queries.dim() != 3 or documents.codes.dim() != 2:
        raise ValueError(
            "padded queries must be [Q, Lq, E] and codes [N, Ld], got "
            f"{tuple(queries.shape)} and {tuple(documents.codes.shape)}; for packed ones there is "
            "maxsim_residual_varlen"
        )
    operands = ResidualOperands(
        queries, *documents, codec.centroids, codec.bucket_weights,
        _even_boundaries(queries), _even_boundaries(documents.codes), query_mask, document_mask,
    )  # fmt: skip
    check_operands(operands)
    return residual_scores(operands.flat(), "cross", normalize=normalize)


def maxsim_residual_varlen(
    queries: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    pairing: str | Tensor = "cross",
    normalize: bool = True,
) -> Tensor:
    """:func:`maxsim_residual` of packed queries and documents, as an index holds them.

    Args:
        queries: ``[W, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        documents: codes ``[T]``, residuals ``[T, P]``, inverse_norms ``[T]`` or None.
        codec: what the documents were compressed with.
        query_cu_seqlens: int32 or int64 ``[Q + 1]``, boundaries of the queries; ascending from 0 to
            W.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of the documents; ascending from
            0 to T.
        query_mask, document_mask: bool ``[W]`` and ``[T]``, or None.
        pairing: "cross" for every query against every document, or "pairs" for query p and document
            p. An int32 or int64 tensor ``[P, 2]`` lists pairs, the numbers of a query and of a
            document in each row, as often as one likes; their tokens are read in place. Pairs are
            for inference: their scores have no gradient. The products of all query tokens and
            centroids, fp32 ``[C, W]``, exist at once.
        normalize: as there.

    Returns:
        fp32 ``[Q, N]``, differentiable once with respect to the queries; ``[P]`` of pairs.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown pairing, or on a
            CPU numbers in a list of pairs that there are not (a GPU ends in an assertion).
    """
    if queries.dim() != 2 or documents.codes.dim() != 1:
        raise ValueError(
            "packed queries must be [W, E] and codes [T], got "
            f"{tuple(queries.shape)} and {tuple(documents.codes.shape)}; for padded ones there is "
            "maxsim_residual"
        )
    operands = ResidualOperands(
        queries, *documents, codec.centroids, codec.bucket_weights, query_cu_seqlens,
        document_cu_seqlens, query_mask, document_mask,
    )  # fmt: skip
    check_operands(operands, pairing)
    return residual_scores(operands, pairing, normalize=normalize)


def maxsim_centroids(
    queries: Tensor,
    codes: Tensor,
    centroids: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    pairing: str | Tensor = "cross",
    normalize: bool = True,
) -> Tensor:
    """Late-interaction scores of packed documents whose tokens are taken for their centroids.

    ``scores[q, n]`` is the sum over the query's tokens s of the maximum over the document's tokens
    t of ``query[s] . centroid[code[t]]``: an approximation of
    :func:`~sparton.kernels.maxsim.maxsim_residual_varlen` that reads 4 bytes of a token. PLAID
    (https://arxiv.org/abs/2205.09707) keeps the candidates that score best in this way; where it
    also leaves out tokens whose centroids suit no query token, ``document_mask`` does. A document
    or query without tokens that take part scores 0. Products are made in fp32. For inference: the
    result has no gradient.

    Args:
        queries: ``[W, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        codes: int32 or int64 ``[T]``, centroid ids.
        centroids: ``[C, E]``, any float dtype; taken as they are.
        query_cu_seqlens: int32 or int64 ``[Q + 1]``, boundaries of the queries; ascending from 0 to
            W.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, boundaries of the documents; ascending from
            0 to T.
        query_mask, document_mask: bool ``[W]`` and ``[T]``, True for tokens that take part; None
            for all.
        pairing: as in :func:`~sparton.kernels.maxsim.maxsim_residual_varlen`.
        normalize: L2-normalise the queries.

    Returns:
        fp32 ``[Q, N]``; ``[P]`` of pairs.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown pairing, and on a
            CPU boundaries that do not ascend from 0 to the number of tokens, or numbers in a list
            of pairs that there are not.
    """
    if queries.dim() != 2 or codes.dim() != 1:
        raise ValueError(
            "queries must be packed [W, E] and codes [T], got "
            f"{tuple(queries.shape)} and {tuple(codes.shape)}"
        )
    operands = ResidualOperands(
        queries, codes, None, None, centroids, None, query_cu_seqlens, document_cu_seqlens,
        query_mask, document_mask,
    )  # fmt: skip
    check_operands(operands, pairing)
    return centroid_scores(operands, pairing, normalize=normalize)


def _even_boundaries(padded: Tensor) -> Tensor:
    """``[N + 1]`` of ``[N, L, ...]``; int64 where int32 cannot count the tokens."""
    count, length = padded.shape[:2]
    if count * length < 2**31:
        return equal_cu_seqlens(count, length, padded.device)
    return torch.arange(count + 1, device=padded.device) * length
