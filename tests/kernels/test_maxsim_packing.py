"""Masked tokens out of a batch and back. T tokens, E embedding."""

import pytest
import torch

from sparton.kernels.maxsim.normalization import (
    normalize_tokens_backward_cpu,
    normalize_tokens_cpu,
)
from sparton.kernels.maxsim.packing import compact_tokens, original_rows, sequence_of_tokens
from tests.kernels.maxsim_problems import boundaries

LENGTHS = (0, 5, 3, 0, 9, 1, 0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_tokens_keep_their_order_and_sequence(share, device):
    T = sum(LENGTHS)
    mask = torch.rand(T, generator=torch.Generator().manual_seed(0)) < share
    tokens = torch.arange(T, device=device, dtype=torch.float32)[:, None].expand(-1, 4)
    compacted = compact_tokens(tokens, mask.to(device), boundaries(LENGTHS, device))
    used = int(mask.sum())
    assert compacted.tokens.shape == (T, 4)
    assert torch.equal(compacted.tokens[:used, 0].cpu(), mask.nonzero()[:, 0].float())
    assert torch.equal(compacted.positions[:used].cpu(), mask.nonzero()[:, 0].int())
    kept = [int(x.sum()) for x in mask.split(LENGTHS)]
    assert torch.equal(compacted.cu_seqlens.cpu(), boundaries(tuple(kept)))
    assert compacted.cu_seqlens.dtype == compacted.positions.dtype == torch.int32
    rows = torch.tensor([[-1, *range(used)]], dtype=torch.int32, device=device)
    back = original_rows(rows, compacted.positions)
    assert back.tolist() == [[-1, *mask.nonzero()[:, 0].tolist()]]


def test_no_tokens(device):
    nothing = torch.zeros(0, 4, device=device)
    mask = torch.zeros(0, dtype=torch.bool, device=device)
    compacted = compact_tokens(nothing, mask, boundaries((0, 0), device))
    assert compacted.tokens.shape == (0, 4)
    assert compacted.cu_seqlens.tolist() == [0, 0, 0]
    rows = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    assert torch.equal(original_rows(rows, compacted.positions), rows)


def test_sequence_of_tokens(device):
    owners = sequence_of_tokens(boundaries(LENGTHS, device), sum(LENGTHS))
    assert owners.tolist() == [n for n, length in enumerate(LENGTHS) for _ in range(length)]


def test_gradients_of_unit_length_against_autograd():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(7, 24, dtype=torch.float64, generator=generator)
    tokens[2], tokens[3], tokens[4] = 0, tokens[3] * 1e-14, tokens[4] * 1e-10
    grad = torch.randn(7, 24, dtype=torch.float64, generator=generator)
    leaf = tokens.clone().requires_grad_()
    unit = torch.nn.functional.normalize(leaf, eps=1e-12)
    torch.testing.assert_close(normalize_tokens_cpu(tokens), unit.detach())
    (expected,) = torch.autograd.grad(unit, leaf, grad)
    torch.testing.assert_close(normalize_tokens_backward_cpu(grad, tokens), expected)
