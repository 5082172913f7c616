"""Which kernels serve which operands, and that they mean the same; Triton's interpreter or a GPU.

Q queries, N documents, T packed tokens.
"""

import pytest
import torch

from sparton.kernels.maxsim import maxsim, maxsim_pairs, maxsim_varlen, paths
from sparton.kernels.maxsim.cross import cross_backward, cross_forward
from sparton.kernels.maxsim.streaming import streaming_forward
from sparton.kernels.maxsim.streaming_backward import (
    streaming_backward_lowmem,
    streaming_backward_unified,
)
from tests.kernels.maxsim_kernels import CUT, use_kernels
from tests.kernels.maxsim_problems import make_problem, upstream_for
from tests.kernels.problems import SMALL, error

STREAMING, PRODUCT = ("streaming_forward",), ("cross_forward",)
HALF, MANY = (paths.FEW // 2,) * 2, (paths.FEW, 1)


@pytest.mark.parametrize(
    ("lengths", "per_query", "normalize", "backward", "expected"),
    [
        (HALF, None, False, "auto", (*STREAMING, "cross_backward")),
        (HALF, None, True, "auto", (*STREAMING, "streaming_backward_lowmem")),
        (HALF, None, False, "unified", (*STREAMING, "streaming_backward_unified")),
        ((paths.FEW + 1,), None, False, "auto", (*PRODUCT, "cross_backward")),
        (MANY, None, True, "lowmem", (*PRODUCT, "cross_backward")),
        (MANY, None, False, "unified", (*PRODUCT, "streaming_backward_unified")),
        (MANY, 1, False, "auto", (*STREAMING, "streaming_backward_lowmem")),
        ((3, 1), 1, False, "unified", (*STREAMING, "streaming_backward_unified")),
    ],
)
def test_the_choice(lengths, per_query, normalize, backward, expected, monkeypatch):
    called = []
    for name in (
        "cross_forward",
        "cross_backward",
        "streaming_forward",
        "streaming_backward_lowmem",
        "streaming_backward_unified",
    ):
        monkeypatch.setattr(paths, name, lambda *_, name=name, **__: called.append(name))
    problem = make_problem(lengths, (4, 2), 8, per_query=per_query)
    nothing = torch.empty(0)
    paths.maxsim_forward_cuda(problem, normalize=normalize, argmax=True)
    paths.maxsim_backward_cuda(nothing, nothing, problem, normalize=normalize, backward=backward)
    assert tuple(called) == expected


def test_auto_follows_the_measurements(monkeypatch):
    """Long queries with much of their own; nothing else, and nothing where bits must repeat."""
    monkeypatch.setattr(paths, "LONG_QUERY", 5)
    monkeypatch.setattr(paths, "MANY_SIMILARITIES", 60)
    own, shared = {"per_query": 1}, {}
    for queries, documents, pairing, unified in (
        ((5, 5), (4, 8), own, True),
        ((5, 5), (4, 7), own, False),  # 55 similarities
        ((4, 5), (20, 20), own, False),  # 4.5 tokens
        ((5, 5), (40, 80), shared, False),
    ):
        problem = make_problem(queries, documents, 8, **pairing)
        assert paths.chooses_unified(problem, "auto") == unified
        assert paths.chooses_unified(problem, "unified")
        assert not paths.chooses_unified(problem, "lowmem")
        torch.use_deterministic_algorithms(True)
        try:
            assert not paths.chooses_unified(problem, "auto")
        finally:
            torch.use_deterministic_algorithms(False)
    listed = torch.tensor([[0, 0], [1, 1]], dtype=torch.int32)
    pairs = make_problem((5, 5), (40, 80), 8)._replace(pairs=listed)
    assert not paths.chooses_unified(pairs, "auto")


def test_few_tokens_and_many_documents_are_streamed(monkeypatch):
    called = []
    for name in ("cross_backward", "streaming_backward_lowmem"):
        monkeypatch.setattr(paths, name, lambda *_, name=name, **__: called.append(name))
    monkeypatch.setattr(paths, "MANY_DOCUMENTS", 3)
    nothing = torch.empty(0)
    for documents in ((4, 2), (4, 2, 1)):
        problem = make_problem((3,), documents, 8)
        paths.maxsim_backward_cuda(nothing, nothing, problem, normalize=False, backward="auto")
    assert called == ["cross_backward", "streaming_backward_lowmem"]


@pytest.mark.parametrize("backward", ["auto", "unified"])
def test_wide_embeddings_are_products(backward, monkeypatch):
    """The streaming backward holds whole embeddings. What it cannot hold is refused beforehand."""
    called = []
    for name in ("cross_forward", "cross_backward"):
        monkeypatch.setattr(paths, name, lambda *_, name=name, **__: called.append(name))
    problem = make_problem((3,), (4, 2), paths.LARGEST_E + 1)
    paths.maxsim_forward_cuda(problem, normalize=False, argmax=True)
    nothing = torch.empty(0)
    paths.maxsim_backward_cuda(nothing, nothing, problem, normalize=False, backward=backward)
    assert called == ["cross_forward", "cross_backward"]
    own = make_problem((3,), (4, 2), paths.LARGEST_E + 1, per_query=2)
    with pytest.raises(ValueError, match=f"E <= 2048 on a GPU, got E = {paths.LARGEST_E + 1}"):
        paths.maxsim_forward_cuda(own, normalize=False, argmax=True)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
def test_either_backward_serves_either_forward(normalize, device):
    problem = make_problem((5, 0, 17), (3, 21, 0, 7), 48, device)
    upstream = upstream_for(problem)
    options = {"normalize": normalize}
    scores, winners = cross_forward(problem, **options, argmax=True, config=SMALL)
    others, same_winners = streaming_forward(problem, **options, argmax=True)
    assert error(scores, others.double()) < 1e-6 < error(scores * 1.001, others.double())
    assert torch.equal(winners, same_winners)
    expected = cross_backward(upstream, winners, problem, **options, config=CUT)
    for backward in (streaming_backward_lowmem, streaming_backward_unified):
        for actual, right in zip(
            backward(upstream, winners, problem, **options), expected, strict=True
        ):
            assert error(actual, right.double()) < 1e-5 < error(actual * 1.001, right.double())


def every_pairing(normalize, device):
    """Scores and gradients of the public functions."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 24), (3, 2, 9, 24))
    queries, documents = (torch.randn(*x, generator=generator) for x in shapes)
    masks = [torch.rand(x[:-1], generator=generator).to(device) > 0.3 for x in shapes]
    leaves = [x.to(device).requires_grad_() for x in (queries, documents)]
    flat = [x.flatten(0, -2) for x in leaves]
    bounds = [
        torch.arange(0, x.numel() + 1, x.shape[-1], dtype=torch.int32, device=device) for x in masks
    ]
    shared = leaves[1].flatten(0, 1), masks[0], masks[1].flatten(0, 1)
    listed = torch.tensor([[2, 5], [0, 1], [2, 5], [1, 0]], device=device)
    options = {"normalize": normalize}
    results = []
    for scores in (
        maxsim(*leaves, *masks, **options),
        maxsim(leaves[0], *shared, **options),
        maxsim_pairs(leaves[0], leaves[1][:, 1], masks[0], masks[1][:, 1], **options),
        maxsim_varlen(*flat, *bounds, *(x.flatten() for x in masks), pairing=2, **options),
        maxsim_varlen(*flat, *bounds, **options),
        maxsim_varlen(*flat, *bounds, pairing=listed, **options),
        maxsim_pairs(leaves[0], *shared, pairs=listed, **options),
    ):
        upstream = torch.rand(scores.shape, generator=generator).to(device)
        results += [scores.detach(), *torch.autograd.grad(scores, leaves, upstream)]
    return results


@pytest.mark.quick(1)
@pytest.mark.parametrize("few", [0, 256])
@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.slow), True])
def test_public_functions_on_the_kernels(normalize, few, device, monkeypatch):
    expected = every_pairing(normalize, torch.device("cpu"))
    use_kernels(monkeypatch, few)
    actual = every_pairing(normalize, device)
    for got, right in zip(actual, expected, strict=True):
        assert error(got.cpu(), right.double()) < 1e-5 < error(got.cpu() * 1.001, right.double())


@pytest.mark.parametrize("Q", [1, 3])
def test_queries_of_known_length(Q, device, monkeypatch):
    """One launch sums their maxima, and its backward knows whose a token is without a list."""
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(n, 24, generator=generator) for n in (Q * 8, 11))
    bounds = torch.arange(Q + 1, dtype=torch.int32) * 8, torch.tensor([0, 5, 5, 11]).int()
    upstream = torch.rand(Q, 3, generator=generator)

    def results(device, **options):
        leaves = [x.to(device).requires_grad_() for x in (queries, documents)]
        scores = maxsim_varlen(*leaves, *(x.to(device) for x in bounds), **options)
        gradients = torch.autograd.grad(scores, leaves, upstream.to(device))
        return [x.detach().cpu() for x in (scores, *gradients)]

    expected = results(torch.device("cpu"))
    use_kernels(monkeypatch, 0)
    actual = results(device, query_max_seqlen=8, document_max_seqlen=6)
    for got, right in zip(actual, expected, strict=True):
        assert error(got, right.double()) < 1e-5 < error(got * 1.001, right.double())
