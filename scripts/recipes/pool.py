"""Put training texts of several origins into one collection, one file of queries, and files of ids.

    python scripts/recipes/pool.py --data data --output runs/zero_shot/pool

``corpus.jsonl`` and ``queries.jsonl`` are as in the layout of BEIR, and ``NAME.jsonl`` holds pairs
of their ids: ``squad`` and ``acl`` of the training splits, one for each file of Debian pairs, and
``crops``, queries that were made of the texts themselves. Of SQuAD and ACL only those documents
come in that a training query has. ``to_mine.jsonl`` has the first pairs of every source, for which
negatives are mined. ``--collections`` makes crops of all documents of some folders in the place of
all this.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from sparton.datasets.collection import beir_file, read_texts
from sparton.datasets.judgments import read_judgments
from sparton.pipelines import pair_texts
from sparton.writing import replacing_folder

JUDGED = {"squad": "squad", "acl": "acl_title_abstract"}
TO_MINE = "to_mine.jsonl"
DEBIAN = ("descriptions", "documentation", "manuals", "wordnet")

Texts = dict[str, str]


class Pool:
    """Texts by id, and pairs of ids by source."""

    def __init__(self) -> None:
        self.documents: Texts = {}
        self.queries: Texts = {}
        self.pairs: dict[str, list[tuple[str, str]]] = {}

    def add(self, source: str, query_id: str, query: str, document_id: str, document: str) -> None:
        self.queries[query_id] = query
        self.documents[document_id] = document
        self.pairs.setdefault(source, []).append((query_id, document_id))

    def write(self, folder: Path, mined: int) -> None:
        for name, texts in (("corpus", self.documents), ("queries", self.queries)):
            write_lines(folder / f"{name}.jsonl", ({"_id": i, "text": t} for i, t in texts.items()))
        to_mine = [pair for pairs in self.pairs.values() for pair in pairs[:mined]]
        files = {f"{name}.jsonl": pairs for name, pairs in self.pairs.items()}
        for name, pairs in (files | {TO_MINE: to_mine}).items():
            ids = ({"query_id": query, "positive_id": document} for query, document in pairs)
            write_lines(folder / name, ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--collections", nargs="+", default=[], metavar="FOLDER", help="below DATA")
    parser.add_argument("--debian", type=int, default=10_000, help="pairs of each file at most")
    parser.add_argument("--crops", type=int, default=15_000, help="texts that queries are made of")
    parser.add_argument("--limit", type=int, help="pairs of each judged collection at most")
    parser.add_argument("--mined", type=int, default=30_000, help="pairs of a source to mine for")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, pool = random.Random(arguments.seed), Pool()
    for folder in arguments.collections:
        texts = documents_of(arguments.data / folder)
        pool.documents |= {f"{folder}-{key}": text for key, text in texts.items() if text.strip()}
    if not arguments.collections:
        for name, folder in JUDGED.items():
            add_judged(pool, name, arguments.data / folder, arguments.limit)
        for name in DEBIAN:
            path = arguments.data / "debian" / f"{name}.jsonl"
            add_pairs(pool, name, path, arguments.debian, chance)
    with replacing_folder(arguments.output) as fresh:
        add_crops(pool, arguments.crops, chance, fresh / "crops.jsonl")
        pool.write(fresh, arguments.mined)
    counts = ", ".join(f"{len(pairs):,} {name}" for name, pairs in pool.pairs.items())
    Console(highlight=False).print(f"{len(pool.documents):,} documents; pairs: {counts}")


def documents_of(folder: Path) -> Texts:
    return {key: text for _, key, text in read_texts(beir_file(folder, "corpus.jsonl"))}


def add_judged(pool: Pool, name: str, folder: Path, limit: int | None) -> None:
    """The training queries of a folder and their documents."""
    documents = documents_of(folder)
    queries = {key: text for _, key, text in read_texts(beir_file(folder, "queries.jsonl"))}
    judged = [j for j in read_judgments(beir_file(folder, "qrels/train.tsv")) if j.grade > 0]
    for query, document, *_ in judged[:limit]:
        ids = f"{name}-{query}", f"{name}-{document}"
        pool.add(name, ids[0], queries[query], ids[1], documents[document])


def add_pairs(pool: Pool, name: str, path: Path, most: int, chance: random.Random) -> None:
    """Some of the pairs of a file."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row, record in enumerate(chance.sample(records, min(most, len(records)))):
        pool.add(name, f"{name}-q{row}", record["query"], f"{name}-d{row}", record["positive"])


def add_crops(pool: Pool, most: int, chance: random.Random, scratch: Path) -> None:
    """Spans and rare words of some of the documents, whose positives are the whole documents."""
    ids = chance.sample(sorted(pool.documents), min(most, len(pool.documents)))
    texts = [pool.documents[key] for key in ids]
    for way in ("spans", "keywords"):
        pair_texts(texts, scratch, by=[way], progress=False)
        pairs = [json.loads(line) for line in scratch.read_text(encoding="utf-8").splitlines()]
        for query, row in placed(pairs, texts):
            pool.add("crops", f"crops-{way}-{ids[row]}", query, ids[row], texts[row])


def placed(pairs: list[dict[str, str]], texts: list[str]) -> Iterator[tuple[str, int]]:
    """Each query, and the row of the text that it was made of: pairs come in the order of the
    texts, of which some gave none. A positive is its whole text, or what the query left of it."""
    row = 0
    for query, positive in ((pair["query"], pair["positive"]) for pair in pairs):
        while positive != texts[row] and letters(query + positive) != letters(texts[row]):
            row += 1
        yield query, row
        row += 1


def letters(text: str) -> list[str]:
    return sorted("".join(text.split()))


def write_lines(path: Path, records: Iterator[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    main()
