"""Kernels that restore compressed tokens: the gradient of the queries, and missing inverse norms.

Q queries, N documents, T document tokens, W query tokens, E embedding, P bytes of a residual.

The gradient of a query token is the sum over the documents of its winning token there, restored and
scaled. A program owns one query token and a run of documents; the runs' sums are added in order, so
the bits repeat.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton.kernels.launch import Launch, cdiv, next_power_of_2
from sparton.kernels.maxsim.residual.forward import bytes_of
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from sparton.kernels.maxsim.residual.prepare import mirrored

PROGRAMS = 2048
FEWEST_DOCUMENTS = 64


@triton.jit
def _restore(
    token, valid, first_e, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr,
    E: tl.constexpr, NBITS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Dimensions ``first_e : first_e + BLOCK_E`` of tokens, fp32; zeros for those not valid."""
    e = first_e + tl.arange(0, BLOCK_E)
    present = valid[:, None] & (e < E)[None, :]
    code = tl.load(codes_ptr + token, valid, 0).to(tl.int64)
    centroid = tl.load(centroids_ptr + code[:, None] * E + e[None, :], present, 0.0)
    places = token[:, None] * (E * NBITS // 8) + (e * NBITS // 8)[None, :]
    packed = tl.load(residuals_ptr + places, present, 0).to(tl.int32)
    numbers = packed >> (8 - NBITS - e * NBITS % 8)[None, :] & (1 << NBITS) - 1
    weights = tl.load(weights_ptr + mirrored(numbers, NBITS), present, 0.0)
    return centroid + weights


@triton.jit(do_not_specialize=["T"])
def _inverse_norm_kernel(
    codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, inverse_ptr, T,
    E: tl.constexpr, NBITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    square = tl.zeros((BLOCK_T,), tl.float32)
    for first_e in tl.static_range(0, E, BLOCK_E):
        x = _restore(
            token, token < T, first_e, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr,
            E, NBITS, BLOCK_E,
        )  # fmt: skip
        square += tl.sum(x * x, 1)
    inverse = tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(square), 1e-12))
    tl.store(inverse_ptr + token, inverse, token < T)


@triton.jit(do_not_specialize=["N", "W", "per_run"])
def _maxsim_residual_bwd_kernel(
    grad_ptr, argmax_ptr, query_ptr, mask_ptr, cu_ptr, codes_ptr, residuals_ptr, inverse_ptr,
    centroids_ptr, weights_ptr, dqueries_ptr, N, W, per_run, stride_gq, stride_gn,
    E: tl.constexpr, NBITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    w = tl.program_id(0).to(tl.int64) % W
    run = tl.program_id(0).to(tl.int64) // W
    first_e = tl.program_id(1) * BLOCK_E
    last = tl.minimum((run + 1) * per_run, N)
    if mask_ptr is not None:
        last = tl.where(tl.load(mask_ptr + w) != 0, last, 0)
    q = tl.load(query_ptr + w).to(tl.int64)
    acc = tl.zeros((BLOCK_E,), tl.float32)
    for first in range(run * per_run, last, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        winner = tl.load(argmax_ptr + n * W + w, n < last, -1)
        valid = winner >= 0
        token = tl.load(cu_ptr + n, valid, 0).to(tl.int64) + winner
        scale = tl.load(grad_ptr + q * stride_gq + n * stride_gn, valid, 0.0)
        if inverse_ptr is not None:
            scale *= tl.load(inverse_ptr + token, valid, 0.0).to(tl.float32)
        x = _restore(
            token, valid, first_e, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr,
            E, NBITS, BLOCK_E,
        )  # fmt: skip
        acc += tl.sum(x * scale[:, None], 0)
    e = first_e + tl.arange(0, BLOCK_E)
    tl.store(dqueries_ptr + (run * W + w) * E + e, acc, e < E)


def residual_inverse_norms(
    codes: Tensor, residuals: Tensor, centroids: Tensor, bucket_weights: Tensor
) -> Tensor:
    """fp32 ``[T]``, 1 / max(norm, 1e-12) of every restored token; of contiguous
    :class:`~sparton.kernels.maxsim.residual.operands.ResidualOperands`."""
    T, E = codes.numel(), centroids.shape[1]
    inverse = torch.empty(T, dtype=torch.float32, device=codes.device)
    if T:
        Launch(
            _inverse_norm_kernel, (cdiv(T, 32),), T,
            E=E, NBITS=residuals.shape[1] * 8 // E, BLOCK_T=32,
            BLOCK_E=min(next_power_of_2(E), 128), num_warps=4,
        )(codes, residuals, centroids.float(), bucket_weights.float(), inverse)  # fmt: skip
    return inverse


def residual_backward(
    grad: Tensor, argmax: Tensor, operands: ResidualOperands, *, dtype: torch.dtype
) -> Tensor:
    """Gradient of the query tokens, ``[W, E]`` in ``dtype``.

    Args:
        grad: fp32 ``[Q, N]``, any strides: gradient of the scores.
        argmax: int32 ``[N, W]`` from
            :func:`~sparton.kernels.maxsim.residual.forward.residual_forward`.
        operands: those of the forward; the mask of the documents is not read.
    """
    (N, W), E, codec = argmax.shape, operands.centroids.shape[1], operands.codec
    if N == 0 or W == 0:
        return torch.zeros(W, E, dtype=dtype, device=grad.device)
    rows = torch.arange(W, device=grad.device)
    query = torch.searchsorted(operands.query_cu_seqlens[1:], rows, right=True, out_int32=True)
    block_e = min(next_power_of_2(E), 128)
    runs = min(cdiv(PROGRAMS, W), cdiv(N, FEWEST_DOCUMENTS))
    partial = torch.empty(runs, W, E, dtype=torch.float32, device=grad.device)
    Launch(
        _maxsim_residual_bwd_kernel, (runs * W, cdiv(E, block_e)),
        N, W, cdiv(N, runs), *grad.stride(),
        E=E, NBITS=codec.nbits, BLOCK_N=16, BLOCK_E=block_e, num_warps=4,
    )(
        grad, argmax, query, bytes_of(operands.query_mask), operands.document_cu_seqlens,
        *operands[1:4], codec.centroids.float(), codec.bucket_weights.float(), partial,
    )  # fmt: skip
    return partial.sum(0).to(dtype)
