"""From the cells of search to their records."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import count
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from benchmarks.gate import timed_if_right
from benchmarks.screen import Columns, Record, figure, timed_columns
from benchmarks.search.providers import PROVIDERS, Search, Truth
from benchmarks.search.vectors import DOCUMENT_TERMS, QUERY_TERMS, draw_vectors
from benchmarks.study import Measured, Settings, Study
from sparton.kernels.sparse_vectors import SparseVectors, mean_flops

JUDGED = 3  # queries, the first of a cell's
DIFFERENT = 64  # queries, one of which is asked at a time
ALLOWED = {"scores": 1e-5, "best": 1e-5}
MINIATURE = 2000


class Cell(NamedTuple):
    """So many queries at once."""

    provider: str
    documents: int
    queries: int
    k: int

    @property
    def label(self) -> str:
        return f"{self.provider} {self.documents:,} x {self.queries:,}, k={self.k}"


# By device: documents, queries and k.
SIZES = {
    "cuda": [
        (100_000, 1, 10),
        (100_000, 1000, 1000),
        (1_000_000, 1, 10),
        (1_000_000, 1, 1000),
        (1_000_000, 1000, 1000),
        (8_800_000, 1, 10),
        (8_800_000, 512, 1000),
        (8_800_000, 6980, 1000),
    ],
    "cpu": [
        (n, *asked) for n in (100_000, 1_000_000) for asked in ((1, 10), (1, 1000), (100, 1000))
    ],
}
TOO_LONG = {("embedding_bag", 6980)}  # a minute and a half


class Collection(NamedTuple):
    """Documents in parts, more queries than any cell has, and the truth of some of these."""

    parts: list[SparseVectors]
    queries: SparseVectors
    truth: Truth
    flops: float


class SearchStudy(Study[Cell]):
    """Time and memory of exact search over sparse vectors, one query at a time and many.

        python scripts/benchmark.py search
        OMP_NUM_THREADS=1 python scripts/benchmark.py search --device cpu

    Documents of 135 terms and queries of 43 on average, which share 2.2, are drawn. The baseline
    multiplies every document with a block of dense queries (torch's embedding_bag). Scores are
    compared with those in float64 first. Times are those of calls from Python, from vectors on the
    host to results on the host; single queries differ from call to call.
    """

    name = "search"
    cell = Cell
    limit = 300.0
    needs_gpu = False
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "block": {"type": int, "help": "documents of a block; default: what suits the device"}
    }
    columns: ClassVar[Columns] = timed_columns(
        **{
            "queries/s": figure("queries_per_s", ",.0f"),
            "build s": figure("build_s", ".2f"),
            "index MiB": figure("index_bytes", ",.1f", 2**-20),
        }
    )

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        cells = [Cell(name, *size) for size in SIZES[settings.device] for name in PROVIDERS]
        cells = [cell for cell in cells if (cell.provider, cell.queries) not in TOO_LONG]
        # An index is built once: its cells are neighbours.
        order = list(PROVIDERS)
        return {"sizes": sorted(cells, key=lambda c: (c.documents, order.index(c.provider)))}

    def context(self, suite: str, settings: Settings) -> Record:
        return {"block": settings.options["block"], "threads": torch.get_num_threads()}

    def process_of(self, cell: Cell) -> Hashable:
        return cell.documents

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        documents, queries = cells[0].documents, max(DIFFERENT, *(cell.queries for cell in cells))
        if settings.miniature:
            documents, queries = MINIATURE, DIFFERENT
        collection = cache(lambda: draw_collection(documents, queries, settings.device))

        @lru_cache(maxsize=1)
        def index(provider: str) -> tuple[Search, float]:
            parts = collection().parts
            make = PROVIDERS[provider]
            make(parts[:1], settings.device, settings.options["block"])  # compiled, or loaded
            begin = time.perf_counter()
            made = make(parts, settings.device, settings.options["block"])
            if settings.device == "cuda":
                torch.cuda.synchronize()
            return made, time.perf_counter() - begin

        return lambda cell: measure(cell, collection(), *index(cell.provider), settings)


def draw_collection(documents: int, queries: int, device: str) -> Collection:
    parts = list(draw_vectors(documents, DOCUMENT_TERMS, device, seed=1))
    asked = SparseVectors.concatenate(list(draw_vectors(queries, QUERY_TERMS, device, seed=2)))
    truth = Truth.of(asked.slice(0, JUDGED), parts, device)
    return Collection(parts, asked, truth, mean_flops(asked, parts[0]))


def measure(
    cell: Cell, collection: Collection, search: Search, build_s: float, settings: Settings
) -> Record:
    asked, turn = collection.queries, count()
    bounds = range(DIFFERENT) if cell.queries == 1 else [0]
    calls = [asked.slice(n, min(n + cell.queries, asked.num_vectors)) for n in bounds]

    def run() -> tuple[Tensor, Tensor]:
        return search(calls[next(turn) % len(calls)], cell.k)

    # The calls that are timed are judged, one at a time as many as have all judged queries.
    judged = [run() for _ in range(ceil(JUDGED / calls[0].num_vectors))]
    scores, rows = (torch.cat(each)[:JUDGED] for each in zip(*judged, strict=True))
    found = collection.truth.errors((scores, rows))
    sizes = {
        "flops": round(collection.flops, 3),
        "build_s": round(build_s, 3),
        "index_bytes": search.nbytes,
    }
    record = {**sizes, **timed_if_right(found, ALLOWED, run, settings)}
    if record["status"] == "ok":
        record["queries_per_s"] = round(1e3 * cell.queries / record["p50_ms"], 1)
    return record


STUDY = SearchStudy()
