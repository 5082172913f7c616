"""Builds kernels for a GPU, where there need not be one: python -m tests.kernels.builds 8.6 99

Triton's interpreter knows neither Gluon nor how much shared memory there is. Here the launching
functions run on CPU tensors, and every launch ends when its kernel is compiled. A line of JSON for
each case names its kernels, with their modules, their bytes of shared memory and their columns of
tensor memory. A process of its own, as modules of kernels are imported with or without the
interpreter.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sparton.kernels.encoder_layer import fp8_tiles, gated, gelu, normalization, rotation
from sparton.kernels.encoder_layer.fp8_limits import limits_of
from sparton.kernels.encoder_layer.fp8_operands import Limits
from sparton.kernels.encoder_layer.fp8_tiles import round_tiles
from sparton.kernels.encoder_layer.hopper_products import hopper_linear
from sparton.kernels.hybrid_head.backward import hybrid_head_backward
from sparton.kernels.hybrid_head.forward import hybrid_head_forward
from sparton.kernels.launch import Launch
from sparton.kernels.maxsim import hidden, paths
from sparton.kernels.maxsim.batches import packed_operands, padded_operands
from sparton.kernels.maxsim.hidden_operands import HiddenOperands
from sparton.kernels.maxsim.lists import mark_listed
from sparton.kernels.maxsim.projection import MOST_UNITS, project_tokens_backward
from sparton.kernels.maxsim.residual import forward as residual
from sparton.kernels.maxsim.residual import pair_forward
from sparton.kernels.maxsim.residual.backward import residual_backward, residual_inverse_norms
from sparton.kernels.maxsim.residual.centroid_forward import centroid_forward
from sparton.kernels.maxsim.residual.operands import ResidualOperands
from sparton.kernels.maxsim.topk_keys import keys_beside
from sparton.kernels.segment_max import backward, forward, quantize
from sparton.kernels.segment_max.hopper import HopperConfig
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.sparse_products.kernels import copy_entries
from sparton.kernels.sparse_products.spans import Span
from sparton.kernels.sparse_search.kernels import best_keys_gpu
from sparton.kernels.sparse_search.postings import CPU_BLOCK, GPU_BLOCK, LARGEST_BLOCK, Postings
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.kernels.splade_head.fp8 import rescore
from sparton.kernels.splade_head.sum_backward import splade_head_sum_backward
from sparton.kernels.splade_head.token_topk import MOST_BY_KERNEL
from sparton.kernels.splade_head.token_topk_kernels import largest_of_logits
from sparton.kernels.varlen_attention import forward as attention_kernels
from sparton.kernels.varlen_attention.backward import varlen_attention_backward
from sparton.kernels.varlen_attention.hopper_attention import attention_hopper
from sparton.kernels.varlen_attention.hopper_backward import attention_backward_hopper
from sparton.kernels.varlen_attention.operands import attention_operands
from sparton.kernels.varlen_attention.shares import share_out

# ptxas crashes on some, and of others it makes what happens to be in a register.
CONSTANTS_ROUNDED = re.compile(r"cvt\S+e4m3x2\.f32\s+%rs\d+, (%r\d+), \1;")
ASSERTING = ("_verify_lengths_kernel", "_varlen_attention_fwd_kernel", "_shares_kernel")
BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32


class Driver:
    """In the place of Triton's."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def build(built: list[tuple[str, int, int]], launch: Launch, *tensors: Any) -> None:
    kernel = launch.kernel
    compiled = kernel.warmup(*tensors, *launch.integers, grid=launch.grid, **launch.constants)
    name, ptx = kernel.fn.__name__, compiled.asm["ptx"]
    assert not CONSTANTS_ROUNDED.search(ptx), f"{name} rounds constants"
    listed = dict(zip(kernel.arg_names, tensors)).get("pairs_ptr") is not None
    asserts = launch.constants.get("VERIFY", name in ASSERTING)
    asserts |= listed and name in ("_maxsim_streaming_fwd_kernel", "_maxsim_residual_pairs_kernel")
    rounded = launch.constants.get("enable_fp_fusion") is False
    assert not (rounded and "fma.rn.f32" in ptx), f"{name} does not round products"
    assert not (rounded and ".ftz" in ptx), f"{name} makes small numbers zero"
    assert ("__assertfail" in ptx) == asserts, f"{name} asserts too much or nothing"
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    built.append((f"{kernel.fn.__module__}.{name}", compiled.metadata.shared, tensor_memory))


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
    for need_hidden in (True, False):
        backward.segment_max_backward(
            reps, reps, winners, tokens, rows, cu_seqlens, bias_dtype=None, activation=activation,
            need_hidden=need_hidden,
        )  # fmt: skip


def from_hidden(dtype: torch.dtype, E: int, *, biased: bool = False) -> None:
    queries, tokens, projection, bias = (
        torch.zeros(*sizes, dtype=dtype) for sizes in ((2, 256, E), (600, 768), (E, 768), (E,))
    )
    cu_seqlens = torch.tensor([0, 200, 600], dtype=torch.int32)
    mask = torch.ones(600, dtype=torch.bool)
    layer = (projection, bias if biased else None)
    operands = HiddenOperands(queries, tokens, *layer, cu_seqlens, None, mask)
    for argmax in (True, False):
        hidden.search_hidden(operands, argmax=argmax)


def gradients_from_hidden(E: int) -> None:
    hidden_states, projection = torch.zeros(600, 768, dtype=BF16), torch.zeros(E, 768, dtype=BF16)
    tokens, norms = torch.zeros(600, E, dtype=BF16), torch.zeros(600)
    mask = torch.ones(600, dtype=torch.bool)
    for need_hidden in (True, False):
        kept = (tokens, norms, hidden_states, projection)
        project_tokens_backward(tokens, *kept, need_hidden, not need_hidden, False, mask)


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


def product(dtype: torch.dtype) -> None:
    """Of all queries with all documents, of which masks leave tokens out, and its gradients."""
    queries, documents = torch.zeros(300, 128, dtype=dtype), torch.zeros(600, 128, dtype=dtype)
    bounds = torch.tensor([0, 100, 300]), torch.tensor([0, 200, 600])
    masks = torch.ones(300, dtype=torch.bool), torch.ones(600, dtype=torch.bool)
    operands = packed_operands(queries, documents, *bounds, *masks, "cross")
    _, winners = paths.maxsim_forward_cuda(operands, normalize=True, argmax=True)
    grad = torch.zeros(2, 2)
    paths.maxsim_backward_cuda(grad, winners, operands, normalize=True, backward="auto")


def centroids(W: int) -> None:
    queries, codes = torch.zeros(W, 128, dtype=BF16), torch.zeros(600, dtype=torch.int32)
    bounds = torch.tensor([0, W]), torch.tensor([0, 200, 600])
    mask = torch.ones(600, dtype=torch.bool)
    alone = (codes, None, None, torch.zeros(64, 128), None)
    centroid_forward(ResidualOperands(queries, *alone, *bounds, None, mask), True)


def attention(d: int) -> None:
    states, bounds = torch.zeros(600, 12, d, dtype=BF16), torch.tensor([0, 200, 600]).int()
    for window in (-1, 64):
        operands = attention_operands(states, states, states, bounds, bounds, 400, 400, 0.1, window)
        out, sums = attention_kernels.varlen_attention_forward(operands)
        varlen_attention_backward(states, operands, out, sums)
    varlen_attention_backward(states, operands, out, sums, norms=torch.zeros(3, 12, 600))
    share_out(operands, 64)


def attention_on_hopper(d: int, *, lse: bool) -> None:
    states, bounds = torch.zeros(600, 12, d, dtype=BF16), torch.tensor([0, 200, 600]).int()
    operands = attention_operands(states, states, states, bounds, bounds, 400, 400, 0.1)
    sums = torch.zeros(12, 600) if lse else None
    attention_hopper(operands, states, sums)
    if sums is not None:
        for norms in ((None,) * 3, (sums,) * 3):
            attention_backward_hopper(operands, (states, sums, states), (states,) * 3, norms)


def layer(dtype: torch.dtype, D: int) -> None:
    """What lies between the products of an encoder's layer."""
    states, vector = torch.zeros(600, D, dtype=dtype), torch.zeros(D)
    gelu.gelu_forward(states, vector)
    gelu.gelu_backward(states, states, vector)
    gated.gated_backward(gated.gated_forward(states, None, "gelu"), states, None, "gelu")
    gated.gated_backward(gated.gated_forward(states, states, "silu"), states, states, "silu")
    for d in (D // 12, D // 6):
        heads, angles = states.view(600, -1, d), torch.zeros(600, d)
        for back in (False, True):
            rotation.rotate(heads, None, angles, angles, eps=0.0, copied=2, back=back)
        rotation.rotate(heads, angles[0], angles, angles, eps=1e-6, copied=0, back=False)
        rotation.normed_rotary_backward(heads, heads, angles[0], angles, angles, 1e-6)
    number = torch.zeros((), dtype=torch.int32)
    for bias, seed, centred in ((vector, number, True), (None, None, True), (None, None, False)):
        _, _, *saved = normalization.norm_forward(
            states, bias, states, vector, bias, seed, p=0.1, eps=1e-5, dtype=dtype, copy=BF16,
            save=True, centred=centred,
        )  # fmt: skip
        sum_grad, vectors = (states, 1) if bias is None else (None, 3)
        normalization.norm_backward(
            states, None, sum_grad, *saved, vector, seed, vectors=vectors, p=0.1,
            dtypes=(dtype, dtype),
        )  # fmt: skip
    _, _, *saved = normalization.norm_forward(
        states, None, None, vector, None, None, p=0.0, eps=1e-5, dtype=BF16, copy=None, save=True,
        centred=False,
    )  # fmt: skip
    normalization.norm_backward(
        states, None, None, *saved, vector, None, vectors=1, p=0.0, dtypes=(dtype, None)
    )
    tables = (torch.zeros(70, dtype=torch.int64),) * 2
    normalization.norm_forward(
        states, vector, states, vector, vector, None, p=0.0, eps=1e-5, dtype=dtype, copy=None,
        save=False, tables=tables,
    )  # fmt: skip


def products(dtype: torch.dtype) -> None:
    """With a bias, with GELU, and with the product that its backward reads."""
    x, weight, bias = (
        torch.zeros(*shape, dtype=dtype) for shape in ((600, 768), (1000, 768), (1000,))
    )
    hopper_linear(x, weight, bias)
    hopper_linear(x, weight, bias, gelu=True)
    hopper_linear(x, weight, bias.float(), gelu=True, save=True)


def layer_in_fp8(D: int, copy: torch.dtype | None) -> None:
    """The same where products are in FP8."""
    states, vector, seed = torch.zeros(600, D, dtype=BF16), torch.zeros(D), torch.zeros(()).int()
    limits = Limits(torch.zeros(600), seed.float(), seed.float(), seed.float())
    for x in (states, states.float()):
        round_tiles(x, limits._replace(factor=None, offset=None), turned=True)
    for turned in (True, False):
        round_tiles(states, limits, bias=vector, turned=turned)
    round_tiles(states, limits._replace(norms=None), turned=True)
    for bias in (None, vector):
        others = {"grad": None if bias is None else states, "turned": True, "sums": True}
        round_tiles(states, limits._replace(offset=None), bias=bias, **others)
    options: dict[str, Any] = {"p": 0.1, "limits": limits_of(states)}
    _, _, *saved = normalization.norm_forward(
        states, vector, states, vector, vector, seed, eps=1e-5, copy=copy, save=True,
        dtype=BF16 if copy is None else FP32, **options,
    )  # fmt: skip
    normalization.norm_backward(
        states, None, None, *saved, vector, seed, vectors=3, dtypes=(BF16, BF16), **options
    )


def sums_of_logits(dtype: torch.dtype) -> None:
    """The backward of sum pooling."""
    tokens, rows = torch.zeros(600, 768, dtype=dtype), torch.zeros(1024, 768, dtype=dtype)
    cu_seqlens = torch.tensor([0, 200, 600], dtype=torch.int32)
    splade_head_sum_backward(torch.zeros(2, 1024), tokens, rows, torch.zeros(1024), cu_seqlens)


def largest_of_tokens(V: int, k: int, bias: torch.Tensor | None) -> None:
    terms = torch.zeros(8, k, dtype=torch.int64)
    largest_of_logits(torch.zeros(8, V), bias, torch.zeros(8, k), terms)


def rescored(D: int) -> None:
    tokens, rows = torch.zeros(600, D, dtype=BF16), torch.zeros(1024, D, dtype=BF16)
    reps, winners = torch.zeros(2, 1024), torch.zeros(2, 1024, dtype=torch.int32)
    rescore(reps, winners, tokens, rows, None)


def hybrid(dtype: torch.dtype) -> None:
    tokens, rows = torch.zeros(2, 40, 768, dtype=dtype), torch.zeros(1024, 768, dtype=dtype)
    mask = torch.ones(2, 40, dtype=torch.bool)
    reps, winners = hybrid_head_forward(tokens, rows, None, mask)
    hybrid_head_backward(reps, reps, winners, tokens, rows, torch.zeros(1024))


def compressed(dtype: torch.dtype, nbits: int, E: int = 128) -> None:
    """Documents in residuals, as a GPU unpacks them."""
    W, T, P = 64, 600, E * nbits // 8
    weights = torch.zeros(64, E), torch.zeros(2**nbits)
    documents = torch.zeros(T).int(), torch.zeros(T, P, dtype=torch.uint8), torch.zeros(T)
    bounds, scores = (torch.tensor([0, W]), torch.tensor([0, 200, T])), torch.zeros(1, 2)
    config = residual.FULL_PRECISION if dtype == FP32 else residual.DEFAULT
    unpack = "table" if dtype == FP32 or nbits > 4 else config.unpack
    operands = ResidualOperands(torch.zeros(W, E, dtype=dtype), *documents, *weights, *bounds)
    with patch.object(residual, "choose_unpack", return_value=unpack):
        _, winners = residual.residual_forward(operands, normalize=True)
    residual_inverse_norms(*documents[:2], *weights)
    residual_backward(scores, winners, operands, dtype=dtype)


def compressed_pairs(dtype: torch.dtype, nbits: int, E: int = 128) -> None:
    """Of one query and of several, with residuals, as a GPU unpacks them, and without."""
    W, T = 64, 600
    residuals, codes = torch.zeros(T, E * nbits // 8, dtype=torch.uint8), torch.zeros(T).int()
    stored = (codes, residuals, torch.zeros(T), torch.zeros(64, E), torch.zeros(2**nbits))
    alone = (codes, None, None, torch.zeros(64, E), None)
    pairs, mask = torch.zeros(3, 2, dtype=torch.int32), torch.ones(T, dtype=torch.bool)
    unpack = "table" if dtype == FP32 or nbits > 4 else residual.DEFAULT.unpack
    with patch.object(pair_forward, "choose_unpack", return_value=unpack):
        for Q in (1, 2):
            bounds = torch.arange(Q + 1) * (W // Q), torch.tensor([0, 200, T])
            queries = torch.zeros(W, E, dtype=dtype)
            for documents in (stored, alone):
                operands = ResidualOperands(queries, *documents, *bounds, None, mask)
                pair_forward.pair_forward(operands, pairs, True, dtype)


def entries() -> None:
    """Copies of active entries, the keys of the best documents, and what is in lists."""
    vectors = SparseVectors.from_dense(torch.eye(3, 100))
    for to_matrix in (True, False):
        copy_entries(
            vectors.values, vectors, Span(0, 100, 0, 100), torch.zeros(3, 100), to_matrix=to_matrix
        )
    keys_beside(torch.zeros(2, 70), torch.zeros(2, 5, dtype=torch.int64), 0)
    found, chosen = torch.zeros(2, 9, dtype=torch.uint8), torch.zeros(5, 3, dtype=torch.int64)
    lists = torch.zeros(7, dtype=torch.int32), torch.tensor([0, 3, 7])
    mark_listed(found, chosen, torch.tensor([0, 2, 5], dtype=torch.int32), *lists)


def searched(block: int) -> None:
    postings = Postings(
        torch.zeros(50, dtype=torch.uint16), torch.zeros(50), torch.zeros(101).long(),
        block, 100, block,
    )  # fmt: skip
    queries = SparseVectors.from_dense(torch.eye(3, 100))
    best_keys_gpu(postings, queries, 10, torch.zeros(3).long(), torch.zeros(3 * block))


def listed_pairs(dtype: torch.dtype) -> None:
    queries, documents = torch.zeros(80, 128, dtype=dtype), torch.zeros(600, 128, dtype=dtype)
    bounds = torch.tensor([0, 40, 80]), torch.tensor([0, 200, 600])
    pairs = torch.tensor([[0, 1], [1, 1], [0, 0]])
    operands = packed_operands(queries, documents, *bounds, None, None, pairs, 40)
    _, winners = paths.maxsim_forward_cuda(operands, normalize=True, argmax=True)
    for method in ("lowmem", "unified"):
        grad = torch.zeros(3, 1)
        paths.maxsim_backward_cuda(grad, winners, operands, normalize=True, backward=method)


def cases(capability: tuple[int, int]) -> Iterator[tuple[str, Callable[[], None]]]:
    """What a GPU of this capability runs, with the configurations that it gets by default."""
    if capability[0] == 9:
        yield from hopper_cases()
    for dtype in (BF16, FP32):
        (config, *_) = forward.PORTABLE if dtype == BF16 else forward.FULL_PRECISION
        for pooling, activation in (("max", "relu"), ("max", "none"), ("sum", "log1p_relu")):
            variant = {"pooling": pooling, "activation": activation}
            yield (
                f"head {dtype} {pooling} {activation}",
                partial(head, dtype, 768, config, **variant),
            )
        yield (
            f"sums {dtype}",
            partial(head, dtype, 128, config, summed=32, activation="none", argmax=True),
        )
        yield f"sums of logits {dtype}", partial(sums_of_logits, dtype)
        yield f"hybrid {dtype}", partial(hybrid, dtype)
        yield f"layer {dtype}", partial(layer, dtype, 768)
    if capability >= (8, 9):
        (config,) = forward.PORTABLE_FP8
        yield "head fp8", partial(head, FP8, 768, config)
        yield from rounding_cases()
        for D in (16, 400, 768, 2304, 3072):
            yield f"layer fp8 {D}", partial(layer_in_fp8, D, None if D == 400 else BF16)
        yield "rescored", partial(rescored, 768)
    for nbits in (1, 2, 8):
        yield f"compressed {nbits}", partial(compressed, BF16, nbits)
        yield f"compressed pairs {nbits}", partial(compressed_pairs, BF16, nbits)
    yield f"compressed {FP32}", partial(compressed, FP32, 2)
    yield f"compressed pairs {FP32}", partial(compressed_pairs, FP32, 2)
    yield "entries", entries
    for block in (GPU_BLOCK, CPU_BLOCK, LARGEST_BLOCK):
        yield f"searched {block}", partial(searched, block)
    for V, activation in ((1000, "none"), (6000, "relu")):
        yield f"gradients {V} {activation}", partial(gradients, V, activation)
    for dtype in (BF16, FP32):
        for E in (64, 96, 128, 256, 320, 1024, 4096 // dtype.itemsize):
            if not hidden._select_config(E, dtype.itemsize, torch.device("cpu")):
                continue
            for biased in (False, True)[: 1 + (capability[0] == 9)]:
                name = f"from hidden {dtype} {E}{' biased' * biased}"
                yield name, partial(from_hidden, dtype, E, biased=biased)
        for method in ("lowmem", "unified"):
            name = f"own documents {dtype} {method}"
            yield name, partial(own_documents, dtype, 1024, method)
        yield f"pairs {dtype}", partial(listed_pairs, dtype)
        yield f"product {dtype}", partial(product, dtype)
    for E in (96, MOST_UNITS):
        yield f"gradients from hidden {E}", partial(gradients_from_hidden, E)
    for Lq, pairing in ((40, "cross"), (40, 1), (2, "cross"), (300, "cross")):
        yield f"stated lengths {Lq} {pairing}", partial(stated_lengths, Lq, pairing)
    for V, k in ((30522, 12), (256000, 12), (256000, MOST_BY_KERNEL)):
        yield f"largest of tokens {V} {k}", partial(largest_of_tokens, V, k, torch.zeros(V))
    yield "largest of tokens, without bias", partial(largest_of_tokens, 30522, 12, None)
    for W in (1, 32, 200):
        yield f"centroids {W}", partial(centroids, W)
    for d in (64, 128):
        yield f"attention {d}", partial(attention, d)
    too_large = PortableConfig(False, 128, 128, 128, num_warps=8, num_stages=5)
    yield "too large", partial(head, BF16, 768, too_large)


def rounding_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for by in ("row", "weight_row", "matrix"):
        for D in (1, 100, 128):
            operands = (torch.zeros(n, D, dtype=BF16) for n in (600, 70))
            yield f"rounding {by} {D}", partial(quantize.quantize_operands, *operands, by=by)


def hopper_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every configuration that is meant for Hopper alone."""
    for dtype in (BF16, torch.float16):
        yield f"products {dtype}", partial(products, dtype)
    for d in (32, 64):
        yield f"attention on Hopper {d}", partial(attention_on_hopper, d, lse=True)
        yield f"attention on Hopper {d}, no graph", partial(attention_on_hopper, d, lse=False)
    hopper, maxsim = forward.HOPPER[:2]
    head_fp8, maxsim_fp8 = forward.HOPPER_FP8[:2]
    for D in (128, 768):
        for pooling, activation in (("max", "relu"), ("max", "none"), ("sum", "relu")):
            variant = {"pooling": pooling, "activation": activation}
            config = maxsim if activation == "none" else hopper
            yield f"head {D} {pooling} {activation}", partial(head, BF16, D, config, **variant)
        variant = {"activation": "none", "argmax": False}
        yield f"maxsim {D} fp8", partial(head, FP8, D, maxsim_fp8, **variant)
        yield f"head {D} fp8", partial(head, FP8, D, head_fp8)
    variants = ("max", "relu"), ("max", "none"), ("sum", "log1p_relu")
    for config, (pooling, activation) in zip(forward.HOPPER[2:], variants, strict=True):
        variant = {"pooling": pooling, "activation": activation}
        yield f"portable {pooling} {activation}", partial(head, BF16, 768, config, **variant)
    yield "portable fp8", partial(head, FP8, 768, forward.HOPPER_FP8[2])
    for dtype, config, argmax in (
        (BF16, maxsim, True),
        (BF16, maxsim, False),
        (FP8, maxsim_fp8, False),
    ):
        variant = {"activation": "none", "argmax": argmax}
        for summed in (8, 32):
            sums = partial(head, dtype, 128, config, summed=summed, **variant)
            yield f"sums {dtype} {argmax} {summed}", sums
    for config in (*forward.HOPPER[2:], *forward.HOPPER_FP8[2:]):
        dtype = FP8 if config in forward.HOPPER_FP8 else BF16
        yield f"head {tuple(config)}", partial(head, dtype, 768, config)


def main(capability: tuple[int, int], room: int) -> None:
    """``room``: bytes of shared memory that a block may have."""
    driver.set_active(Driver(capability))
    forward._capability = lambda device: capability
    hidden.shared_memory = lambda device: room
    attention_kernels.JITFunction = ()  # for tensors on a CPU
    for module in (gelu, fp8_tiles, gated):
        module.approximates = lambda x: True
    built: list[tuple[str, int, int]] = []
    Launch.__call__ = lambda *launch: build(built, *launch)  # type: ignore[method-assign]
    for case, run in cases(capability):
        built.clear()
        run()
        sys.stdout.write(json.dumps([case, built]) + "\n")


if __name__ == "__main__":
    name, kib = sys.argv[1:]
    major, minor = map(int, name.split("."))
    main((major, minor), int(kib) * 1024)
