"""Search of a million compressed documents, all of them or in stages.

Q queries, N documents, L tokens of a document, E embedding, C centroids.
"""

from typing import ClassVar, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.gate import timed_if_right
from benchmarks.kernels import KernelCell, KernelStudy, floors
from benchmarks.screen import Columns, Record, figure
from benchmarks.study import Settings
from sparton.kernels.maxsim import CompressedTokens, ResidualCodec, decompress, maxsim_varlen
from sparton.kernels.maxsim.codec import published_num_centroids, with_inverse_norms
from sparton.kernels.maxsim.residual import forward
from sparton.kernels.maxsim.residual.forward import DEFAULT
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.compressed import CompressedIndex
from sparton.retrieval.indexes.protocols import Found

EXHAUSTIVE, STAGED = "exhaustive", "staged"
ONE, MANY = "1 query", "16 queries"  # asked at once
K = 10
# Of a document's tokens, those that are of its topic's words; documents of a topic, and its words.
TOPICAL, TOPIC_DOCUMENTS, TOPIC_WORDS = 0.75, 50, 64
# Tokens of a query that are its own; the others fill it up and lie near one of these.
OWN_TOKENS, NOISE = 12, 0.5
SCORES, RECALL = 5e-3, 0.9
# How else the exhaustive kernel could be launched: tokens of a tile, warps, stages.
CONFIGS = {
    f"tile {block_t} warps {warps} stages {stages}": DEFAULT._replace(
        block_t=block_t, num_warps=warps, num_stages=stages
    )
    for block_t, warps, stages in ((32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 4), (128, 8, 3))
}
DOCUMENTS_AT_ONCE = 20_000


class Shape(NamedTuple):
    """A collection of N documents of L tokens each, and queries of Lq tokens."""

    N: int
    L: int = 160
    Lq: int = 32
    nbits: int = 2
    E: int = 128

    def shrunk(self) -> "Shape":
        """Small enough for a test on a CPU."""
        return self._replace(N=200, L=12, Lq=6, E=32)


class Problem(NamedTuple):
    """A collection on the device, with its codec, and 16 queries."""

    shape: Shape
    documents: CompressedTokens
    codec: ResidualCodec
    queries: Representations

    def build_index(self, *, staged: bool) -> CompressedIndex:
        N, L = self.shape.N, self.shape.L
        bounds, device = torch.arange(N + 1) * L, self.documents.codes.device
        return CompressedIndex(self.documents, bounds, self.codec, device, staged=staged)


def make_problem(shape: Shape, device: str) -> Problem:
    """Documents of topics: their codes are words of one topic, or any; queries come from one
    document each, with noise. Centroids and residuals are random: what they cost does not depend on
    them."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(high: int, *sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(high, sizes, generator=generator, device=device, dtype=dtype)

    N, L, E, count = shape.N, shape.L, shape.E, published_num_centroids(shape.N * shape.L)
    centroids = torch.randn(count, E, generator=generator, device=device)
    quantiles = (torch.arange(2**shape.nbits, device=device) + 0.5) / 2**shape.nbits
    weights = 0.05 * 2**0.5 * torch.erfinv(2 * quantiles - 1)
    codec = ResidualCodec(normalize(centroids, dim=1), (weights[1:] + weights[:-1]) / 2, weights)
    words = draw(count, max(N // TOPIC_DOCUMENTS, 1), TOPIC_WORDS)
    codes = torch.empty(N, L, dtype=torch.int32, device=device)
    for part in codes.split(DOCUMENTS_AT_ONCE):
        topic = draw(len(words), len(part), dtype=torch.int64)
        chosen = words[topic].gather(1, draw(TOPIC_WORDS, *part.shape, dtype=torch.int64))
        topical = torch.rand(part.shape, generator=generator, device=device) < TOPICAL
        part.copy_(torch.where(topical, chosen, draw(count, *part.shape)))
    residuals = draw(256, N * L, E * shape.nbits // 8, dtype=torch.uint8)
    documents = with_inverse_norms(codec, CompressedTokens(codes.flatten(), residuals))
    sources = draw(N, 16, dtype=torch.int64)
    own = decompress(codec, CompressedTokens(codes[sources], residuals.view(N, L, -1)[sources]))
    tokens = own[:, :OWN_TOKENS].repeat(1, -(-shape.Lq // OWN_TOKENS), 1)[:, : shape.Lq]
    noise = normalize(torch.randn(tokens.shape, generator=generator, device=device), dim=2)
    values = normalize(tokens + NOISE * noise, dim=2).half().cpu()
    bounds = torch.arange(17) * shape.Lq
    queries = Representations(tokens=TokenVectors(values.flatten(0, 1), bounds))
    return Problem(shape, documents, codec, queries)


def truth(problem: Problem) -> tuple[Tensor, Tensor]:
    """The best K scores and documents of every query, from restored tokens in fp32."""
    device, (N, L, *_) = problem.codec.centroids.device, problem.shape
    asked = problem.queries.tokens
    assert asked is not None
    queries, bounds = asked.values.float().to(device), asked.cu_seqlens.int().to(device)
    scores = []
    for first in range(0, N, DOCUMENTS_AT_ONCE):
        last = min(first + DOCUMENTS_AT_ONCE, N)
        part = slice(first * L, last * L)
        codes, residuals, _ = problem.documents
        tokens = decompress(problem.codec, CompressedTokens(codes[part], residuals[part]))
        own = torch.arange(last - first + 1, device=device, dtype=torch.int32) * L
        scores.append(maxsim_varlen(queries, tokens, bounds, own))
    best = torch.cat(scores, 1).topk(K)
    return best.values.cpu(), best.indices.cpu()


def errors(found: Found, best: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Of the scores at each rank, relative, where all documents are looked at; and what is not
    found of the best documents."""
    scores, rows = best
    missed = [
        1 - len({*own.tolist()} & {*right.tolist()}) / K
        for own, right in zip(found.rows, rows, strict=False)
    ]
    difference = (torch.from_numpy(found.scores) - scores[: len(found.scores)]).norm()
    return {"scores": float(difference / scores.norm()), "missed": sum(missed) / len(missed)}


class SearchStudy(KernelStudy):
    """Search for the ten best of a million compressed documents, from the token vectors of queries
    on the host to rows and scores there. An exhaustive search must have the scores of restored
    documents, a staged one nine tenths of the best of these."""

    name = "maxsim_search"
    suites_apart = True
    shapes: ClassVar = {"1M_160": Shape(1_000_000)}
    limit = 120.0
    columns: ClassVar[Columns] = {
        **KernelStudy.columns,
        "missed": figure("missed", ".3f"),
        "GB": figure("index_gb", ".2f"),
    }

    def suites(self, settings: Settings) -> dict[str, list[KernelCell]]:
        cells = [
            KernelCell(shape, mode, provider)
            for shape in self.shapes
            for provider in (EXHAUSTIVE, STAGED)
            for mode in (ONE, MANY)
        ]
        others = [KernelCell(name, ONE, config) for name in self.shapes for config in CONFIGS]
        return {self.name: cells, f"{self.name}_configs": others}

    def problem(
        self, shape: Shape, gradients: bool, device: str
    ) -> tuple[Problem, tuple[Tensor, Tensor]]:
        problem = make_problem(shape, device)
        return problem, truth(problem)

    def measure(
        self, cell: KernelCell, problem: Problem, truth: tuple[Tensor, Tensor], settings: Settings
    ) -> Record:
        shape, staged = problem.shape, cell.provider == STAGED
        index = problem.build_index(staged=staged)
        allowed = {"scores": 1.0 if staged else SCORES, "missed": 1 - RECALL}
        asked = problem.queries if cell.mode == MANY else problem.queries.slice(0, 1)
        with patch.object(forward, "DEFAULT", CONFIGS.get(cell.provider, DEFAULT)):
            found = errors(index.search(problem.queries, K), truth)
            record = timed_if_right(found, allowed, lambda: index.search(asked, K), settings)
        record |= {"missed": found["missed"], "index_gb": index.nbytes / 1e9}
        if staged or record["status"] != "ok":
            return record
        size = sum(x.nbytes for x in problem.documents if x is not None)
        flop = 2 * shape.N * shape.L * asked.num_texts * shape.Lq * shape.E
        return record | floors(size, flop, settings)


STUDY = SearchStudy()
