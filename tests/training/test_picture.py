"""The picture of a run: of whatever it has logged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparton.training.picture import draw, draw_run

RECORDS = [
    {"step": step, "loss": 9 / step, "loss_ranking": 8 / step, "examples_per_second": 10.0 * step}
    | {"document_active_terms": 100 / step, "query_active_terms": 0.0}
    for step in (1, 10, 20)
]
DEV = [{"step": step, "dev_ndcg@10": step / 30} for step in (10, 20)]


def titles(records: list[dict], **references: float) -> list[str]:
    figure = draw(records, references, "a run")
    return [axis.get_title(loc="left") for axis in figure.axes if axis.lines]


def test_there_is_a_panel_for_what_was_logged_and_for_nothing_else():
    terms, speed = "Active terms of a text", "Training examples per second"
    dev = "NDCG@10 on the dev queries"
    assert titles([*RECORDS, *DEV]) == ["Loss", dev, terms, speed]
    assert titles(RECORDS) == ["Loss", terms, speed]
    assert titles([{"step": 1, "loss": 2.0}]) == ["Loss"]


def test_a_level_to_compare_with_is_drawn_and_named():
    axis = draw([*RECORDS, *DEV], {"BM25": 0.4}, "a run").axes[1]
    assert list(axis.lines[1].get_ydata()) == [0.4, 0.4]
    assert [text.get_text() for text in axis.texts] == ["0.667", "BM25 0.400"]


def test_a_loss_is_on_a_logarithmic_scale_where_it_can_be():
    assert draw(RECORDS, {}, "a run").axes[0].get_yscale() == "log"
    negative = [{"step": step, "loss": 1.0 - step} for step in (1, 2)]
    assert draw(negative, {}, "a run").axes[0].get_yscale() == "linear"


def test_the_picture_lies_in_the_folder(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert draw_run(tmp_path) == tmp_path / "run.png"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    other = draw_run(tmp_path, title="other", output=tmp_path / "other.svg")
    assert "other" in other.read_text()


@pytest.mark.parametrize("content", ["", '{"step": 5, "lo'], ids=["empty", "half_a_line"])
def test_a_picture_needs_records_and_says_so(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match="has logged nothing yet"):
        draw_run(tmp_path)


def test_matplotlib_is_imported_when_something_is_drawn():
    code = "import sparton.training.picture, sys; sys.exit('matplotlib' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
