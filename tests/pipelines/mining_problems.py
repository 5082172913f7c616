"""A small generated collection, and mining in it."""

import gzip
import json
import random
from pathlib import Path

from sparton.datasets.sources import text_records
from sparton.pipelines.mining import mine_hard_negatives

# No stop words, and stems of themselves.
WORDS = [
    a + b for a in ("bab", "dod", "gug", "lul", "mom", "nun") for b in ("ak", "ok", "uk", "ug")
]


def generate(count: int = 40) -> list[dict]:
    """Queries of four words of their document."""
    generator = random.Random(0)
    examples = []
    for number in range(count):
        words = generator.choices(WORDS, k=8 + number % 5)
        examples.append({"query": " ".join(words[:4]), "positive": " ".join(words)})
    return examples


def write(path: Path, records: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def mine(examples: Path, output: Path, **options: object) -> list[dict]:
    """Mine for examples that are written out as texts; gives the records of the output."""
    mine_hard_negatives(text_records(str(examples)), output, progress=False, **options)
    return read_records(output)


def read_records(file: Path) -> list[dict]:
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    return [json.loads(line) for line in text.decode().removesuffix("\n").split("\n")]
