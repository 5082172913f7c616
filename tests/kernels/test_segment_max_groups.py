"""Which program of the forward has which sequences."""

import pytest
import torch
import triton
import triton.language as tl

from sparton.kernels.segment_max.hopper import balanced_groups
from sparton.kernels.segment_max.reduction import sequences_of_group

PROCESSORS = 132


@triton.jit
def _groups_kernel(cu_ptr, out_ptr, N, group_tokens, num_groups):
    group = tl.program_id(0)
    lanes = tl.arange(0, 16)
    first, last = sequences_of_group(cu_ptr, N, group, group_tokens, num_groups, lanes)
    tl.store(out_ptr + 2 * group, first)
    tl.store(out_ptr + 2 * group + 1, last)


@pytest.mark.parametrize("groups", [1, 20])
@pytest.mark.parametrize("num_sequences", [1, 15, 16, 17, 255, 257, 5000])
def test_every_sequence_has_one_group(num_sequences, groups, device):
    """The lanes look at 16 starts at once, so that these need one to four steps."""
    generator = torch.Generator().manual_seed(num_sequences)
    lengths = torch.randint(1, 9, (num_sequences,), generator=generator)
    lengths *= torch.rand(num_sequences, generator=generator) < 0.4
    lengths[-num_sequences // 3 :] = 0
    lengths[0] = 3
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    total = int(cu_seqlens[-1])
    group_tokens = triton.cdiv(total, groups)
    num_groups = triton.cdiv(total, group_tokens)
    found = torch.full((num_groups, 2), -1, dtype=torch.int32, device=device)
    _groups_kernel[(num_groups,)](cu_seqlens, found, num_sequences, group_tokens, num_groups)
    starts = torch.arange(num_groups, device=device) * group_tokens
    expected = torch.searchsorted(cu_seqlens[:-1], starts.int())
    assert found[:, 0].tolist() == expected.tolist()
    assert found[:, 1].tolist() == [*expected[1:].tolist(), num_sequences]


def waste(total, blocks, tokens):
    """Processor time over that of an even spread."""
    programs = triton.cdiv(total, tokens) * blocks
    return triton.cdiv(programs, PROCESSORS) * tokens / (total * blocks / PROCESSORS)


@pytest.mark.parametrize("blocks", [1, 3, 16, 32, 120, 128, 131, 133])
@pytest.mark.parametrize("total", [20_000, 38_400, 100_000])
def test_groups_fill_the_processors(total, blocks):
    tokens = balanced_groups(total, blocks, PROCESSORS, 4096)
    assert waste(total, blocks, tokens) < 1.35
    assert waste(38_400, 16, 4096) > 1.6, "what it is for"


def test_groups_of_small_and_of_large_problems():
    assert balanced_groups(10**6, 120, PROCESSORS, 4096) == 4096
    assert balanced_groups(1, 1, PROCESSORS, 4096) == 1
    assert balanced_groups(300, 500, PROCESSORS, 4096) <= 300
