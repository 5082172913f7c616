"""How rows are cut into ranges."""

import pytest

from sparton.packing import ranges_of


@pytest.mark.parametrize(("total", "sizes"), [(0, []), (3, [3]), (6, [3, 3]), (7, [3, 3, 1])])
def test_ranges_of_a_size(total, sizes):
    ranges = ranges_of(total, 3)
    assert [len(each) for each in ranges] == sizes
    assert [row for each in ranges for row in each] == list(range(total))
