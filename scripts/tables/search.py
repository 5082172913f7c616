"""Exact search over sparse vectors: by postings, and by products with every document."""

from tables.records import Record, find, markdown, mebibytes, milliseconds, table

PROVIDERS = {"inverted": "**ours**", "embedding_bag": "embedding_bag"}
SIZE = ("documents", "queries", "k")


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
