"""Keys against sorts with a rule for equal scores."""

import numpy as np
import pytest
import torch

from sparton.kernels.sort_keys import from_keys, sort_keys

NAN, INF = float("nan"), float("inf")


def some_scores() -> torch.Tensor:
    scores = torch.randint(-3, 4, (5, 200), generator=torch.Generator().manual_seed(0)).float()
    scores[:, :6] = torch.tensor([-INF, INF, -0.0, 0.0, 1e-45, -1e-45])
    return scores


@pytest.mark.parametrize("non_negative", [False, True])
def test_order_is_that_of_a_stable_descending_sort(non_negative):
    scores = some_scores().abs() if non_negative else some_scores()
    keys = sort_keys(scores, 7, non_negative=non_negative)
    found, numbers = from_keys(keys.sort(dim=1, descending=True).values)
    expected, order = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(numbers, order + 7)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("non_negative", [False, True])
def test_not_a_number_of_either_sign_is_the_largest(non_negative):
    negative = torch.tensor(NAN).copysign(torch.tensor(-1.0))
    scores = torch.stack((torch.tensor(INF), negative, torch.tensor(NAN), torch.tensor(1.0)))
    _, numbers = from_keys(sort_keys(scores, non_negative=non_negative).sort(descending=True)[0])
    assert numbers.tolist() == [1, 2, 0, 3]


def test_numbers_use_all_of_the_lower_half():
    last = 2**32 - 2
    assert from_keys(sort_keys(torch.tensor([2.0]), last))[1].tolist() == [last]
    keys = sort_keys(torch.tensor([1.0]), last), sort_keys(torch.tensor([1.0]), 0)
    assert keys[0] < keys[1]


def test_signed_zeros_tie():
    keys = sort_keys(torch.tensor([[-0.0, 0.0, -1.0, 1.0, -2.0]]), 5)
    assert keys.argsort(dim=1, descending=True).tolist() == [[3, 0, 1, 2, 4]]
    scores, numbers = from_keys(keys)
    assert scores.tolist() == [[0.0, 0.0, -1.0, 1.0, -2.0]]
    assert numbers.tolist() == [[5, 6, 7, 8, 9]]
