"""Sequences end to end: where they lie, and how they are cut into ranges."""

import pytest
import torch

from sparton.kernels.boundaries import cu_seqlens_of, ranges_within, rows_of

LENGTHS = torch.tensor([3, 0, 5, 1, 0, 9, 2])


def test_boundaries_begin_at_zero_and_end_at_the_number_of_tokens():
    assert cu_seqlens_of(LENGTHS).tolist() == [0, 3, 3, 8, 9, 9, 18, 20]
    assert cu_seqlens_of(LENGTHS, torch.int32).dtype == torch.int32
    assert cu_seqlens_of(LENGTHS[:0]).tolist() == [0]


@pytest.mark.parametrize(
    ("most_tokens", "most_sequences", "expected"),
    [
        (8, None, [(0, 3), (3, 5), (5, 6), (6, 7)]),
        (100, None, [(0, 7)]),
        (100, 3, [(0, 3), (3, 6), (6, 7)]),
        (1, None, [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6), (6, 7)]),
    ],
)
def test_ranges_keep_both_limits_but_are_never_empty(most_tokens, most_sequences, expected):
    bounds = cu_seqlens_of(LENGTHS)
    assert list(ranges_within(bounds, most_tokens, most_sequences)) == expected
    assert list(ranges_within(bounds.tolist(), most_tokens, most_sequences)) == expected


def test_no_sequences_have_no_ranges():
    assert list(ranges_within(torch.zeros(1, dtype=torch.int32), 5)) == []


def test_rows_of_chosen_sequences():
    rows, own = rows_of(torch.tensor([2, -1, 0, 2, 1]), cu_seqlens_of(LENGTHS))
    assert rows.tolist() == [3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]
    assert own.tolist() == [0, 5, 5, 8, 13, 13]
    rows, own = rows_of(torch.tensor([-1, -1]), torch.zeros(1, dtype=torch.int64))
    assert rows.tolist() == [] and own.tolist() == [0, 0, 0]


def test_ranges_are_as_long_as_the_limits_allow():
    lengths = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(0))
    lengths[50] = 40
    bounds = cu_seqlens_of(lengths).tolist()
    ranges = list(ranges_within(bounds, 12, 7))
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(200))
    for (start, stop), after in zip(ranges, [*ranges[1:], None]):
        tokens = bounds[stop] - bounds[start]
        assert stop - start <= 7 and (tokens <= 12 or stop == start + 1)
        if after is not None:  # one more sequence would have been too much
            assert stop - start == 7 or bounds[stop + 1] - bounds[start] > 12
