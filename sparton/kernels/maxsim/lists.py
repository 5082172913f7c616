"""What is in some of many lists, marked in one launch.

Q queries, W query tokens, N documents, C lists, L entries of all of them.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import Launch
from sparton.kernels.maxsim.residual.maxima import locate_document

PROGRAMS = 128  # of a query, which share its lists
BLOCK = 1024


@triton.jit(do_not_specialize=["N", "M"])
def _mark_kernel(
    found_ptr, chosen_ptr, query_cu_ptr, documents_ptr, list_cu_ptr, N, M,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0)
    found_ptr += q.to(tl.int64) * N
    stop = tl.load(query_cu_ptr + q + 1) * M
    for place in range(tl.load(query_cu_ptr + q) * M + tl.program_id(1), stop, PROGRAMS):
        start, length = locate_document(list_cu_ptr, None, tl.load(chosen_ptr + place))
        for first in range(0, length, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            document = tl.load(documents_ptr + start + offs, offs < length, 0)
            tl.store(found_ptr + document, 1, offs < length)


@on_its_device
def mark_listed(
    found: Tensor, chosen: Tensor, query_cu_seqlens: Tensor, documents: Tensor, cu_seqlens: Tensor
) -> None:
    """Set the documents of each query that are in a list of one of its tokens.

    Args:
        found: uint8 ``[Q, N]``, contiguous, where ones are written.
        chosen: int64 ``[W, M]``, contiguous, the lists of each query token.
        query_cu_seqlens: int ``[Q + 1]``, boundaries of the queries.
        documents: int ``[L]``, the lists end to end.
        cu_seqlens: int ``[C + 1]``, their boundaries.
    """
    (Q, N), M = found.shape, chosen.shape[1]
    launch = Launch(_mark_kernel, (Q, PROGRAMS), N, M, PROGRAMS=PROGRAMS, BLOCK=BLOCK)
    launch(found, chosen, query_cu_seqlens, documents, cu_seqlens)
