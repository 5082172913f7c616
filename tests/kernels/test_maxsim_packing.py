"""Masked tokens taken out of a batch, and tokens of unit length. T tokens, E embedding."""

import pytest
import torch

from sparton.kernels.maxsim.normalization import normalize_tokens, normalize_tokens_backward
from sparton.kernels.maxsim.normalization_cpu import (
    normalize_tokens_backward_cpu,
    normalize_tokens_cpu,
)
from sparton.kernels.maxsim.packing import compact
from sparton.kernels.segment_max.operands import sequence_of_tokens
from tests.kernels.maxsim_problems import boundaries
from tests.kernels.problems import error

LENGTHS = (0, 5, 3, 0, 9, 1, 0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_tokens_keep_their_order_and_sequence(share, device):
    T = sum(LENGTHS)
    mask = torch.rand(T, generator=torch.Generator().manual_seed(0)) < share
    rows, cu_seqlens = compact(mask.to(device), boundaries(LENGTHS, device))
    used = int(mask.sum())
    assert rows.shape == (T,)
    assert torch.equal(rows[:used].cpu(), mask.nonzero()[:, 0].int())
    assert ((rows >= 0) & (rows < T)).all()
    kept = [int(x.sum()) for x in mask.split(LENGTHS)]
    assert torch.equal(cu_seqlens.cpu(), boundaries(tuple(kept)))
    assert cu_seqlens.dtype == rows.dtype == torch.int32


def test_no_tokens(device):
    mask = torch.zeros(0, dtype=torch.bool, device=device)
    rows, cu_seqlens = compact(mask, boundaries((0, 0), device))
    assert rows.shape == (0,)
    assert cu_seqlens.tolist() == [0, 0, 0]


def test_sequence_of_tokens(device):
    owners = sequence_of_tokens(boundaries(LENGTHS, device), sum(LENGTHS))
    assert owners.tolist() == [n for n, length in enumerate(LENGTHS) for _ in range(length)]


def unusual_tokens(E):
    """Tokens of all lengths, also around 1e-12, and gradients."""
    generator = torch.Generator().manual_seed(E)
    tokens = torch.randn(67, E, dtype=torch.float64, generator=generator)
    for row, scale in ((2, 0.0), (3, 1e-14), (4, 1e-10), (5, 1e8)):
        tokens[row] *= scale
    return tokens, torch.randn(67, E, dtype=torch.float64, generator=generator)


def test_gradients_of_unit_length_against_autograd():
    tokens, grad = unusual_tokens(24)
    leaf = tokens.clone().requires_grad_()
    unit = torch.nn.functional.normalize(leaf, eps=1e-12)
    torch.testing.assert_close(normalize_tokens_cpu(tokens), unit.detach())
    (expected,) = torch.autograd.grad(unit, leaf, grad)
    torch.testing.assert_close(normalize_tokens_backward_cpu(grad, tokens), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("E", [1, 24, 320])
def test_kernels_of_unit_length(E, dtype, device):
    tokens, grad = (x.float() for x in unusual_tokens(E))
    if dtype == torch.float16:
        tokens = tokens[6:]
        grad = grad[6:]
    tokens, grad = tokens.to(device, dtype), grad.to(device, dtype)
    unit = normalize_tokens(tokens)
    dtokens = normalize_tokens_backward(grad, tokens)
    assert unit.dtype == dtokens.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    # A GPU's division in fp32 is right to two units in the last place.
    units = 2 if unit.is_cuda and dtype == torch.float32 else 1
    for row in range(tokens.shape[0]):
        exact = normalize_tokens_cpu(tokens[row : row + 1].double())
        assert error(unit[row : row + 1], exact) <= units * tolerance
        assert tokens[row].any() == (error(unit[row : row + 1] * 1.01, exact) > tolerance)
        exact = normalize_tokens_backward_cpu(grad[row : row + 1].double(), tokens[row : row + 1])
        if E > 1:  # of one unit, the gradient is a difference of equals
            assert error(dtokens[row : row + 1], exact) <= 2 * tolerance
    rows = torch.tensor([3, 3, 0], dtype=torch.int32, device=device)
    assert torch.equal(normalize_tokens(tokens, rows), unit[rows.long()])
