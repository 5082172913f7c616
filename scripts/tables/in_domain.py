"""Training on real pairs with every head."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product

from tables.records import Record, markdown, read_records

TASKS = ("squad", "acl", "cranfield", "medline")
_HEADS = {
    "EagerHead": "eager",
    "CompiledHead": "compiled",
    "TiledHead": "tiled",
    "TiledHead compiled": "tiled_compiled",
    "HybridHead": "sparton_hybrid",
    "SpartonHead": "**sparton**",
    "SpartonHead fp8": "sparton, fp8",
}
_VARIANTS = ("", " sum", " log1p_relu", " sum log1p_relu")
# Labels of scripts/record_runs.py, in the order of the rows.
NAMES = {
    head + variant: name + variant.replace(" ", ", ")
    for variant, (head, name) in product(_VARIANTS, _HEADS.items())
}


def in_domain_table() -> str:
    """Every head on real pairs: speed, memory, NDCG@10 per task; seeds as mean and spread."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in read_records("in_domain"):
        groups[record["label"]].append(record)
    baselines = sorted(label for label in groups if label.startswith("BM25"))
    rows = [
        in_domain_row(label, groups[label]) for label in (*baselines, *NAMES) if label in groups
    ]
    header = ["", "pairs/s", "ms/step", "peak GiB", *(f"{task}" for task in TASKS), "terms q / d"]
    return markdown(header, rows)


def _ndcg(task: str, record: Record) -> float:
    return 100 * record["tasks"][task]["metrics"]["ndcg@10"]


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
    quality = [over_seeds(partial(_ndcg, task), ".1f") for task in TASKS]
    tasks = records[0]["tasks"].values()
    terms = [statistics.mean(t[f"{side}_terms"] for t in tasks) for side in ("query", "document")]
    return [NAMES.get(label, label), *speed, *quality, f"{terms[0]:.0f} / {terms[1]:.0f}"]
