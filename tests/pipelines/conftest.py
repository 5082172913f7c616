"""What the tests of the pipelines share."""

from pathlib import Path

import datasets
import pytest

from tests.pipelines.mining_problems import generate, write


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Prepared datasets go to the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def pairs(tmp_path) -> Path:
    """The generated collection as a file of examples."""
    return write(tmp_path / "pairs.jsonl", generate())
