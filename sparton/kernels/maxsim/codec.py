"""Residual compression of token embeddings, in the layout of ColBERTv2 and PLAID.

T tokens, E embedding, C centroids, P bytes of a token's residual.

A token is stored as the id of its nearest centroid and, for every dimension, the bucket that the
difference falls into (https://arxiv.org/abs/2112.01488, section 3.3). Bucket numbers are 1, 2, 4 or
8 bits wide. The dimensions follow each other from the highest bit of a byte to the lowest, while
the bits within a number run from its lowest to its highest: with two bits, the numbers 1, 0, 0, 3
make 0b10000011.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.maxsim.kmeans import nearest_centroids, spherical_kmeans

WIDTHS = (1, 2, 4, 8)
TOKENS_AT_ONCE = 2**14
HELD_OUT = 0.05
HELD_OUT_TOKENS = 50_000
QUANTILE_ELEMENTS = 2**24
FOR_A_BUCKET = 16  # numbers


class ResidualCodec(NamedTuple):
    """What compression learns from a sample of embeddings.

    Attributes:
        centroids: fp32 ``[C, E]``.
        bucket_cutoffs: fp32 ``[2**nbits - 1]``, ascending; a residual equal to one belongs to the
            bucket below it.
        bucket_weights: fp32 ``[2**nbits]``, what a residual in each bucket is restored to.
    """

    centroids: Tensor
    bucket_cutoffs: Tensor
    bucket_weights: Tensor

    @property
    def nbits(self) -> int:
        return self.bucket_weights.numel().bit_length() - 1


class CompressedTokens(NamedTuple):
    """Compressed embeddings of T tokens, or of any leading shape.

    Attributes:
        codes: int32 ``[T]``, centroid ids.
        residuals: uint8 ``[T, P]`` with P = E * nbits / 8.
        inverse_norms: float16 ``[T]``, 1 / norm of the restored embedding. The published layout has
            none of these: None leaves them to be computed in each search.
    """

    codes: Tensor
    residuals: Tensor
    inverse_norms: Tensor | None = None


def published_num_centroids(num_tokens: int) -> int:
    """How many centroids ColBERTv2 takes for a collection: the power of 2 at or below 16 times the
    square root of its number of tokens."""
    return 1 << max((256 * num_tokens).bit_length() - 1, 0) // 2


def mirrored_numbers(nbits: int) -> list[int]:
    """Each number below ``2**nbits`` with its bits in reverse order: how the layout holds it."""
    return [int(f"{number:0{nbits}b}"[::-1], 2) for number in range(2**nbits)]


def _places(nbits: int, device: torch.device) -> Tensor:
    """By how many bits each number of a byte is shifted, the first one to the top."""
    return torch.arange(8 - nbits, -1, -nbits, device=device, dtype=torch.uint8)


def pack_buckets(buckets: Tensor, nbits: int) -> Tensor:
    """Bucket numbers ``[T, E]``, integers below ``2**nbits``, to uint8 ``[T, E * nbits / 8]``.

    Raises:
        ValueError: a width that is not among WIDTHS, or rows that do not fill whole bytes.
    """
    T, E = buckets.shape
    check_width(E, nbits)
    mirrored = torch.tensor(mirrored_numbers(nbits), dtype=torch.uint8, device=buckets.device)
    numbers = mirrored[buckets.long()].view(T, E * nbits // 8, 8 // nbits)
    return (numbers << _places(nbits, buckets.device)).sum(dim=2, dtype=torch.uint8)


def unpack_buckets(packed: Tensor, nbits: int) -> Tensor:
    """The inverse of :func:`pack_buckets`: uint8 ``[T, P]`` to uint8 ``[T, P * 8 / nbits]``."""
    T, P = packed.shape
    mirrored = torch.tensor(mirrored_numbers(nbits), dtype=torch.uint8, device=packed.device)
    numbers = packed[..., None] >> _places(nbits, packed.device) & 2**nbits - 1
    return mirrored[numbers.view(T, P * 8 // nbits).long()]


def check_width(E: int, nbits: int) -> None:
    """Raise ValueError unless residuals of E dimensions in ``nbits`` bits fill whole bytes."""
    if nbits not in WIDTHS:
        raise ValueError(f"nbits must be one of {WIDTHS}, got {nbits}")
    if E * nbits % 8:
        raise ValueError(
            f"residuals of E = {E} dimensions in {nbits} bits do not fill whole bytes; "
            f"E must be a multiple of {8 // nbits}"
        )


def train_codec(
    embeddings: Tensor,
    num_centroids: int,
    nbits: int,
    *,
    iterations: int = 10,
    seed: int = 0,
) -> ResidualCodec:
    """Centroids and buckets for embeddings like these.

    As in ColBERTv2, a twentieth of the sample (at most HELD_OUT_TOKENS) is kept from the
    clustering; the residuals of those tokens, all dimensions together, give the buckets: cut-offs
    at their quantiles i / 2**nbits, weights at the quantiles half-way between. Where a twentieth
    has fewer numbers than FOR_A_BUCKET for each bucket, up to half of the sample is kept.

    Args:
        embeddings: ``[T, E]``, any float dtype, unit rows: a sample of the collection's tokens.
        num_centroids: C; see :func:`published_num_centroids`.
        nbits: 1, 2, 4 or 8.
        iterations, seed: of the clustering, which is spherical k-means.

    Returns:
        The codec, on the device of the embeddings; the same bits under the same seed.

    Raises:
        ValueError: no matrix, a width that does not fit, too few tokens, or some that are not
            finite.
    """
    if embeddings.dim() != 2:
        raise ValueError(f"embeddings must be [T, E], got {tuple(embeddings.shape)}")
    _check_finite(embeddings)
    T, E = embeddings.shape
    check_width(E, nbits)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(seed)).to(embeddings.device)
    usual = min(int(T * HELD_OUT), HELD_OUT_TOKENS, QUANTILE_ELEMENTS // E)
    fewest = min(-(-FOR_A_BUCKET * 2**nbits // E), T // 2, T - num_centroids)
    held_out = max(usual, fewest, 1)
    if T - held_out < max(num_centroids, 1):
        raise ValueError(
            f"{num_centroids} centroids need at least as many tokens beside the {held_out} held "
            f"out for the buckets, got {T}; take fewer centroids or a larger sample"
        )
    sample = embeddings[order[held_out:]]
    centroids = spherical_kmeans(sample, num_centroids, iterations=iterations, seed=seed)
    tokens = embeddings[order[:held_out]].float()
    residuals = tokens - centroids[nearest_centroids(tokens, centroids)[1]]
    count = 2**nbits
    steps = torch.arange(count, device=embeddings.device, dtype=torch.float32) / count
    cutoffs = residuals.flatten().quantile(steps[1:])
    weights = residuals.flatten().quantile(steps + 0.5 / count)
    return ResidualCodec(centroids, cutoffs, weights)


def _check_finite(embeddings: Tensor) -> None:
    if not embeddings.isfinite().all():
        raise ValueError("embeddings hold numbers that are not finite")


def compress(codec: ResidualCodec, embeddings: Tensor) -> CompressedTokens:
    """Codes, packed residuals and inverse norms of ``[T, E]`` embeddings of any float dtype.

    Raises:
        ValueError: embeddings of another width than the centroids, or that are not finite: no code
            stands for these.
    """
    if embeddings.dim() != 2 or embeddings.shape[1] != codec.centroids.shape[1]:
        raise ValueError(
            f"embeddings must be [T, E] with E = {codec.centroids.shape[1]} as the centroids have, "
            f"got {tuple(embeddings.shape)}"
        )
    check_width(embeddings.shape[1], codec.nbits)
    _check_finite(embeddings)
    parts = []
    for chunk in embeddings.split(TOKENS_AT_ONCE):
        tokens = chunk.float()
        codes = nearest_centroids(tokens, codec.centroids)[1]
        buckets = torch.bucketize(tokens - codec.centroids[codes], codec.bucket_cutoffs)
        parts.append((codes.int(), pack_buckets(buckets, codec.nbits)))
    codes, residuals = (torch.cat(x) for x in zip(*parts, strict=True))
    return with_inverse_norms(codec, CompressedTokens(codes, residuals))


def restore(codec: ResidualCodec, codes: Tensor, residuals: Tensor) -> Tensor:
    """Centroid plus bucket weights, fp32 ``[T, E]``, of codes ``[T]`` and residuals ``[T, P]``."""
    buckets = unpack_buckets(residuals, codec.nbits)
    return codec.centroids[codes.long()].float() + codec.bucket_weights.float()[buckets.long()]


def decompress(codec: ResidualCodec, tokens: CompressedTokens, *, normalize: bool = True) -> Tensor:
    """The embeddings that compressed tokens stand for.

    Args:
        codec: what they were compressed with.
        tokens: codes of any shape, residuals with one dimension more.
        normalize: L2-normalise them, from their own norms, as the published code always does.

    Returns:
        fp32, the shape of the codes and E.
    """
    flat = tokens.residuals.flatten(0, -2)
    pairs = zip(tokens.codes.flatten().split(TOKENS_AT_ONCE), flat.split(TOKENS_AT_ONCE))
    restored = torch.cat([restore(codec, *pair) for pair in pairs])
    if normalize:
        restored = F.normalize(restored, dim=1)
    return restored.view(*tokens.codes.shape, restored.shape[1])


def with_inverse_norms(codec: ResidualCodec, tokens: CompressedTokens) -> CompressedTokens:
    """The same tokens with their inverse norms, for example those of an index in the published
    layout. The dense embeddings exist for TOKENS_AT_ONCE tokens at a time. Norms below the inverse
    of float16's largest number are taken as that."""
    flat = tokens.residuals.flatten(0, -2)
    pairs = zip(tokens.codes.flatten().split(TOKENS_AT_ONCE), flat.split(TOKENS_AT_ONCE))
    largest = torch.finfo(torch.float16).max
    inverse = [restore(codec, *pair).norm(dim=1).reciprocal().clamp_max(largest) for pair in pairs]
    return tokens._replace(inverse_norms=torch.cat(inverse).half().view(tokens.codes.shape))
