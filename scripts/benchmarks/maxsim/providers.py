"""What is measured against what. A provider is one line of PROVIDERS.

Packages of others are imported when their cell runs; where they are missing, the cell says so.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels import KernelCell
from benchmarks.maxsim import problems
from benchmarks.maxsim.problems import Collection, Problem, project, reference
from benchmarks.maxsim.shapes import (
    BOTH,
    CROSS,
    FORWARD,
    HIDDEN,
    KINDS,
    OWN,
    PACKED,
    RESIDUAL,
    Shape,
)
from sparton.kernels import maxsim as own

Score = Callable[..., Tensor]


def sparton(problem: Problem, **options: Any) -> Score:
    shape, bounds = problem.shape, problem.cu_seqlens
    if problem.collection is not None:
        tokens, codec = problem.collection
        return lambda q: own.maxsim_residual(q, tokens, codec)
    if shape.kind == HIDDEN:
        return own.maxsim_from_hidden
    if bounds is None:
        return partial(own.maxsim, **options)
    starts = query_bounds(shape, bounds)
    longest: dict[str, Any] = {
        "query_max_seqlen": shape.Lq,
        "document_max_seqlen": problem.longest,
    }
    return lambda q, d: own.maxsim_varlen(q.flatten(0, 1), d, starts, bounds, **longest, **options)


def sparton_fp8(problem: Problem, **options: Any) -> Score:
    return partial(own.maxsim_fp8, **options)


def eager(problem: Problem) -> Score:
    """All similarities, accumulated in fp32 and rounded to 16 bits, then maxima and fp32 sums."""
    everything = slice(0, problem.shape.Q if problem.shape.kind == OWN else problem.shape.N)
    return lambda *leaves: reference(problem, leaves, everything)


def compiled(problem: Problem) -> Score:
    return torch.compile(eager(problem), dynamic=False)


def lik(problem: Problem, **options: Any) -> Score:
    import late_interaction_kernels as library

    shape, bounds = problem.shape, problem.cu_seqlens
    if problem.collection is not None:
        return lik_residual(problem.collection, shape)
    if shape.kind == HIDDEN:
        from late_interaction_kernels.fused_head import maxsim_from_hidden

        return maxsim_from_hidden
    if bounds is None:
        return partial(library.maxsim, **options)
    starts = query_bounds(shape, bounds)
    longest = {"max_seqlen_q": shape.Lq, "max_seqlen_d": problem.longest}
    return lambda q, d: library.maxsim_varlen(q.flatten(0, 1), d, starts, bounds, **longest)


def lik_residual(collection: Collection, shape: Shape) -> Score:
    """Its bytes hold the buckets from the lowest bit up, ours from the highest down."""
    from late_interaction_kernels.plaid import maxsim_residual

    codes, residuals, _ = collection.tokens
    numbers = [int(f"{byte:08b}"[::-1], 2) for byte in range(256)]
    table = torch.tensor(numbers, dtype=torch.uint8, device=codes.device)
    mirrored = torch.cat([table[x.long()] for x in residuals.split(500)])
    lengths = torch.full(codes.shape[:1], codes.shape[1], device=codes.device)
    centroids, weights = collection.codec.centroids.bfloat16(), collection.codec.bucket_weights
    return lambda q: maxsim_residual(q, codes, mirrored, lengths, centroids, weights, shape.nbits)


def lik_fp8(problem: Problem) -> Score:
    """Its quantisation is timed as well, as ours is."""
    from late_interaction_kernels import fp8

    def score(queries: Tensor, documents: Tensor) -> Tensor:
        q, d = (fp8.quantize_fp8_per_token(x) for x in (queries, documents))
        return fp8.maxsim_inference_fp8(q[0], d[0], scale_Q=q[1], scale_D=d[1])

    return score


def lik_projected(problem: Problem) -> Score:
    """Projection and normalisation in PyTorch before the kernels."""
    import late_interaction_kernels as library

    return lambda q, hidden, projection: library.maxsim(q, project(hidden, projection))


def flash(problem: Problem) -> Score:
    import flash_maxsim as library

    shape, bounds = problem.shape, problem.cu_seqlens
    shared = shape.kind != OWN
    if bounds is not None:
        longest = problem.longest
        return lambda q, d: library.flash_maxsim_packed(q[0], d, bounds, longest)[None]

    def score(queries: Tensor, documents: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return library.flash_maxsim_batched_train(queries, documents, shared_docs=shared)
        if len(queries) == 1 and shared:
            return library.flash_maxsim(queries[0], documents)[None]
        return library.flash_maxsim_batched(queries, documents, shared_docs=shared)

    return score


def query_bounds(shape: Shape, like: Tensor) -> Tensor:
    return torch.arange(shape.Q + 1, dtype=like.dtype, device=like.device) * shape.Lq


class Provider(NamedTuple):
    """Attributes:
    build: from a problem to a function of its leaves.
    kinds, modes: what it serves.
    ties, scores: what the gate allows it, see problems.allowance.
    package: whose version the record names.
    """

    build: Callable[..., Score]
    kinds: tuple[str, ...] = KINDS
    modes: tuple[str, ...] = (FORWARD, BOTH)
    ties: float = problems.EXACT
    scores: float = problems.SCORES
    package: str = ""


FP8_ERROR = 5e-2
LIK, FLASH = "late-interaction-kernels", "flash-maxsim"
DENSE = (CROSS, OWN)
PROVIDERS = {
    "sparton": Provider(sparton),
    **{
        f"sparton_{backward}": Provider(
            partial(sparton, backward=backward), (*DENSE, PACKED), (BOTH,)
        )
        for backward in ("lowmem", "unified")
    },
    "sparton_fp8_tensor": Provider(
        partial(sparton_fp8, scales="tensor"), (CROSS,), (FORWARD,), scores=FP8_ERROR
    ),
    "sparton_fp8_token": Provider(
        partial(sparton_fp8, scales="token"), (CROSS,), (FORWARD,), scores=FP8_ERROR
    ),
    "eager": Provider(eager, ties=problems.ROUNDED),
    "compiled": Provider(compiled, (*DENSE, PACKED, HIDDEN), ties=problems.ROUNDED),
    "lik": Provider(lik, package=LIK),
    "lik_lowmem": Provider(partial(lik, backward="lowmem"), DENSE, (BOTH,), package=LIK),
    "lik_unified": Provider(partial(lik, backward="unified"), DENSE, (BOTH,), package=LIK),
    "lik_projected": Provider(lik_projected, (HIDDEN,), package=LIK),
    "lik_fp8": Provider(lik_fp8, (CROSS,), (FORWARD,), scores=FP8_ERROR, package=LIK),
    "flash": Provider(flash, (*DENSE, PACKED), package=FLASH),
}
FP8_PROVIDERS = ("sparton_fp8_tensor", "sparton_fp8_token", "lik_fp8")


def serves(name: str, shape: Shape, mode: str) -> bool:
    provider = PROVIDERS[name]
    if shape.kind not in provider.kinds or mode not in provider.modes:
        return False
    if name in FP8_PROVIDERS:
        return shape.fp8
    if shape.kind == RESIDUAL and name == "lik":
        return shape.nbits > 1
    # Its packed kernel is one query's, without a gradient.
    return not (name == "flash" and shape.kind == PACKED and (shape.Q > 1 or mode == BOTH))


def cells(shapes: Mapping[str, Shape], providers: Iterable[str]) -> list[KernelCell]:
    """The cells of these shapes and providers, mode by mode."""
    return [
        KernelCell(name, mode, provider)
        for name, shape in shapes.items()
        for mode in shape.modes
        for provider in providers
        if serves(provider, shape, mode)
    ]
