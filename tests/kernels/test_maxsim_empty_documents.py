"""A document without tokens: score 0, gradient 0, and the others as if it were not there.

Every public function, padded and packed, by its CPU version and by its kernels (in Triton's
interpreter, or on a GPU). Q queries, N documents, L tokens, E embedding.
"""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from sparton.kernels.maxsim import (
    compress,
    maxsim,
    maxsim_from_hidden,
    maxsim_pairs,
    maxsim_residual,
    maxsim_residual_varlen,
    maxsim_varlen,
    train_codec,
)
from sparton.kernels.maxsim.codec import CompressedTokens
from sparton.kernels.maxsim.residual import operators as residual_operators
from sparton.kernels.maxsim.residual.backward import residual_backward
from sparton.kernels.maxsim.residual.forward import residual_forward
from tests.kernels.maxsim_kernels import use_kernels

Q, LQ, E = 2, 4, 16
LENGTHS, FULL = (0, 5, 0, 7, 0), (5, 7)
CODEC = train_codec(torch.randn(80, E, generator=torch.Generator().manual_seed(3)), 4, 2)


def bounds_of(lengths, device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def padded(tokens, lengths):
    """``[N, 7, ...]`` and a mask; padding holds other documents' tokens."""
    places = torch.arange(7, device=tokens.device)
    starts = bounds_of(lengths, tokens.device)[:-1, None]
    rows = (starts + places).clamp(max=len(tokens) - 1)
    return tokens[rows], places < torch.tensor(lengths, device=tokens.device)[:, None]


def every_pair(N, device):
    return torch.cartesian_prod(torch.arange(Q), torch.arange(N)).to(device)


def dense(queries, tokens, lengths):
    documents, mask = padded(tokens, lengths)
    return maxsim(queries, documents, None, mask)


def own(queries, tokens, lengths):
    documents, mask = padded(tokens, lengths)
    return maxsim(queries, documents[None].expand(Q, -1, -1, -1), None, mask.expand(Q, -1, -1))


def padded_pairs(queries, tokens, lengths):
    documents, mask = padded(tokens, lengths)
    pairs = every_pair(len(lengths), tokens.device)
    return maxsim_pairs(queries, documents, None, mask, pairs=pairs).view(Q, -1)


def packed(queries, tokens, lengths, *, pairing="cross"):
    bounds = bounds_of((LQ,) * Q, tokens.device), bounds_of(lengths, tokens.device)
    return maxsim_varlen(queries.flatten(0, 1), tokens, *bounds, pairing=pairing)


def packed_own(queries, tokens, lengths):
    tokens, lengths = torch.cat((tokens, tokens)), lengths * Q
    return packed(queries, tokens, lengths, pairing=len(lengths) // Q)


def packed_pairs(queries, tokens, lengths):
    pairs = every_pair(len(lengths), tokens.device)
    return packed(queries, tokens, lengths, pairing=pairs).view(Q, -1)


def hidden(queries, tokens, lengths):
    documents, mask = padded(tokens, lengths)
    projection = torch.eye(E, device=tokens.device) + 0.1
    return maxsim_from_hidden(queries, documents, projection, None, mask)


def packed_hidden(queries, tokens, lengths):
    projection = torch.eye(E, device=tokens.device) + 0.1
    bounds = bounds_of(lengths, tokens.device)
    return maxsim_from_hidden(queries, tokens, projection, document_cu_seqlens=bounds)


def compressed(tokens):
    codec = type(CODEC)(*(x.to(tokens.device) for x in CODEC))
    return compress(codec, tokens.detach()), codec


def residual(queries, tokens, lengths):
    documents, codec = compressed(tokens)
    laid_out = [padded(x, lengths) for x in documents]
    documents, mask = CompressedTokens(*(x for x, _ in laid_out)), laid_out[0][1]
    return maxsim_residual(queries, documents, codec, None, mask)


def packed_residual(queries, tokens, lengths):
    bounds = bounds_of((LQ,) * Q, tokens.device), bounds_of(lengths, tokens.device)
    return maxsim_residual_varlen(queries.flatten(0, 1), *compressed(tokens), *bounds)


FUNCTIONS = (
    dense, own, padded_pairs, packed, packed_own, packed_pairs, hidden, packed_hidden, residual,
    packed_residual,
)  # fmt: skip


@pytest.fixture(params=["public", "streaming", "product"])
def engine(request, monkeypatch):
    """ "public" as called; the others on kernels in any case."""
    if request.param == "public":
        return
    use_kernels(monkeypatch, 0 if request.param == "product" else 256)
    if not torch.cuda.is_available():
        monkeypatch.setattr(residual_operators._scores._function, "run", residual_forward)
        monkeypatch.setattr(residual_operators, "residual_backward_cpu", residual_backward)


@pytest.mark.quick(5)
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("score", FUNCTIONS)
def test_gradients_with_and_without_it(score, device):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(Q, LQ, E, generator=generator).to(device).requires_grad_()
    tokens = torch.randn(12, E, generator=generator).to(device).requires_grad_()
    upstream = torch.randn(Q, len(LENGTHS), generator=generator).to(device)
    both = []
    full = [n > 0 for n in LENGTHS]
    for lengths, grad in ((LENGTHS, upstream), (FULL, upstream[:, full].contiguous())):
        scores = score(queries, tokens, lengths)
        found = torch.autograd.grad(scores, (queries, tokens), grad, allow_unused=True)
        both.append((scores.detach(), *found))
    (scores, *gradients), (others, *expected) = both
    assert not scores[:, [not x for x in full]].any()
    torch.testing.assert_close(scores[:, full], others)
    assert others.all()
    for actual, wanted in zip(gradients, expected, strict=True):
        if wanted is None:
            assert score in (residual, packed_residual) and actual is None
            continue
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
        assert wanted.any() and not torch.allclose(actual * 1.01, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("score", FUNCTIONS)
def test_nothing_but_empty_documents(score, device):
    queries = torch.randn(Q, LQ, E).to(device).requires_grad_()
    tokens = torch.randn(12, E).to(device).requires_grad_()
    if score in (packed, packed_own, packed_pairs, packed_hidden, packed_residual):
        tokens = tokens.detach()[:0].requires_grad_()
    scores = score(queries, tokens, (0, 0, 0))
    assert torch.equal(scores, torch.zeros(Q, 3, device=device))
    gradients = torch.autograd.grad(scores.sum(), (queries, tokens), allow_unused=True)
    assert gradients[0] is not None
    assert not any(x.any() for x in gradients if x is not None)
