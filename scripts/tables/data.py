"""Preparing and loading of training data, by the number of worker processes."""

from benchmarks.data.figures import LOADING, PREPARATION
from tables.records import Record, markdown, table


@table("data", "data")
def data(records: list[Record]) -> str:
    first = records[0]
    sizes = {record["examples"]: record for record in records}
    prepared = [[words(record) for words in PREPARATION.values()] for record in sizes.values()]
    loaded = [
        [
            f"{record['examples']:,}",
            str(record["workers"]),
            *(words(record) for words in LOADING.values()),
        ]
        for record in records
    ]
    return (
        f"{first['cpu']}, {first['cpus']} cores.\n\n"
        f"{markdown([*PREPARATION], prepared)}\n"
        f"{markdown(['examples', 'workers', *LOADING], loaded)}"
    )
