"""Clustered token vectors, drawn in parts where they are compressed, and which of the documents are
the best of some queries.

N documents, L tokens of a document, Q queries, W tokens of a query, E embedding.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sparton.packing import ranges_of

PART = 4096  # documents drawn at a time
# Tokens lie around the centres of words. Of a document's tokens, those that are of its topic's
# words; documents of a topic, and its words.
WORDS = 2**15
TOPICAL, TOPIC_DOCUMENTS, TOPIC_WORDS = 0.75, 50, 64
# Lengths of the noise between a word's centre and a document's token, and between this one and a
# query's: cosines are about 0.9.
DOCUMENT_NOISE, QUERY_NOISE = 0.5, 0.5
BEST = 10


class Shape(NamedTuple):
    """N documents of L tokens, queries of W tokens, vectors of E dimensions."""

    N: int
    L: int = 160
    W: int = 32
    E: int = 128

    def shrunk(self) -> "Shape":
        """Small enough for a test on a CPU."""
        return self._replace(N=200, L=24, W=16, E=64)


def draw_documents(shape: Shape, device: str) -> Iterator[Tensor]:
    """The documents in parts, fp16 ``[n, L, E]`` on the device; the same ones every time."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(high: int, *sizes: int) -> Tensor:
        return torch.randint(high, sizes, generator=generator, device=device)

    words = min(WORDS, shape.N * shape.L // 8)
    centres = torch.randn(words, shape.E, generator=generator, device=device)
    centres = normalize(centres, dim=1)
    topics = draw(words, max(shape.N // TOPIC_DOCUMENTS, 1), TOPIC_WORDS)
    for part in ranges_of(shape.N, PART):
        size = len(part), shape.L
        own = topics[draw(len(topics), len(part))].gather(1, draw(TOPIC_WORDS, *size))
        topical = torch.rand(size, generator=generator, device=device) < TOPICAL
        chosen = centres[torch.where(topical, own, draw(words, *size))]
        yield _near(chosen, DOCUMENT_NOISE, generator)


def draw_queries(shape: Shape, number: int, device: str) -> Tensor:
    """Noisy copies of different tokens of documents from all parts, fp16 ``[Q, W, E]`` on the
    host."""
    generator = torch.Generator(device).manual_seed(2)
    sources = torch.arange(number, device=device) * shape.N // number
    found, first = [], 0
    for documents in draw_documents(shape, device):
        own = sources[(sources >= first) & (sources < first + len(documents))] - first
        places = torch.rand(len(own), shape.L, generator=generator, device=device)
        chosen = documents[own[:, None], places.topk(shape.W).indices]
        found.append(_near(chosen.float(), QUERY_NOISE, generator))
        first += len(documents)
    return torch.cat(found).cpu()


def _near(vectors: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Unit vectors in fp16 beside those of the last dimension."""
    drawn = torch.randn(vectors.shape, generator=generator, device=vectors.device)
    return normalize(vectors + noise * normalize(drawn, dim=-1), dim=-1).half()


def best_documents(shape: Shape, queries: Tensor, device: str) -> Tensor:
    """The BEST documents of each query by MaxSim in fp32, int64 ``[Q, BEST]`` on the host."""
    Q, W, E = queries.shape
    asked = queries.to(device).float().view(Q * W, E).T
    scores = []
    for documents in draw_documents(shape, device):
        products = (documents.float().flatten(0, 1) @ asked).view(len(documents), -1, Q, W)
        scores.append(products.amax(1).sum(2))
    return torch.cat(scores).topk(BEST, dim=0).indices.T.cpu()
