"""Write the tables of README.md from the records in results/; the only author of its figures.

python scripts/make_tables.py          # rewrite
python scripts/make_tables.py --check  # fail if a table is not what the records say
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]
HEADS = ("EagerHead", "CompiledHead", "TiledHead", "TiledHead compiled", "SpartonHead")
TASKS = ("squad", "acl", "cranfield", "medline")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = before
    for name, build in TABLES.items():
        block = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.S)
        after = block.sub(lambda match, build=build: f"{match[1]}{build()}{match[2]}", after)
    if parser.parse_args().check:
        sys.exit("README.md is not what the records say: make tables" if after != before else 0)
    readme.write_text(after)


def read_records(study: str) -> list[Record]:
    """Records of a study from every device; one study is published from one device at a time."""
    paths = sorted((ROOT / "results").glob(f"*/{study}.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def in_domain_table() -> str:
    """Every head on real pairs: speed, memory, NDCG@10 per task; seeds as mean and spread."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in read_records("in_domain"):
        groups[record["label"]].append(record)
    baselines = sorted(label for label in groups if label.startswith("BM25"))
    rows = [
        in_domain_row(label, groups[label]) for label in (*baselines, *HEADS) if label in groups
    ]
    header = ["", "pairs/s", "ms/step", "peak GiB", *(f"{task}" for task in TASKS), "terms q / d"]
    return markdown(header, rows)


def in_domain_row(label: str, records: list[Record]) -> list[str]:
    def over_seeds(value: Callable[[Record], float], form: str) -> str:
        values = [value(record) for record in records]
        spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
        return f"{statistics.mean(values):{form}}{spread}"

    speed = ["", "", ""]
    if "step_ms" in records[0]:
        first = records[0]
        speed = [
            f"{first['examples_per_second']:,.0f}",
            f"{first['step_ms']:.0f}",
            f"{first['peak_memory_mib'] / 1024:.1f}",
        ]
    quality = [
        over_seeds(lambda r, task=task: 100 * r["tasks"][task]["metrics"]["ndcg@10"], ".1f")
        for task in TASKS
    ]
    tasks = records[0]["tasks"].values()
    terms = [statistics.mean(t[f"{side}_terms"] for t in tasks) for side in ("query", "document")]
    return [display_name(label), *speed, *quality, f"{terms[0]:.0f} / {terms[1]:.0f}"]


def display_name(label: str) -> str:
    names = {
        "EagerHead": "eager",
        "CompiledHead": "compiled",
        "TiledHead": "tiled",
        "TiledHead compiled": "tiled_compiled",
        "SpartonHead": "**sparton**",
    }
    return names.get(label, label)


TABLES = {"in_domain": in_domain_table}

if __name__ == "__main__":
    main()
