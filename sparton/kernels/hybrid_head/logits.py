"""The first half of Algorithm 2: logits of one vocabulary tile after the other, from the library's
matrix product; and what the operands must look like.

B sequences, S tokens of the longest, D hidden, V vocabulary, C vocabulary rows of a tile.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

TILE_BYTES = 2**26


def check_padded_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor
) -> None:
    """Raise ValueError unless the shapes and dtypes fit together; reads no values."""
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(
            "hidden must be [B, S, D] and weight [V, D] with the same D, got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            "hidden and weight must have the same float dtype, got "
            f"{hidden.dtype} and {weight.dtype}; cast one, or run under torch.autocast"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] = [{weight.shape[0]}], got {tuple(bias.shape)}")
    if mask.dtype != torch.bool or mask.shape != hidden.shape[:2]:
        raise ValueError(
            f"mask must be bool [B, S] = {list(hidden.shape[:2])}, got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )
    if len({x.device for x in (hidden, weight, mask, bias) if x is not None}) > 1:
        raise ValueError(
            f"operands must be on one device, got hidden on {hidden.device}, weight on "
            f"{weight.device}, mask on {mask.device}"
        )


def vocabulary_tile(tokens: int) -> int:
    """C: as many rows as give 64 MiB of 16-bit logits for ``tokens`` = B S tokens, in multiples of
    256 and at least 512."""
    return max(TILE_BYTES // (2 * max(tokens, 1)) // 256 * 256, 512)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.T
    return logits if bias is None else logits + bias


@functools.cache
def _compiled_product() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    return torch.compile(_product, dynamic=True)


def logit_tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tile: int | None
) -> Iterator[tuple[int, Tensor]]:
    """First vocabulary row and logits ``[B, S, C]``, in the dtype of ``hidden``, of every tile.

    The last tile ends at V and overlaps the one before where V is not a multiple of C, so that all
    tiles have one shape and rows that cuBLAS can load by 16 bytes. On a GPU the product and its
    bias go through torch.compile, as in the paper; on a CPU they do not.
    """
    (B, S, D), V = hidden.shape, weight.shape[0]
    C = min(tile or vocabulary_tile(B * S), V)
    product = _compiled_product() if hidden.is_cuda else _product
    rows = hidden.detach().reshape(B * S, D)
    weight = weight.detach()
    if bias is not None:
        bias = bias.detach().to(hidden.dtype)
    for v in range(0, V, C):
        first = min(v, V - C)
        part = slice(first, first + C)
        with torch.no_grad():
            logits = product(rows, weight[part], None if bias is None else bias[part])
        yield first, logits.view(B, S, C)
        del logits
