"""Operands, the results that an exact provider gives, and how far others may differ from them."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.gate import Errors, Results, relative_errors
from benchmarks.maxsim.shapes import CENTROIDS, HIDDEN, OWN, PACKED, RESIDUAL, Shape
from sparton.kernels.maxsim import CompressedTokens, ResidualCodec, decompress
from sparton.kernels.maxsim.codec import with_inverse_norms

SIMILARITIES_AT_ONCE = 2**27
SPREAD, LONGEST = 0.8, 8
# Of the norm of the truth; those of a query's or a document's gradient that near-ties leave alone.
SCORES, UNTIED = 5e-3, 1e-2
# Of the largest score.
WORST = 2e-2
# Of the gradient's norm: similarities in fp32 tie rarely, those rounded to 16 bits often. Zeros
# instead of a gradient have an error of 1.
EXACT, ROUNDED = 0.1, 0.4


class Collection(NamedTuple):
    """Compressed documents ``[N, Ld]``, and how to read them."""

    tokens: CompressedTokens
    codec: ResidualCodec


class Problem(NamedTuple):
    """Operands of one shape, bfloat16 of unit length.

    Attributes:
        leaves: queries ``[Q, Lq, E]`` and what else has a gradient: documents ``[N, Ld, E]``
            (``[Q, K, Ld, E]``, packed ``[T, E]``), or hidden states ``[N, Ld, H]`` and projection
            ``[E, H]``; nothing for compressed documents.
        upstream: gradient of the scores, fp32 ``[Q, N]``.
        cu_seqlens: int32 ``[N + 1]`` of packed documents.
        longest: tokens of the longest document.
        collection: compressed documents.
    """

    shape: Shape
    leaves: tuple[Tensor, ...]
    upstream: Tensor
    longest: int
    cu_seqlens: Tensor | None = None
    collection: Collection | None = None

    def tokens(self) -> int:
        """Tokens of all documents."""
        if self.collection is not None:
            return self.collection.tokens.codes.numel()
        return self.leaves[1].numel() // self.leaves[1].shape[-1]

    def operand_bytes(self) -> int:
        compressed = () if self.collection is None else self.collection.tokens
        tensors = (x for x in (*self.leaves, *compressed) if x is not None)
        return sum(x.numel() * x.element_size() for x in tensors)


def make_problem(shape: Shape, device: str) -> Problem:
    generator = torch.Generator(device).manual_seed(0)

    def unit(*sizes: int) -> Tensor:
        return normalize(torch.randn(*sizes, generator=generator, device=device), dim=-1).bfloat16()

    queries = unit(shape.Q, shape.Lq, shape.E)
    upstream = torch.randn(shape.Q, shape.N, generator=generator, device=device)
    if shape.kind == RESIDUAL:
        collection = _collection(shape, generator, device)
        return Problem(shape, (queries,), upstream, shape.Ld, None, collection)
    if shape.kind == PACKED:
        noise = torch.randn(shape.N, generator=generator, device=device)
        lengths = (shape.Ld * (SPREAD * noise).exp()).long().clamp(1, LONGEST * shape.Ld)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        documents = unit(int(cu_seqlens[-1]), shape.E)
        return Problem(shape, (queries, documents), upstream, int(lengths.max()), cu_seqlens)
    if shape.kind == HIDDEN:
        leaves = (queries, unit(shape.N, shape.Ld, shape.H), unit(shape.E, shape.H))
        return Problem(shape, leaves, upstream, shape.Ld)
    own = (shape.Q,) if shape.kind == OWN else ()
    documents = unit(*own, shape.N, shape.Ld, shape.E)
    return Problem(shape, (queries, documents), upstream, shape.Ld)


def _collection(shape: Shape, generator: torch.Generator, device: str) -> Collection:
    """Random codes and buckets around random centroids: what it costs does not depend on them."""
    number = min(CENTROIDS, shape.N * 64)
    centroids = torch.randn(number, shape.E, generator=generator, device=device)
    centroids = normalize(centroids, dim=1)
    quantiles = (torch.arange(2**shape.nbits, device=device) + 0.5) / 2**shape.nbits
    weights = 0.05 * 2**0.5 * torch.erfinv(2 * quantiles - 1)
    codec = ResidualCodec(centroids, (weights[1:] + weights[:-1]) / 2, weights)
    draw = partial(torch.randint, generator=generator, device=device)
    codes = draw(number, (shape.N, shape.Ld), dtype=torch.int32)
    residuals = draw(256, (shape.N, shape.Ld, shape.E * shape.nbits // 8), dtype=torch.uint8)
    return Collection(with_inverse_norms(codec, CompressedTokens(codes, residuals)), codec)


def padded(documents: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Packed documents as ``[N, longest, E]``, and the mask of their tokens ``[N, longest]``."""
    positions = torch.arange(longest, device=documents.device)
    mask = positions < cu_seqlens.diff()[:, None]
    rows = (cu_seqlens[:-1, None] + positions).clamp_max(len(documents) - 1)
    return documents[rows], mask


def project(hidden: Tensor, projection: Tensor) -> Tensor:
    return normalize(hidden @ projection.T, dim=-1)


def reference(problem: Problem, leaves: tuple[Tensor, ...], part: slice) -> Tensor:
    """Scores of some documents in the precision of the leaves, differentiable; OWN documents are
    chosen by their query."""
    queries, mask = leaves[0], None
    if problem.collection is not None:
        codes, residuals, _ = problem.collection.tokens
        chosen = CompressedTokens(codes[part], residuals[part])
        documents = decompress(problem.collection.codec, chosen).to(queries)
        queries = normalize(queries, dim=-1)
    elif problem.shape.kind == HIDDEN:
        documents = project(leaves[1][part], leaves[2])
    elif problem.cu_seqlens is not None:
        bounds = problem.cu_seqlens[part.start : part.stop + 1]
        documents, mask = padded(leaves[1], bounds, problem.longest)
    else:
        documents = leaves[1][part]
    pairs = "qse,qkte->qkst" if problem.shape.kind == OWN else "qse,nte->qnst"
    queries = queries[part] if problem.shape.kind == OWN else queries
    similarities = torch.einsum(pairs, queries, documents)
    if mask is not None:
        similarities = similarities.masked_fill(~mask[:, None], -torch.inf)
    return similarities.max(-1).values.float().sum(-1)


def truth(problem: Problem, gradients: bool) -> Results:
    """Scores and gradients in fp32, a few documents at a time."""
    shape = problem.shape
    leaves = tuple(x.float().requires_grad_(gradients) for x in problem.leaves)
    own = shape.kind == OWN
    rows, columns = (shape.Q, shape.N) if own else (shape.N, shape.Q)
    step = max(SIMILARITIES_AT_ONCE // (columns * shape.Lq * problem.longest), 1)
    scores = torch.zeros_like(problem.upstream)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        where = (part, slice(None)) if own else (slice(None), part)
        found = reference(problem, leaves, part)
        scores[where] = found.detach()
        if gradients:
            found.backward(problem.upstream[where])
    return compared(problem, scores, *(x.grad for x in leaves if x.grad is not None))


def compared(problem: Problem, scores: Tensor, *grads: Tensor) -> Results:
    """What is compared of a provider's results.

    Near-ties send a gradient to another token. Left alone by that are the products of a query
    token with its gradient, and the sum of the gradients of a document's tokens; nearly so each
    gradient's norm.
    """
    found = {"scores": scores.float().reshape(problem.upstream.shape)}
    for name, grad in zip(("queries", "documents", "projection"), grads):
        found[name] = grad.float()
        found[f"{name}_norm"] = grad.float().norm()
    if grads:
        found["query_products"] = (grads[0].float() * problem.leaves[0].float()).sum(-1)
    if grads and problem.shape.kind != HIDDEN and problem.cu_seqlens is None:
        found["document_sums"] = grads[1].float().sum(-2)
    return found


def errors(actual: Results, truth: Results) -> Errors:
    """Norms of the differences relative to the truth's, and the largest difference of a score."""
    found = relative_errors(actual, truth)
    worst = (actual["scores"] - truth["scores"]).abs().max()
    found["scores_max"] = float(worst / truth["scores"].abs().max().clamp_min(1e-30))
    return found


def allowance(found: Errors, *, ties: float = EXACT, scores: float = SCORES) -> Errors:
    """The largest errors that pass: ``ties`` for elements of gradients, ``scores`` for scores."""
    fixed = {"scores": scores, "scores_max": max(WORST, 4 * scores)}
    elements = ("queries", "documents", "projection")
    return {n: fixed.get(n, ties if n in elements else UNTIED) for n in found}
