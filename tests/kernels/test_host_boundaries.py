"""What a CPU refuses: boundaries that the host can read without waiting for a GPU."""

import pytest
import torch

from sparton.kernels.boundaries import read_boundaries
from sparton.kernels.maxsim import (
    maxsim_from_hidden,
    maxsim_residual_varlen,
    maxsim_varlen,
    train_codec,
)
from sparton.kernels.maxsim.codec import compress
from sparton.kernels.splade_head import splade_head

T = 6
GOOD = torch.tensor([0, 4, 4, T], dtype=torch.int32)
X = torch.eye(T, 8)


def from_hidden(bounds):
    return maxsim_from_hidden(X[None], X, torch.eye(8), document_cu_seqlens=bounds)


def residual(queries, documents):
    codec = train_codec(X.repeat(8, 1), 4, 2)
    return maxsim_residual_varlen(X, compress(codec, X), codec, queries, documents)


FUNCTIONS = {
    "maxsim, queries": lambda bounds: maxsim_varlen(X, X, bounds, GOOD),
    "maxsim, documents": lambda bounds: maxsim_varlen(X, X, GOOD, bounds),
    "maxsim, own documents": lambda bounds: maxsim_varlen(X, X, GOOD, bounds, pairing=1),
    "from hidden states": from_hidden,
    "compressed, queries": lambda bounds: residual(bounds, GOOD),
    "compressed, documents": lambda bounds: residual(GOOD, bounds),
    "head": lambda bounds: splade_head(X, X, None, bounds),
    "head, sums": lambda bounds: splade_head(X, X, None, bounds, pooling="sum"),
    "head, fp8": lambda bounds: splade_head(X.bfloat16(), X.bfloat16(), None, bounds, fp8=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([0, 3, 4, 9], f"from 0 to the number of tokens, {T}; it goes from 0 to 9"),
        ([1, 3, 4, 6], "it goes from 1 to 6"),
        ([0, 5, 3, 6], "must ascend; entry 1 is 5 and the next one 3"),
    ],
)
def test_boundaries_that_do_not_ascend_to_the_end(name, bounds, words):
    assert FUNCTIONS[name](GOOD).isfinite().all()
    with pytest.raises(ValueError, match=words):
        FUNCTIONS[name](torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "bounds", [[0, 3, 4, T + 2**32], [-(2**32), 3, 4, T], [0, 4 - 2**32, 4, T]]
)
def test_boundaries_beyond_int32_are_not_cut_to_others(name, bounds):
    with pytest.raises(ValueError, match=r"it goes from|must ascend"):
        FUNCTIONS[name](torch.tensor(bounds))


def test_sequences_may_be_empty():
    assert read_boundaries("x", torch.tensor([0]), 0) == [0]
    assert read_boundaries("x", torch.tensor([0, 0, 3, 3]), 3) == [0, 0, 3, 3]
