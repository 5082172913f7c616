"""A small generated collection, and the mining program run in this process."""

import gzip
import json
import random
from pathlib import Path

import mine_hard_negatives as program
from hard_negatives.arguments import parser

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


def mine(*arguments: object) -> list[dict]:
    """Run the program here; gives the records of its output."""
    parsed = parser(None).parse_args([*map(str, arguments)])
    program.mine(parsed)
    content = parsed.output.read_bytes()
    text = gzip.decompress(content) if parsed.output.suffix == ".gz" else content
    return [json.loads(line) for line in text.splitlines()]
