"""The permutation is one, for every size, and looks random."""

import numpy as np
import pytest

from sparton.datasets.permutation import derive_key, mix, permute


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 255, 257, 1000, 4097])
def test_is_a_bijection(size: int) -> None:
    images = permute(np.arange(size), size, derive_key(3, size))
    np.testing.assert_array_equal(np.sort(images), np.arange(size))


def test_elements_are_permuted_one_by_one_under_their_own_key() -> None:
    size, keys = 100, derive_key(1, np.arange(50))
    indices = np.arange(50)
    together = permute(indices, size, keys)
    alone = [permute(indices[i : i + 1], size, keys[i : i + 1])[0] for i in range(50)]
    np.testing.assert_array_equal(together, alone)


def test_keys_give_different_orders() -> None:
    orders = {tuple(permute(np.arange(20), 20, derive_key(seed))) for seed in range(100)}
    assert len(orders) == 100


def test_large_sizes_do_not_overflow() -> None:
    size = 3_000_000_001
    images = permute(np.array([0, 1, size - 1]), size, derive_key(0))
    assert len(set(images.tolist())) == 3
    assert images.min() >= 0 and images.max() < size


def test_images_are_spread_evenly_and_uncorrelated() -> None:
    """Chi-square over 64 cells and serial correlation stay within five deviations of chance; the
    identity, as a control, is far outside."""

    def statistics(images: np.ndarray) -> tuple[float, float]:
        counts = np.bincount(images[:5000] * 64 // 50_000, minlength=64)
        chi_square = float(((counts - 5000 / 64) ** 2 / (5000 / 64)).sum())
        return (chi_square - 63) / np.sqrt(2 * 63), float(
            np.corrcoef(images[:-1], images[1:])[0, 1] * np.sqrt(images.size)
        )

    shuffled = statistics(permute(np.arange(50_000), 50_000, derive_key(11)))
    assert max(map(abs, shuffled)) < 5
    assert min(map(abs, statistics(np.arange(50_000)))) > 5


def test_key_parts_do_not_commute_and_mixing_is_injective() -> None:
    assert derive_key(1, 2)[0] != derive_key(2, 1)[0]
    assert derive_key(-1)[0] != derive_key(1)[0]
    assert np.unique(mix(np.arange(100_000, dtype=np.uint64))).size == 100_000
