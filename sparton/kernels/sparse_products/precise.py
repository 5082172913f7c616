"""Matrix products of fp32 accuracy on the tensor cores of a GPU.

A number of fp32 is the sum of two of bf16, high and low, up to 2^-18 of itself. Of the product of
two sums the part low * low is left out, which is as small; the other three are products of bf16,
exact in the fp32 in which tensor cores add them up (the idea: Henry et al., arXiv 1904.06376).
They are one product of factors with high and low side by side. A tensor core truncates when it
adds: small products go first, and no sum runs over more than :data:`LONGEST` large ones.

Elsewhere, and in fp64, products are those of PyTorch.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sparton.kernels.dispatch import without_autocast

LONGEST = 4096
ALIGNMENT = 16  # numbers; rows of 16 bit then begin where tensor cores want them


def in_pieces(x: Tensor) -> bool:
    """Whether a factor is cut into high and low."""
    return x.is_cuda and x.dtype == torch.float32


def left_factor(x: Tensor) -> list[Tensor]:
    """``x [M, K]`` made ready for :func:`multiply`, in parts of at most :data:`LONGEST` columns."""
    return list(_left_parts(x))


def product(x: Tensor, right: Tensor) -> Tensor:
    """``x @ right``, ``[M, N]``, of factors of which few columns are made ready at a time."""
    return multiply(_left_parts(x), right)


def _left_parts(x: Tensor) -> Iterator[Tensor]:
    return (_side_by_side(part, 1, left=True) for part in x.split(LONGEST, 1))


def multiply(left: Iterable[Tensor], right: Tensor) -> Tensor:
    """``x @ right``, ``[M, N]`` of ``right [K, N]``, with ``left_factor(x)``, in fp32 or, of fp64,
    in that; autocast changes nothing."""
    parts = zip(left, right.split(LONGEST), strict=True)
    total, *others = (_product(each, _side_by_side(rows, 0, left=False)) for each, rows in parts)
    for other in others:
        total += other
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    with without_autocast(left.device):
        if left.dtype != torch.bfloat16:
            return left @ right
        if not left.is_cuda:
            return left.float() @ right.float()
        return torch.mm(left, right, out_dtype=torch.float32)


def _side_by_side(x: Tensor, dim: int, *, left: bool) -> Tensor:
    """Low, high, high of the left factor, along ``dim``; high, low, high of the right one; and
    zeros up to the alignment."""
    if not in_pieces(x):
        return x
    if x.stride(0) < x.stride(1):
        return _side_by_side(x.T, 1 - dim, left=left).T
    high = x.bfloat16()
    low = (x - high).bfloat16()
    pieces = [low, high, high] if left else [high, low, high]
    if missing := -3 * x.shape[dim] % ALIGNMENT:
        pieces.append(high.new_zeros([missing if d == dim else n for d, n in enumerate(x.shape)]))
    return torch.cat(pieces, dim)
