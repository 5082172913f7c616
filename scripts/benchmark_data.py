"""Speed and memory of preparing training files and of loading batches from them.

    python scripts/benchmark_data.py --examples 1000000 --workers 4 --tokenizer bert-base-uncased

Files of generated text are written in the real formats, then prepared and read through the same
functions that training uses. Peak memory is that of the main process.
"""

import argparse
import contextlib
import gzip
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from sparton.datasets.loader import train_loader
from sparton.datasets.mixture import Mixture
from sparton.datasets.sources import Records, id_records, text_records
from sparton.datasets.tokenization import PackedTokenizer

Result = TypeVar("Result")

POOL = 5000
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def passages(words: int, seed: int) -> list[str]:
    """Texts of about ``words`` words each, frequent words as frequent as Zipf's law has them."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(LETTERS[:16], k=rng.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]
    return [
        " ".join(rng.choices(vocabulary, weights, k=rng.randint(words // 2, words * 3 // 2)))
        for _ in range(POOL)
    ]


def write(path: Path, lines: Iterable[str]) -> str:
    with path.open("wb") as raw, contextlib.ExitStack() as stack:
        packed = path.suffix == ".gz"
        file = stack.enter_context(gzip.open(raw, "wb", compresslevel=1)) if packed else raw
        file.writelines(f"{line}\n".encode() for line in lines)
    return str(path)


def pairs(folder: Path, examples: int) -> Callable[[], Records]:
    """Pairs as JSON lists in one gzipped file, as most of embedding-training-data has them."""
    queries, documents = passages(9, 1), passages(80, 2)
    records = (
        json.dumps([f"{queries[number % POOL]} {number}", documents[number * 7 % POOL]])
        for number in range(examples)
    )
    path = write(folder / "pairs.jsonl.gz", records)
    return lambda: text_records(path, cache_dir=str(folder))


def negatives(folder: Path, examples: int) -> Callable[[], Records]:
    """A query, a positive and seven negatives as JSON objects."""
    queries, documents = passages(9, 1), passages(80, 2)
    records = (
        json.dumps(
            {
                "query": queries[number % POOL],
                "pos": [documents[number * 7 % POOL]],
                "neg": [documents[(number + step) % POOL] for step in range(1, 8)],
            }
        )
        for number in range(examples)
    )
    path = write(folder / "negatives.jsonl.gz", records)
    return lambda: text_records(path, cache_dir=str(folder))


def id_triples(folder: Path, examples: int) -> Callable[[], Records]:
    """MS MARCO style triples of ids over a collection as large as the number of examples."""
    queries, documents = passages(9, 1), passages(60, 2)
    rng = random.Random(3)
    names = {
        "queries": (f"{number}\t{queries[number % POOL]}" for number in range(examples // 10)),
        "collection": (f"{number}\t{documents[number % POOL]}" for number in range(examples)),
        "triples": (
            f"{rng.randrange(examples // 10)}\t{rng.randrange(examples)}\t{rng.randrange(examples)}"
            for _ in range(examples)
        ),
    }
    paths = {name: write(folder / f"{name}.tsv", lines) for name, lines in names.items()}
    return lambda: id_records(
        paths["triples"], paths["queries"], paths["collection"], cache_dir=str(folder)
    )


def peak_megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def timed(action: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def measure(
    prepare: Callable[[], Records], tokenizer: PackedTokenizer, workers: int
) -> dict[str, str]:
    """Preparation, reopening and loading of one source: a row of the table by its headings."""
    before = peak_megabytes()
    preparing, source = timed(prepare)
    grown = peak_megabytes() - before
    reopening, _ = timed(prepare)
    mixture = Mixture({"source": source})
    reading, _ = timed(lambda: mixture.examples(range(5120), seed=0))
    loader = iter(train_loader(mixture, tokenizer, batch=512, steps=44, num_workers=workers))
    warm = [next(loader) for _ in range(4)]
    loading, pairs_loaded = timed(lambda: sum(batch.queries.num_sequences for batch in loader))
    tokens = warm[0].queries.num_tokens + warm[0].documents.num_tokens
    return {
        "examples": f"{len(source):,}",
        "prepare s": f"{preparing:.1f}",
        "records/s": f"{len(source) / preparing:,.0f}",
        "RAM grown MB": f"{grown:,}",
        "reopen s": f"{reopening:.2f}",
        "read examples/s": f"{5120 / reading:,.0f}",
        "load pairs/s": f"{pairs_loaded / loading:,.0f}",
        "tokens/pair": f"{tokens / 512:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokenizer", default="bert-base-uncased", help="folder or hub name")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    arguments = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = PackedTokenizer(AutoTokenizer.from_pretrained(arguments.tokenizer), 64, 256)
    rows = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        pairs(Path(folder), 100)()  # imports what preparing needs, which is not its memory
        for make in (pairs, negatives, id_triples):
            count = arguments.examples // (8 if make is negatives else 1)
            prepare = make(Path(folder), count)
            rows[make.__name__] = measure(prepare, tokenizer, arguments.workers)
    table = Table("", *rows, title=f"{arguments.workers} worker processes, batches of 512")
    for heading in rows["pairs"]:
        table.add_row(heading, *(row[heading] for row in rows.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
