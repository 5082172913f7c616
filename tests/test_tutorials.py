"""The tutorials and the README do what they say: their code is run, on fewer steps."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.forking import environment

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# In the order of reading, as later pages use what earlier ones made; with what is made shorter.
PAGES: dict[str, dict[str, str]] = {
    "own_data": {
        "MODULES.split()": "['filecmp', 'random', 'statistics', 'tempfile']",
        "batch=16 steps=60": "batch=4 steps=2",
        "evaluation.every=20 log_every=10": "evaluation.every=2 log_every=1",
    },
    "colbert": {"batch=32": "batch=4", "steps=50": "steps=2", "every=25": "every=2"},
    "from_dense": {"batch=8 steps=60 log_every=20": "batch=4 steps=2"},
    "decoder_lora": {"steps=40": "steps=2", "every=20": "every=2"},
    "sentence_transformers": {"max_steps=20": "max_steps=2", "batch_size=16": "batch_size=4"},
}


def script(page: str, shorter: Mapping[str, str]) -> str:
    """The blocks of a page as one program; those of the shell are started by it."""
    for wordy, brief in shorter.items():
        assert wordy in page, f"{wordy} is not on the page"
        page = page.replace(wordy, brief)
    parts = ["import subprocess"]
    for language, code in BLOCK.findall(page):
        shell = f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {code!r}], check=True)"
        parts.append(shell if language == "bash" else code)
    return "\n".join(parts)


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program in a folder, with the command ``sparton`` of this clone and without the hub."""
    command = folder / "bin" / "sparton"
    if not command.exists():
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sparton "$@"\n')
        command.chmod(0o755)
    variables = {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = [sys.executable, "-c", code]
    return subprocess.run(
        words, cwd=folder, env=environment(**variables), capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_tutorials_run(tmp_path: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs/tutorials").glob("*.md")}
    assert pages == set(PAGES)
    for name, shorter in PAGES.items():
        page = (ROOT / "docs/tutorials" / f"{name}.md").read_text(encoding="utf-8")
        done = run(script(page, shorter), tmp_path)
        assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"
    start = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Kernels")[0]
    shorter = {"batch=64": "batch=64, steps=2, evaluation='none'"}
    readme = next(code for _, code in BLOCK.findall(start))
    done = run(script(f"```python\n{readme}```\n", shorter), tmp_path)
    assert done.returncode == 0, f"README\n{done.stdout}\n{done.stderr}"
    for model in ("default/first/seed-0/model", "default/colbert/seed-0/model", "theirs/final"):
        assert list((tmp_path / "runs" / model).glob("*.safetensors")), model


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = "```python\nanswer = {}\n```\nText.\n\n```bash\ntest {} = 42\n```\n"
    assert run(script(page.format(41, 42), {}), tmp_path).returncode == 0
    assert run(script(page.format(41, 41), {}), tmp_path).returncode != 0
    assert run(script(page.format("nothing", 42), {}), tmp_path).returncode != 0
    assert "42" in script(page.format(41, 41), {"= 41\n": "= 42\n"})
    with pytest.raises(AssertionError, match="is not on the page"):
        script(page, {"steps=60": "steps=2"})
