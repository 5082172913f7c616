"""TREC files: what is written is read back, and is read by ranx's own reader too."""

import pytest

from sparton.retrieval.run import Run
from sparton.retrieval.trec import read_run, write_run

SCORES = {
    "q1": {"d3": 12.345678, "d1": 0.1, "ü/4": 1e-7},
    "q2": {"d1": 2.0, "d2": 2.0, "a": 2.0},
}


def test_run_survives_the_round_trip(tmp_path):
    run = Run.from_scores(SCORES)
    write_run(run, tmp_path / "run.trec", tag="test")
    again = read_run(tmp_path / "run.trec")
    assert list(again.rankings()) == list(run.rankings())
    assert [name for name, _ in dict(again.rankings())["q2"]] == ["d1", "d2", "a"]


def test_run_lines(tmp_path):
    write_run(Run.from_scores({"q": {"a": 1.5, "b": 2.0}, "none": {}}), tmp_path / "run", tag="t")
    assert (tmp_path / "run").read_text() == "q Q0 b 1 2 t\nq Q0 a 2 1.5 t\n"


def test_files_are_read_by_ranx(tmp_path):
    from ranx.utils import run_file_to_dict

    write_run(Run.from_scores(SCORES), tmp_path / "run.trec")
    assert run_file_to_dict(tmp_path / "run.trec") == {
        query: pytest.approx(ranking, rel=1e-7) for query, ranking in SCORES.items()
    }


@pytest.mark.parametrize("bad", ["", "two words", "tab\t", "line\n"])
def test_identifiers_that_the_format_cannot_express(tmp_path, bad):
    for run in ({bad: {"d": 1.0}}, {"q": {bad: 1.0}}):
        with pytest.raises(ValueError, match="empty or holds white space"):
            write_run(Run.from_scores(run), tmp_path / "run.trec")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["q Q0 d 2", "q Q0 d 2 high tag", "q Q0 d 2 nan tag", ""])
def test_malformed_line_is_named(tmp_path, line):
    (tmp_path / "run.trec").write_text(f"q Q0 d 1 2.0 tag\n{line}\n")
    with pytest.raises(ValueError, match=r"run\.trec:2: expected"):
        read_run(tmp_path / "run.trec")
