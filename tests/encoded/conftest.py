"""A model that encodes."""

from pathlib import Path

import pytest

from tests.encoded.problems import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Of sparse and token vectors."""
    return save_model(tmp_path_factory.mktemp("model") / "joint", "joint")
