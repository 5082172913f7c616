"""Residual codec of late interaction. T tokens, E embedding, C centroids, P packed bytes."""

import pytest
import torch
import torch.nn.functional as F

from sparton.kernels.maxsim.codec import (
    CompressedTokens,
    ResidualCodec,
    compress,
    decompress,
    pack_buckets,
    published_num_centroids,
    train_codec,
    unpack_buckets,
    with_inverse_norms,
)
from sparton.kernels.maxsim.kmeans import nearest_centroids, spherical_kmeans


def unit_rows(T, E, device, *, groups=None, seed=0):
    """Unit embeddings, around ``groups`` directions if given."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, E, generator=generator)
    if groups:
        directions = torch.randn(groups, E, generator=generator)
        x = directions[torch.arange(T) % groups] + 0.15 * x
    return F.normalize(x, dim=1).to(device)


def read_published(byte: int, nbits: int) -> list[int]:
    """Numbers of a byte as ColBERTv2's description has them, written without the codec: the encoder
    lists the bits of each number from the lowest up and then packs eight in a row, the first as the
    highest bit of the byte."""
    stream = [byte >> place & 1 for place in range(7, -1, -1)]
    return [
        sum(bit << power for power, bit in enumerate(stream[first : first + nbits]))
        for first in range(0, 8, nbits)
    ]


@pytest.mark.parametrize(
    ("nbits", "numbers", "byte"),
    [
        (1, [1, 0, 0, 0, 0, 0, 1, 1], 0b1000_0011),
        (2, [1, 0, 0, 3], 0b1000_0011),
        (2, [2, 3, 1, 0], 0b0111_1000),
        (4, [1, 8], 0b1000_0001),
        (4, [13, 2], 0b1011_0100),
        (8, [1], 0b1000_0000),
        (8, [0b1101_0010], 0b0100_1011),
    ],
)
def test_layout_by_hand(nbits, numbers, byte, device):
    assert pack_buckets(torch.tensor([numbers], device=device), nbits).tolist() == [[byte]]
    assert read_published(byte, nbits) == numbers


@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_every_byte_of_the_layout(nbits, device):
    packed = torch.arange(256, dtype=torch.uint8, device=device).view(64, 4)
    numbers = unpack_buckets(packed, nbits)
    assert numbers.shape == (64, 4 * 8 // nbits)
    assert numbers.flatten().tolist() == [x for b in range(256) for x in read_published(b, nbits)]
    assert torch.equal(pack_buckets(numbers, nbits), packed)


def test_rows_that_fill_no_bytes_are_refused(device):
    with pytest.raises(ValueError, match="multiple of 4"):
        pack_buckets(torch.zeros(3, 6, dtype=torch.int64, device=device), 2)
    with pytest.raises(ValueError, match="nbits must be one of"):
        pack_buckets(torch.zeros(3, 6, dtype=torch.int64, device=device), 3)


def test_kmeans_finds_the_groups(device):
    x = unit_rows(640, 24, device, groups=8)
    centroids = spherical_kmeans(x, 16, seed=3)
    assert torch.allclose(centroids.norm(dim=1), torch.ones(16, device=device))
    similarity, ids = nearest_centroids(x, centroids)
    assert torch.equal(ids, (x @ centroids.T).argmax(1))
    groups = torch.stack([ids.cpu(), torch.arange(640) % 8]).unique(dim=1)
    assert groups.shape[1] == ids.unique().numel()
    first, _ = nearest_centroids(x, spherical_kmeans(x, 16, iterations=0, seed=3))
    assert similarity.mean() > first.mean() + 0.01


def test_kmeans_repeats_bit_by_bit_and_follows_its_seed(device):
    x = unit_rows(3000, 16, device)
    centroids = spherical_kmeans(x, 5, seed=1)
    assert torch.equal(centroids, spherical_kmeans(x, 5, seed=1))
    assert not torch.equal(centroids, spherical_kmeans(x, 5, seed=2))


def test_lost_centroids_move(device):
    """Equal tokens all go to the first of equal centroids."""
    x = torch.cat([unit_rows(1, 8, device).expand(40, 8), unit_rows(6, 8, device, seed=1)])
    centroids = spherical_kmeans(x, 7, iterations=20)
    assert nearest_centroids(x, centroids)[0].min() > 0.999


def test_too_few_tokens_are_refused(device):
    x = unit_rows(10, 8, device)
    with pytest.raises(ValueError, match="from 1 to the number of tokens, 10, got 11"):
        spherical_kmeans(x, 11)
    with pytest.raises(ValueError, match="take fewer centroids"):
        train_codec(x, 10, 2)
    with pytest.raises(ValueError, match="must be \\[T, E\\]"):
        train_codec(x[None], 2, 2)
    with pytest.raises(ValueError, match="E = 8"):
        compress(train_codec(x, 4, 2), x[:, :4])


def test_numbers_that_are_none_are_refused():
    embeddings = torch.nn.functional.normalize(torch.randn(300, 8), dim=1)
    codec = train_codec(embeddings, 4, 2)
    embeddings[7, 3] = torch.nan
    for refuse in (lambda: train_codec(embeddings, 4, 2), lambda: compress(codec, embeddings)):
        with pytest.raises(ValueError, match="not finite"):
            refuse()


def test_number_of_centroids():
    assert [published_num_centroids(n) for n in (1, 63, 64, 3_000_000)] == [16, 64, 128, 16384]


def test_buckets_are_the_quantiles_of_residuals(device):
    """A uniform residual is cut evenly: here all centroids are alike."""
    E = 64
    x = unit_rows(4000, E, device)
    codec = train_codec(x, 1, 2)
    residuals = (x - codec.centroids).flatten()
    assert codec.nbits == 2
    shares = torch.bucketize(residuals, codec.bucket_cutoffs).bincount() / residuals.numel()
    assert (shares - 0.25).abs().max() < 0.01
    below = (residuals[:, None] < codec.bucket_weights).float().mean(0)
    assert (below - torch.tensor([0.125, 0.375, 0.625, 0.875], device=device)).abs().max() < 0.01


def test_a_residual_at_a_cutoff_belongs_below(device):
    codec = ResidualCodec(
        torch.zeros(1, 4, device=device),
        torch.tensor([-0.5, 0.0, 0.5], device=device),
        torch.arange(4.0, device=device),
    )
    tokens = compress(codec, torch.tensor([[-0.5, 0.0, 0.5, 0.75]], device=device))
    assert unpack_buckets(tokens.residuals, 2).tolist() == [[0, 1, 2, 3]]


def test_compression_restores_better_with_more_bits(device):
    x = unit_rows(2000, 32, device, groups=20)
    errors = []
    for nbits in (1, 2, 4, 8):
        codec = train_codec(x, 24, nbits)
        tokens = compress(codec, x)
        assert tokens.codes.dtype == torch.int32 and tokens.residuals.shape == (2000, 4 * nbits)
        restored = decompress(codec, tokens)
        assert torch.allclose(restored.norm(dim=1), torch.ones(2000, device=device))
        errors.append(float((restored - x).norm(dim=1).mean()))
        plain = decompress(codec, tokens, normalize=False)
        scaled = plain * tokens.inverse_norms.float()[:, None]
        assert (scaled - restored).abs().max() < 2**-11
        swapped = tokens._replace(residuals=tokens.residuals.flip(1))
        assert (decompress(codec, swapped) - x).norm(dim=1).mean() > 1.2 * errors[-1]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02 < errors[0]


def test_shapes_and_empty_input(device):
    x = unit_rows(60, 16, device)
    codec = train_codec(x, 4, 4)
    tokens = compress(codec, x)
    padded = CompressedTokens(tokens.codes.view(6, 10), tokens.residuals.view(6, 10, 8))
    assert torch.equal(decompress(codec, padded).view(60, 16), decompress(codec, tokens))
    assert torch.equal(with_inverse_norms(codec, padded).inverse_norms.flatten(), tokens[2])
    nothing = compress(codec, x[:0])
    assert nothing.residuals.shape == (0, 8) and decompress(codec, nothing).shape == (0, 16)


def test_chunks_change_nothing(device, monkeypatch):
    x = unit_rows(100, 16, device)
    codec = train_codec(x, 9, 2)
    whole = compress(codec, x)
    monkeypatch.setattr("sparton.kernels.maxsim.codec.TOKENS_AT_ONCE", 7)
    monkeypatch.setattr("sparton.kernels.maxsim.kmeans.SIMILARITIES_AT_ONCE", 20)
    for a, b in zip(whole, compress(codec, x), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(decompress(codec, whole), decompress(codec, compress(codec, x)))
