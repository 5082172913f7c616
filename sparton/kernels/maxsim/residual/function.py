"""Late interaction with compressed documents: what is checked and flattened.

Q queries, N documents, L tokens, T packed tokens, W packed query tokens, E embedding, P bytes of a
token's residual.
"""

from torch import Tensor

from sparton.kernels.boundaries import check_boundaries
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec
from sparton.kernels.maxsim.residual.operands import (
    check_codec,
    check_devices,
    check_documents,
    check_mask,
    check_queries,
    even_boundaries,
)
from sparton.kernels.maxsim.residual.operators import residual_scores


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
    (Q, Lq, E), (N, Ld) = queries.shape, documents.codes.shape
    _check(queries, documents, codec, query_mask, document_mask)
    codes, residuals, inverse_norms = documents
    flat = CompressedTokens(
        codes.reshape(N * Ld),
        residuals.reshape(N * Ld, residuals.shape[2]),
        None if inverse_norms is None else inverse_norms.reshape(N * Ld),
    )
    return residual_scores(
        queries.reshape(Q * Lq, E),
        flat,
        codec,
        even_boundaries(Q, Lq, queries.device),
        even_boundaries(N, Ld, queries.device),
        None if query_mask is None else query_mask.reshape(Q * Lq),
        None if document_mask is None else document_mask.reshape(N * Ld),
        normalize=normalize,
    )


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
    _check(
        queries,
        documents,
        codec,
        query_mask,
        document_mask,
        query_cu_seqlens=query_cu_seqlens,
        document_cu_seqlens=document_cu_seqlens,
        pairing=pairing if isinstance(pairing, Tensor) else None,
    )
    return residual_scores(
        queries,
        documents,
        codec,
        query_cu_seqlens,
        document_cu_seqlens,
        query_mask,
        document_mask,
        normalize=normalize,
        pairing=pairing,
    )


def _check(
    queries: Tensor,
    documents: CompressedTokens,
    codec: ResidualCodec,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    *,
    pairing: Tensor | None = None,
    **boundaries: Tensor,
) -> None:
    """What padded and packed operands have in common; ``boundaries`` by their argument's name."""
    check_queries(queries)
    check_codec(codec, queries.shape[-1])
    check_documents(documents, codec, documents.codes.shape)
    for name, cu_seqlens in boundaries.items():
        check_boundaries(name, cu_seqlens)
    check_mask("query_mask", query_mask, queries.shape[:-1])
    check_mask("document_mask", document_mask, documents.codes.shape)
    check_devices(
        queries=queries,
        codes=documents.codes,
        residuals=documents.residuals,
        inverse_norms=documents.inverse_norms,
        centroids=codec.centroids,
        bucket_weights=codec.bucket_weights,
        **boundaries,
        query_mask=query_mask,
        document_mask=document_mask,
        pairing=pairing,
    )
