"""What a cell of a sweep is told."""

import sys

from sparton.cli.command_line import read_request
from sparton.cli.sweeps import run_command


def test_a_cell_is_composed_from_the_files_of_its_sweep(tmp_path):
    words = ["-m", f"--config-dir={tmp_path}", "batch=8,16", "hydra.verbose=true"]
    again = [sys.executable, "train.py", *read_request(words, "train").again()]
    command = run_command(again, ["batch=8"], tmp_path / "one cell")
    assert command[2:] == [
        "--config-name=train",
        f"--config-dir={tmp_path}",
        "hydra.verbose=true",
        "batch=8",
        "hydra.mode=RUN",
        f"hydra.run.dir='{tmp_path}/one cell'",
    ]
