"""``sparton push-vectors``: flags to arguments, and queries that find what was pushed."""

import gzip
import json

import numpy as np
import pytest

from sparton.cli.commands.push_vectors import main
from sparton.cli.main import main as sparton
from sparton.encoded import encode_collection, open_encoded
from sparton.evaluation import load_retriever
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.indexes.exact import exact_index
from tests.encoded.problems import make_texts, save_model
from tests.engines.double import double


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    """Texts, encoded by a joint model."""
    folder = tmp_path_factory.mktemp("push")
    model = save_model(folder / "model", "joint")
    texts = make_texts(5)
    encode_collection(
        *load_retriever(model), texts, folder / "docs", name=str(model), progress=False
    )
    return folder / "docs"


def push(docs, *arguments: object) -> None:
    main([str(docs), *map(str, arguments)])


def test_files_are_written_and_a_query_finds_them(docs, tmp_path, capsys):
    flags = ["--to", "elasticsearch", "--index", "mine", "--kind", "sparse", "--terms", "tokens"]
    push(docs, *flags, "--output", tmp_path / "out")
    said = capsys.readouterr().out
    assert f"5 documents, written to {tmp_path / 'out'}" in said
    assert "sparse, what elasticsearch loses: 9 significant bits of a document's weight" in said
    (file,) = (tmp_path / "out" / "documents").rglob("*.ndjson.gz")
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    documents = [line["sparse"] for line in lines if "sparse" in line]
    push(docs, *flags, "--query", "w1 w2 w3", "--k", 3)
    body = json.loads(capsys.readouterr().out)
    query = body["query"]["sparse_vector"]["query_vector"]
    scores = [sum(w * each.get(key, 0) for key, w in query.items()) for each in documents]
    encoder, tokenizer = load_retriever(docs.parent / "model")
    encoded = encode_texts(encoder, tokenizer, ["w1 w2 w3"], "query", kinds=["sparse"])
    texts = open_encoded(docs).representations()
    found = exact_index(texts._replace(tokens=None)).search(encoded, 5)
    assert body["size"] == 3
    assert np.argsort(scores)[::-1].tolist() == found.rows[0].tolist()
    np.testing.assert_allclose(sorted(scores)[::-1], found.scores[0], rtol=1e-5)


def test_documents_are_sent(docs, capsys):
    with double() as there:
        sparton(["push-vectors", str(docs), "--to", "qdrant", "--url", there.url])
        assert f"5 documents, sent to {there.url}" in capsys.readouterr().out
        assert there.documents.keys() == {f"0-{row}" for row in range(5)}
        assert there.index["vectors"]["tokens"]["size"] == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "solr", "--output", "x"], "--to solr must be opensearch, elasticsearch, vespa"),
        (["--to", "milvus", "--output", "x"], "push another half alone, as by --kind sparse"),
        (["--to", "vespa", "--index", "A b", "--output", "x"], "--index A b is no name that vespa"),
        (["--to", "vespa", "--url", "host"], "--url host must be http://HOST:PORT"),
        (["--to", "qdrant", "--terms", "tokens", "--output", "x"], "leave --terms out"),
        (["--to", "qdrant", "--k", "3", "--output", "x"], "without --query ignores --k: leave"),
        (["--to", "qdrant", "--query", " "], "--query has no text"),
        (["--to", "qdrant", "--query", "w1", "--k", "0"], "--k 0 must be at least 1"),
        (["--to", "qdrant", "--model", "m", "--url", "x"], "numbers of terms ignores --model: le"),
    ],
)
def test_refusals_name_flags(docs, flags, message):
    with pytest.raises(ValueError, match=message):
        push(docs, *flags)


def test_another_model_makes_no_queries(docs, tmp_path):
    other = save_model(tmp_path / "other", "joint", seed=1)
    with pytest.raises(ValueError, match="was encoded by another model"):
        push(docs, "--to", "vespa", "--query", "w1", "--model", other)
