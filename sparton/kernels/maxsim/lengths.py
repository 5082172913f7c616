"""Assertions on a GPU: no sequence is longer than a caller states, and pairs name what there is.

Nothing waits for them: like an index out of range, a failed one ends the process's work on the
device. Streaming kernels assert what they read; other ways launch a kernel for it.
"""

import triton
import triton.language as tl

from sparton.kernels.launch import Launch, cdiv
from sparton.kernels.maxsim.operands import MaxSimOperands

ANY = 2**31 - 1
BLOCK = 1024


@triton.jit
def assert_lengths(query_lengths, longest_query, document_lengths, longest_document):
    tl.device_assert(query_lengths <= longest_query, "a query is longer than query_max_seqlen")
    tl.device_assert(
        document_lengths <= longest_document, "a document is longer than document_max_seqlen"
    )


@triton.jit
def assert_pair(query, Q, document, N):
    tl.device_assert((query >= 0) & (query < Q), "pairs name a query that there is not")
    tl.device_assert((document >= 0) & (document < N), "pairs name a document that there is not")


@triton.jit
def _lengths(cu_ptr, count, first, BLOCK: tl.constexpr):
    """The lengths of the sequences from ``first`` on; 0 beyond the last one."""
    i = first + tl.arange(0, BLOCK)
    return tl.load(cu_ptr + i + 1, i < count, 0) - tl.load(cu_ptr + i, i < count, 0)


@triton.jit(debug=True, do_not_specialize=["Q", "N", "longest_query", "longest_document"])
def _verify_lengths_kernel(
    query_cu_ptr, document_cu_ptr, Q, N, longest_query, longest_document, BLOCK: tl.constexpr
):
    first = tl.program_id(0) * BLOCK
    assert_lengths(
        _lengths(query_cu_ptr, Q, first, BLOCK), longest_query,
        _lengths(document_cu_ptr, N, first, BLOCK), longest_document,
    )  # fmt: skip


def stated_lengths(operands: MaxSimOperands) -> tuple[int, int] | None:
    """The most tokens of a query and of a document that are to be verified, ANY for what is not
    stated; None if nothing is."""
    if not operands.verify:
        return None
    longest_query, longest_document = operands.longest_query, operands.longest_document
    return (
        ANY if longest_query is None else longest_query,
        ANY if longest_document is None else longest_document,
    )


def verify_lengths(operands: MaxSimOperands) -> None:
    """Launch the assertions, if lengths are stated."""
    stated = stated_lengths(operands)
    if stated is None:
        return
    query_cu, document_cu = operands.query_cu_seqlens, operands.document_cu_seqlens
    Q, N = query_cu.shape[0] - 1, document_cu.shape[0] - 1
    if Q or N:
        launch = Launch(
            _verify_lengths_kernel, (cdiv(max(Q, N), BLOCK),), Q, N, *stated,
            BLOCK=BLOCK, num_warps=4, sanitize_overflow=False,
        )  # fmt: skip
        launch(query_cu.contiguous(), document_cu.contiguous())
