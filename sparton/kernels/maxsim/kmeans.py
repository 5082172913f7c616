"""Spherical k-means, deterministic under a seed on one kind of device.

T tokens, E embedding, C centroids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SIMILARITIES_AT_ONCE = 2**26
POINTS_PER_CENTROID = 256


def nearest_centroids(embeddings: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The centroid of largest inner product for every token, the first of equals.

    Args:
        embeddings: ``[T, E]``, any float dtype.
        centroids: fp32 ``[C, E]``.

    Returns:
        similarities fp32 ``[T]`` and centroid ids int64 ``[T]``; at most SIMILARITIES_AT_ONCE (or
        C) inner products exist at a time.
    """
    rows = max(SIMILARITIES_AT_ONCE // max(centroids.shape[0], 1), 1)
    best = [(chunk.float() @ centroids.T).max(dim=1) for chunk in embeddings.split(rows)]
    return torch.cat([x.values for x in best]), torch.cat([x.indices for x in best])


def _directions(points: Tensor, ids: Tensor, num_centroids: int) -> Tensor:
    """The unit sum of the points of each centroid, zero where there are none. Each sum is made in
    the order of the points: no atomics, so the bits repeat."""
    members, order = ids.sort(stable=True)
    firsts = torch.searchsorted(members, torch.arange(num_centroids, device=ids.device))
    return F.normalize(F.embedding_bag(order, points, firsts, mode="sum"), dim=1)


def spherical_kmeans(
    embeddings: Tensor, num_centroids: int, *, iterations: int = 10, seed: int = 0
) -> Tensor:
    """Unit centroids that maximise the tokens' inner products with their nearest one.

    ColBERTv2 clusters with Euclidean k-means and normalises its result; then tokens are assigned by
    inner product. Here the inner product decides in every iteration. Starts from random tokens. A
    centroid that lost its tokens moves to one of those that fit worst where they are.

    Args:
        embeddings: ``[T, E]``, any float dtype, T >= num_centroids; unit rows. Of more than
            POINTS_PER_CENTROID tokens per centroid, a random subset of that size is used.
        num_centroids: C.
        iterations: rounds of assignment and averaging.
        seed: of the draws, made on the CPU so that they are the same on every device.

    Returns:
        fp32 ``[C, E]`` on the device of the embeddings.

    Raises:
        ValueError: fewer tokens than centroids, or no centroids at all.
    """
    T = embeddings.shape[0]
    if not 0 < num_centroids <= T:
        raise ValueError(
            f"num_centroids must be from 1 to the number of tokens, {T}, got {num_centroids}"
        )
    order = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    subset = order[: num_centroids * POINTS_PER_CENTROID].to(embeddings.device)
    points = embeddings[subset].float()
    centroids = F.normalize(points[:num_centroids], dim=1)
    for _ in range(iterations):
        similarities, ids = nearest_centroids(points, centroids)
        centroids = _directions(points, ids, num_centroids)
        lost = (centroids == 0).all(dim=1).nonzero()[:, 0]
        worst = similarities.argsort(stable=True)[: lost.numel()]
        centroids[lost] = F.normalize(points[worst], dim=1)
    return centroids
