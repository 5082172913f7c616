"""Preparing and loading of training data, by the number of worker processes."""

from data_benchmark.figures import LOADING, PREPARATION, shown
from tables.records import Record, by_device, markdown

MISSING = "Not measured yet: `python scripts/benchmark_data.py`.\n"


def data_table() -> str:
    return by_device("data", _data, missing=MISSING)


def _data(records: list[Record]) -> str:
    first = records[0]
    sizes = {(record["format"], record["examples"]): record for record in records}
    prepared = [[form, *(shown(r, h) for h in PREPARATION)] for (form, _), r in sizes.items()]
    loaded = [
        [f"{r['format']}, {r['examples']:,}", str(r["workers"]), *(shown(r, h) for h in LOADING)]
        for r in records
    ]
    return (
        f"{first['cpu']}, {first['cpus']} cores.\n\n"
        f"{markdown(['', *PREPARATION], prepared)}\n"
        f"{markdown(['examples', 'workers', *LOADING], loaded)}"
    )
