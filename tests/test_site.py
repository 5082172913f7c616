"""What the site promises beside what its build checks."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import sparton.ops

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_every_public_kernel_is_on_its_page():
    page = (DOCS / "api/ops.rst").read_text()
    shown = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(sparton.ops.__all__)


def test_the_readme_can_be_read_in_one_sitting():
    lines = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150


def test_the_loss_of_the_guide_is_what_it_says():
    page = (DOCS / "guides/own_classes.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    scores = torch.tensor([[3.0, 1.0, 2.5, 0.0], [4.0, 0.0, 2.0, 1.0]])
    loss = names["HardestNegative"](margin=1.0)
    # The hardest others are 2.5 beside 3, and 4 beside 2.
    assert loss(scores, torch.tensor([0, 2]), None).item() == pytest.approx((0.5 + 3.0) / 2)


def test_the_logger_of_the_guide_goes_on_where_it_was(tmp_path):
    page = (DOCS / "guides/own_classes.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(# my_loggers\.py\n.*?)```", page, re.DOTALL)
    settings = re.search(r"```yaml\n# configs/logger/losses\.yaml\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code[1], names)
    given = OmegaConf.create(settings[1])["losses"]
    assert given["_partial_"] and given._get_node("path")._value().endswith("/losses.txt")
    for start in (0, 1):
        logger = names["Losses"](path=str(tmp_path / "losses.txt"), start_step=start)
        logger.describe({})
        logger.log({"loss": 0.5 - start, "lr": 1.0}, start + 1)
        logger.conclude({}, start + 1)
        logger.close()
    assert (tmp_path / "losses.txt").read_text() == "1 0.5\n2 -0.5\n"
