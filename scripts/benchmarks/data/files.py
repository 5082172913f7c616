"""Generated files in the formats that training reads, gzipped where the real ones are."""

import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from benchmarks.data.texts import Texts, documents, queries
from sparton.datasets.mixture import Mixture, text_mixture
from sparton.datasets.sources import id_records

MIXTURE, NEGATIVES, IDS = FORMATS = ("mixture", "negatives", "ids")
NUM_NEGATIVES = {MIXTURE: 0, NEGATIVES: 7, IDS: 1}
# Files of embedding-training-data by their share of the examples: one for each shape it has.
SHARES = {"pairs": 0.81, "sets": 0.05, "positives": 0.08, "lists": 0.03, "negatives": 0.03}
EXAMPLES_PER_QUERY = 10  # of ids
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
    "queries": lambda q, d, n: f"{n}\t{q[n]}",
    "collection": lambda q, d, n: f"{n}\t{d[n]}",
}


def write_files(folder: Path, form: str, examples: int) -> int:
    """Write the files of a format, their parts on all cores. Returns their bytes."""
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run may have left
    folder.mkdir(parents=True)
    _texts()  # before the fork, so that all have them
    with get_context("fork").Pool() as pool:
        for name, lines in _sizes(form, examples).items():
            bounds = pairwise([*range(0, lines, PART), lines])
            tasks = ((name, *bound, examples) for bound in bounds)
            with (folder / name).open("wb") as file:
                file.writelines(pool.imap(_part, tasks))
    return sum(file.stat().st_size for file in folder.iterdir())


def open_files(folder: Path, form: str) -> Mixture:
    """The examples as training opens them; prepared by the first call."""
    cache_dir = str(folder.with_suffix(".cache"))
    if form == IDS:
        names = ("triples.tsv", "queries.tsv", "collection.tsv")
        return Mixture({IDS: id_records(*names, root=str(folder), cache_dir=cache_dir)})
    files = {path.name.partition(".")[0]: path.name for path in sorted(folder.iterdir())}
    return text_mixture(files, root=str(folder), cache_dir=cache_dir)


def _sizes(form: str, examples: int) -> dict[str, int]:
    """Lines by name of the file."""
    if form == IDS:
        queries = examples // EXAMPLES_PER_QUERY
        return {"queries.tsv": queries, "collection.tsv": examples, "triples.tsv": examples}
    shares = SHARES if form == MIXTURE else {NEGATIVES: 1.0}
    return {f"{name}.jsonl.gz": round(share * examples) for name, share in shares.items()}


@cache
def _texts() -> tuple[Texts, Texts]:
    return queries(), documents()


def _part(task: tuple[str, int, int, int]) -> bytes:
    """Lines ``start`` to ``stop - 1`` of a file; members of gzip may follow one another."""
    name, start, stop, examples = task
    kind = name.partition(".")[0]
    content = "\n".join(_lines(kind, range(start, stop), examples)) + "\n"
    return gzip.compress(content.encode(), 1) if name.endswith(".gz") else content.encode()


def _lines(kind: str, numbers: range, examples: int) -> Iterator[str]:
    if kind == "triples":
        generator = random.Random(numbers.start)
        for _ in numbers:
            query, *both = (int(generator.random() * examples) for _ in range(3))
            yield "\t".join(map(str, (query // EXAMPLES_PER_QUERY, *both)))
        return
    line = LINES[kind]
    yield from (line(*_texts(), number) for number in numbers)
