"""Entries of sparse vectors into some columns of a dense matrix, and back, on a GPU.

N vectors over V terms, P active entries, C columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.dispatch import on_its_device
from sparton.kernels.launch import Launch
from sparton.kernels.sparse_products.spans import Span
from sparton.kernels.sparse_vectors import SparseVectors

BLOCK = 1024


@triton.jit
def _first_from(terms_ptr, begin, end, term):
    """Where the terms of a vector, which ascend from ``begin`` to ``end``, reach a given one."""
    while begin < end:
        middle = (begin + end) // 2
        below = tl.load(terms_ptr + middle) < term
        begin = tl.where(below, middle + 1, begin)
        end = tl.where(below, end, middle)
    return begin


@triton.jit(do_not_specialize=["first", "last", "column"])
def _copy_entries_kernel(
    entries_ptr, terms_ptr, bounds_ptr, numbers_ptr, matrix_ptr, stride_mn, stride_mc,
    first, last, column, TO_MATRIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each vector."""
    pid_n = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(bounds_ptr + pid_n), tl.load(bounds_ptr + pid_n + 1)
    begin = _first_from(terms_ptr, begin, end, first)
    end = _first_from(terms_ptr, begin, end, last)
    for start in range(begin, end, BLOCK):
        offs_p = start + tl.arange(0, BLOCK)
        inside = offs_p < end
        offs_c = tl.load(terms_ptr + offs_p, inside, other=0)
        if numbers_ptr is not None:
            offs_c = tl.load(numbers_ptr + offs_c, inside, other=-1)
            inside = inside & (offs_c >= 0)
        places = matrix_ptr + pid_n * stride_mn + (offs_c - column) * stride_mc
        if TO_MATRIX:
            tl.store(places, tl.load(entries_ptr + offs_p, inside), inside)
        else:
            tl.store(entries_ptr + offs_p, tl.load(places, inside), inside)


@on_its_device
def copy_entries(
    entries: Tensor, vectors: SparseVectors, span: Span, matrix: Tensor, *, to_matrix: bool
) -> None:
    """Launch the copy between the active entries that lie in some columns and these columns.

    Args:
        entries: ``[P]``, in the order of the entries of ``vectors``.
        vectors: whose terms say where each entry lies.
        matrix: ``[N, C]``, of the same dtype, any strides, at least ``span.width`` columns.
        to_matrix: copy from ``entries`` to ``matrix``, or else from ``matrix`` to ``entries``; what
            is not copied to keeps its value.

    Raises:
        ValueError: operands that do not fit together.
    """
    shape = vectors.num_vectors, span.width
    if (
        entries.shape != vectors.terms.shape
        or matrix.shape[0] != shape[0]
        or matrix.shape[1] < shape[1]
        or entries.dtype != matrix.dtype
    ):
        raise ValueError(
            f"{vectors.num_entries} active entries of {shape[0]} vectors in {shape[1]} columns "
            f"cannot be copied between {entries.dtype} {tuple(entries.shape)} and {matrix.dtype} "
            f"{tuple(matrix.shape)}"
        )
    if not vectors.num_vectors:
        return
    Launch(
        _copy_entries_kernel, (vectors.num_vectors,),
        *matrix.stride(), span.first, span.last, span.column, TO_MATRIX=to_matrix, BLOCK=BLOCK,
    )(entries, vectors.terms, vectors.cu_seqlens, span.numbers, matrix)  # fmt: skip
