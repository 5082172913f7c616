"""The study of search among compressed token vectors, in miniature."""

import pytest
import torch

import tables.search
from benchmarks.search import tokens
from benchmarks.search.compressed import (
    ALLOWED,
    EXHAUSTIVE,
    JUDGED,
    LARGE,
    MANY,
    ONE,
    OURS,
    RIVALS,
    SMALL,
    STAGED,
    STUDY,
    Collection,
    Ours,
    compress_documents,
    measure,
)
from benchmarks.search.study import Cell
from benchmarks.search.tokens import BEST, Shape, best_documents, draw_documents
from benchmarks.study import Settings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = Shape(0).shrunk()


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.draw(SHAPE, JUDGED, DEVICE)


@pytest.fixture(scope="module")
def compressed():
    return compress_documents(SHAPE, DEVICE)


@pytest.mark.parametrize("provider", [*OURS, *RIVALS])
def test_providers_are_measured(provider, tmp_path):
    if provider in RIVALS:
        pytest.importorskip("fast_plaid")
    settings = Settings(DEVICE, 0.001, str(tmp_path), True, {})
    cells = [cell for cell in STUDY.suites(settings)[STUDY.name] if cell.provider == provider]
    run = STUDY.prepare(cells, settings)
    for cell in cells:
        record = run(cell)
        assert record["status"] == "ok", record
        assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
        asked = cell.queries / record["p50_ms"] * 1e3
        assert record["queries_per_s"] == pytest.approx(asked, rel=0.01)
        assert 0 <= record["missed"] <= ALLOWED["missed"]
        assert record["index_bytes"] > 0 and record["build_s"] > 0


@pytest.mark.parametrize("asked", [ONE, MANY])
@pytest.mark.parametrize("wrong", ["rows", "documents", "residuals", "zeros"])
def test_wrong_indexes_get_no_time(wrong, asked, compressed):
    """Among them one that is right for as many queries as are judged alone."""
    collection = Collection.draw(SHAPE, 2 * JUDGED, DEVICE)
    stored = compressed.tokens
    if wrong == "documents":
        stored = stored._replace(codes=stored.codes.roll(SHAPE.L * SHAPE.N // 2))
    if wrong == "residuals":
        stored = stored._replace(residuals=stored.residuals.roll(1, dims=0))
    right = Ours(compressed._replace(tokens=stored), SHAPE, DEVICE, staged=False)

    def search(queries, k):
        rows = right(queries, k)
        if wrong == "zeros" and len(queries) != JUDGED:
            return [[0] * k for _ in rows]
        return [[row + 1 for row in own] for own in rows] if wrong == "rows" else rows

    search.nbits, search.nbytes, search.build_s = right.nbits, right.nbytes, right.build_s
    settings = Settings(DEVICE, 0.001, "", True, {})
    record = measure(Cell("", SMALL, *asked), collection, search, settings)
    assert record["status"] == "red_gate" and "p50_ms" not in record


def test_an_index_of_files_has_a_folder_without_those_of_another(tmp_path, monkeypatch):
    found = []

    def make(shape, device, nbits, folder):
        found.append([*folder.iterdir()])
        (folder / "part").touch()
        right = Ours(compress_documents(shape, device), shape, device, staged=False)
        right.nbytes = 1
        return right

    monkeypatch.setattr("benchmarks.search.compressed.FastPlaid", make)
    settings, cell = Settings(DEVICE, 0.001, str(tmp_path), True, {}), Cell("fast_plaid", 1, *ONE)
    for _ in range(2):
        assert STUDY.prepare([cell], settings)(cell)["status"] == "ok"
    assert found == [[], []]


def test_the_best_documents_are_those_by_every_product(collection):
    documents = torch.cat(list(draw_documents(SHAPE, DEVICE))).double().cpu()
    for query, found in zip(collection.queries[:4].double(), collection.best):
        products = torch.stack([(query @ own.T).amax(1).sum() for own in documents])
        assert set(products.topk(BEST).indices.tolist()) == set(found.tolist())
        assert collection.missed([found.tolist()] * JUDGED) > 0, "queries are alike"
    assert collection.missed(collection.best.tolist()) == 0


def test_parts_are_the_same_every_time_and_hold_the_queries(collection, monkeypatch):
    monkeypatch.setattr(tokens, "PART", 80)
    sizes = [[len(part) for part in draw_documents(SHAPE, DEVICE)] for _ in range(2)]
    assert sizes == [[80, 80, 40]] * 2
    whole, again = (torch.cat(list(draw_documents(SHAPE, DEVICE))) for _ in range(2))
    assert torch.equal(whole, again)
    queries = tokens.draw_queries(SHAPE, JUDGED, DEVICE)
    sources = torch.arange(JUDGED) * SHAPE.N // JUDGED
    first = best_documents(SHAPE, queries, DEVICE)[:, 0]
    assert (first == sources).float().mean() > 0.9


def test_the_table_says_which_bars_are_met():
    def record(provider, documents, asked, milliseconds, **others):
        rate = 1e3 * asked[0] / milliseconds
        figures = {"p50_ms": milliseconds, "queries_per_s": rate, "missed": 0.0625, "build_s": 9.5}
        return {
            **Cell(provider, documents, *asked)._asdict(),
            **{"nbits": 2, "status": "ok", "index_bytes": 2**30, **figures, **others},
        }

    records = [
        record(EXHAUSTIVE, LARGE, ONE, 12.5),
        record(STAGED, LARGE, ONE, 1.5),
        record(EXHAUSTIVE, SMALL, MANY, 100.0),
        record("fast_plaid", SMALL, MANY, 250.0, nbits=4),
        {**Cell("fast_plaid", SMALL, *ONE)._asdict(), "status": "absent"},
    ]
    lines = tables.search.compressed(records).splitlines()
    assert (
        lines[2] == "| **ours**, exhaustive | 1,000,000 | 1 | 10 | 12.5 | 80 | 0.94 | 1,024 | 9.5 |"
    )
    assert lines[6] == "| fast-plaid, 4 bits | 100,000 | 1 | 10 | absent |  |  |  |  |"
    assert lines[-3:] == [
        "| exhaustive, 1,000,000 documents, 1 query | ≤ 12 ms | 12.5 ms | **no** |",
        "| staged, 1,000,000 documents, 1 query | ≤ 2 ms | 1.50 ms | yes |",
        "| exhaustive, 100,000 documents, 256 queries "
        "| ≥ 3 times fast-plaid's rate | 2.50 | **no** |",
    ]
