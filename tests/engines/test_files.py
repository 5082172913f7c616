"""What is written for engines: byte for byte what it was, with the vectors that were encoded."""

import gzip
import json

import numpy as np
import pytest
import torch

from sparton.arguments import ArgumentError
from sparton.datasets.texts import TextList
from sparton.encoded import begin_folder, delete_texts, open_encoded
from sparton.encoded.shards import write_shard
from sparton.engines import ENGINES, engine_for, write_files
from sparton.engines.json_text import numbers_text, vectors_text
from sparton.engines.sending import send
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations
from tests.engines.problems import (
    GOLDEN,
    IDS,
    NAMES,
    QUERY,
    SPARSE,
    TOKENS,
    engine_of,
    made_files,
    representations,
    write_encoded,
)


@pytest.mark.parametrize("name", ENGINES)
def test_files_are_the_golden_ones(name, tmp_path):
    folder = GOLDEN / name
    golden = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert made_files(name, tmp_path) == golden


def fp32(weights: dict) -> torch.Tensor:
    row = torch.zeros(SPARSE.shape[1])
    for key, weight in weights.items():
        row[int(key)] = float(np.float32(weight))
    return row


@pytest.mark.parametrize("name", ["opensearch", "elasticsearch", "milvus"])
def test_weights_are_those_that_were_encoded(name):
    found = {}
    for path in sorted((GOLDEN / name / "documents").rglob("*.json")):
        found |= {r["id"]: fp32(r["sparse"]) for r in json.loads(path.read_bytes())["data"]}
    for path in sorted((GOLDEN / name / "documents").rglob("*.ndjson")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for action, source in zip(lines[::2], lines[1::2], strict=True):
            found[action["index"]["_id"]] = fp32(source["sparse"])
            tokens = torch.tensor(source["tokens"])
            assert torch.equal(tokens, TOKENS[IDS.index(action["index"]["_id"])].half().float())
    assert list(found) == IDS[:3]
    assert torch.equal(torch.stack([*found.values()]), SPARSE[:3])


def test_bits_of_vespa_are_the_nearest_bfloat16():
    for path in (GOLDEN / "vespa" / "documents").rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            fields = json.loads(line)["fields"]
            row = IDS.index(fields["id"])
            assert torch.equal(fp32(fields["sparse"]), SPARSE[row])
            # Behind the sign, exponent and 7 bits of a bfloat16 come the last 16 bits of fp32.
            bits = [bytes.fromhex(each) for each in fields["tokens"].values()]
            found = [
                [
                    np.frombuffer(each[at : at + 2] + b"\0\0", ">f4")[0]
                    for at in range(0, len(each), 2)
                ]
                for each in bits
            ]
            expected = TOKENS[row].half().bfloat16().float()
            assert torch.equal(torch.tensor(np.array(found)), expected)


def test_numbers_of_16_bits_are_read_as_they_are():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].reshape(-1, 2)
    read = np.array(json.loads(vectors_text(every)), np.float32)
    np.testing.assert_array_equal(read, every.astype(np.float32))
    assert (np.array(json.loads(numbers_text(every[0] + 1)), np.float16) != every[0]).any()


def test_an_interrupted_push_goes_on(tmp_path, monkeypatch):
    texts = write_encoded(tmp_path / "docs", representations(), IDS, rows_per_shard=1)
    engine, whole, output = engine_of("opensearch", texts), tmp_path / "whole", tmp_path / "output"
    assert write_files(engine, texts, whole, progress=False) == (3, 1)
    made, line = [], engine.line

    def failing(document):
        made.append(document.id)
        if len(made) == 3:
            raise KeyboardInterrupt
        return line(document)

    monkeypatch.setattr(engine, "line", failing)
    with pytest.raises(KeyboardInterrupt):
        write_files(engine, texts, output, progress=False)
    assert [path.name for path in (output / "documents").iterdir()] == ["00000", "00001"]
    assert write_files(engine, texts, output, progress=False) == (3, 1)
    assert made == [*IDS[:3], IDS[2]], "what is complete is not made again"
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert {(output / path).read_bytes() == (whole / path).read_bytes() for path in files} == {True}
    assert len(files) == len([path for path in output.rglob("*") if path.is_file()])


def test_files_are_written_for_what_was_added_alone(tmp_path, monkeypatch):
    docs, output = tmp_path / "docs", tmp_path / "output"
    texts = write_encoded(docs, representations(), IDS, rows_per_shard=2)
    engine = engine_of("opensearch", texts)
    assert write_files(engine, texts, output, progress=False) == (3, 1)
    facts = begin_folder(
        docs, texts.facts.settings, TextList(["x", "y"], ["x", "y"]), "a model", append=True
    )
    write_shard(docs, facts.shards()[-1], representations().slice(0, 2))
    made, line = [], engine.line
    monkeypatch.setattr(engine, "line", lambda each: made.append(each.id) or line(each))
    both = open_encoded(docs)
    assert write_files(engine, both, output, progress=False) == (5, 1)
    assert made == ["x", "y"]
    assert write_files(engine, both, tmp_path / "anew", progress=False) == (5, 1)
    files = [path.relative_to(output) for path in output.rglob("*") if path.is_file()]
    assert {(output / p).read_bytes() == (tmp_path / "anew" / p).read_bytes() for p in files} == {
        True
    }
    with pytest.raises(ArgumentError, match="holds files of other texts"):
        write_files(engine, texts, output, progress=False)
    with pytest.raises(ArgumentError, match="of some that are deleted now"):
        write_files(engine, delete_texts(docs, ["x"]), output, progress=False)


def test_a_folder_of_something_else_is_kept(tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(), IDS)
    output = tmp_path / "output"
    write_files(engine_of("qdrant", texts), texts, output, progress=False)
    with pytest.raises(ArgumentError, match="or of some that are deleted now, or for another"):
        write_files(engine_of("opensearch", texts), texts, output, progress=False)
    with pytest.raises(ArgumentError, match=r"docs is there and was not written by a push"):
        write_files(engine_of("qdrant", texts), texts, tmp_path / "docs", progress=False)


def test_requests_are_of_a_size_that_engines_take(tmp_path, monkeypatch):
    monkeypatch.setattr("sparton.engines.lines._BYTES", 150)
    texts = write_encoded(tmp_path / "docs", representations(("sparse",)), IDS, rows_per_shard=4)
    write_files(engine_of("opensearch", texts), texts, tmp_path / "output", progress=False)
    files = sorted((tmp_path / "output" / "documents" / "00000").iterdir())
    assert [gzip.decompress(path.read_bytes()).count(b"\n") for path in files] == [4, 2]


def test_terms_may_have_names(tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(("sparse",)), IDS)
    engine = engine_for("elasticsearch", texts.facts.settings, names=NAMES)
    write_files(engine, texts, tmp_path / "output", progress=False)
    file = tmp_path / "output" / "documents" / "00000" / "0000.ndjson.gz"
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert lines[1]["sparse"] == {"##s": 1.8454583, "трия": 0.1}
    assert lines[3]["sparse"].keys() == {"cat", "[row 2]"}, "a dot is no name in Lucene"
    (body,) = engine.query(QUERY, 1)
    assert body["query"]["sparse_vector"]["query_vector"].keys() == {"cat", "##s", "трия"}
    vespa = engine_for("vespa", texts.facts.settings, names=NAMES)
    assert vespa.keys == NAMES
    engine = engine_for("elasticsearch", texts.facts.settings, names=["[row 2]", "a", "b.c", "d"])
    with pytest.raises(ValueError, match=r"two terms are called '\[row 2\]' in elasticsearch"):
        write_files(engine, texts, tmp_path / "other", progress=False)


@pytest.mark.parametrize("k", [3, 2000])
@pytest.mark.parametrize("name", ["opensearch", "vespa", "qdrant"])
def test_there_are_as_many_candidates_as_results_at_least(name, k, tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(), IDS)
    (body,) = engine_for(name, texts.facts.settings).query(QUERY, k)
    candidates = {
        "opensearch": lambda: body["rescore"]["window_size"],
        "vespa": lambda: body["ranking.rerankCount"],
        "qdrant": lambda: body["prefetch"][0]["limit"],
    }
    assert candidates[name]() == max(k, 1000)


@pytest.mark.parametrize("name", ENGINES)
def test_a_query_without_weights_is_refused(name, tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(("sparse",)), IDS)
    nothing = SparseVectors.from_dense(torch.tensor([[0.5, 0, 0, 0], [0, 0, 0, 0]]))
    engine = engine_for(name, texts.facts.settings)
    with pytest.raises(ValueError, match="query 1 has no term with a weight"):
        engine.query(Representations(nothing), 3)


@pytest.mark.parametrize(
    ("to", "more", "message"),
    [
        ("solr", {}, r"to='solr' must be opensearch, elasticsearch, vespa, qdrant or milvus"),
        (
            "milvus",
            {},
            r"milvus has no exact search by token vectors: .* half alone, as by kind='sparse'",
        ),
        ("milvus", {"kind": "tokens"}, r"token vectors: choose another engine$"),
        ("opensearch", {"index": "Docs"}, r"index='Docs' is no name that opensearch takes"),
        ("vespa", {"index": "my-docs"}, r"index='my-docs' is no name that vespa takes"),
        ("qdrant", {"names": NAMES}, r"qdrant knows terms by their numbers alone: leave names out"),
        ("vespa", {"names": NAMES, "kind": "tokens"}, r"vespa gets none: leave names out"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(to, more, message, tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(), IDS)
    with pytest.raises(ArgumentError, match=message):
        engine_for(to, texts.facts.settings, **more)


def test_vectors_that_there_are_not_are_refused(tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(("tokens",)), IDS)
    with pytest.raises(ArgumentError, match="texts have token vectors and not kind='sparse'"):
        engine_for("vespa", texts.facts.settings, kind="sparse")
    engine = engine_for("vespa", texts.facts.settings)
    with pytest.raises(ValueError, match="queries have sparse vectors, but the documents are"):
        engine.query(QUERY._replace(tokens=None), 3)
    with pytest.raises(ValueError, match="k is 0"):
        engine.query(QUERY, 0)
    queries = texts.facts.settings._replace(side="query")
    with pytest.raises(ValueError, match="encoded as queries: push texts that are documents"):
        engine_for("vespa", queries)


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf"), 1e-40])
@pytest.mark.parametrize("name", ENGINES)
def test_weights_that_would_rank_wrongly_are_refused(name, weight, tmp_path):
    sparse = SPARSE.clone()
    sparse[1, 2] = weight
    encoded = representations(("sparse",))
    encoded = encoded._replace(sparse=type(encoded.sparse).from_dense(sparse))
    texts = write_encoded(tmp_path / "docs", encoded, IDS)
    with pytest.raises(ValueError, match=r"text 'zwei' has the weight .* for term 2: engines take"):
        write_files(engine_of(name, texts), texts, tmp_path / "output", progress=False)


@pytest.mark.parametrize(
    ("name", "identifier", "message"),
    [
        ("opensearch", "é" * 257, "has 514 bytes, but opensearch takes ids of 1 to 512 bytes"),
        ("milvus", "", "has 0 bytes"),
        ("vespa", "a\nb", r"the id 'a\\nb' has control characters"),
        ("vespa", "..", r"the id '\.\.' is no part of a URL"),
    ],
)
def test_ids_that_an_engine_does_not_take_are_refused(name, identifier, message, tmp_path):
    texts = write_encoded(tmp_path / "docs", representations(), [*IDS[:-1], identifier])
    with pytest.raises(ValueError, match=message):
        write_files(engine_of(name, texts), texts, tmp_path / "output", progress=False)
    assert not (tmp_path / "output").exists(), "all ids are looked at first"
    with pytest.raises(ValueError, match=message):
        send(engine_of(name, texts), texts, "http://localhost:1", progress=False)
    longest = write_encoded(tmp_path / "more", representations(), ["é" * 256, *IDS[1:]])
    write_files(engine_of(name, longest), longest, tmp_path / "taken", progress=False)


def test_the_guide_says_what_is_lost():
    guide = (GOLDEN.parents[2] / "docs" / "guides" / "vectors.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in guide.splitlines() if line.startswith("| ")]
    for name, engine in ENGINES.items():
        (row,) = [each for each in rows if name in each[0].lower() and len(each) >= 4]
        for kind, place in (("sparse", 2), ("tokens", 4)):
            assert engine.loses.get(kind, "") == row[place].strip("| "), (name, kind)
        assert f"`{engine.key_variable}`" in guide
