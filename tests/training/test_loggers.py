"""What the screen shows of a run."""

import io

from rich.console import Console

from sparton.training.loggers import ScreenLogger


def shown(record: dict[str, float], step: int) -> str:
    file = io.StringIO()
    ScreenLogger(Console(file=file, width=200), steps=90).log(record, step)
    return file.getvalue()


def test_the_time_left_is_that_of_the_steps_left():
    line = shown({"loss": 0.5, "step_ms": 1500.0}, 10)
    assert line == "10/90  loss 0.5000  ms 1,500  left 0:02:00\n"
    assert "left" not in shown({"step_ms": 1500.0}, 90)
    assert "left" not in shown({"dev_ndcg@10": 0.5}, 10)
