"""Builds kernels for Hopper, where there need not be one: python -m tests.kernels.hopper_builds

Triton's interpreter knows neither Gluon nor how much shared memory there is. Here the launching
functions run on CPU tensors, and every launch ends when its kernel is compiled. A line of JSON for
each case names its kernels and their bytes of shared memory. A process of its own, as modules of
kernels are imported with or without the interpreter.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sparton.kernels.launch import Launch
from sparton.kernels.maxsim import hidden, paths
from sparton.kernels.maxsim.batches import packed_operands, padded_operands
from sparton.kernels.maxsim.hidden_operands import HiddenOperands
from sparton.kernels.maxsim.projection import MOST_UNITS, project_tokens_backward
from sparton.kernels.maxsim.residual.centroid_forward import centroid_forward
from sparton.kernels.segment_max import backward, forward, quantize
from sparton.kernels.segment_max.hopper import HopperConfig
from sparton.kernels.varlen_attention import forward as attention_kernels
from sparton.kernels.varlen_attention.operands import attention_operands

# ptxas crashes on some, and of others it makes what happens to be in a register.
CONSTANTS_ROUNDED = re.compile(r"cvt\S+e4m3x2\.f32\s+%rs\d+, (%r\d+), \1;")
ASSERTING = ("_verify_lengths_kernel", "_varlen_attention_fwd_kernel")
BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32


class Hopper:
    """In the place of Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def build(built: list[tuple[str, int]], launch: Launch, *tensors: Any) -> None:
    kernel = launch.kernel
    compiled = kernel.warmup(*tensors, *launch.integers, grid=launch.grid, **launch.constants)
    name, ptx = kernel.fn.__name__, compiled.asm["ptx"]
    assert not CONSTANTS_ROUNDED.search(ptx), f"{name} rounds constants"
    listed = dict(zip(kernel.arg_names, tensors)).get("pairs_ptr") is not None
    asserts = launch.constants.get("VERIFY", name in ASSERTING)
    asserts |= listed and name == "_maxsim_streaming_fwd_kernel"
    assert ("__assertfail" in ptx) == asserts, f"{name} asserts too much or nothing"
    built.append((name, compiled.metadata.shared))


def head(dtype: torch.dtype, D: int, config: forward.Config, **options: Any) -> None:
    tokens, rows = torch.zeros(600, D, dtype=dtype), torch.zeros(1024, D, dtype=dtype)
    cu_seqlens = torch.tensor([0, 200, 600], dtype=torch.int32)
    scales = None
    if dtype == FP8:
        # As it is chosen: factors of the tokens are the portable kernel's.
        of_tokens = None if isinstance(config, HopperConfig) else torch.ones(600)
        scales = (of_tokens, torch.ones(1024))
    forward.segment_max_forward(
        tokens, rows, None, cu_seqlens, config=config, scales=scales, **options
    )


def gradients(V: int, activation: str) -> None:
    tokens, rows = torch.zeros(600, 128, dtype=BF16), torch.zeros(V, 128, dtype=BF16)
    cu_seqlens = torch.tensor([0, 200, 600], dtype=torch.int32)
    reps, winners = torch.zeros(2, V), torch.zeros(2, V, dtype=torch.int32)
    backward.segment_max_backward(
        reps, reps, winners, tokens, rows, cu_seqlens, bias_dtype=None, activation=activation
    )


def from_hidden(
    dtype: torch.dtype, E: int, *, biased: bool = False, config: hidden.HiddenConfig | None = None
) -> None:
    queries, tokens, projection, bias = (
        torch.zeros(*sizes, dtype=dtype) for sizes in ((2, 256, E), (600, 768), (E, 768), (E,))
    )
    cu_seqlens = torch.tensor([0, 200, 600], dtype=torch.int32)
    mask = torch.ones(600, dtype=torch.bool)
    layer = (projection, bias if biased else None)
    operands = HiddenOperands(queries, tokens, *layer, cu_seqlens, None, mask)
    for argmax in (True, False):
        hidden.search_hidden(operands, argmax=argmax, config=config)


def gradients_from_hidden(E: int) -> None:
    hidden_states, projection = torch.zeros(600, 768, dtype=BF16), torch.zeros(E, 768, dtype=BF16)
    tokens, norms = torch.zeros(600, E, dtype=BF16), torch.zeros(600)
    for need_hidden in (True, False):
        kept = (tokens, norms, hidden_states, projection)
        project_tokens_backward(tokens, *kept, need_hidden, False, False)


def own_documents(dtype: torch.dtype, E: int, method: str) -> None:
    queries, documents = torch.zeros(2, 40, E, dtype=dtype), torch.zeros(2, 3, 50, E, dtype=dtype)
    masks = (torch.ones(2, 40, dtype=torch.bool), torch.ones(2, 3, 50, dtype=torch.bool))
    operands = padded_operands(queries, documents, *masks)
    _, winners = paths.maxsim_forward_cuda(operands, normalize=True, argmax=True)
    grad = torch.zeros(2, 3)
    paths.maxsim_backward_cuda(grad, winners, operands, normalize=True, backward=method)


def stated_lengths(Lq: int, pairing: str | int) -> None:
    """Of two queries and documents, for a product or not."""
    queries, documents = torch.zeros(2 * Lq, 128, dtype=BF16), torch.zeros(600, 128, dtype=BF16)
    bounds = torch.tensor([0, Lq, 2 * Lq]), torch.tensor([0, 200, 600])
    operands = packed_operands(queries, documents, *bounds, None, None, pairing, Lq, 400)
    paths.maxsim_forward_cuda(operands, normalize=False, argmax=True)


def centroids(W: int) -> None:
    queries, codes = torch.zeros(W, 128, dtype=BF16), torch.zeros(600, dtype=torch.int32)
    bounds = torch.tensor([0, W]), torch.tensor([0, 200, 600])
    mask = torch.ones(600, dtype=torch.bool)
    centroid_forward(queries, codes, torch.zeros(64, 128), *bounds, None, mask, True)


def attention(d: int) -> None:
    states, bounds = torch.zeros(600, 12, d, dtype=BF16), torch.tensor([0, 200, 600]).int()
    operands = attention_operands(states, states, states, bounds, bounds, 400, 400, 0.1)
    attention_kernels.varlen_attention_forward(operands)


def listed_pairs(dtype: torch.dtype) -> None:
    queries, documents = torch.zeros(80, 128, dtype=dtype), torch.zeros(600, 128, dtype=dtype)
    bounds = torch.tensor([0, 40, 80]), torch.tensor([0, 200, 600])
    pairs = torch.tensor([[0, 1], [1, 1], [0, 0]])
    operands = packed_operands(queries, documents, *bounds, None, None, pairs, 40)
    _, winners = paths.maxsim_forward_cuda(operands, normalize=True, argmax=True)
    for method in ("lowmem", "unified"):
        grad = torch.zeros(3, 1)
        paths.maxsim_backward_cuda(grad, winners, operands, normalize=True, backward=method)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    hopper, hopper_fp8 = forward.HOPPER[0], forward.HOPPER_FP8[0]
    for D in (128, 768):
        for pooling, activation in (("max", "relu"), ("max", "none"), ("sum", "relu")):
            variant = {"pooling": pooling, "activation": activation}
            yield f"head {D} {pooling} {activation}", partial(head, BF16, D, hopper, **variant)
        variant = {"activation": "none", "argmax": False}
        yield f"head {D} fp8", partial(head, FP8, D, hopper_fp8, **variant)
    for dtype, config, argmax in (
        (BF16, hopper, True),
        (BF16, hopper, False),
        (FP8, hopper_fp8, False),
    ):
        variant = {"activation": "none", "argmax": argmax}
        for summed in (8, 32):
            sums = partial(head, dtype, 128, config, summed=summed, **variant)
            yield f"sums {dtype} {argmax} {summed}", sums
    for config in (*forward.HOPPER[1:], *forward.HOPPER_FP8[1:]):
        dtype = FP8 if config in forward.HOPPER_FP8 else BF16
        yield f"head {tuple(config)}", partial(head, dtype, 768, config)
    for V, activation in ((1000, "none"), (6000, "relu")):
        yield f"gradients {V} {activation}", partial(gradients, V, activation)
    for by in ("row", "matrix"):
        for D in (1, 100, 128):
            operands = (torch.zeros(n, D, dtype=BF16) for n in (600, 70))
            yield f"rounding {by} {D}", partial(quantize.quantize_operands, *operands, by=by)
    for dtype in (BF16, FP32):
        for E in (64, 96, 128, 256, 320, 1024, 4096 // dtype.itemsize):
            for biased in (False, True):
                name = f"from hidden {dtype} {E}{' biased' * biased}"
                yield name, partial(from_hidden, dtype, E, biased=biased)
        for method in ("lowmem", "unified"):
            name = f"own documents {dtype} {method}"
            yield name, partial(own_documents, dtype, 1024, method)
        yield f"pairs {dtype}", partial(listed_pairs, dtype)
    for E in (96, MOST_UNITS):
        yield f"gradients from hidden {E}", partial(gradients_from_hidden, E)
    for Lq, pairing in ((40, "cross"), (40, 1), (2, "cross"), (300, "cross")):
        yield f"stated lengths {Lq} {pairing}", partial(stated_lengths, Lq, pairing)
    for W in (1, 32, 200):
        yield f"centroids {W}", partial(centroids, W)
    for d in (64, 128):
        yield f"attention {d}", partial(attention, d)
    yield "too large", partial(from_hidden, BF16, 1024, config=hidden.HiddenConfig())


def main() -> None:
    driver.set_active(Hopper())
    forward._capability = lambda device: (9, 0)
    attention_kernels.JITFunction = ()  # for tensors on a CPU
    built: list[tuple[str, int]] = []
    Launch.__call__ = lambda *launch: build(built, *launch)  # type: ignore[method-assign]
    for case, run in cases():
        built.clear()
        run()
        sys.stdout.write(json.dumps([case, built]) + "\n")


if __name__ == "__main__":
    main()
