"""What columns are taken as: by their names, then by their order."""

import pytest

from sparton.datasets.columns import (
    COLLECTION,
    ID_EXAMPLES,
    TEXT_EXAMPLES,
    Schema,
    assign,
    holds_text,
    is_header,
)

QUERY, POSITIVE = {"query": "question"}, {"positive": "passage"}


@pytest.mark.parametrize(
    ("names", "renames", "unused"),
    [
        ("query positive", {}, ""),
        ("question passage", {"question": "query", "passage": "positive"}, ""),
        ("Question Answer", {"Question": "query", "Answer": "positive"}, ""),
        ("anchor pos neg", {}, ""),
        ("id questionText document", {"questionText": "query", "document": "positive"}, "'id'"),
        ("answer question", {"question": "query", "answer": "positive"}, ""),
        ("question context answer", {"question": "query", "context": "positive"}, "'answer'"),
        ("title text", {"title": "query", "text": "positive"}, ""),
        ("frage antwort", {"frage": "query", "antwort": "positive"}, ""),
        (
            "frage antwort falsch auch_falsch",
            {
                "frage": "query",
                "antwort": "positive",
                "falsch": "negative_1",
                "auch_falsch": "negative_2",
            },
            "",
        ),
        ("doc_id frage antwort", {"frage": "query", "antwort": "positive"}, "'doc_id'"),
        ("question antwort quelle", {"question": "query", "antwort": "positive"}, "'quelle'"),
        (
            "query passage hard_negative negative_1 score",
            {"passage": "positive", "hard_negative": "negative_2", "score": "scores"},
            "",
        ),
        (
            "query positive negative query_id positive_id negative_id neg_ids hard_negative_id_1",
            {},
            "'query_id', 'positive_id', 'negative_id', 'neg_ids', 'hard_negative_id_1'",
        ),
        ("query documents scores", {}, ""),
        ("question documents scores", {"question": "query"}, ""),
    ],
)
def test_names_go_before_order(names, renames, unused):
    columns = names.split()
    found = assign(columns, columns, TEXT_EXAMPLES)
    assert found.renames == renames
    assert found.description.partition("; not used: ")[2] == unused


ABOUT = ["id", "_id", "docid", "DocNo", "pid", "qid", "uuid", "article_ids", "page_url", "nr"]


@pytest.mark.parametrize("name", [*ABOUT, "__index_level_0__"])
def test_ids_are_no_texts(name):
    columns = [name, "frage", "antwort"]
    renames = {"frage": "query", "antwort": "positive"}
    assert assign(columns, columns, TEXT_EXAMPLES).renames == renames
    columns[0] = "kids"
    assert assign(columns, columns, TEXT_EXAMPLES).renames["kids"] == "query"


def test_what_holds_no_text_is_not_taken_by_order():
    found = assign(["number", "frage", "antwort"], ["frage", "antwort"], TEXT_EXAMPLES)
    assert found.renames == {"frage": "query", "antwort": "positive"}
    found = assign(["n", "m"], [], TEXT_EXAMPLES)
    assert found.renames == {}


def test_cells_of_negatives_may_be_empty_and_no_others():
    names = ["question", "passage", "negative", "neg_2"]
    assert assign(names, names, TEXT_EXAMPLES).optional == {"negative", "neg_2"}


def test_ids_and_collections():
    names = ["query_id", "doc_id", "negative_id"]
    found = assign(names, names, ID_EXAMPLES)
    assert found.renames == {"doc_id": "positive_id"}
    names = ["query_id", "doc_id", "neg_ids"]
    assert assign(names, names, ID_EXAMPLES).renames["neg_ids"] == "negative_1"
    names = ["docno", "headline", "contents"]
    found = assign(names, names, COLLECTION)
    assert found.renames == {"docno": "_id", "headline": "title", "contents": "text"}
    assert assign(["a", "b", "c"], ["a", "b", "c"], COLLECTION).renames == {"a": "_id", "b": "text"}
    # Where the text has a name, no other column is an id.
    names = ["query", "positive"]
    assert assign(names, names, COLLECTION).renames == {"query": "text"}


LONG = [["how is rice cooked", "In water."], ["why is the sky blue", "Light scatters."]]
SHORT = [["rice", "food"], ["sky", "weather"]]


@pytest.mark.parametrize(
    ("fields", "following", "schema", "expected"),
    [
        (["question", "passage"], SHORT, TEXT_EXAMPLES, "a header"),
        (["question", "passage"], [], TEXT_EXAMPLES, "a header"),
        (["", "Question", "Passage Text"], SHORT, TEXT_EXAMPLES, "a header"),
        (["question", "passage", "", ""], SHORT, TEXT_EXAMPLES, "a header"),
        (["Question ", " passage"], SHORT, TEXT_EXAMPLES, "a header"),
        (["question", "passage", "passage"], LONG, TEXT_EXAMPLES, "a header"),
        (["query", "positive", "negative_1"], SHORT, TEXT_EXAMPLES, "a header"),
        (["frage", "antwort"], LONG, TEXT_EXAMPLES, "a header"),
        (["frage", "antwort"], SHORT, TEXT_EXAMPLES, "as assumed"),
        (["frage", "antwort"], [], TEXT_EXAMPLES, "as assumed"),
        (["query", "what is this"], SHORT, TEXT_EXAMPLES, "as assumed"),
        (["query", "what is a query"], LONG, TEXT_EXAMPLES, "none"),
        (["what is rice?", "food"], LONG, TEXT_EXAMPLES, "none"),
        (["rice", "rice"], LONG, TEXT_EXAMPLES, "none"),
        (["7", "passage"], LONG, TEXT_EXAMPLES, "none"),
        (["qid", "pid", "pos_score"], [], ID_EXAMPLES, "a header"),
        (["q1", "d1"], [["q2", "d2 and d3"]], ID_EXAMPLES, "none"),
        (["id", "text"], LONG, COLLECTION, "a header"),
        (["nummer", "text"], LONG, COLLECTION, "a header"),
        (["q1", "define extreme"], LONG, COLLECTION, "as assumed"),
    ],
)
def test_headers(fields: list[str], following: list, schema: Schema, expected: str):
    answers = [is_header(fields, following, schema, assumed=each) for each in (True, False)]
    assert answers == {"a header": [True, True], "none": [False, False]}.get(
        expected, [True, False]
    )


def test_texts_are_told_from_numbers():
    assert holds_text(["a", None, "", "7 dwarfs"], TEXT_EXAMPLES)
    assert holds_text([["a", "b"], []], TEXT_EXAMPLES)
    for others in (["a", "7"], [1.5], ["7", "-3.5e4", "1,000"], [None, ""], [{"a": "b"}], []):
        assert not holds_text(others, TEXT_EXAMPLES), others


def test_addresses_of_the_web_are_no_texts_but_may_stand_among_them_and_be_ids():
    addresses = ["https://a.org/b?c=d", " www.a.org", None, ["HTTP://a.org"]]
    assert not holds_text(addresses, TEXT_EXAMPLES)
    assert holds_text([*addresses, "see https://a.org"], TEXT_EXAMPLES)
    assert holds_text([["https://a.org", "an answer"]], TEXT_EXAMPLES)
    assert holds_text(addresses, COLLECTION)
