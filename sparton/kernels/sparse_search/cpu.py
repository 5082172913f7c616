"""The best documents for some queries on a CPU, in several threads.

Q queries, K results, M excluded documents of a query.
"""

import numpy as np
import torch
from torch import Tensor

from sparton.kernels.sparse_search import loops
from sparton.kernels.sparse_search.postings import GROUP, Postings
from sparton.kernels.sparse_search.threads import run_ranges, thread_ranges
from sparton.kernels.sparse_vectors import SparseVectors

LEAST_WORK = 8  # blocks searched for a query; less is not worth another thread


def best_keys_cpu(postings: Postings, queries: SparseVectors, k: int, excluded: Tensor) -> Tensor:
    """Search for Q queries.

    Args:
        postings, queries: with one document and one query or more.
        excluded: int64 ``[Q, M]``, documents that are no result; -1 for none.

    Returns:
        int64 ``[Q, <= k]``, keys of the best documents, best first.
    """
    arrays = (*(each.numpy() for each in postings[:3]), *postings[3:])
    terms, values, bounds, left_out = (
        each.numpy() for each in (queries.terms, queries.values, queries.cu_seqlens, excluded)
    )
    num_queries, num_blocks = queries.num_vectors, postings.num_blocks
    # Many queries share the threads among them; for few, threads share the documents.
    by_query = num_queries >= torch.get_num_threads()
    units, work = (num_queries, num_blocks) if by_query else (num_blocks, num_queries)
    ranges = thread_ranges(units, LEAST_WORK // work)
    slots = min(2 * k + GROUP, postings.num_documents)
    found = np.empty((1 if by_query else len(ranges), num_queries, slots), np.int64)

    def search(number: int, first: int, last: int) -> None:
        own = slice(first, last) if by_query else slice(0, num_queries)
        loops.search_blocks(
            *arrays, (0, num_blocks) if by_query else (first, last),
            terms, values, bounds[own.start : own.stop + 1], left_out[own],
            k, found[0 if by_query else number, own],
        )  # fmt: skip

    run_ranges(search, ranges)
    # NumPy sorts integers many times as fast as topk finds some.
    ascending = np.sort(found.transpose(1, 0, 2).reshape(num_queries, -1))
    return torch.from_numpy(ascending[:, : -k - 1 : -1].copy())
