"""What a head is judged by: results against fp32 truth, eager bfloat16 as the measure.

N sequences, T packed tokens, D hidden, V vocabulary.

Truth and allowance are computed once per problem, sequence by sequence (the logits of all would
not fit). Compared are representations and gradients, and
two quantities that do not depend on which of two nearly equal tokens won, so that their allowance
is tight: the sum of dhidden over each sequence, and the product of each row of dweight with that
row of the weights.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gate import Errors, Results, relative_errors
from benchmarks.head.problems import Problem, describe_pattern
from sparton.kernels.splade_head import splade_head_reference
from sparton.models.heads import EagerHead
from sparton.types import TokenBatch

Run = Callable[..., Tensor]
CHUNK_TOKENS = 8192
KEPT_ELEMENTS = 2**24
STRIDES = (1, 5, 11, 23, 47, 97, 199, 397, 797)
# A gradient rounded to bfloat16 once may differ by this, however small eager's own error is.
FLOOR = 2e-3
# Rounding differs from head to head.
SLACK = 1.1
# Whatever slack a head has: gradients of zero have an error of 1, those of wrong winners more.
CEILING = 0.7
WORST = "reps_max"
# What alone depends on which of two nearly equal tokens won.
NEAR_TIES = ("dhidden", "dweight")


class Truth(NamedTuple):
    """What an exact head gives, on the CPU, the errors of the eager head in bfloat16, and what else
    is known of a problem."""

    results: Results
    eager: Errors
    facts: dict[str, float]

    @classmethod
    def of(cls, exact: Results, eager: Results, facts: dict[str, float]) -> "Truth":
        return cls({name: x.cpu() for name, x in exact.items()}, errors(eager, exact), facts)


class Work(NamedTuple):
    """What is timed of a cell, its results, and the tokens it runs on."""

    timed: Callable[[], Any]
    results: Callable[[], Results]
    tokens: TokenBatch


def reference(hidden: Tensor, weight: Tensor, bias: Tensor, tokens: TokenBatch) -> Tensor:
    return splade_head_reference(hidden, weight, bias, tokens.cu_seqlens)


def gradients(head: Run, problem: Problem) -> tuple[Tensor, ...]:
    """reps, dhidden, dweight, dbias of a head."""
    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    reps = head(*leaves, problem.tokens)
    return reps.detach(), *torch.autograd.grad(reps, leaves, problem.upstream.to(reps.dtype))


def in_chunks(head: Run, problem: Problem, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """reps, dhidden, dweight, dbias at some precision, a few sequences at a time; the chunks'
    gradients are summed in fp32."""
    weight, bias = (x.detach().to(dtype) for x in problem[1:3])
    like = (problem.upstream, *problem[:3])
    reps, dhidden, dweight, dbias = (torch.zeros_like(x, dtype=torch.float32) for x in like)
    bounds, count = problem.tokens.cu_seqlens.tolist(), problem.tokens.num_sequences
    step = max(CHUNK_TOKENS // problem.tokens.max_seqlen, 1)
    for first in range(0, count, step):
        last = min(first + step, count)
        own = slice(bounds[first], bounds[last])
        tokens, hidden = problem.tokens.select(first, last), problem.hidden[own].to(dtype)
        part = Problem(hidden, weight, bias, tokens, problem.upstream[first:last])
        reps[first:last], dhidden[own], *shared = gradients(head, part)
        dweight += shared[0]
        dbias += shared[1]
    return reps, dhidden, dweight, dbias


def make_truth(problem: Problem) -> Truth:
    exact = results(problem, *in_chunks(reference, problem, torch.float32))
    eager = results(problem, *in_chunks(EagerHead(), problem, torch.bfloat16))
    return Truth.of(exact, eager, describe_pattern(problem))


def results(problem: Problem, reps: Tensor, *grads: Tensor) -> Results:
    """What is compared of a head's results; without gradients, the representations alone."""
    found = {"reps": _sample(reps)}
    if grads:
        dhidden, dweight, dbias = grads
        bounds = pairwise(problem.tokens.cu_seqlens.tolist())
        sums = [dhidden[a:b].sum(0, dtype=torch.float32) for a, b in bounds]
        rows = zip(dweight.split(CHUNK_TOKENS), problem.weight.split(CHUNK_TOKENS), strict=True)
        products = [(d.float() * w.float()).sum(1) for d, w in rows]
        found |= {"dhidden": _sample(dhidden), "dweight": _sample(dweight), "dbias": dbias.float()}
        found |= {"dhidden_sums": torch.stack(sums), "dweight_products": torch.cat(products)}
    return found


def errors(actual: Results, truth: Results) -> Errors:
    """:func:`relative_errors`, and the largest difference of a representation."""
    found = relative_errors(actual, truth)
    if "reps" in actual:
        found[WORST] = float((actual["reps"] - truth["reps"]).abs().max())
    return found


def allowance(
    eager: Errors,
    slack: float = SLACK,
    worst_slack: float = SLACK,
    rounding: float = SLACK,
) -> Errors:
    """The largest errors that pass: ``rounding`` times eager's and FLOOR.

    Args:
        eager: errors of the eager head.
        slack: in place of ``rounding`` for :data:`NEAR_TIES`, up to CEILING.
        worst_slack: in place of it for the largest difference of a representation.
        rounding: for everything else.
    """
    allowed = {name: rounding * error + FLOOR for name, error in eager.items()}
    for name in NEAR_TIES:
        if name in eager:
            usual = SLACK * eager[name] + FLOOR
            allowed[name] = max(usual, min(slack * eager[name] + FLOOR, CEILING))
    if WORST in eager:
        allowed[WORST] = worst_slack * eager[WORST] + FLOOR
    return allowed


def _sample(x: Tensor) -> Tensor:
    """fp32 elements of x, all or evenly spread ones that touch every row."""
    least = math.ceil(x.numel() / KEPT_ELEMENTS)
    stride = next((stride for stride in STRIDES if stride >= least), STRIDES[-1])
    return x.flatten()[::stride].float()
