"""The benchmark of passages: texts are as long as MS MARCO's, and what finds nothing has no row."""

import numpy as np
import pytest

from benchmarks.encoding import passages as study
from benchmarks.encoding.passages import STUDY, Cell
from benchmarks.study import Settings
from benchmarks.texts import build_tokenizer, passages


def test_passages_are_as_long_as_those_of_ms_marco():
    texts = passages()
    tokens = build_tokenizer()([texts[row] for row in range(3000)])["input_ids"]
    lengths = np.array([len(each) for each in tokens])
    assert lengths.mean() == pytest.approx(77, abs=3)
    assert np.quantile(lengths, 0.95) == pytest.approx(140, abs=8)
    assert len({texts[row] for row in range(20_000)}) == 20_000


@pytest.mark.slow
def test_what_is_stored_is_found(tmp_path, monkeypatch):
    cell = Cell(study.MINIATURE, 1)
    measure = STUDY.prepare([cell], Settings("cpu", 0.0, str(tmp_path), True, {}))
    record = measure(cell)
    assert record["status"] == "ok" and record["bytes_each"] > 100
    monkeypatch.setattr(study, "FEWEST_FOUND", record["mrr"] + 0.01)
    assert measure(cell)["status"] == "red_gate"
