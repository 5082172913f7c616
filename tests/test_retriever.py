"""A trained model to use, of every kind: from a folder to hits."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import sparton
from sparton.encoded.facts import FACTS
from sparton.evaluation import evaluate_encoder
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.representations import Representations
from sparton.retrieval.indexes.compression import CompressedIndexBuilder
from sparton.retriever import Hit, Retriever
from tests.evaluation.problems import DOCUMENTS, QUERIES, make_task
from tests.forking import environment

HEADS = {
    "splade": EagerHead,
    "colbert": lambda: ColbertHead(8),
    "joint": lambda: JointHead(EagerHead(), ColbertHead(8)),
}
KINDS = pytest.mark.parametrize("kind", HEADS)
TEXTS, IDS = list(DOCUMENTS.values()), list(DOCUMENTS)


@pytest.fixture
def load(tmp_path):
    def folder(kind: str, **options) -> Retriever:
        torch.manual_seed(0)
        backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=32)
        encoder = build_encoder(backbone, HEADS[kind]())
        path = tmp_path / kind
        save_encoder(encoder.train(), path, query_length=8, document_length=12)
        return sparton.load(path, **options)

    return folder


@KINDS
def test_hits_are_those_of_an_evaluation(kind, load):
    model = load(kind)
    assert not model.encoder.training
    index = model.index(TEXTS, IDS)
    hits = index.search(list(QUERIES.values()), k=4)
    task = make_task()
    result = evaluate_encoder(model.encoder, model.tokenizer, task, k=4, metrics=["mrr@4"])
    expected = dict(result.run.rankings())
    for query, found in zip(QUERIES, hits, strict=True):
        own = [hit for hit in found if hit.id != query] if task.exclude_self else found
        for hit, (document, score) in zip(own, expected[query], strict=False):
            assert (hit.id, hit.score) == (document, pytest.approx(score))
    assert any(hits)


@KINDS
def test_similarity_is_the_score_of_a_hit(kind, load):
    model = load(kind)
    queries, documents = model.encode_queries(["red cat", "green"]), model.encode_documents(TEXTS)
    scores = model.similarity(queries, documents)
    assert scores.shape == (2, len(TEXTS))
    assert torch.equal(scores, model.similarity(["red cat", "green"], TEXTS))
    for query, found in enumerate(model.index(documents).search(queries, k=len(TEXTS))):
        assert found, "the case must find something"
        for hit in found:
            assert hit.score == pytest.approx(scores[query, hit.id].item(), abs=1e-5)


@KINDS
def test_what_an_encoder_gives_is_compared_as_it_is(kind, load):
    model = load(kind)
    queries = ["red cat", "green"]
    asked = model.encoder.encode(model.tokenizer.queries(queries), "query")
    answers = model.encoder.encode(model.tokenizer.documents(TEXTS), "document")
    expected = model.similarity(queries, TEXTS)
    found = model.similarity(asked, answers)  # of vectors that are not rounded to 16 bits
    assert torch.allclose(found, expected, rtol=1e-3) and expected.any()
    found = model.index(answers, IDS).search(asked, k=3)
    for own, hits in zip(found, model.index(TEXTS, IDS).search(queries, k=3), strict=True):
        assert [hit.id for hit in own] == [hit.id for hit in hits] != []
    if kind == "splade":
        with pytest.raises(ValueError, match=r"keep the active ones alone, as .*compact"):
            model.index(TEXTS).index.search(asked, 3)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_queries_are_compared_with_documents_in_any_dtype(dtype, load):
    model = load("colbert")
    documents = model.encode_documents(TEXTS, vector_dtype=dtype)
    scores = model.similarity(["red cat"], documents)
    torch.testing.assert_close(scores, model.similarity(["red cat"], TEXTS), atol=0.1, rtol=0)


def test_sparse_similarity_is_the_dot_product(load):
    model = load("splade")
    queries, documents = model.encode_queries(["red cat", "green"]), model.encode_documents(TEXTS)
    expected = queries.sparse.dense() @ documents.sparse.dense().T
    torch.testing.assert_close(model.similarity(queries, documents), expected)
    assert expected.count_nonzero()


@KINDS
def test_a_saved_model_is_the_same(kind, load, tmp_path):
    model = load(kind, query_length=6)
    model.save(tmp_path / "again")
    again = sparton.load(tmp_path / "again")
    assert again.tokenizer.query_length == 6
    assert torch.equal(again.similarity(["red cat"], TEXTS), model.similarity(["red cat"], TEXTS))


def test_a_folder_with_something_in_it_is_not_replaced(load, tmp_path):
    model, place = load("splade"), tmp_path / "place"
    place.mkdir()
    model.save(place)  # an empty one
    (place / "notes").mkdir()
    with pytest.raises(ValueError, match=r"path=.*place' is a folder with something in it, 1_"):
        model.save(place)
    assert (place / "notes").is_dir()
    model.save(place, overwrite=True)
    assert not (place / "notes").exists()
    file = tmp_path / "pairs.csv"
    file.write_text("a,b")
    with pytest.raises(NotADirectoryError, match=r"pairs\.csv is a file: name a folder"):
        model.save(file)
    assert file.read_text() == "a,b" and not list(tmp_path.glob(".*"))


class Table(list):
    """A table of pandas: a loop meets the names of its columns."""

    columns = ("text",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.encode_documents(each for each in TEXTS), "texts is a generator: put"),
        (lambda model: model.index(TEXTS).search({"a": "cat"}), "texts is a dict: put them into"),
        (lambda model: model.encode_documents({*TEXTS}), "texts is a set: put them into a list"),
        (lambda model: model.index(TEXTS, {*IDS}), "ids is a set: put them into a list"),
        (lambda model: model.index(TEXTS).search(["cat"], k="3"), "k='3' must be a whole number"),
        (lambda model: model.index(TEXTS).search(["cat"], k=2.5), "k=2.5 must be a whole number"),
        (
            lambda model: model.index(TEXTS, build="compressed"),
            "build='compressed' builds no index",
        ),
        (lambda model: model.index(TEXTS).search(["cat"], k=True), "k=True must be a whole number"),
        (lambda model: model.index(TEXTS, "abc"), "ids is a str: put them into a list"),
        (lambda model: model.index(["a"], [None]), "the id of document 0 is None: each must be"),
        (lambda model: model.index(["a"], [["x"]]), r"the id of document 0 is \['x'\]: each must"),
        (lambda model: model.index(Table({"text": TEXTS})), "texts is a Table, a table: give one"),
        (lambda model: model.index(Representations()), "the representations hold nothing"),
        (
            lambda model: model.index(model.encode_documents(TEXTS)[:1]),
            r"document 0 is SparseVectors\.\.\..*: each must be a text",
        ),
        (lambda model: model.explain(None), "one text is explained at a time, not None"),
        (lambda model: model.explain(TEXTS), "one text is explained at a time, not"),
        (lambda model: model.explain("cat", k=0), "k=0 must be a whole number of at least 1"),
    ],
)
def test_wrong_types_are_named(call, message, load):
    with pytest.raises(ValueError, match=message):
        call(load("splade"))


def test_a_text_alone_has_no_terms_without_sparse_vectors(load):
    with pytest.raises(ValueError, match="this model gives token vectors: give a document"):
        load("colbert").explain("cat")


def test_texts_and_ids_are_taken_in_their_order_whatever_their_labels(load):
    """A part of a table of pandas has labels that are no positions."""

    class Labelled(list):
        def __getitem__(self, label):
            return super().__getitem__(len(self) - 1 - label)

    model = load("splade")
    expected = model.index(TEXTS, IDS).search(["red cat", "green"], k=2)
    index = model.index(Labelled(TEXTS), Labelled(IDS))
    assert index.search(Labelled(["red cat", "green"]), k=2) == expected
    assert expected[0] and expected[0] != expected[1]


def test_ids_of_an_array_are_given_back_as_numbers(load):
    index = load("splade").index(TEXTS, np.arange(5, 5 + len(TEXTS)))
    found = [hit.id for hit in index.search(["red cat"], k=2)[0]]
    assert found and {type(each) for each in found} == {int}


def test_vectors_of_another_kind_are_not_indexed(load):
    vectors = load("colbert").encode_documents(TEXTS)
    with pytest.raises(ValueError, match=r"have token vectors, and queries .* sparse vectors"):
        load("splade").index(vectors)


def test_what_cannot_be_loaded_is_said_at_once(load):
    with pytest.raises(ValueError, match="precision='int8' must be fp32"):
        load("splade", precision="int8")
    with pytest.raises(ValueError, match="query_length=0 must be at least 1"):
        load("splade", query_length=0)
    with pytest.raises(ValueError, match="precision=fp8 needs a CUDA GPU"):
        load("splade", precision="fp8")
    with pytest.raises(TypeError, match=r"load\(\) has no argument foo"):
        load("splade", foo=1)


def test_representations_are_shown_by_their_sizes(load):
    shown = repr(load("joint").encode_documents(TEXTS))
    assert shown.startswith(f"Representations(sparse vectors ({len(TEXTS)}, ")
    assert ", token vectors (" in shown and "tensor" not in shown


def test_explanations_add_up_to_the_similarity(load):
    for kind in ("splade", "colbert"):
        model = load(kind)
        matches = model.explain("red cat", "crimson cat", k=100)
        total = sum(match[-1] for match in matches)
        score = model.similarity(["red cat"], ["crimson cat"]).item()
        assert total == pytest.approx(score, abs=2e-3)
        assert matches
    model = load("splade")
    terms = model.explain("crimson cat", k=3)
    assert len(terms) == 3
    assert terms == sorted(terms, key=lambda term: -term[1])


def test_documents_without_ids_are_numbered_and_few_hits_are_few(load):
    model = load("colbert")
    (found,) = model.index(TEXTS[:2]).search(["red"], k=10)
    assert sorted(hit.id for hit in found) == [0, 1]
    assert isinstance(found[0], Hit)
    assert model.index(TEXTS[:2]).search(["red"], k=10**15) == [found]


def test_bars_are_shown_when_asked_for(load, capsys):
    model = load("splade")
    capsys.readouterr()
    model.encode_documents(TEXTS)
    assert capsys.readouterr().err == ""
    model.encode_documents(TEXTS, progress=True)
    assert "documents" in capsys.readouterr().err


def test_options_reach_the_encoding(load):
    model = load("joint")
    assert model.encode_documents(TEXTS, max_terms=2).sparse.lengths.max() == 2
    vectors = model.encode_documents(TEXTS, vector_dtype="float32").tokens
    assert vectors.values.dtype == torch.float32


def test_what_cannot_be_used_is_refused(load, tmp_path):
    model = load("splade")
    assert repr(model) == "Retriever(SpladeEncoder on cpu, the usual precision)"
    with pytest.raises(ValueError, match="texts is the single text 'red'"):
        model.index(TEXTS).search("red")
    for queries, message in (
        (["red", " "], "query 1 has no text: leave it out"),
        (["red", None], "query 1 is None: each must be a text"),
        (["red \udcff"], r"query 0 holds '\\udcff', half of a character"),
    ):
        with pytest.raises(ValueError, match=message):
            model.index(TEXTS).search(queries)
    with pytest.raises(ValueError, match="document 0 is 3: each must be a text"):
        model.encode_documents([3])
    with pytest.raises(ValueError, match="6 documents, but 1 ids"):
        model.index(TEXTS, ["a"])
    with pytest.raises(ValueError, match="the id 'a' stands for several documents"):
        model.index(TEXTS[:3], ["a", "b", "a"])
    with pytest.raises(ValueError, match="there are no texts"):
        model.encode_documents([])
    for length in (8.5, "8", True):
        with pytest.raises(ValueError, match=f"query_length={length!r} must be a whole number"):
            load("splade", query_length=length)
    with pytest.raises(ValueError, match="device=gpu cannot be used"):
        load("splade", device="gpu")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        sparton.load(tmp_path / "nothing")


def test_encoded_texts_are_no_model(tmp_path):
    (tmp_path / FACTS).write_text("{}")
    with pytest.raises(FileNotFoundError, match="holds encoded texts, not a model: name the model"):
        sparton.load(tmp_path)


def test_another_index_can_be_built(load):
    model = load("splade")
    asked = []

    class Last:
        kinds = frozenset({"sparse"})

        def search(self, queries, k, *, exclude=None, progress=None):
            shape = queries.num_texts, k
            return np.ones(shape, np.float32), np.full(shape, len(TEXTS) - 1)

    def build(documents, device, *, rerank_depth):
        asked.append((documents.num_texts, rerank_depth))
        return Last()

    index = model.index(TEXTS, IDS, build=build, rerank_depth=5)
    assert index.search(["red"], k=2) == [[Hit("own", 1.0)] * 2]
    assert asked == [(len(TEXTS), 5)]


def test_no_more_candidates_are_asked_for_than_there_are_documents(load):
    model = load("joint")
    found = model.index(TEXTS, rerank_depth=10**15).search(["red cat"])
    assert found == model.index(TEXTS, rerank_depth=len(TEXTS)).search(["red cat"]) != [[]]
    with pytest.raises(ValueError, match="rerank_depth=0 must be a whole number of at least 1"):
        model.index(TEXTS, rerank_depth=0)


@pytest.mark.parametrize("kind", ["colbert", "joint"])
def test_a_compressed_index_of_fewer_and_narrower_vectors(kind, load):
    """Of so few tokens a codec learns little; scores stay near the exact ones all the same."""
    model = load(kind)
    documents = model.encode_documents(TEXTS)
    build = CompressedIndexBuilder(nbits=8)
    expected = model.index(documents).search(["red cat"], k=6)[0]
    found = model.index(documents, build=build).search(["red cat"], k=6)[0]
    for hit, same in zip(found, expected, strict=True):
        assert hit.score == pytest.approx(same.score, rel=0.15)
    pooled = model.encode_documents(TEXTS, pool_factor=2)
    assert len(pooled.tokens.values) < len(documents.tokens.values)
    assert model.index(pooled, build=build).search(["red cat"], k=6)[0]
    if kind == "colbert":
        narrow = load(kind, width=4).encode_documents(TEXTS).tokens
        assert narrow.values.shape == (len(documents.tokens.values), 4)


def test_what_an_index_refuses_is_said_of_the_builder(load):
    with pytest.raises(ValueError, match=r"these documents have none: set build=exact_index\("):
        load("splade").index(TEXTS, build=CompressedIndexBuilder())


def test_importing_the_package_is_cheap():
    program = (
        "import sys, sparton; print(sorted({'torch', 'transformers', 'hydra'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr
