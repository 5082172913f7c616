"""What the operands must look like; shared by CPU and GPU versions."""

import torch
from torch import Tensor

from sparton.kernels.boundaries import check_rows


def check_operands(hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless the shapes and dtypes fit together; reads no values."""
    if hidden.dim() != 2 or weight.dim() != 2 or not hidden.shape[1] == weight.shape[1] > 0:
        raise ValueError(
            "hidden [T, D] and weight [V, D] must be matrices with the same D > 0, got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    check_rows("hidden states", hidden.shape[0])
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            "hidden and weight must have the same float dtype, got "
            f"{hidden.dtype} and {weight.dtype}; cast one, or run under torch.autocast"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"bias must be [V] = [{weight.shape[0]}] of a float dtype, got {bias.dtype} "
            f"{tuple(bias.shape)}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"cu_seqlens must be int32 [N + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    device = hidden.device
    if not (
        device == weight.device == cu_seqlens.device and (bias is None or bias.device == device)
    ):
        raise ValueError(
            f"operands must be on one device, got hidden on {device}, weight on "
            f"{weight.device}, cu_seqlens on {cu_seqlens.device}"
        )


def num_rows(x: Tensor) -> int:
    """How many rows a matrix has, or a tensor whose rows lie along several axes."""
    return x.shape[:-1].numel()


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence that each token belongs to, int32 ``[T]``."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True)


def check_fp8(hidden: Tensor) -> None:
    """Raise ValueError unless FP8 serves operands of this dtype on this device."""
    if hidden.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"fp8=True takes float16 or bfloat16 operands, got {hidden.dtype}; run under "
            "torch.autocast, or leave fp8 off"
        )
    if hidden.is_cuda:
        capability = torch.cuda.get_device_capability(hidden.device)
        if capability < (8, 9):
            raise ValueError(
                "fp8=True needs a GPU of compute capability 8.9 or later (Ada, Hopper), got "
                f"{'.'.join(map(str, capability))} of {torch.cuda.get_device_name(hidden.device)}; "
                "leave fp8 off"
            )
