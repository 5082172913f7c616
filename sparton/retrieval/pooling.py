"""Fewer vectors for a document: those of tokens that are alike become one.

N texts, T tokens, E width of a vector.
"""

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.representations import TokenVectors
from sparton.types import TokenPooling


def pool_tokens(vectors: TokenVectors, pooling: TokenPooling) -> TokenVectors:
    """Means of clusters in the place of tokens (Clavié et al., arXiv 2409.14683), as
    sentence-transformers' ``HierarchicalTokenPooling`` makes them.

    Ward's clustering, by cosine distances, of a text's n tokens behind the protected ones leaves
    ``max(n // factor, 1)`` clusters, or all tokens where these are no fewer.

    Args:
        vectors: N texts on the host without a mask; fp32, of length 1.
        pooling: how.

    Returns:
        fp32, the protected tokens of a text first.
    """
    parts = [
        _pool(vectors.values[start:stop], pooling)
        for start, stop in pairwise(vectors.cu_seqlens.tolist())
    ]
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    values = torch.cat([vectors.values[:0], *parts])
    if pooling.normalize:
        values = F.normalize(values, dim=1)
    return TokenVectors(values, cu_seqlens_of(lengths))


def _pool(tokens: Tensor, pooling: TokenPooling) -> Tensor:
    kept, rest = tokens[: pooling.protected], tokens[pooling.protected :]
    count = max(int(len(rest) // pooling.factor), 1)
    if count >= len(rest):
        return tokens
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    distances = (1 - rest @ rest.T).clamp_(0, 2).numpy()
    tree = linkage(squareform(distances, checks=False), method="ward")
    # Of tokens that are equally far from each other there may be fewer clusters than asked for.
    _, cluster = np.unique(fcluster(tree, count, criterion="maxclust"), return_inverse=True)
    own = F.one_hot(torch.from_numpy(cluster)).T.float()
    return torch.cat([kept, own @ rest / own.sum(dim=1, keepdim=True)])
