"""Search among compressed token vectors: ours, exhaustive and in stages, and fast-plaid's."""

import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import count, islice
from math import ceil
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from benchmarks.gate import timed_if_right
from benchmarks.screen import Columns, Record, figure, timed_columns
from benchmarks.search.study import Cell
from benchmarks.search.tokens import (
    BEST,
    PART,
    Shape,
    best_documents,
    draw_documents,
    draw_queries,
)
from benchmarks.study import Measured, Settings, Study
from sparton.kernels.maxsim import CompressedTokens, ResidualCodec, compress, train_codec
from sparton.kernels.maxsim.codec import HELD_OUT, published_num_centroids
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.indexes.compressed import CompressedIndex
from sparton.retrieval.indexes.compression import ITERATIONS, SAMPLE
from sparton.training.manifest import installed_version

OURS = EXHAUSTIVE, STAGED = "exhaustive", "staged"
NBITS = 2
RIVALS = {"fast_plaid": 4, "fast_plaid_2_bits": NBITS}  # bits of a dimension: by default, as ours
ONE, MANY = (1, 10), (256, 100)  # queries at once, k
SMALL, LARGE = 100_000, 1_000_000
JUDGED = 32  # queries
DIFFERENT = 64  # queries, one of which is asked at a time
ALLOWED = {"missed": 0.15}


Rows = Sequence[Sequence[int]]


class Search(Protocol):
    """An index of some documents.

    Attributes:
        nbits: of a dimension.
        nbytes: of what it holds; theirs, of its files.
        build_s: seconds in which it was made, from documents that are drawn meanwhile.
    """

    nbits: int
    nbytes: int
    build_s: float

    def __call__(self, queries: Tensor, k: int) -> Rows:
        """Rows, the best first, of queries fp16 ``[Q, W, E]``; all on the host."""
        ...


class Collection(NamedTuple):
    """Documents that are drawn when they are needed, queries fp16 ``[Q, W, E]`` on the host, and
    the best documents of the first of these."""

    shape: Shape
    device: str
    queries: Tensor
    best: Tensor

    @classmethod
    def draw(cls, shape: Shape, number: int, device: str) -> "Collection":
        queries = draw_queries(shape, number, device)
        return cls(shape, device, queries, best_documents(shape, queries[:JUDGED], device))

    def missed(self, found: Rows) -> float:
        """The share of the best documents that is not among the first found."""
        pairs = zip(found, self.best.tolist(), strict=True)
        return sum(len({*right} - {*own[:BEST]}) for own, right in pairs) / self.best.numel()


class Compressed(NamedTuple):
    """All documents, as :class:`CompressedIndex` takes them, and how long that took."""

    tokens: CompressedTokens
    codec: ResidualCodec
    seconds: float


def compress_documents(shape: Shape, device: str) -> Compressed:
    """What the builder of compressed indexes makes of all documents, which are drawn in parts: no
    memory has to hold them. Documents are independent of each other, so that the first are a sample
    like any other."""
    begin, total = time.perf_counter(), shape.N * shape.L
    number = max(min(published_num_centroids(total), total // 4), 1)
    wanted = int(number * SAMPLE / (1 - HELD_OUT)) + 1
    sample = torch.cat(
        [
            part.flatten(0, 1)
            for part in islice(draw_documents(shape, device), -(-wanted // (PART * shape.L)))
        ]
    )
    with _tf32():
        codec = train_codec(sample, number, NBITS, iterations=ITERATIONS)
        del sample
        parts = [compress(codec, part.flatten(0, 1)) for part in draw_documents(shape, device)]
    codes, residuals, scales = (torch.cat(each) for each in zip(*parts))
    _wait(device)
    seconds = time.perf_counter() - begin
    return Compressed(CompressedTokens(codes, residuals, scales), codec, seconds)


@contextmanager
def _tf32() -> Iterator[None]:
    """Centroids by products in TF32: in fp32, those of a million documents take minutes."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Ours:
    """Our compressed index."""

    nbits = NBITS

    def __init__(self, documents: Compressed, shape: Shape, device: str, *, staged: bool) -> None:
        begin, bounds = time.perf_counter(), torch.arange(shape.N + 1) * shape.L
        self.index = CompressedIndex(
            documents.tokens, bounds, documents.codec, device, staged=staged
        )
        _wait(device)
        self.nbytes = self.index.nbytes
        self.build_s = documents.seconds + time.perf_counter() - begin

    def __call__(self, queries: Tensor, k: int) -> Rows:
        bounds = torch.arange(len(queries) + 1, dtype=torch.int32) * queries.shape[1]
        asked = Representations(tokens=TokenVectors(queries.flatten(0, 1), bounds))
        return self.index.search(asked, k).rows.tolist()


class FastPlaid:
    """The index of the package fast-plaid, which lies in files of a folder."""

    def __init__(self, shape: Shape, device: str, nbits: int, folder: Path) -> None:
        from fast_plaid import search

        begin = time.perf_counter()
        documents = [each for part in draw_documents(shape, device) for each in part.cpu()]
        self.index = search.FastPlaid(str(folder), device)
        self.index.create(documents, nbits=nbits)
        self.build_s = time.perf_counter() - begin
        self.nbits = nbits
        self.nbytes = sum(file.stat().st_size for file in folder.iterdir())

    def __call__(self, queries: Tensor, k: int) -> Rows:
        found = self.index.search(queries, k, show_progress=False)
        return [[row for row, _ in each] for each in found]


class CompressedStudy(Study[Cell]):
    """Time of search among compressed token vectors, one query at a time and many.

        python scripts/benchmark.py compressed_search

    Documents of 160 tokens and queries of 32 are drawn around the centres of words. fast-plaid is
    called as it comes, and with as many bits as ours. At least 0.85 of the ten best documents by
    MaxSim of the vectors as they were must be found, on average. Times are those of calls from
    Python, from vectors on the host to results on the host; single queries differ from call to
    call.
    """

    name = "compressed_search"
    cell = Cell
    seconds = 0.4
    limit = 300.0
    columns: ClassVar[Columns] = timed_columns(
        **{
            "queries/s": figure("queries_per_s", ",.0f"),
            "missed": figure("missed", ".3f"),
            "build s": figure("build_s", ".1f"),
            "index MiB": figure("index_bytes", ",.1f", 2**-20),
        }
    )

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        small = [Cell(name, SMALL, *asked) for name in (*OURS, *RIVALS) for asked in (ONE, MANY)]
        large = [Cell(name, LARGE, *asked) for name in OURS for asked in (ONE, MANY)]
        # Seconds a call.
        large.remove(Cell(EXHAUSTIVE, LARGE, *MANY))
        return {self.name: small + large}

    def context(self, suite: str, settings: Settings) -> Record:
        return {"versions": {"fast-plaid": installed_version("fast-plaid")}}

    def process_of(self, cell: Cell) -> Hashable:
        return cell.documents

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        shape, number, device = Shape(cells[0].documents), MANY[0], settings.device
        if settings.miniature:
            shape, number = shape.shrunk(), JUDGED
        collection = cache(lambda: Collection.draw(shape, number, device))
        compressed = cache(lambda: compress_documents(shape, device))

        @lru_cache(maxsize=1)
        def index(provider: str) -> Search:
            if provider in RIVALS:
                folder = Path(settings.folder) / provider
                shutil.rmtree(folder, ignore_errors=True)  # its files count as the index
                folder.mkdir(parents=True)
                return FastPlaid(shape, device, RIVALS[provider], folder)
            return Ours(compressed(), shape, device, staged=provider == STAGED)

        return lambda cell: measure(cell, collection(), index(cell.provider), settings)


def measure(cell: Cell, collection: Collection, search: Search, settings: Settings) -> Record:
    asked, turn = collection.queries, count()
    calls = asked[:DIFFERENT].split(1) if cell.queries == 1 else [asked]

    def run() -> Rows:
        return search(calls[next(turn) % len(calls)], cell.k)

    # The calls that are timed are judged, one at a time as many as have all judged queries.
    judged = [row for _ in range(ceil(JUDGED / len(calls[0]))) for row in run()]
    found = {"missed": collection.missed(judged[:JUDGED])}
    record = {
        **found,
        "nbits": search.nbits,
        "build_s": round(search.build_s, 3),
        "index_bytes": search.nbytes,
        # fast-plaid has threads of its own.
        **timed_if_right(found, ALLOWED, run, settings, one_core=False),
    }
    if record["status"] == "ok":
        record["queries_per_s"] = round(1e3 * cell.queries / record["p50_ms"], 1)
    return record


STUDY = CompressedStudy()
