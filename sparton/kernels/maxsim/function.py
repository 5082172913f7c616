"""MaxSim of padded batches and of packed ones.

Q queries, N documents, K documents per query, P pairs, L tokens, E embedding, T packed tokens.

One operator serves every pairing, padded batches and packed ones: the public functions check their
operands (see batches.py), and operators.py scores them.
"""

from torch import Tensor

from sparton.kernels.maxsim.batches import packed_operands, padded_operands
from sparton.kernels.maxsim.operands import Backward
from sparton.kernels.maxsim.operators import maxsim_scores


def maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """MaxSim of padded queries against shared documents, or against documents of their own.

    ``score(q, d) = sum over the tokens s of q of max over the tokens t of d of <q_s, d_t>``, over
    tokens whose mask is True. Masks may have holes; a masked token never wins, whatever the sign of
    the similarities, and gets a gradient of zero. A query or a document without tokens scores 0.
    Equal similarities: the first token wins and gets the gradient. Products, maxima and sums run in
    fp32. Under torch.autocast both sides are cast to its dtype first. The winners are saved only
    where a gradient can follow. A token that is not a number makes the scores it enters NaN; on a
    GPU a cross product of many query tokens leaves its similarities out instead. Similarities that
    overflow to infinity have no defined score.

    Args:
        queries: ``[Q, Lq, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        documents: ``[N, Ld, E]``, the same dtype (or any under autocast): every query against all.
            ``[Q, K, Ld, E]``: every query against K of its own, in one launch.
        query_mask: bool ``[Q, Lq]``; None if every token takes part.
        document_mask: bool ``[N, Ld]`` or ``[Q, K, Ld]``; None if every token takes part.
        normalize: L2-normalise every token (``x / max(|x|, 1e-12)``) first; the gradients are those
            of the given tokens.
        backward: "lowmem" sums each row of a gradient in one place, in a fixed order, without a
            buffer in fp32: the same bits every time. "unified" is one pass with atomic additions,
            on GPUs; not repeatable. "auto" is "lowmem", except for documents of each query's own
            where queries have 512 tokens or more and there is much to do (2^27 similarities), and
            ``torch.use_deterministic_algorithms`` is off. CPU tensors are repeatable in any case.

    Returns:
        fp32 ``[Q, N]`` or ``[Q, K]``. Differentiable once, with respect to queries and documents;
        gradients come in the dtype of each.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an unknown backward.
    """
    arguments = (query_mask, document_mask)
    return maxsim_scores(padded_operands, queries, documents, arguments, normalize, backward)


def maxsim_pairs(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    pairs: Tensor | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """MaxSim of query p and document p, or of a list of pairs, padded.

    Args:
        queries: ``[Q, Lq, E]``.
        documents: ``[N, Ld, E]``.
        query_mask: bool ``[Q, Lq]`` or None.
        document_mask: bool ``[N, Ld]`` or None.
        pairs: int32 or int64 ``[P, 2]``, the numbers of a query and of a document in each row, as
            often as one likes; their tokens are read in place. None for query p and document p of
            P = Q = N.
        normalize, backward: as in :func:`maxsim`, and so is everything else.

    Returns:
        fp32 ``[P]``.

    Raises:
        ValueError: as :func:`maxsim`, for unequal numbers of queries and documents without a list,
            and on a CPU for numbers in the list that there are not: a GPU ends in an assertion.
    """
    arguments = (query_mask, document_mask, True if pairs is None else pairs)
    scores = maxsim_scores(padded_operands, queries, documents, arguments, normalize, backward)
    return scores.squeeze(1)


def maxsim_varlen(
    queries: Tensor,
    documents: Tensor,
    query_cu_seqlens: Tensor,
    document_cu_seqlens: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    pairing: str | int | Tensor = "cross",
    query_max_seqlen: int | None = None,
    document_max_seqlen: int | None = None,
    normalize: bool = False,
    backward: Backward = "auto",
) -> Tensor:
    """MaxSim of packed queries and documents; no work is done for padding.

    Args:
        queries: ``[Tq, E]``, Q queries end to end.
        documents: ``[Td, E]``, N documents end to end, the same dtype (or any under autocast).
        query_cu_seqlens: int32 or int64 ``[Q + 1]``, boundaries of the queries; from 0 to Tq,
            ascending.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, from 0 to Td.
        query_mask: bool ``[Tq]`` or None, for tokens left out (punctuation, say).
        document_mask: bool ``[Td]`` or None.
        pairing: "cross" for every query against every document, "pairs" for query p and document p,
            or K for query q against documents ``q * K : (q + 1) * K``. An int32 or int64 tensor
            ``[P, 2]`` lists pairs, the numbers of a query and of a document in each row, as often
            as one likes; their tokens are read in place.
        query_max_seqlen, document_max_seqlen: no query and no document has more tokens, where the
            host knows it. That shortens the way, most of all where all queries have as many. If one
            has more, an assertion fails on a GPU, for which nothing waits. Gradients of a list of
            pairs need ``query_max_seqlen``: if it is None the host reads it, for which it waits.
        normalize, backward: as in :func:`maxsim`, and so is everything else.

    Returns:
        fp32 ``[Q, N]``, ``[P]`` or ``[Q, K]``.

    Raises:
        ValueError: as :func:`maxsim`, for an unknown pairing, for numbers of queries and documents
            that it does not allow, and for more tokens than a ``max_seqlen`` does. On a CPU also
            for boundaries that do not ascend from 0 to the number of tokens, for a sequence that is
            longer than its ``max_seqlen``, and for numbers in a list of pairs that there are not
            (a GPU ends in an assertion).
    """
    bounds = (query_cu_seqlens, document_cu_seqlens)
    longest = (query_max_seqlen, document_max_seqlen)
    arguments = (*bounds, query_mask, document_mask, pairing, *longest)
    scores = maxsim_scores(packed_operands, queries, documents, arguments, normalize, backward)
    paired = isinstance(pairing, Tensor) or pairing == "pairs"
    return scores.squeeze(1) if paired else scores
