"""Tiles of matrices: how kernels cut them, and how those for Hopper (compute capability 9.0) copy
them, in Gluon."""

import functools

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 and 3.7 know the second names alone, 3.9 the first alone.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Descriptor(TensorDescriptor):
    """A descriptor that checks nothing, for operands that are known to fit: a check takes as long
    as half a launch."""

    def __post_init__(self) -> None:
        pass


@functools.cache
def rows_layout(bits: int, bytes_of_row: int = 128) -> gl.NVMMASharedLayout:
    """Rows of so many bytes in shared memory, swizzled, of elements of so many bits."""
    return gl.NVMMASharedLayout(bytes_of_row, bits, rank=2)


@triton.jit
def halves(x):
    """Columns of ``x`` ``[M, W]`` as two blocks ``[M, W / 2]``, left and right."""
    pairs = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))
