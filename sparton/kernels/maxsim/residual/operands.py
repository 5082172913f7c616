"""What the operands of compressed late interaction must look like.

Q queries, N documents, L tokens, T packed tokens, E embedding, C centroids, P residual bytes.
"""

import torch
from torch import Tensor

from sparton.kernels.maxsim.boundaries import equal_cu_seqlens
from sparton.kernels.maxsim.codec import CompressedTokens, ResidualCodec, check_width


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def check_centroids(name: str, centroids: Tensor, E: int) -> None:
    """Raise ValueError unless they have E dimensions, as the queries have; reads no values."""
    if centroids.dim() != 2 or not centroids.is_floating_point():
        raise ValueError(
            f"{name} must be [C, E] of a float dtype, got {centroids.dtype} "
            f"{tuple(centroids.shape)}"
        )
    if centroids.shape[1] != E:
        raise ValueError(f"queries have E = {E}, {name} {centroids.shape[1]}")


def check_codes(name: str, codes: Tensor) -> None:
    """Raise ValueError unless they are integers; reads no values."""
    if codes.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {codes.dtype}")


def check_codec(codec: ResidualCodec, E: int) -> None:
    """Raise ValueError unless the codec restores embeddings of E dimensions; reads no values."""
    count = codec.bucket_weights.numel()
    check_centroids("codec.centroids", codec.centroids, E)
    if codec.bucket_weights.dim() != 1 or count != 2**codec.nbits:
        raise ValueError(
            f"codec.bucket_weights must be [2**nbits], got {tuple(codec.bucket_weights.shape)}"
        )
    check_width(E, codec.nbits)


def check_documents(documents: CompressedTokens, codec: ResidualCodec, shape: torch.Size) -> None:
    """Raise ValueError unless codes, residuals and inverse norms fit; reads no values."""
    codes, residuals, inverse_norms = documents
    P = codec.centroids.shape[1] * codec.nbits // 8
    check_codes("documents.codes", codes)
    if residuals.dtype != torch.uint8 or residuals.shape != (*shape, P):
        raise ValueError(
            f"documents.residuals must be uint8 {(*shape, P)}, {codec.nbits} bits for each of "
            f"{codec.centroids.shape[1]} dimensions, got {residuals.dtype} "
            f"{tuple(residuals.shape)}"
        )
    if inverse_norms is not None and (
        inverse_norms.shape != shape or not inverse_norms.is_floating_point()
    ):
        raise ValueError(
            f"documents.inverse_norms must be a float tensor {tuple(shape)}, got "
            f"{inverse_norms.dtype} {tuple(inverse_norms.shape)}"
        )


def check_queries(queries: Tensor) -> None:
    """Raise ValueError unless the dtype is served on the device."""
    served = [torch.float16, torch.bfloat16, torch.float32]
    if not queries.is_cuda:
        served.append(torch.float64)
    if queries.dtype not in served:
        raise ValueError(
            f"queries must be float16, bfloat16 or float32 (float64 on the CPU), got "
            f"{queries.dtype}"
        )


def check_mask(name: str, mask: Tensor | None, shape: torch.Size) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
        raise ValueError(
            f"{name} must be bool {tuple(shape)}, True for tokens that take part, got "
            f"{mask.dtype} {tuple(mask.shape)}"
        )


def check_devices(**operands: Tensor | None) -> None:
    devices = {name: x.device for name, x in operands.items() if x is not None}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"operands must be on one device, got {places}")


def even_boundaries(count: int, length: int, device: torch.device) -> Tensor:
    """``[count + 1]``: sequences of equal length; int64 where int32 cannot count the tokens."""
    if count * length < 2**31:
        return equal_cu_seqlens(count, length, device)
    return torch.arange(count + 1, device=device) * length
