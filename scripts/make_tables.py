"""Write the tables of the README and of docs/ from the records in results/; the only author of
their figures.

python scripts/make_tables.py          # rewrite
python scripts/make_tables.py --check  # fail if a table is not what the records say
"""

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

from tables.records import TABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "docs/quality.md")
for module in sorted((ROOT / "scripts/tables").glob("[a-z]*.py")):
    import_module(f"tables.{module.stem}")
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->|(?=<!-- table: )|\Z)", re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        try:
            after = filled(before)
        except ValueError as error:
            sys.exit(f"{page}: {error}")
        if check and after != before:
            sys.exit(f"{page} is not what the records say: make tables")
        if after != before:
            path.write_text(after, encoding="utf-8")


def filled(page: str) -> str:
    """The page with every block between a table's marks as its records have it.

    Raises:
        ValueError: a block does not end before the next one.
    """

    def fill(block: re.Match[str]) -> str:
        if not block[3]:
            raise ValueError(f"{block[1].strip()} has no <!-- end --> behind it: write it there")
        return f"{block[1]}{TABLES[block[2]]()}{block[3]}"

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    main()
