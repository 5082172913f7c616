"""The operands of a head: random ones of a shape and a pattern.

N sequences, S tokens of the longest, T packed tokens, D hidden, V vocabulary.
"""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.head.suites import PATTERNS, Shape
from sparton.types import TokenBatch

SEED = 0
FAVOURED, FAVOUR = 3, 6.0
SAMPLED_SEQUENCES = 8


class Problem(NamedTuple):
    """hidden ``[T, D]`` and weight ``[V, D]`` bfloat16, bias fp32 ``[V]``, the tokens that hold the
    boundaries, upstream fp32 ``[N, V]``: the gradient that reaches the representations."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    tokens: TokenBatch
    upstream: Tensor


def random_problem(shape: Shape, pattern: str, device: str) -> Problem:
    """Normally distributed operands; equal arguments give equal ones on one kind of device."""
    tokens = random_tokens(shape).to(device)
    active, concentrated = PATTERNS[pattern]
    generator = torch.Generator(device).manual_seed(SEED)
    normal = partial(torch.randn, generator=generator, device=device)
    hidden = normal(tokens.num_tokens, shape.D, dtype=torch.bfloat16)
    if concentrated:
        hidden[tokens.position_ids < FAVOURED] *= FAVOUR
    weight = normal(shape.V, shape.D, dtype=torch.bfloat16) / shape.D**0.5
    bias = torch.full((shape.V,), -_threshold(hidden, weight, tokens, active), device=device)
    upstream = normal(tokens.num_sequences, shape.V)
    return Problem(hidden, weight, bias, tokens, upstream)


def random_tokens(shape: Shape) -> TokenBatch:
    """Random ids in sequences of the shape's lengths, on the CPU."""
    generator = torch.Generator().manual_seed(SEED)
    draws = [
        torch.randint(low, high + 1, (n,), generator=generator) for n, low, high in shape.lengths
    ]
    lengths = torch.cat(draws)
    ids = torch.randint(5, shape.V, (int(lengths.sum()),), generator=generator)
    return TokenBatch.from_lists([part.tolist() for part in ids.split(lengths.tolist())])


def describe_pattern(problem: Problem) -> dict[str, float]:
    """Shares seen in a sample of sequences: entries above 0, and those of them that the sequence's
    three most frequent winners hold."""
    active = won = 0
    for start, stop in _sampled_sequences(problem.tokens):
        logits = problem.hidden[start:stop].float() @ problem.weight.float().T + problem.bias
        maxima, winners = logits.max(0)
        counts = winners[maxima > 0].bincount(minlength=1)
        active += int(counts.sum())
        won += int(counts.topk(min(FAVOURED, counts.numel())).values.sum())
    entries = len(_sampled_sequences(problem.tokens)) * problem.weight.shape[0]
    return {"active_share": active / entries, "top3_share": won / max(active, 1)}


def _threshold(hidden: Tensor, weight: Tensor, tokens: TokenBatch, active: float) -> float:
    """The level that about this share of the maxima exceeds, and all of them where it is 1. In
    fp32: rounded to bfloat16, many maxima would tie with the level."""
    rows = weight.float().T
    maxima = torch.cat(
        [(hidden[a:b].float() @ rows).amax(0) for a, b in _sampled_sequences(tokens)]
    )
    if active == 1:
        return float(maxima.min()) - 1.0
    return float(maxima.kthvalue(max(int((1 - active) * maxima.numel()), 1)).values)


def _sampled_sequences(tokens: TokenBatch) -> list[tuple[int, int]]:
    bounds = list(pairwise(tokens.cu_seqlens.tolist()))
    return bounds[:: -(-len(bounds) // SAMPLED_SEQUENCES)]
