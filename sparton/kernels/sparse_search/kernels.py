"""Scores of all documents by their postings, and the documents that may be the best, on a GPU.

Q queries, N documents in blocks of B and groups of G, V terms, P postings, K results, M excluded
documents of a query.

A program owns the scores of one query and one block, 16 KiB that stay near its multiprocessor. It
adds up term after term, each in the order of a CPU, with products that are rounded before they are
added: the bits are the same on both. Within a term documents differ, so that nothing is added to at
the same time, and a barrier ends each term. Programs of one block run at the same time, and what
they read of its postings stays in the second cache.

A whole matrix ``[Q, N]`` is not sorted. The K best documents lie in the K groups with the best
maxima, where equal maxima count by the lower group: each document elsewhere is behind K of these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.sparse_search.postings import GROUP, Postings
from sparton.kernels.sparse_vectors import SparseVectors

CHUNK = 1024  # postings, or documents, that a program handles at once
GROUPS_AT_ONCE = 16
WARPS = 8  # of a program: the scores of all that run at once stay in the caches


@triton.jit
def _sort_keys(scores, numbers):
    """Make the keys of :mod:`sparton.kernels.sort_keys`, of scores that are not negative."""
    return ((scores.to(tl.int32, bitcast=True).to(tl.int64) + 1) << 32) - 1 - numbers


# Programs lie along one axis: the others end at 65,535, and a collection may have more blocks.
@triton.jit(do_not_specialize=["num_queries", "num_excluded"])
def _score_kernel(
    places_ptr, weights_ptr, starts_ptr, terms_ptr, values_ptr, bounds_ptr, excluded_ptr,
    scores_ptr, maxima_ptr, num_queries, num_excluded, width, num_scores,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add up the scores of a query and a block, and make keys of each group's best and number."""
    pid = tl.program_id(0)
    pid_q, pid_b = (pid % num_queries).to(tl.int64), (pid // num_queries).to(tl.int64)
    own_ptr = scores_ptr + pid_q * num_scores + pid_b * BLOCK
    # Not of the shape of postings: these would be laid out like whole vectors of scores, too.
    offs_g = tl.arange(0, CHUNK // GROUP)
    offs_gn = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for start in range(0, BLOCK, CHUNK):
        tl.store(own_ptr + start + offs_gn, tl.zeros((CHUNK // GROUP, GROUP), tl.float32))
    tl.debug_barrier()
    offs = tl.arange(0, CHUNK)
    first, last = tl.load(bounds_ptr + pid_q), tl.load(bounds_ptr + pid_q + 1)
    for entry in range(first, last):
        weight = tl.load(values_ptr + entry)
        row_ptr = starts_ptr + pid_b * width + tl.load(terms_ptr + entry)
        begin, end = tl.load(row_ptr), tl.load(row_ptr + 1)
        for posting in range(begin, end, CHUNK):
            inside = posting + offs < end
            # Read once, past the first cache, in which scores are.
            place = tl.load(places_ptr + posting + offs, inside, other=0, cache_modifier=".cg")
            own = own_ptr + place.to(tl.int32)
            product = weight * tl.load(
                weights_ptr + posting + offs, inside, other=0.0, cache_modifier=".cg"
            )
            tl.store(own, tl.load(own, inside, other=0.0) + product, inside)
        tl.debug_barrier()
    for each in range(num_excluded):
        excluded = tl.load(excluded_ptr + pid_q * num_excluded + each) - pid_b * BLOCK
        tl.store(own_ptr + excluded, 0.0, (excluded >= 0) & (excluded < BLOCK))
    tl.debug_barrier()
    for start in range(0, BLOCK, CHUNK):
        best = tl.maximum(tl.max(tl.load(own_ptr + start + offs_gn), axis=1), 0.0)
        group = pid_b * (BLOCK // GROUP) + start // GROUP + offs_g
        place = pid_q * (num_scores // GROUP) + group
        tl.store(maxima_ptr + place, _sort_keys(best, group))


@triton.jit
def _candidates_kernel(
    chosen_ptr, scores_ptr, keys_ptr, num_chosen, num_scores,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Keys of all documents of some groups, which are given by their own keys."""
    pid, programs = tl.program_id(0), tl.cdiv(num_chosen, GROUPS)
    pid_q = (pid // programs).to(tl.int64)
    offs_c = pid % programs * GROUPS + tl.arange(0, GROUPS)
    inside = offs_c < num_chosen
    chosen = tl.load(chosen_ptr + pid_q * num_chosen + offs_c, inside, other=-1)
    group = (((chosen >> 32) + 1) << 32) - 1 - chosen
    offs_g = tl.arange(0, GROUP)[None, :]
    document = group[:, None] * GROUP + offs_g
    score = tl.load(scores_ptr + pid_q * num_scores + document, inside[:, None], other=0.0)
    place = (pid_q * num_chosen + offs_c[:, None]) * GROUP + offs_g
    keys = _sort_keys(tl.maximum(score, 0.0), document)
    tl.store(keys_ptr + place, keys, inside[:, None])


@on_its_device
def best_keys_gpu(
    postings: Postings, queries: SparseVectors, k: int, excluded: Tensor, scores: Tensor
) -> Tensor:
    """Launch the search of Q queries.

    Args:
        postings, queries: on one device, with one document or more.
        excluded: int64, M of each of the Q queries, documents that are no result; -1 for none.
        scores: fp32 with room for ``Q`` times the documents of all blocks; overwritten.

    Returns:
        int64 ``[Q, <= k]``, keys of the best documents, best first.
    """
    Q, block = queries.num_vectors, postings.block
    num_scores = postings.num_blocks * block
    num_groups = num_scores // GROUP
    maxima = torch.empty(Q, num_groups, dtype=torch.int64, device=scores.device)
    asked = queries.terms, queries.values, queries.cu_seqlens, excluded
    # A product that is not rounded before it is added would make other bits than a CPU's.
    Launch(
        _score_kernel, (Q * postings.num_blocks,), Q, excluded.numel() // Q, postings.width,
        num_scores, BLOCK=block, GROUP=GROUP, CHUNK=min(CHUNK, block), enable_fp_fusion=False,
        num_warps=WARPS,
    )(*postings[:3], *asked, scores, maxima)  # fmt: skip
    num_chosen = min(k, num_groups)
    chosen = maxima.topk(num_chosen, sorted=False).values
    keys = torch.empty(Q, num_chosen * GROUP, dtype=torch.int64, device=scores.device)
    Launch(
        _candidates_kernel, (Q * cdiv(num_chosen, GROUPS_AT_ONCE),), num_chosen, num_scores,
        GROUP=GROUP, GROUPS=GROUPS_AT_ONCE,
    )(chosen, scores, keys)  # fmt: skip
    return keys.topk(min(k, keys.shape[1])).values
