"""Every accepted shape of a record, and what is said about the others."""

from typing import Any

import pytest

from sparton.datasets.files import RecordError
from sparton.datasets.records import IDS, TEXTS, Row, parse_record, parse_text

ACCEPTED = {
    "pair": (TEXTS, ["q", "p"], Row("q", ["p"], [], [])),
    "triplet": (TEXTS, ["q", "p", "n"], Row("q", ["p"], ["n"], [])),
    "several negatives": (TEXTS, ["q", "p", "n", "m"], Row("q", ["p"], ["n", "m"], [])),
    "set": (TEXTS, {"set": ["a", "b", "a", "c"]}, Row("", ["a", "b", "c"], [], [])),
    "query and pos": (TEXTS, {"query": "q", "pos": ["p", "r"]}, Row("q", ["p", "r"], [], [])),
    "query, pos and neg": (
        TEXTS,
        {"query": "q", "pos": ["p"], "neg": ["n", "m"]},
        Row("q", ["p"], ["n", "m"], []),
    ),
    "columns": (
        TEXTS,
        {"anchor": "q", "positive": "p", "negative_10": "z", "negative_2": "b", "id": 7},
        Row("q", ["p"], ["b", "z"], []),
    ),
    "negative": (
        TEXTS,
        {"query": "q", "positive": "p", "negative": "n", "negatives": None},
        Row("q", ["p"], ["n"], []),
    ),
    "negatives that are positives": (
        TEXTS,
        {"query": "q", "pos": ["p", "r"], "neg": ["r", "n", "p"], "scores": [5, 4, 3, 2, 1]},
        Row("q", ["p", "r"], ["n"], [5.0, 4.0, 2.0], repeated=2),
    ),
    "a negative that is the positive": (IDS, ["1", "2", "2"], Row("1", ["2"], [], [], repeated=1)),
    "scores": (
        TEXTS,
        {"query": "q", "positive": "p", "negatives": ["n"], "scores": [2, 1.5]},
        Row("q", ["p"], ["n"], [2.0, 1.5]),
    ),
    "separate scores": (
        TEXTS,
        {"query": "q", "pos": ["p"], "pos_scores": [3], "neg": ["n"], "neg_scores": [1]},
        Row("q", ["p"], ["n"], [3.0, 1.0]),
    ),
    "scored documents": (
        TEXTS,
        {"query": "q", "documents": ["a", "b", "c"], "scores": [1, 5, 5]},
        Row("q", ["b"], ["a", "c"], [5.0, 1.0, 5.0]),
    ),
    "several teachers": (
        TEXTS,
        {"query": "q", "pos": "p", "neg": ["n", "m"], "scores": [[9, 0.25], [5, 0.5], [1, 0.0]]},
        Row("q", ["p"], ["n", "m"], [0.75, 0.75, 0.0], 2),
    ),
    "several teachers, apart": (
        TEXTS,
        {"query": "q", "pos": ["p"], "pos_scores": [[3, 0]], "neg": ["n"], "neg_scores": [[1, 4]]},
        Row("q", ["p"], ["n"], [0.5, 0.5], 2),
    ),
    "several teachers choose the positive": (
        IDS,
        {"query_id": 1, "document_ids": [5, 6], "scores": "[[80, -3], [90, -3]]"},
        Row("1", ["6"], ["5"], [0.5, 0.0], 2),
    ),
    "a list of one teacher": (
        TEXTS,
        {"query": "q", "positive": "p", "negatives": ["n"], "scores": [[7], [2]]},
        Row("q", ["p"], ["n"], [7.0, 2.0]),
    ),
    "id triple": (IDS, ["1", "2", "3"], Row("1", ["2"], ["3"], [])),
    "ids": (
        IDS,
        {"query_id": 1, "positive_id": "2", "negative_ids": [3, "4"]},
        Row("1", ["2"], ["3", "4"], []),
    ),
    "scored ids": (
        IDS,
        {"query_id": 1, "document_ids": [5, 6], "scores": [0.25, 0.5]},
        Row("1", ["6"], ["5"], [0.5, 0.25]),
    ),
    "lists written as JSON": (
        IDS,
        {"query_id": "1", "document_ids": '["5", "6"]', "scores": "[0.25, 0.5]"},
        Row("1", ["6"], ["5"], [0.5, 0.25]),
    ),
    "scores of TSV columns": (
        IDS,
        {"pos_score": "9.5", "neg_score": "-1", "qid": "1", "pid": "2", "nid": "3"},
        Row("1", ["2"], ["3"], [9.5, -1.0]),
    ),
}

REFUSED = {
    "a lone text": (TEXTS, ["q"], "list of 1"),
    "a number": (TEXTS, 3, "int where a JSON list or object"),
    "no query": (TEXTS, {"title": "x", "pos": ["p"]}, r"keys \['title', 'pos'\] lack a query"),
    "no positive": (TEXTS, {"query": "q", "neg": ["n"]}, "lack a query .* or its positive"),
    "empty positives": (TEXTS, {"query": "q", "pos": []}, "'pos' is empty"),
    "empty query": (TEXTS, {"query": " ", "pos": ["p"]}, "'query' holds an empty text"),
    "empty negative": (TEXTS, ["q", "p", ""], "'negative' holds an empty text"),
    "null in a list": (TEXTS, {"query": "q", "pos": [None]}, "'pos' holds a NoneType"),
    "number as text": (TEXTS, ["q", 5], "'positive' holds a int where text"),
    "true as id": (IDS, [True, 5], "'query' holds a bool where id"),
    "set of one": (TEXTS, {"set": ["a", "a"]}, "two different texts, this one has 1"),
    "too few scores": (
        TEXTS,
        {"query": "q", "pos": ["p"], "neg": ["n"], "scores": [1]},
        "1 scores for 2 documents",
    ),
    "half the scores": (
        TEXTS,
        {"query": "q", "pos": ["p"], "neg": ["n"], "pos_scores": [1]},
        "others have none",
    ),
    "scores that are text": (
        TEXTS,
        {"query": "q", "documents": ["a"], "scores": ["high"]},
        "not a number",
    ),
    "another number of teachers": (
        TEXTS,
        {"query": "q", "pos": ["p"], "neg": ["n"], "scores": [[1, 2], [1]]},
        "some documents have 2 teacher scores and others have not",
    ),
    "no teacher in a list": (
        TEXTS,
        {"query": "q", "documents": ["a"], "scores": [[]]},
        "an empty list of teacher scores",
    ),
    "infinite score of a second teacher": (
        TEXTS,
        {"query": "q", "documents": ["a"], "scores": [[1, float("nan")]]},
        "not finite",
    ),
    "infinite score": (
        TEXTS,
        {"query": "q", "documents": ["a"], "scores": [float("inf")]},
        "not finite",
    ),
    "documents without scores": (TEXTS, {"query": "q", "documents": ["a"]}, "have none"),
    "no documents": (TEXTS, {"query": "q", "documents": [], "scores": []}, "no documents"),
    "broken list of ids": (IDS, {"qid": "1", "document_ids": "[5", "scores": [1]}, "not JSON"),
}


@pytest.mark.parametrize("shape", ACCEPTED)
def test_accepted_shapes(shape: str) -> None:
    kind, record, expected = ACCEPTED[shape]
    assert parse_record(record, kind) == expected


@pytest.mark.parametrize("shape", REFUSED)
def test_refused_records(shape: str) -> None:
    kind, record, message = REFUSED[shape]
    with pytest.raises(RecordError, match=message):
        parse_record(record, kind)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"_id": "a", "title": "T", "text": "x"}, ("a", "T x")),
        ({"_id": 3, "title": "", "text": "x"}, ("3", "x")),
        ({"query_id": "a", "text": None}, ("a", "")),
    ],
)
def test_texts_with_ids(record: Any, expected: tuple[str, str]) -> None:
    assert parse_text(record) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "an id"),
        ({"_id": "a", "body": "x"}, r"found \['_id', 'body'\]"),
        ({"_id": "", "text": "x"}, "empty id"),
        ({"_id": "a", "text": ["x"]}, "must hold text"),
        (["a", "x"], "an object"),
    ],
)
def test_texts_with_faults(record: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse_text(record)
