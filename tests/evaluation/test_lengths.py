"""Texts that are longer than what is read of them are counted, and many queries warned of."""

import json

import pytest

from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import lengths, results_table, write_results
from sparton.evaluation.lengths import shares_cut
from sparton.evaluation.tasks import evaluate_encoder
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.types import Markup, RetrievalTask, TextCollection, TextForm
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
    task = task_of(first_words(1, 3, 4, 9), first_words(2, 5, 6, 7, 10))
    tokenizer = tokenizer_of(6 + ("query_marker" in markup), 8, **markup)
    assert shares_cut(tokenizer, task, TextForm()) == {"query": 0.5, "document": 0.6}
    longer = TextForm(query_length=13, document_length=9)
    assert shares_cut(tokenizer, task, longer) == {"query": 0.0, "document": 0.4}


def test_a_sample_lies_evenly_among_many(monkeypatch):
    monkeypatch.setattr(lengths, "SAMPLE", 3)
    task = task_of(first_words(9, 1, 1, 1, 9, 1, 9, 1, 1), first_words(1))
    assert shares_cut(tokenizer_of(6, 8), task, TextForm()) == {"query": 2 / 3, "document": 0.0}


def test_many_queries_are_warned_of_and_documents_are_not(caplog):
    queries, documents = first_words(9, *[1] * 9), first_words(10, 10)
    tokenizer = tokenizer_of(6, 8)
    caplog.clear()
    shares_cut(tokenizer, task_of(queries[1:], documents), TextForm())
    assert not caplog.records
    shares_cut(tokenizer, task_of(queries, documents), TextForm())
    assert "counting: 10 % of the queries have query_length=6 tokens or more" in caplog.text
    caplog.clear()
    shares_cut(tokenizer, task_of(queries, documents), TextForm(query_length=5))
    assert "query_length=5 tokens" in caplog.text and "at most" not in caplog.text
    filled = PackedTokenizer(tokenizer.tokenizer, 6, 8, max_length=32, markup=Markup(expansion=4))
    shares_cut(filled, task_of(queries, documents), TextForm())
    assert "to more, 32 at most; every query has as many vectors then" in caplog.text


def test_results_say_it(tmp_path):
    encoder = build_encoder(
        tiny(DOCUMENTS.values(), hidden_size=32, layers=1, max_length=32), ColbertHead(8)
    )
    task = make_task()
    tokenizer = PackedTokenizer(encoder.tokenizer, 4, 32, markup=encoder.markup)
    result = evaluate_encoder(encoder, tokenizer, task, timed_queries=0, progress=False)
    assert result.cut == shares_cut(tokenizer, task, task.form)
    assert result.cut["query"] > 0 and result.cut["document"] == 0
    write_results([result], tmp_path, {})
    written = json.loads((tmp_path / "results.json").read_text())["tasks"][0]
    assert written["cut"] == result.cut
    assert written["lengths"] == {"query": 4, "document": 32}
    found, _ = results_table([result]).renderables
    assert "cut q/d" in [column.header for column in found.columns]
