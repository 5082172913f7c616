"""Exact search over sparse vectors: by postings, and by products with every document. Search among
compressed token vectors: ours and fast-plaid's."""

from benchmarks.search.compressed import EXHAUSTIVE, LARGE, MANY, ONE, RIVALS, SMALL, STAGED
from benchmarks.search.study import Cell
from tables.bars import MET
from tables.records import Record, find, markdown, mebibytes, milliseconds, table

PROVIDERS = {"inverted": "**ours**", "embedding_bag": "embedding_bag"}
SIZE = ("documents", "queries", "k")
COMPRESSED = {name: f"**ours**, {name}" for name in (EXHAUSTIVE, STAGED)} | {
    name: f"fast-plaid, {nbits} bits" for name, nbits in RIVALS.items()
}
# Milliseconds; and how many times the rate of fast-plaid, as it comes, at the same size.
TIME_BARS = {Cell(EXHAUSTIVE, LARGE, *ONE): 12, Cell(STAGED, LARGE, *ONE): 2}
# At that size the index scores all documents, if it is left to choose.
RATE_BARS = {Cell(EXHAUSTIVE, SMALL, *asked): 3 for asked in (ONE, MANY)}


@table("search", "search")
def search(records: list[Record]) -> str:
    rows = []
    for size in dict.fromkeys(tuple(record[key] for key in SIZE) for record in records):
        found = [find(records, provider=name, **dict(zip(SIZE, size))) for name in PROVIDERS]
        build = f"{found[0]['build_s']:.1f}" if "build_s" in found[0] else ""
        figures = [f(record) for f in (milliseconds, _index) for record in found]
        rows.append([*(f"{number:,}" for number in size), *figures, build])
    words = PROVIDERS.values()
    columns = [*(f"{name}, ms" for name in words), *(f"{name}, MiB" for name in words)]
    return markdown(["documents", "queries at once", "k", *columns, "**ours**, built in s"], rows)


def _index(record: Record) -> str:
    return mebibytes(record, "index_bytes")


@table("compressed_search", "compressed_search")
def compressed(records: list[Record]) -> str:
    rows = []
    for record in records:
        timed = record["status"] == "ok"
        rows.append(
            [
                COMPRESSED[record["provider"]],
                *(f"{record[key]:,}" for key in SIZE),
                milliseconds(record),
                f"{record['queries_per_s']:,.0f}" if timed else "",
                f"{1 - record['missed']:.2f}" if "missed" in record else "",
                _index(record),
                f"{record['build_s']:.1f}" if "build_s" in record else "",
            ]
        )
    columns = ["ms", "queries/s", "of the 10 best", "MiB", "built in s"]
    found = markdown(["", "documents", "queries at once", "k", *columns], rows)
    bars = markdown(["bar", "target", "measured", "met"], _bars(records))
    return f"{found}\n{bars}" if bars else found


def _bars(records: list[Record]) -> list[list[str]]:
    """What was measured of the targets."""
    rows = []
    for cell, limit in TIME_BARS.items():
        if "p50_ms" in (record := find(records, cell)):
            said, met = f"{milliseconds(record)} ms", record["p50_ms"] <= limit
            rows.append([_size(cell), f"≤ {limit} ms", said, MET[met]])
    for cell, least in RATE_BARS.items():
        ours, theirs = find(records, cell), find(records, cell._replace(provider="fast_plaid"))
        if "p50_ms" in ours and "p50_ms" in theirs:
            ratio = theirs["p50_ms"] / ours["p50_ms"]
            target = f"≥ {least} times fast-plaid's rate"
            rows.append([_size(cell), target, f"{ratio:.2f}", MET[ratio >= least]])
    return rows


def _size(cell: Cell) -> str:
    queries = "1 query" if cell.queries == 1 else f"{cell.queries} queries"
    return f"{cell.provider}, {cell.documents:,} documents, {queries}"
