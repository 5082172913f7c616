"""BM25 against a plain double loop, and on real collections."""

import csv
import gzip
import itertools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from sparton.representations import Representations
from sparton.retrieval.bm25 import BM25, Analyzer
from sparton.retrieval.indexes.inverted import InvertedIndex
from sparton.retrieval.metrics import evaluate_run
from sparton.retrieval.run import Run

DATA = Path(os.environ.get("SPARTON_DATA", Path(__file__).resolve().parents[3] / "shared/data"))

DOCUMENTS = [
    "The cats are running, running and running.",
    "A cat's dream of fish",
    "",
    "Fishing boats and fishermen",
    "the of and",
    "Dogs chase cats; cats chase dogs.",
]
QUERIES = ["running cats", "fish fish dream", "the of", "zebra", "cat dog"]


def asked(bm25: BM25, queries: Iterable[str]) -> Representations:
    return Representations(bm25.queries(queries))


def reference_scores(query: str, documents: list[str], k1: float, b: float) -> list[float]:
    """Lucene's formula, one occurrence of a query term at a time."""
    analyze = Analyzer()
    texts = [analyze(document) for document in documents]
    mean_length = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for term in filter(text.count, analyze(query)):
            frequency = sum(term in other for other in texts)
            idf = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
            tf = text.count(term)
            score += idf * tf / (tf + k1 * (1 - b + b * len(text) / mean_length))
        scores.append(score)
    return scores


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.2, 0.75), (0.5, 0.0), (2.0, 1.0)])
def test_scores_equal_the_double_loop(k1, b):
    bm25 = BM25(k1, b)
    index = InvertedIndex(bm25.fit(DOCUMENTS))
    scores, rows = index.search(asked(bm25, QUERIES), len(DOCUMENTS))

    def agrees(k1: float, b: float) -> bool:
        for query, text in enumerate(QUERIES):
            expected = np.array(reference_scores(text, DOCUMENTS, k1, b))
            found = np.zeros(len(DOCUMENTS))
            hits = rows[query] >= 0
            found[rows[query][hits]] = scores[query][hits]
            if not np.allclose(found, expected, rtol=1e-5, atol=0):
                return False
        return True

    assert agrees(k1, b)
    assert not agrees(k1 * 1.001, b), "the tolerance must notice k1 changed by 0.1 %"


def test_queries_without_known_terms_find_nothing():
    bm25 = BM25()
    index = InvertedIndex(bm25.fit(DOCUMENTS))
    _, rows = index.search(asked(bm25, ["zebra", "the of", ""]), 3)
    assert (rows == -1).all()


@pytest.mark.parametrize("texts", [[""], ["the", "of"]])
def test_collection_without_terms(texts):
    bm25 = BM25()
    documents = bm25.fit(texts)
    assert (documents.num_vectors, documents.width) == (len(texts), 0)
    assert (InvertedIndex(documents).search(asked(bm25, ["cat"]), 2)[1] == -1).all()


def test_fit_forgets_the_previous_collection():
    bm25 = BM25()
    bm25.fit(["zebra giraffe"])
    fitted = bm25.fit(DOCUMENTS)
    assert fitted.width == BM25().fit(DOCUMENTS).width
    assert bm25.queries(["zebra"]).mean_entries == 0


def test_analyzer_lowers_stems_and_drops_stop_words():
    assert Analyzer()("The Cat's RUNNING, and the cats' x-ray_2 of Élan") == [
        "cat",
        "run",
        "cat",
        "x",
        "rai",
        "2",
        "élan",
    ]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("हिन्दी की किताब का", ["हिन्दी", "की", "किताब", "का"]),
        ("cre\u0300me bru\u0302le\u0301e", ["crème", "brûlée"]),
        ("كِتَاب جديد", ["كِتَاب", "جديد"]),
        (
            "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
            ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"],
        ),  # Persian
        ("İstanbul", ["i\u0307stanbul"]),
        ("日本語の文章 GPU3台", ["日", "本", "語", "の", "文", "章", "gpu3", "台"]),
        ("カタカナ 한국어", ["カタカナ", "한국어"]),
        ("\u0301 _", []),
    ],
)
def test_words_of_other_scripts_are_whole(text, terms):
    assert Analyzer()(text) == terms


def test_a_stop_word_with_a_possessive_is_one():
    assert Analyzer()("It's that\u2019s bond's") == ["bond"]


def test_words_of_one_or_two_letters_are_their_own_stems():
    assert Analyzer()("S us S's AS/400 es' ed uses") == ["s", "us", "s", "400", "es", "ed", "us"]


def test_no_word_becomes_an_empty_term():
    analyze = Analyzer()
    letters = "aeiouylsdbt"
    words = [*letters, *map("".join, itertools.product(letters, repeat=2))]
    words += map("".join, itertools.product(letters, repeat=3))
    words += [word + end for word in letters for end in ("'s", "'", "s's", "sses", "ies", "eed")]
    terms = [term for word in words for term in analyze(word)]
    assert len(terms) > 1400
    assert "" not in terms


@pytest.mark.parametrize(("k1", "b"), [(-1, 0.4), (0.9, 1.5)])
def test_parameters_out_of_range(k1, b):
    with pytest.raises(ValueError, match="BM25 needs"):
        BM25(k1, b)


@pytest.mark.parametrize(
    ("collection", "low", "high"), [("cranfield", 0.35, 0.38), ("medline", 0.65, 0.70)]
)
def test_real_collections_score_as_known(collection, low, high):
    folder = DATA / collection
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set SPARTON_DATA to the folder of the real collections")
    documents = _texts(folder / "corpus.jsonl.gz")
    queries = _texts(folder / "queries.jsonl.gz")
    qrels: dict[str, dict[str, int]] = {}
    with (folder / "qrels" / "test.tsv").open() as file:
        for query, document, grade in list(csv.reader(file, delimiter="\t"))[1:]:
            qrels.setdefault(query, {})[document] = int(grade)
    bm25 = BM25()
    index = InvertedIndex(bm25.fit(documents.values()))
    scores, rows = index.search(asked(bm25, queries.values()), 10)
    run = Run(list(queries), list(documents), rows, scores)
    assert low < evaluate_run(qrels, run, ["ndcg@10"])["ndcg@10"] < high
    shifted = run._replace(rows=np.where(rows > 0, rows - 1, rows))
    assert evaluate_run(qrels, shifted, ["ndcg@10"])["ndcg@10"] < low


def _texts(path: Path) -> dict[str, str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return {each["_id"]: f"{each.get('title', '')} {each['text']}" for each in records}
