"""What makes models good on collections that nobody tuned for, from the study of zero_shot.py."""

import statistics
from collections.abc import Sequence

from recipes.ingredients import MIXED, RECIPES
from recipes.untrained import HEADS
from recipes.zero_shot import PRECISION_STUDY, PRECISIONS, STUDY, TARGETS, UNTRAINED, WHOLE
from tables.in_domain import by_label, captioned, sizes, spread, values
from tables.records import TABLES, Record

NOT_MEASURED = "Not measured yet: `python scripts/zero_shot.py`.\n"
OTHERS = {
    "bm25": "BM25, k1 0.9, b 0.4",
    "bm25-lucene": "BM25, k1 1.2, b 0.75",
    "parent": "all-MiniLM-L6-v2, dense, as it comes",
}
PUBLIC_SPLADE = "splade-tiny"  # rasyosef/splade-tiny, 4.4M parameters, Apache-2.0
DEV = ("squad_dev", "acl_dev")
TASKS = ("squad", "acl", *DEV, *TARGETS)
SHARE = 0.95  # of the parent's NDCG@10, on each of the two
HEADER = (
    "", "squad", "acl", "squad dev", "acl dev", "cranfield", "medline", "mean", "choice",
    "terms or vectors q / d", "s", "peak GiB",
)  # fmt: skip


def zero_shot() -> str:
    """Every recipe of every kind; what meets the bars is bold."""
    groups = by_label(STUDY)
    labels = [*OTHERS]
    for kind, recipes in RECIPES.items():
        labels += [f"{UNTRAINED}{name}" for name in HEADS if UNTRAINED.startswith(kind)]
        for name in recipes:
            labels += [f"{kind}-{name}{end}" for end in ("", WHOLE, "-average")]
        labels += [f"{kind}-{name}" for name in MIXED.get(kind, ())]
    rows = [row(label, groups) for label in labels if label in groups]
    return captioned(HEADER, rows, groups) or NOT_MEASURED


def precision() -> str:
    """The same models encoded in every precision."""
    groups = by_label(PRECISION_STUDY)
    rows = [
        [name, each, *(_exactly(groups[label][0], task) for task in TASKS)]
        for name in ("parent", PUBLIC_SPLADE, *(f"{kind}-base" for kind in RECIPES))
        for each in PRECISIONS
        if (label := f"{name}-{each}") in groups
    ]
    header = ("", "precision", *(task.replace("_", " ") for task in TASKS))
    return captioned(header, rows, groups) or NOT_MEASURED


def _exactly(record: Record, task: str) -> str:
    return f"{values([record], task)[0]:.2f}" if has([record], task) else ""


def row(label: str, groups: dict[str, list[Record]]) -> list[str]:
    own = {task: values(groups[label], task) for task in TASKS if has(groups[label], task)}
    cells = {task: spread(numbers) for task, numbers in own.items()}
    means = {task: statistics.mean(numbers) for task, numbers in own.items()}
    mean = mean_of(means, TARGETS)
    shown = f"{mean:.1f}"
    if label not in OTHERS and {*OTHERS} <= {*groups}:
        others = {
            name: {task: statistics.mean(values(groups[name], task)) for task in TARGETS}
            for name in OTHERS
        }
        for task in TARGETS:
            bars = [others[name][task] * (SHARE if name == "parent" else 1) for name in OTHERS]
            cells[task] = marked(cells[task], means[task] > max(bars))
        shown = marked(shown, mean > mean_of(others["parent"], TARGETS))
    return [
        OTHERS.get(label) or row_name(label),
        *(cells.get(task, "") for task in TASKS),
        shown,
        f"{(mean + mean_of(means, DEV)) / 2:.1f}" if {*DEV} <= {*means} else "",
        sizes(groups[label][0]),
        median(groups[label], "seconds", 1, ".0f"),
        median(groups[label], "peak_memory_mib", 1 / 1024, ".1f"),
    ]


def row_name(label: str) -> str:
    """The kind, and the recipe."""
    kind = next(kind for kind in RECIPES if label.startswith(f"{kind}-"))
    return f"{kind}, {label.removeprefix(f'{kind}-')}"


def mean_of(means: dict[str, float], tasks: Sequence[str]) -> float:
    return statistics.mean(means[task] for task in tasks)


def marked(cell: str, met: bool) -> str:
    return f"**{cell}**" if met else cell


def has(records: Sequence[Record], task: str) -> bool:
    """Whether all were tested with it."""
    return all(task in record["tasks"] for record in records)


def median(records: Sequence[Record], key: str, unit: float, form: str) -> str:
    found = [record[key] * unit for record in records if key in record]
    return f"{statistics.median(found):{form}}" if found else ""


TABLES |= {"zero_shot": zero_shot, "precision": precision}
