"""The study of search among compressed documents, in miniature."""

import pytest
import torch

from benchmarks.maxsim import search
from benchmarks.maxsim.search import STUDY
from benchmarks.study import Settings

SETTINGS = Settings("cpu", 0.001, "", True, {"terabytes": 4.3, "tflop": 790.0})


CELLS = [cell for cells in STUDY.suites(SETTINGS).values() for cell in cells]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_passes_its_gate_and_is_timed(cell):
    record = STUDY.prepare([cell], SETTINGS)(cell)
    assert record["status"] == "ok", record
    assert 0 < record["p20_ms"] <= record["p50_ms"] and record["index_gb"] > 0
    assert record["missed"] <= 0.1


def test_other_documents_do_not_pass(monkeypatch):
    made = search.make_problem

    def damaged(shape, device):
        problem = made(shape, device)
        return problem._replace(queries=problem.queries.take(torch.arange(15, -1, -1)))

    right = search.truth
    monkeypatch.setattr(search, "truth", lambda problem: right(made(problem.shape, "cpu")))
    monkeypatch.setattr(search, "make_problem", damaged)
    for cell in STUDY.suites(SETTINGS)["maxsim_search"]:
        assert STUDY.prepare([cell], SETTINGS)(cell)["status"] == "red_gate"
