"""What the kernels share: where a program works, and how it reads.

Tq and Tk packed tokens of queries and keys, N sequences, H heads, d the width of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparton.kernels.varlen_attention.operands import AttentionOperands

LOG2_E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """One way to launch a kernel.

    Attributes:
        block_q, block_k: tile of query tokens and key tokens; powers of 2 from 16 on.
        max_registers: of a thread; fewer let more programs share a multiprocessor.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def constants(operands: AttentionOperands, tiling: Tiling) -> dict[str, Any]:
    """The constants that all kernels take."""
    _, H, d = operands.query.shape
    return {
        "SCALE": operands.scale, "WINDOW": operands.window, "H": H, "D": d,
        "BLOCK_Q": tiling.block_q, "BLOCK_K": tiling.block_k, "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages, "maxnreg": tiling.max_registers,
    }  # fmt: skip


def metadata(products: int, tensors: int) -> Callable[..., dict[str, Any]]:
    """For Triton's profiler: useful FLOPs of so many matrix products, and bytes if so many tensors
    were moved once. Reads the lengths, for which it waits for the device."""

    def describe(grid: tuple, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        lengths = [arguments[name].diff() for name in ("query_cu_ptr", "key_cu_ptr")]
        pairs = lengths[0].long() * lengths[1]
        if (window := arguments["WINDOW"]) >= 0:
            reach = (lengths[0].long() - 1).clamp(0, window)
            pairs = lengths[0] * (2 * reach + 1) - reach * (reach + 1)
        H, D, query = arguments["H"], arguments["D"], arguments["query_ptr"]
        return {
            "name": f"{kernel.name} [T={query.shape[0]}, H={H}, D={D}]",
            "flops16": 2 * products * int(pairs.sum()) * H * D,
            "bytes": tensors * query.numel() * query.element_size(),
        }

    return describe


@triton.jit
def locate(query_cu_ptr, key_cu_ptr, num_blocks, H: tl.constexpr):
    """Block and head of this program, then first token and number of tokens of its sequence, among
    queries and among keys. Programs of one head and sequence are neighbours: they share reads."""
    pid = tl.program_id(0)
    problem = pid // num_blocks
    n = problem // H
    first_q = tl.load(query_cu_ptr + n)
    first_k = tl.load(key_cu_ptr + n)
    num_q = tl.load(query_cu_ptr + n + 1) - first_q
    num_k = tl.load(key_cu_ptr + n + 1) - first_k
    return pid % num_blocks, problem % H, first_q, num_q, first_k, num_k


@triton.jit
def within_reach(first, size, count, WINDOW: tl.constexpr):
    """The first and the end of those among ``count`` tokens that any of ``size`` sees, from
    ``first`` on."""
    begin, end = 0, count
    if WINDOW >= 0:
        begin, end = tl.maximum(first - WINDOW, 0), tl.minimum(first + size + WINDOW, count)
    return begin, end


@triton.jit
def sees(real, queries, keys, WINDOW: tl.constexpr):
    """Those that are ``real`` and see each other, at these places in their sequence."""
    if WINDOW >= 0:
        real = real & (tl.abs(queries - keys) <= WINDOW)
    return real


@triton.jit
def rows_at(x_ptr, first, head, stride_t, stride_h, ROWS: tl.constexpr, D: tl.constexpr):
    """Addresses of one head of ROWS tokens from ``first`` on."""
    tokens = first.to(tl.int64) + tl.arange(0, ROWS)
    base = x_ptr + head.to(tl.int64) * stride_h
    return base + tokens[:, None] * stride_t + tl.arange(0, D)[None, :]
