"""A small generated collection, and mining in it."""

import gzip
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from sparton.datasets.sources import text_records
from sparton.pipelines.mining import Rule, TrainedModel, mine_hard_negatives, miners
from sparton.pipelines.mining.mining import Mining

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


def bm25_scores(query: str, documents: list[str], k1: float = 0.9, b: float = 0.4) -> list[float]:
    """Lucene's formula, word for word."""
    bags = [Counter(document.split()) for document in documents]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for term in query.split():
            df = sum(term in other for other in bags)
            idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
            saturation = k1 * (1 - b + b * bag.total() / mean)
            score += idf * bag[term] / (bag[term] + saturation)
        scores.append(score)
    return scores


def write(path: Path, records: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def mine(examples: Path, output: Path, **options: object) -> list[dict]:
    """Mine for examples that are written out as texts; gives the records of the output."""
    mine_hard_negatives(text_records(str(examples)), output, progress=False, **options)
    return read_records(output)


def mine_after_a_failure(
    examples: Path, model: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict]:
    """Three negatives each by a model, in a second run that finds two of three encoded slabs."""
    monkeypatch.setattr(miners, "SLAB", 16)
    settings = {"miners": [TrainedModel(model)], "rule": Rule(3), "output": output}
    with monkeypatch.context() as patched:
        patched.setattr(Mining, "part", lambda self, *ends: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mine(examples, **settings)
    slabs = sorted(Path(f"{output}.parts").rglob("*.safetensors"))
    assert len(slabs) == 3
    slabs[1].unlink()
    real, encoded = miners.encode_texts, []

    def encode_texts(encoder, tokenizer, texts, side, **options):
        encoded.append(len(texts))
        return real(encoder, tokenizer, texts, side, **options)

    monkeypatch.setattr(miners, "encode_texts", encode_texts)
    records = mine(examples, **settings)
    assert encoded == [16, 40]  # the slab that was missing, and the queries
    return records


def check_hardest(
    records: list[dict], documents: list[str], scores: torch.Tensor, tolerance: float
) -> None:
    """The negatives of query n have the best of its scores ``[n]``, but that of document n."""
    for row, record in enumerate(records):
        scores[row, row] = -math.inf
        expected = scores[row].topk(3).values
        found = scores[row, [documents.index(text) for text in record["neg"]]]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def read_records(file: Path) -> list[dict]:
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    return [json.loads(line) for line in text.decode().removesuffix("\n").split("\n")]
