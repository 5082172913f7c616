"""Which program of the forward has which sequences."""

import pytest
import torch
import triton
import triton.language as tl

from sparton.kernels.launch import cdiv, l2_cache
from sparton.kernels.segment_max.grouping import Grouping, group_evenly, group_rows
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


def grouped(T: int, blocks: int, *, length: int = 100, band: int = 300) -> Grouping:
    N = max(T // length, 1)
    return group_evenly(N, T, blocks, band, tile=128, most=4096, start=130, processors=PROCESSORS)


def waste(total, blocks, groups):
    """Processor time over that of an even spread."""
    waves = cdiv(groups * blocks, PROCESSORS)
    return waves * cdiv(total, groups) / (total * blocks / PROCESSORS)


@pytest.mark.parametrize("blocks", [1, 3, 16, 32, 120, 128, 131, 133])
@pytest.mark.parametrize("total", [20_000, 38_400, 100_000])
def test_groups_fill_the_processors(total, blocks):
    assert waste(total, blocks, grouped(total, blocks).groups) < 1.35
    assert waste(38_400, 16, cdiv(38_400, 4096)) > 1.6, "what it is for"


def test_groups_of_small_and_of_large_problems():
    assert grouped(10**6, 120).tokens == 4100, "41 whole sequences"
    assert grouped(1, 1)[:2] == (1, 1)
    assert grouped(300, 500).tokens in (100, 200, 300)
    assert grouped(600, 9, length=600)[:2] == (600, 1)


@pytest.mark.parametrize("length", [7, 512, 3000])
@pytest.mark.parametrize("blocks", [5, 239])
def test_sequences_of_equal_length_are_spread_evenly(blocks, length):
    tokens, groups, _ = grouped(30 * length, blocks, length=length)
    assert tokens % length == 0
    assert (groups - 1) * tokens < 30 * length <= groups * tokens


@pytest.mark.parametrize(("D", "band"), [(768, 44), (1024, 33), (4096, 8), (2**20, 1)])
def test_rows_in_use_fit_the_cache_whatever_their_width(D, band, device):
    sizes = {"rows": 128, "tile": 256, "most": 4096}
    N, T, V = 64, 2**15, 30522
    found = group_rows(N, T, V, 2 * D, torch.device("cpu"), band=None, **sizes)
    assert found.band == band
    assert band == 1 or 2 * D * 128 * band <= l2_cache(torch.device("cpu")) / 6
    assert group_rows(N, T, V, 2 * D, torch.device("cpu"), band=3, **sizes).band == 3
    sizes = {"tile": 256, "most": 4096, "start": 130, "processors": PROCESSORS}
    evenly = group_evenly(N, T, 239, band, **sizes)
    assert evenly.groups * band > 0.8 * min(PROCESSORS, N * band), "no second band beside the first"
