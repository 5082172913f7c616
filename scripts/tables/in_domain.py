"""Training on real pairs: with every head of SPLADE, and every kind of model."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

from tables.records import TABLES, Record, markdown, read_records

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
# Labels of scripts/in_domain.py, and the rows of what it trains: each on three kinds of data.
BASELINES = {"bm25": "BM25", "dense": "all-MiniLM-L6-v2, dense, as it comes"}
SYSTEMS = ("splade", "colbert", "joint", "inference-free", "csr")
DATA = ("pairs", "mined", "distilled")
MODELS = BASELINES | {
    f"{system}-{data}": f"{system}, {data}" for system, data in product(SYSTEMS, DATA)
}
MODELS["splade-pairs-half-residual"] = "splade, pairs, 16 bits between layers"
NO_MODELS = "Not measured yet: `python scripts/in_domain.py`.\n"


def heads() -> str:
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


def in_domain_row(label: str, records: list[Record]) -> list[str]:
    first = records[0]
    step = [f"{first['step_ms']:.0f}"] if "step_ms" in first else [""]
    pairs, peak = _speed(first)
    terms = _numbers(first, "terms")
    return [NAMES.get(label, label), pairs, *step, peak, *_quality(records), terms]


def models() -> str:
    """Every kind of model on every kind of data: speed, memory, NDCG@10 per task, size."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in read_records("in_domain_models"):
        groups[record["label"]].append(record)
    rows = [models_row(label, groups[label]) for label in MODELS if label in groups]
    if not rows:
        return NO_MODELS
    header = ["", "pairs/s", "peak GiB", *TASKS, "terms or vectors q / d"]
    return f"{markdown(header, rows)}\n{_devices(groups.values())}"


def models_row(label: str, records: list[Record]) -> list[str]:
    sizes = [
        f"{numbers}{unit}"
        for name, unit in (("terms", ""), ("vectors", " vectors"))
        if (numbers := _numbers(records[0], name))
    ]
    return [MODELS[label], *_speed(records[0]), *_quality(records), ", ".join(sizes)]


def _ndcg(task: str, record: Record) -> float:
    return 100 * record["tasks"][task]["metrics"]["ndcg@10"]


def _speed(record: Record) -> tuple[str, str]:
    """Pairs per second and peak memory of a training."""
    speed, peak = record.get("examples_per_second"), record.get("peak_memory_mib")
    return f"{speed:,.0f}" if speed else "", f"{peak / 1024:.1f}" if peak else ""


def _quality(records: list[Record]) -> list[str]:
    """NDCG@10 of each task over the seeds."""

    def over_seeds(value: Callable[[Record], float], form: str) -> str:
        values = [value(record) for record in records]
        spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
        return f"{statistics.mean(values):{form}}{spread}"

    return [over_seeds(partial(_ndcg, task), ".1f") for task in TASKS]


def _numbers(record: Record, name: str) -> str:
    """Mean number of a text's terms or vectors over the tasks, of queries and of documents; nothing
    where a system has none."""
    tasks = record["tasks"].values()
    sides = [f"{side}_{name}" for side in ("query", "document")]
    if any(side not in task for side in sides for task in tasks):
        return ""
    return " / ".join(f"{statistics.mean(task[side] for task in tasks):.0f}" for side in sides)


def _devices(groups: Iterable[list[Record]]) -> str:
    """Where the trainings ran, and of which code."""
    origins = {
        "; ".join(
            (
                record["environment"]["hardware"].get("gpu", "CPU"),
                f"torch {record['environment']['packages']['torch']}",
                f"commit {((record['environment']['git'] or {}).get('sha') or 'unknown')[:9]}",
            )
        )
        for records in groups
        for record in records
    }
    return "".join(f"<sub>{origin}</sub>\n" for origin in sorted(origins))


TABLES["in_domain"] = heads
TABLES["in_domain_models"] = models
