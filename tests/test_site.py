"""What the site promises beside what its build checks."""

import re
from pathlib import Path

import pytest
import torch

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
