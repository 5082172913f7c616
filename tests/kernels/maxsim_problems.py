"""Problems for MaxSim. Q queries, C columns of scores, T packed tokens, E embedding."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_length

from sparton.kernels.maxsim import maxsim_reference
from sparton.kernels.maxsim.operands import MaxSimOperands
from tests.kernels.problems import error

QUERY_LENGTHS = (5, 0, 17, 1)
DOCUMENT_LENGTHS = (3, 40, 0, 1, 16, 33, 7, 2)


def boundaries(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make_problem(
    query_lengths: tuple[int, ...],
    document_lengths: tuple[int, ...],
    E: int,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    per_query: int | None = None,
    masked: bool = True,
) -> MaxSimOperands:
    """Masks have holes, and leave out the whole of the first query and the first document."""
    generator = torch.Generator().manual_seed(E + sum(document_lengths))
    tokens, bounds, masks = [], [], []
    for lengths in (query_lengths, document_lengths):
        tokens.append(torch.randn(sum(lengths), E, generator=generator).to(device, dtype))
        bounds.append(boundaries(lengths, device))
        mask = torch.rand(sum(lengths), generator=generator) > 0.3
        mask[: lengths[0] if lengths else 0] = False
        masks.append(mask.to(device) if masked else None)
    return MaxSimOperands(*tokens, *bounds, *masks, per_query)


def upstream_for(problem: MaxSimOperands) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(problem.scores_shape, generator=generator).to(problem.queries.device)


def with_gradients(
    problem: MaxSimOperands, upstream: Tensor, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, ...]:
    """Scores and gradients of the reference at some precision."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in problem[:2]]
    scores = maxsim_reference(*leaves, *problem[2:6], per_query=problem.per_query, **options)
    if not scores.requires_grad:
        return scores, *(torch.zeros_like(x) for x in leaves)
    gradients = torch.autograd.grad(scores, leaves, upstream.to(dtype), materialize_grads=True)
    return scores.detach(), *gradients


def winners(problem: MaxSimOperands, **options: Any) -> Tensor:
    """First rows of documents with the largest similarity in float64, int32 ``[C, Tq]``, or -1."""
    exact = problem._replace(queries=problem.queries.double(), documents=problem.documents.double())
    (Q, C), Tq = problem.scores_shape, problem.queries.shape[0]
    found = torch.full((C, Tq), -1, dtype=torch.int32)
    starts, bounds = (x.tolist() for x in problem[2:4])
    for q in range(Q):
        for c in range(C):
            n = c if problem.per_query is None else q * C + c
            tokens = torch.arange(bounds[n], bounds[n + 1])
            if problem.document_mask is not None:
                tokens = tokens[problem.document_mask.cpu()[tokens]]
            if not tokens.numel():
                continue
            candidates = exact.documents.cpu()[tokens]
            if options.get("normalize"):
                candidates = unit_length(candidates, eps=1e-12)
            for s in range(starts[q], starts[q + 1]):
                if problem.query_mask is None or problem.query_mask[s]:
                    found[c, s] = tokens[(candidates @ exact.queries[s].cpu()).argmax()]
    return found.to(problem.queries.device)


def gradients_at(
    problem: MaxSimOperands, argmax: Tensor, upstream: Tensor, *, normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """float64 gradients if these were the winners. Rounded operands may settle near-ties
    differently from float64, and one entry that moves outweighs all rounding."""
    leaves = [x.detach().double().requires_grad_() for x in problem[:2]]
    queries, documents = (unit_length(x, eps=1e-12) if normalize else x for x in leaves)
    column, row = (argmax >= 0).nonzero(as_tuple=True)
    owners = torch.repeat_interleave(problem.query_cu_seqlens.diff().long())
    g = upstream[owners[row], column].double()
    similarities = (queries[row] * documents[argmax[column, row].long()]).sum(-1)
    dqueries, ddocuments = torch.autograd.grad((g * similarities).sum(), leaves)
    return dqueries, ddocuments


def tolerances(problem: MaxSimOperands, normalize: bool = False) -> tuple[float, float, float]:
    """Of scores, dqueries, ddocuments: sums in fp32, and half a unit in the last place of what is
    stored; where tokens are normalised, they and their gradients are stored, too."""
    stored = torch.finfo(problem.queries.dtype).eps / 2
    return 1e-5 + stored * normalize, *[stored * (1 + 2 * normalize) + 1e-5] * 2


def assert_close_to_truth(
    results: tuple[Tensor, ...], problem: MaxSimOperands, upstream: Tensor, **options: Any
) -> None:
    """Near float64 by :func:`tolerances`, and no worse than the reference at this precision."""
    truth = with_gradients(problem, upstream, torch.float64, **options)
    eager = with_gradients(problem, upstream, problem.queries.dtype, **options)
    allowed = tolerances(problem, options.get("normalize", False))
    for actual, exact, same_precision, most in zip(results, truth, eager, allowed, strict=True):
        assert actual.shape == exact.shape
        assert error(actual, exact) <= most
        assert error(actual, exact) <= error(same_precision, exact) + 5e-6
