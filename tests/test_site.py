"""What the site promises beside what its build checks."""

import re
from pathlib import Path

import sparton.ops

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_every_public_kernel_is_on_its_page():
    page = (DOCS / "api/ops.rst").read_text()
    shown = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(sparton.ops.__all__)


def test_the_readme_can_be_read_in_one_sitting():
    lines = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
