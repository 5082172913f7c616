"""Tiny models of sentence-transformers, without dropout, of weights that make attention matter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.conftest import build_mlm, family, tokenizer

__all__ = ["build_mlm", "family", "tokenizer"]


@pytest.fixture
def checkpoint(build_mlm: Any, tokenizer: Any, tmp_path: Path) -> Callable[..., str]:
    """The folder of a masked-language model: of a family, with settings of its configuration."""

    def write(family: str = "bert", **settings: float) -> str:
        mlm = build_mlm(family)
        for name in vars(mlm.config):
            if "dropout" in name and isinstance(getattr(mlm.config, name), float):
                setattr(mlm.config, name, 0.0)
        for name, value in settings.items():
            setattr(mlm.config, name, value)
        folder = tmp_path / "-".join(["checkpoint", family, *settings])
        mlm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return write
