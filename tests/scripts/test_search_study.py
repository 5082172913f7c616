"""The study of search in miniature."""

import pytest
import torch

import tables.search
from benchmarks.search import vectors
from benchmarks.search.providers import PROVIDERS
from benchmarks.search.study import ALLOWED, JUDGED, STUDY, Cell, draw_collection, measure
from benchmarks.study import Settings
from sparton.kernels.sparse_vectors import mean_flops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = Settings(DEVICE, 0.001, "", True, {"block": None})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_providers_are_measured(provider):
    cells = [Cell(provider, 100_000, queries, k) for queries, k in ((1, 10), (100, 1000))]
    run = STUDY.prepare(cells, SETTINGS)
    for cell in cells:
        record = run(cell)
        assert record["status"] == "ok", record
        assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
        asked = cell.queries / record["p50_ms"] * 1e3
        assert record["queries_per_s"] == pytest.approx(asked, rel=0.01)
        assert record["index_bytes"] > 0 and record["build_s"] >= 0


def test_parts_are_searched_as_one(monkeypatch):
    monkeypatch.setattr(vectors, "PART", 300)
    monkeypatch.setattr("benchmarks.search.providers.PART", 300)
    collection = draw_collection(1000, 70, DEVICE)
    assert [part.num_vectors for part in collection.parts] == [300, 300, 300, 100]
    for make in PROVIDERS.values():
        search = make(collection.parts, DEVICE, None)
        record = measure(Cell("", 1000, 64, 20), collection, search, 0.0, SETTINGS)
        assert record["status"] == "ok", record


@pytest.mark.parametrize("asked", [1, 64])
@pytest.mark.parametrize("wrong", ["scores", "rows", "missing", "zeros"])
def test_wrong_results_get_no_time(wrong, asked):
    """Among them those of a search that is right for as many queries as are judged alone."""
    collection = draw_collection(500, 70, DEVICE)
    right = PROVIDERS["inverted"](collection.parts, DEVICE, None)

    def search(queries, k):
        scores, rows = right(queries, k + 1)
        if wrong == "scores":
            scores[0, 0] *= 1 + 3 * ALLOWED["scores"]
        elif wrong == "rows":
            rows[0, [4, 5]] = rows[0, [4, 9]]
        elif wrong == "zeros":
            scores *= queries.num_vectors == JUDGED
            rows *= queries.num_vectors == JUDGED
        else:
            return scores[:, 1:], rows[:, 1:]
        return scores[:, :k], rows[:, :k]

    search.nbytes = 0
    record = measure(Cell("", 500, asked, 20), collection, search, 0.0, SETTINGS)
    assert record["status"] == "red_gate" and "p50_ms" not in record


def test_vectors_have_the_lengths_and_overlap_that_are_said():
    documents = next(vectors.draw_vectors(3000, vectors.DOCUMENT_TERMS, DEVICE, 1))
    queries = next(vectors.draw_vectors(3000, vectors.QUERY_TERMS, DEVICE, 2))
    assert documents.mean_entries == pytest.approx(vectors.DOCUMENT_TERMS, rel=0.01)
    assert queries.mean_entries == pytest.approx(vectors.QUERY_TERMS, rel=0.02)
    assert mean_flops(queries, documents) == pytest.approx(2.2, abs=0.1)
    for each in (documents, queries):
        assert (each.values > 0).all()
        assert (each.places.diff() > 0).all(), "terms ascend, each once"


def test_the_table_has_both_searches_side_by_side():
    size = {"documents": 8_800_000, "queries": 6980, "k": 1000}
    ours = {"provider": "inverted", "p50_ms": 2345.6, "index_bytes": 7 << 30, "build_s": 12.34}
    theirs = {"provider": "embedding_bag", "status": "oom", "index_bytes": 9 << 30}
    smaller = size | {"queries": 1}
    lines = tables.search.search([size | ours, size | theirs, smaller | ours]).splitlines()
    assert lines[2] == "| 8,800,000 | 6,980 | 1,000 | 2,346 | OOM | 7,168 | 9,216 | 12.3 |"
    assert lines[3] == "| 8,800,000 | 1 | 1,000 | 2,346 |  | 7,168 |  | 12.3 |"
