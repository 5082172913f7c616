"""What compressed late interaction is given: the one form that every version of it takes.

Q queries, N documents, T packed document tokens, W packed query tokens, E embedding, C centroids,
P bytes of a token's residual.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparton.kernels.boundaries import check_boundaries
from sparton.kernels.maxsim.batches import listed_pairs
from sparton.kernels.maxsim.codec import ResidualCodec, check_width
from sparton.kernels.maxsim.operands import check_mask

SERVED = (torch.float16, torch.bfloat16, torch.float32)


class ResidualOperands(NamedTuple):
    """Query tokens, and documents whose tokens are centroids with residuals or without.

    Attributes:
        queries: ``[W, E]`` float16, bfloat16 or float32 (float64 on the CPU).
        codes: int32 or int64 ``[T]``, centroid ids.
        residuals: uint8 ``[T, P]``; None where tokens are taken for their centroids.
        inverse_norms: float16 or fp32 ``[T]`` to scale restored tokens by, or None.
        centroids: ``[C, E]`` of a float dtype.
        bucket_weights: ``[2**nbits]`` of a float dtype; None without residuals.
        query_cu_seqlens: int32 or int64 ``[Q + 1]``, ascending from 0 to W.
        document_cu_seqlens: int32 or int64 ``[N + 1]``, ascending from 0 to T.
        query_mask, document_mask: bool ``[W]`` and ``[T]``, True for tokens that take part; None
            for all.
    """

    queries: Tensor
    codes: Tensor
    residuals: Tensor | None
    inverse_norms: Tensor | None
    centroids: Tensor
    bucket_weights: Tensor | None
    query_cu_seqlens: Tensor
    document_cu_seqlens: Tensor
    query_mask: Tensor | None = None
    document_mask: Tensor | None = None

    @property
    def scores_shape(self) -> tuple[int, int]:
        """``(Q, N)``."""
        return self.query_cu_seqlens.shape[0] - 1, self.document_cu_seqlens.shape[0] - 1

    @property
    def codec(self) -> ResidualCodec:
        """What restores the tokens. That needs no cut-offs: weights are in their place."""
        assert self.bucket_weights is not None
        return ResidualCodec(self.centroids, self.bucket_weights, self.bucket_weights)

    def flat(self) -> "ResidualOperands":
        """Tokens of padded batches, which lie along two axes, along one."""
        tokens = (None if x is None else x.flatten(0, 1) for x in self[:4])
        masks = (None if x is None else x.flatten() for x in self[8:])
        return ResidualOperands._make((*tokens, *self[4:8], *masks))

    def contiguous(self) -> "ResidualOperands":
        return ResidualOperands._make(None if x is None else x.contiguous() for x in self)


def check_operands(operands: ResidualOperands, pairing: str | Tensor = "cross") -> None:
    """Raise ValueError unless padded or packed operands fit together; reads no values."""
    queries, codes, residuals, _, centroids, _, *bounds = operands[:8]
    served = SERVED if queries.is_cuda else (*SERVED, torch.float64)
    if queries.dtype not in served:
        raise ValueError(
            "queries must be float16, bfloat16 or float32 (float64 on the CPU), got "
            f"{queries.dtype}"
        )
    documents, codec = ("", "") if residuals is None else ("documents.", "codec.")
    E = queries.shape[-1]
    if centroids.dim() != 2 or not centroids.is_floating_point():
        raise ValueError(
            f"{codec}centroids must be [C, E] of a float dtype, got {centroids.dtype} "
            f"{tuple(centroids.shape)}"
        )
    if centroids.shape[1] != E:
        raise ValueError(f"queries have E = {E}, {codec}centroids {centroids.shape[1]}")
    if codes.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{documents}codes must be int32 or int64, got {codes.dtype}")
    if residuals is not None:
        _check_residuals(operands, residuals)
    for name, cu_seqlens in zip(("query_cu_seqlens", "document_cu_seqlens"), bounds):
        check_boundaries(name, cu_seqlens)
    check_mask("query_mask", operands.query_mask, queries.shape[:-1])
    check_mask("document_mask", operands.document_mask, codes.shape)
    given = {**operands._asdict(), "pairing": pairing}
    devices = {name: x.device for name, x in given.items() if isinstance(x, Tensor)}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"operands must be on one device, got {places}")


def _check_residuals(operands: ResidualOperands, residuals: Tensor) -> None:
    """That the codec is whole, and residuals and inverse norms are those of the codes."""
    weights, nbits = operands.codec.bucket_weights, operands.codec.nbits
    if weights.dim() != 1 or weights.numel() != 2**nbits:
        raise ValueError(f"codec.bucket_weights must be [2**nbits], got {tuple(weights.shape)}")
    E, shape = operands.queries.shape[-1], operands.codes.shape
    check_width(E, nbits)
    expected = (*shape, E * nbits // 8)
    if residuals.dtype != torch.uint8 or residuals.shape != expected:
        raise ValueError(
            f"documents.residuals must be uint8 {expected}, {nbits} bits for each of {E} "
            f"dimensions, got {residuals.dtype} {tuple(residuals.shape)}"
        )
    norms = operands.inverse_norms
    if norms is not None and (norms.shape != shape or not norms.is_floating_point()):
        raise ValueError(
            f"documents.inverse_norms must be a float tensor {tuple(shape)}, got {norms.dtype} "
            f"{tuple(norms.shape)}"
        )


def check_pairing(pairing: str | Tensor, operands: ResidualOperands) -> Tensor | None:
    """A list of pairs as the kernels read it; None for query p and document p.

    Raises:
        ValueError: no such pairing, or as many queries as documents are not there.
    """
    if isinstance(pairing, Tensor):
        return listed_pairs(pairing)
    if pairing != "pairs":
        raise ValueError(
            f'pairing must be "cross", "pairs" or a list of pairs [P, 2], got {pairing!r}'
        )
    Q, N = operands.scores_shape
    if Q != N:
        raise ValueError(f'pairing="pairs" of {Q} queries needs {Q} documents, got {N}')
    return None
