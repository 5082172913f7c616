"""Generated files in the shapes that training reads, gzipped as the real ones are."""

import gzip
import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from benchmarks.texts import Texts, documents, queries
from sparton.datasets.mixture import Mixture, text_mixture

# By their share of the examples, one for each shape that embedding-training-data has.
SHARES = {"pairs": 0.81, "sets": 0.05, "positives": 0.08, "lists": 0.03, "negatives": 0.03}
PART = 20_000  # lines written at once


# Lines by the kind of a file, of queries q and documents d from the n-th on.
LINES: dict[str, Callable[[Texts, Texts, int], str]] = {
    "pairs": lambda q, d, n: json.dumps([q[n], d[n]]),
    "lists": lambda q, d, n: json.dumps([q[n], d[n], d[n + 1]]),
    "sets": lambda q, d, n: json.dumps({"set": [q[n], d[n], q[n + 1], d[n + 1]]}),
    "positives": lambda q, d, n: json.dumps({"query": q[n], "pos": [d[n], d[n + 1]]}),
    "negatives": lambda q, d, n: json.dumps(
        {"query": q[n], "pos": [d[n]], "neg": [d[n + step] for step in range(1, 8)]}
    ),
}


def write_files(folder: Path, examples: int) -> int:
    """Write the files, their parts on all cores. Returns their bytes."""
    for left in (folder, tables_of(folder)):  # by an interrupted run, or by other code
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)
    _texts()  # before the fork, so that all have them
    with get_context("fork").Pool() as pool:
        for kind, share in SHARES.items():
            lines = round(share * examples)
            bounds = pairwise([*range(0, lines, PART), lines])
            with (folder / f"{kind}.jsonl.gz").open("wb") as file:
                file.writelines(pool.imap(_part, ((kind, *bound) for bound in bounds)))
    return sum(file.stat().st_size for file in folder.iterdir())


def open_files(folder: Path) -> Mixture:
    """The examples as training opens them; prepared by the first call."""
    files = {path.name.partition(".")[0]: path.name for path in sorted(folder.iterdir())}
    return text_mixture(files, root=str(folder), cache_dir=str(tables_of(folder)))


def tables_of(folder: Path) -> Path:
    """Where the tables that are made of its files lie."""
    return folder.with_suffix(".cache")


@cache
def _texts() -> tuple[Texts, Texts]:
    return queries(), documents()


def _part(task: tuple[str, int, int]) -> bytes:
    """Lines ``start`` to ``stop - 1`` of a file; members of gzip may follow one another."""
    kind, start, stop = task
    lines = (LINES[kind](*_texts(), number) + "\n" for number in range(start, stop))
    return gzip.compress("".join(lines).encode(), 1)
