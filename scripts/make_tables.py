"""Write the tables of the README and of docs/ from the records in results/; the only author of
their figures.

python scripts/make_tables.py          # rewrite
python scripts/make_tables.py --check  # fail if a table is not what the records say
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path

from tables.attention import attention_table
from tables.bars import bars_table
from tables.data import data_table
from tables.heads import captured_table, heads_table, patterns_table
from tables.in_domain import in_domain_table, models_table
from tables.maxsim import backward_table, forward_table, other_run, targets_table
from tables.paper import figure2, table1, table2
from tables.profile import profile_table
from tables.summary import summary_table
from tables.sweeps import multilingual, table3, table3_in_domain
from tables.training import any_batch_table, gpus_table, late_table, splade_table, steps_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/benchmarks.md", "docs/quality.md")
TABLES = {
    "summary": summary_table,
    "in_domain": in_domain_table,
    "in_domain_models": models_table,
    "heads": heads_table,
    "bars": bars_table,
    "profile": profile_table,
    "patterns": patterns_table,
    "captured": captured_table,
    "table1": table1,
    "table2": table2,
    "figure2": figure2,
    "table3": table3,
    "table3_in_domain": table3_in_domain,
    "table3_multilingual": multilingual,
    "maxsim_forward": forward_table,
    "maxsim_backward": backward_table,
    "maxsim_compiled": partial(other_run, "compiled"),
    "maxsim_rest": partial(other_run, "rest"),
    "maxsim_targets": targets_table,
    "training_splade": splade_table,
    "training_colbert": late_table,
    "training_gpus": gpus_table,
    "training_any_batch": any_batch_table,
    "training_steps": steps_table,
    "data": data_table,
    "attention": attention_table,
}
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if check and after != before:
            sys.exit(f"{page} is not what the records say: make tables")
        if after != before:
            path.write_text(after, encoding="utf-8")


def filled(page: str) -> str:
    """The page with every block between a table's marks as its records have it."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}{block[3]}", page)


if __name__ == "__main__":
    main()
