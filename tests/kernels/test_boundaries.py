"""Boundaries in int32 and int64: the same results, and no copy of what the kernels read."""

import pytest
import torch

from sparton.kernels.boundaries import check_boundaries, int32_boundaries
from sparton.kernels.maxsim import (
    compress,
    maxsim_from_hidden,
    maxsim_residual_varlen,
    maxsim_topk,
    maxsim_varlen,
    train_codec,
)
from sparton.kernels.splade_head import splade_head, splade_head_topk
from sparton.kernels.varlen_attention import varlen_attention, varlen_self_attention

BOUNDS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
OTHERS = torch.tensor([0, 2, 9, 12], dtype=torch.int32)


@pytest.fixture
def rows(device):
    return torch.randn(12, 16).to(device)


def residual(rows, queries, documents):
    codec = train_codec(torch.randn(60, 16).to(rows.device), 4, 2)
    return maxsim_residual_varlen(rows, compress(codec, rows), codec, queries, documents)


def attention(rows, queries, keys):
    states = rows.half().view(12, 1, 16)
    return varlen_attention(states, states, states, queries, keys, 7, 7)


def self_attention(rows, bounds, _):
    return varlen_self_attention(rows.half().view(12, 1, 1, 16).repeat(1, 3, 1, 1), bounds, 7)


FUNCTIONS = {
    "maxsim_varlen": lambda x, a, b: maxsim_varlen(x, x, a, b),
    "maxsim_topk": lambda x, a, b: torch.stack(maxsim_topk(x, x, a, b, 2, tokens_at_once=8)),
    "maxsim_from_hidden": lambda x, a, b: maxsim_from_hidden(
        x[None], x, torch.eye(16).to(x), document_cu_seqlens=b
    ),
    "maxsim_residual_varlen": residual,
    "splade_head": lambda x, a, b: splade_head(x, x, None, a),
    "splade_head, sums": lambda x, a, b: splade_head(x, x, None, a, pooling="sum"),
    "splade_head_topk": lambda x, a, b: torch.stack(splade_head_topk(x, x, None, a, 3)),
    "varlen_attention": attention,
    "varlen_self_attention": self_attention,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_int64_gives_what_int32_gives(name, rows, device):
    rows.requires_grad_()
    score = FUNCTIONS[name]
    results = []
    for dtype in (torch.int32, torch.int64):
        torch.manual_seed(1)
        scores = score(rows, *(x.to(device, dtype) for x in (BOUNDS, OTHERS)))
        gradient = torch.zeros(())
        if scores.requires_grad:
            (gradient,) = torch.autograd.grad(scores.double().square().sum(), rows)
        results.append((scores.detach(), gradient))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.manual_seed(1)
    swapped = score(rows, OTHERS.to(device).long(), BOUNDS.to(device).long())
    assert not torch.equal(swapped, results[0][0]), "boundaries are read"


def test_int32_is_not_copied():
    assert int32_boundaries("cu_seqlens", BOUNDS) is BOUNDS
    converted = int32_boundaries("cu_seqlens", BOUNDS.long())
    assert converted.dtype == torch.int32 and torch.equal(converted, BOUNDS)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4), torch.zeros(4, dtype=torch.int16), BOUNDS[None], BOUNDS[:0]]
)
def test_what_is_refused(wrong, rows):
    shape = "\\(" + ", ".join(map(str, wrong.shape))
    message = f"must be int32 or int64 .*, got {wrong.dtype} {shape}"
    for check in (check_boundaries, int32_boundaries):
        with pytest.raises(ValueError, match="cu_seqlens " + message):
            check("cu_seqlens", wrong)
    for name in ("maxsim_varlen", "maxsim_topk", "maxsim_residual_varlen"):
        with pytest.raises(ValueError, match="query_cu_seqlens " + message):
            FUNCTIONS[name](rows, wrong.to(rows.device), BOUNDS.to(rows.device))
    for name in ("maxsim_varlen", "maxsim_from_hidden"):
        with pytest.raises(ValueError, match="document_cu_seqlens " + message):
            FUNCTIONS[name](rows, BOUNDS.to(rows.device), wrong.to(rows.device))
    with pytest.raises(ValueError, match="cu_seqlens " + message):
        splade_head(rows, rows, None, wrong.to(rows.device))
    states = rows.half().view(12, 1, 16)
    with pytest.raises(ValueError, match="key_cu_seqlens " + message):
        varlen_attention(states, states, states, BOUNDS, wrong, 7, 7)
