"""Where commands work."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch) -> None:
    """An empty folder of the test's own."""
    monkeypatch.chdir(tmp_path)
