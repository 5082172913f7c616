"""The tests at the end of a training."""

from functools import partial

import pytest

from sparton.datasets.collection import beir_folder
from sparton.evaluation import evaluate_bm25, run_tests
from tests.evaluation.problems import write_beir


def test_tasks_that_were_checked_before_are_not_reported_again(tmp_path, caplog):
    caplog.set_level("INFO")
    build = partial(beir_folder, str(write_beir(tmp_path / "toy")))
    build()
    said = list(caplog.messages)
    assert "toy/test: 6 documents, 3 judged queries" in said
    [result] = run_tests(evaluate_bm25, {"own": build}, tmp_path, {}, title="toy")
    assert result.name == "own" and caplog.messages == said


def test_no_figure_is_cut_off_in_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "40")
    build = partial(beir_folder, str(write_beir(tmp_path / "toy")))
    [result] = run_tests(evaluate_bm25, {"own": build}, tmp_path, {}, title="toy")
    shown = capsys.readouterr().out
    assert "…" not in shown and shown.count(f"{result.metrics['ndcg@10']:.4f}") >= 2


@pytest.mark.parametrize("other", ["nq/dev", "nq dev", "NQ-dev"])
def test_tasks_that_would_share_a_file_are_refused_before_anything_is_encoded(other, tmp_path):
    tasks = dict.fromkeys(["nq-dev", "nq.dev", other])
    message = f"tasks nq-dev and {other} would both be written to runs/(nq|NQ)-dev.trec: give one"
    with pytest.raises(ValueError, match=message):
        run_tests(evaluate_bm25, tasks, tmp_path, {}, title="toy")
    assert not [*tmp_path.iterdir()]
