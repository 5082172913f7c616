"""Embeddings of packed hidden states against a loop over the texts."""

import pytest
import torch

from sparton.models.pooling import Pooling, pooling_mode
from sparton.types import TokenBatch

LENGTHS = (3, 0, 5, 1, 0)
TOKENS = TokenBatch.from_lists([[7] * length for length in LENGTHS])


def states() -> torch.Tensor:
    return torch.randn(TOKENS.num_tokens, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_and_its_gradient(mode, normalize):
    hidden, copy = states().requires_grad_(), states().requires_grad_()
    rows = []
    for part in copy.split(LENGTHS):
        pool = {"mean": part.mean(0), "cls": part[:1].sum(0), "last": part[-1:].sum(0)}
        row = pool[mode] if len(part) else torch.zeros(6)
        rows.append(row / row.norm().clamp(min=1e-12) if normalize else row)
    expected = torch.stack(rows)
    actual = Pooling(mode, normalize)(hidden, TOKENS)
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(Pooling(mode, not normalize)(hidden, TOKENS), expected)
    weights = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(hidden.grad, copy.grad)
    assert hidden.grad.any()


@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
def test_16_bit_states_are_averaged_in_fp32(mode):
    hidden = states().bfloat16()
    actual = Pooling(mode)(hidden, TOKENS)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, Pooling(mode)(hidden.float(), TOKENS), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
def test_texts_without_any_token_are_zeros(mode):
    tokens = TokenBatch.from_lists([[], []])
    assert torch.equal(Pooling(mode)(torch.zeros(0, 6), tokens), torch.zeros(2, 6))


def test_other_poolings_are_refused():
    with pytest.raises(ValueError, match="pooling='max' is not one of mean, cls, last"):
        pooling_mode("max")
    assert pooling_mode("cls") == "cls"
