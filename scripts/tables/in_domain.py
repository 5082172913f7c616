"""Training on real pairs: with every head of SPLADE, and every kind of model."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import product

from benchmarks.screen import figure
from tables.records import TABLES, Record, markdown, read_records, run_caption

PAIRS, STEP = figure("examples_per_second", ",.0f"), figure("step_ms", ".0f")
PEAK = figure("peak_memory_mib", ".1f", 1 / 1024)
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
SYSTEMS = ("splade", "colbert", "joint", "inference-free", "csr")
# Labels of scripts/recipes/kinds.py: what it does not train, and what it trains.
MODELS = {"bm25": "BM25", "dense": "all-MiniLM-L6-v2, dense, as it comes"} | {
    f"{system}-{data}": f"{system}, {data}"
    for system, data in product(SYSTEMS, ("pairs", "mined", "distilled"))
}
MODELS["splade-pairs-half-residual"] = "splade, pairs, 16 bits between layers"
# Of experiment=smollm2_in_domain and what its first lines say of late interaction.
DECODERS = {
    f"smollm2-{system}": f"{system} on SmolLM2-135M, pairs" for system in ("splade", "colbert")
}
NO_MODELS = "Not measured yet: `python scripts/zero_shot.py --only 'kinds-*'`.\n"


def heads() -> str:
    """Every head on real pairs: speed, memory, NDCG@10 per task; seeds as mean and spread."""
    groups = by_label("in_domain")
    baselines = sorted(label for label in groups if label.startswith("BM25"))
    rows = []
    for label in (*baselines, *NAMES):
        if label in groups:
            pairs, peak = _speed(groups[label][0])
            step = STEP(groups[label][0])
            terms = _numbers(groups[label][0], "terms")
            quality = _quality(groups[label])
            rows.append([NAMES.get(label, label), pairs, step, peak, *quality, terms])
    return markdown(["", "pairs/s", "ms/step", "peak GiB", *TASKS, "terms q / d"], rows)


def models() -> str:
    """Every kind of model on every kind of data: speed, memory, NDCG@10 per task, size."""
    groups = by_label("in_domain_models")
    rows = []
    for label, name in (MODELS | DECODERS).items():
        if label in groups:
            speed, quality = _speed(groups[label][0]), _quality(groups[label])
            rows.append([name, *speed, *quality, sizes(groups[label][0])])
    header = ["", "pairs/s", "peak GiB", *TASKS, "terms or vectors q / d"]
    return captioned(header, rows, groups) or NO_MODELS


def captioned(
    header: Sequence[str], rows: Sequence[Sequence[str]], groups: dict[str, list[Record]]
) -> str:
    """A table and the runs of a study; nothing where it has no rows."""
    runs = {run_caption(record["environment"]) for own in groups.values() for record in own}
    return f"{markdown(header, rows)}\n{''.join(sorted(runs))}" if rows else ""


def by_label(study: str) -> dict[str, list[Record]]:
    """The records of a study, of each label those of all seeds."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in read_records(study):
        groups[record["label"]].append(record)
    return groups


def _speed(record: Record) -> list[str]:
    """Pairs per second and peak memory of a training."""
    return [PAIRS(record), PEAK(record)]


def _quality(records: list[Record]) -> list[str]:
    """NDCG@10 of each task over the seeds."""
    return [spread(values(records, task)) for task in TASKS]


def values(records: Sequence[Record], task: str) -> list[float]:
    """NDCG@10 in percent of each seed."""
    return [100 * record["tasks"][task]["metrics"]["ndcg@10"] for record in records]


def spread(numbers: Sequence[float]) -> str:
    """Their mean, and how far they lie apart."""
    deviation = f" ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.1f}{deviation}"


def sizes(record: Record) -> str:
    """Terms and vectors of a query and of a document."""
    found = {"": _numbers(record, "terms"), " vectors": _numbers(record, "vectors")}
    return ", ".join(f"{numbers}{unit}" for unit, numbers in found.items() if numbers)


def _numbers(record: Record, name: str) -> str:
    """Mean number of a text's terms or vectors over the tasks, of queries and of documents; nothing
    where a system has none."""
    tasks = record["tasks"].values()
    sides = [f"{side}_{name}" for side in ("query", "document")]
    if any(side not in task for side in sides for task in tasks):
        return ""
    return " / ".join(f"{statistics.mean(task[side] for task in tasks):.0f}" for side in sides)


TABLES["in_domain"] = heads
TABLES["in_domain_models"] = models
