"""Consecutive ranges of rows."""

import numpy as np
import pytest

from sparton.ranges import boundaries_of, ranges_of, ranges_within


def test_boundaries_are_the_sums_before():
    assert boundaries_of(np.array([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert boundaries_of(np.zeros(0, np.int64)).tolist() == [0]


@pytest.mark.parametrize(("total", "sizes"), [(0, []), (3, [3]), (6, [3, 3]), (7, [3, 3, 1])])
def test_ranges_of_a_size(total, sizes):
    ranges = ranges_of(total, 3)
    assert [len(each) for each in ranges] == sizes
    assert [row for each in ranges for row in each] == list(range(total))


def test_ranges_within_both_limits():
    lengths = np.random.default_rng(0).integers(0, 6, 200)
    lengths[50] = 40
    boundaries = boundaries_of(lengths)
    ranges = ranges_within(boundaries, 7, 12)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(200))
    for (start, stop), after in zip(ranges, [*ranges[1:], None]):
        entries = boundaries[stop] - boundaries[start]
        assert stop - start <= 7 and (entries <= 12 or stop == start + 1)
        if after is not None:  # one more row would have been too much
            assert stop - start == 7 or boundaries[stop + 1] - boundaries[start] > 12
    assert ranges_within(boundaries_of(np.zeros(0, np.int64)), 7, 12) == []
