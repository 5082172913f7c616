"""Texts that are longer than what is read of them are counted, and many queries warned of."""

import json

import pytest

from sparton.datasets import lengths
from sparton.datasets.lengths import CutCounter, examples_cut, shares_cut
from sparton.datasets.mixture import Mixture
from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import results_table, write_results
from sparton.evaluation.tasks import evaluate_encoder
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.types import Example, Markup, RetrievalTask, TextCollection, TextForm
from tests.evaluation.problems import DOCUMENTS, make_task

WORDS = "one two three four five six seven eight nine ten"


def first_words(*numbers: int) -> list[str]:
    return [" ".join(WORDS.split()[:n]) for n in numbers]


def task_of(queries: list[str], documents: list[str]) -> RetrievalTask:
    names = [
        [f"{kind}{row}" for row in range(len(texts))]
        for kind, texts in (("q", queries), ("d", documents))
    ]
    collections = TextCollection(names[1], documents), TextCollection(names[0], queries)
    return RetrievalTask("counting", *collections, {"q0": {"d0": 1}})


def tokenizer_of(query_length: int, document_length: int, **markup: object) -> PackedTokenizer:
    tokenizer = tiny([WORDS], hidden_size=16, layers=1, heads=1, max_length=32).tokenizer
    return PackedTokenizer(tokenizer, query_length, document_length, markup=Markup(**markup))


# With [CLS] and [SEP], six tokens are four words.
@pytest.mark.parametrize("markup", [{}, {"expansion": 4}, {"query_marker": 5}])
def test_texts_that_fill_their_length_are_counted(markup):
    texts = {"query": first_words(1, 3, 4, 9), "document": first_words(2, 5, 6, 7, 10)}
    tokenizer = tokenizer_of(6 + ("query_marker" in markup), 8, **markup)
    assert shares_cut("these", tokenizer, texts) == {"query": 0.5, "document": 0.6}
    longer = TextForm(query_length=13, document_length=9)
    assert shares_cut("these", tokenizer, texts, longer) == {"query": 0.0, "document": 0.4}


def test_many_queries_are_warned_of_and_documents_are_not(caplog):
    queries, documents = first_words(9, *[1] * 9), first_words(10, 10)
    tokenizer = tokenizer_of(6, 8)
    caplog.clear()
    shares_cut("few", tokenizer, {"query": queries[1:], "document": documents})
    assert not caplog.records
    texts = {"query": queries, "document": documents}
    shares_cut("counting", tokenizer, texts)
    assert "counting: 10 % of the queries have query_length=6 tokens or more" in caplog.text
    caplog.clear()
    shares_cut("counting", tokenizer, texts, TextForm(query_length=5))
    assert "query_length=5 tokens" in caplog.text and "at most" not in caplog.text
    filled = PackedTokenizer(tokenizer.tokenizer, 6, 8, max_length=32, markup=Markup(expansion=4))
    shares_cut("counting", filled, texts)
    assert "to more, 32 at most; every query has as many vectors then" in caplog.text


def test_a_sample_of_a_task_lies_evenly_among_many(monkeypatch):
    monkeypatch.setattr(lengths, "SAMPLE", 3)
    task = task_of(first_words(9, 1, 1, 1, 9, 1, 9, 1, 1), first_words(1))
    assert CutCounter()(tokenizer_of(6, 8), task) == {"query": 2 / 3, "document": 0.0}


def test_a_task_in_memory_is_counted_and_warned_of_once(caplog):
    counter, tokenizer = CutCounter(), tokenizer_of(6, 8)
    task = task_of(first_words(9, 1), first_words(10))
    caplog.clear()
    shares = [counter(tokenizer, each) for each in (task, task._replace(exclude_self=True))]
    assert shares == [{"query": 0.5, "document": 1.0}] * 2
    assert len(caplog.records) == 1
    other = task_of(first_words(9, 9), first_words(1))  # of this name, as test beside dev
    assert counter(tokenizer, other) == {"query": 1.0, "document": 0.0}
    assert len(caplog.records) == 2


class Words:
    """A source of queries with so many words, whose positives have one more."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        number = self._numbers[index]
        return Example(*first_words(number, number + 1))


def test_training_examples_are_counted_by_source(caplog):
    caplog.set_level("INFO", logger="sparton.datasets.lengths")
    sources = {"short": Words(*[1] * 19, 4), "long": Words(5, 9), "other": Words(3, 5)}
    data = Mixture(sources, forms={"other": TextForm(query_length=9)})
    tokenizer = tokenizer_of(6, 7)
    caplog.clear()
    assert examples_cut(data, tokenizer, seed=0) == {
        "short": {"query": 0.05, "document": 0.05},
        "long": {"query": 1.0, "document": 1.0},
        "other": {"query": 0.0, "document": 0.5},
    }
    warning, shares = [each.getMessage() for each in caplog.records]
    assert warning.startswith("source long: 100 % of the queries have query_length=6 tokens")
    assert "long 100.0% of the queries, 100.0% of the positives; other 0.0%" in shares


def test_a_model_that_reads_no_texts_cuts_none():
    class Rows:
        """In the place of a tokenizer, as embeddings that were made before."""

    assert examples_cut(Mixture({"long": Words(9)}), Rows(), seed=0) == {}
    assert CutCounter()(Rows(), task_of(first_words(9), first_words(9))) is None


def test_results_say_it(tmp_path):
    encoder = build_encoder(
        tiny(DOCUMENTS.values(), hidden_size=32, layers=1, max_length=32), ColbertHead(8)
    )
    task = make_task()
    tokenizer = PackedTokenizer(encoder.tokenizer, 4, 32, markup=encoder.markup)
    result = evaluate_encoder(encoder, tokenizer, task, timed_queries=0, progress=False)
    assert result.cut == CutCounter()(tokenizer, task)
    assert result.cut["query"] > 0 and result.cut["document"] == 0
    write_results([result], tmp_path, {})
    written = json.loads((tmp_path / "results.json").read_text())["tasks"][0]
    assert written["cut"] == result.cut
    assert written["lengths"] == {"query": 4, "document": 32}
    found, _ = results_table([result]).renderables
    assert "cut q/d" in [column.header for column in found.columns]
