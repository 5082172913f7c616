"""How rows are cut into tiles, and sums over rows that come out the same every time.

T rows, D columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import cdiv, multiprocessors


def programs_over_rows(x: Tensor, rows: int, per_processor: int) -> int:
    """Programs that share the tiles of ``rows`` rows of ``x [T, D]``, where each adds up columns:
    about so many for each multiprocessor."""
    return max(min(per_processor * multiprocessors(x.device), cdiv(x.shape[0], rows)), 1)


@triton.jit
def load_rows(ptr, rows, columns, inside, D: tl.constexpr, outside=0.0):
    """fp32 ``[R, C]``."""
    ptrs = ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    return tl.load(ptrs, inside, outside).to(tl.float32)


@triton.jit
def store_rows(ptr, rows, columns, inside, values, D: tl.constexpr):
    ptrs = ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(ptrs, values.to(ptr.dtype.element_ty), inside)
