"""Assertions that no sequence is longer than stated, in Triton's interpreter."""

from functools import partial

import pytest
import torch
from triton.runtime.errors import InterpreterError

from sparton.kernels.maxsim import lengths, paths
from sparton.kernels.maxsim.batches import packed_operands
from sparton.kernels.maxsim.cross import cross_forward
from sparton.kernels.maxsim.lengths import ANY, stated_lengths, verify_lengths
from tests.kernels.maxsim_problems import boundaries
from tests.kernels.problems import SMALL


def operands(query_lengths, document_lengths, longest, *, pairing="cross", E=16):
    tokens = [torch.randn(sum(x), E) for x in (query_lengths, document_lengths)]
    bounds = [boundaries(x) for x in (query_lengths, document_lengths)]
    return packed_operands(*tokens, *bounds, None, None, pairing, *longest)


def test_what_is_to_be_verified():
    both = (5, 2), (4, 7)
    for longest, expected in (
        ((None, None), None),
        ((5, None), (5, ANY)),
        ((None, 8), (ANY, 8)),
        ((6, 7), (6, 7)),
    ):
        assert stated_lengths(operands(*both, longest)) == expected


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(paths, "cross_forward", partial(cross_forward, config=SMALL))

    def run(method, *arguments, **options):
        problem = operands(*arguments, **options)
        if method == "alone":
            return verify_lengths(problem)
        assert paths.is_product(problem) == (method == "product")
        return paths.maxsim_forward_cuda(problem, normalize=False, argmax=True)

    return run


@pytest.mark.parametrize(
    ("method", "queries", "options"),
    [
        ("alone", (5, 0, 2), {}),
        ("streaming, groups", (5, 0, 2), {}),
        ("streaming, own documents", (5, 0, 2), {"pairing": 1}),
        ("streaming, long queries", (5, 0, 130), {"pairing": 1}),
        ("product", (5, 0, 200), {}),
    ],
)
def test_longer_sequences_than_stated(method, queries, options, run, device_assertions):
    documents, most = (1, 9, 4), max(queries)
    for longest in ((None, None), (most, 9), (most, None), (None, 9)):
        run(method, queries, documents, longest, **options)
    for longest, side in (((most - 1, 9), "query"), ((most, 8), "document"), ((None, 8), "docum")):
        with pytest.raises(InterpreterError, match=f"a {side}.* is longer than {side}.*max_seqlen"):
            run(method, queries, documents, longest, **options)


def test_every_sequence_is_looked_at(monkeypatch, device_assertions):
    monkeypatch.setattr(lengths, "BLOCK", 4)
    sizes = [3, 1, 0, 2, 3, 3, 1, 2, 3]
    verify_lengths(operands((1, 1), tuple(sizes), (1, 3)))
    for place in range(len(sizes)):
        longer = [*sizes]
        longer[place] = 4
        with pytest.raises(InterpreterError, match="a document is longer"):
            verify_lengths(operands((1, 1), tuple(longer), (1, 3)))
        verify_lengths(operands((1, 1), tuple(longer), (1, None)))
