"""Whole training runs: ours and sentence-transformers', on one GPU and on several, and what a step
is made of."""

from collections.abc import Callable, Sequence
from functools import partial

from tables.records import Record, by_device, find, markdown, paper
from training_benchmark.suites import (
    ALL_TERMS,
    COLBERT,
    JOINT,
    OURS,
    OWN_WORDS,
    SPLADE,
    SUITES,
    THEIRS,
)
from training_benchmark.trace import FAMILIES

FIGURES = ("pairs/s", "ms/step", "peak GiB", "MFU", "waits for data ms", "first step after s")
DIRECT = {
    "micro_batch": 0,
    "compiled": True,
    "half_residual": False,
    "activity": OWN_WORDS,
    "model": SPLADE,
}
COMMAND = "python scripts/benchmark_training.py --suite"


def splade_table() -> str:
    """SPLADE, every head, beside sentence-transformers."""
    return _suite("splade", _splade)


def late_table() -> str:
    """ColBERT and the joint model, beside sentence-transformers."""
    return _suite("colbert", _late)


def gpus_table() -> str:
    """The same work on each of several GPUs."""
    return _suite("gpus", _gpus)


def any_batch_table() -> str:
    """Batches and vocabularies beyond a GPU's memory."""
    return _suite("any_batch", _any_batch)


def steps_table() -> str:
    """What the GPU does in a step, by families of kernels, and what it waits for."""
    return _suite("splade", _steps, "training_profile", " --profile")


def _suite(
    suite: str, build: Callable[[list[Record]], str], study: str = "training", option: str = ""
) -> str:
    """The table of a suite's records, in the order of its cells."""

    def ordered(records: list[Record]) -> str:
        found = (find(records, **cell._asdict()) for cell in SUITES[suite])
        return build([record for record in found if record])

    return by_device(study, ordered, suite, f"Not measured yet: `{COMMAND} {suite}{option}`.\n")


def _side_by_side(records: list[Record]) -> str:
    header = ["", "batch", *FIGURES, "times sentence-transformers"]
    rows = []
    for record in records:
        own, best = rate(record), _best_rival(records, record)
        ratio = f"{own / best:.2f}" if own and best else ""
        rows.append([name(record), _batch(record), *figures(record), ratio])
    return markdown(header, rows)


def _splade(records: list[Record]) -> str:
    gains = [
        f"{batch}: {gain:.2f} ({printed:.2f})" for batch, gain, printed in paper_gains(records)
    ]
    words = (
        "Pairs per second of head=sparton over those of head=compiled at batch 384, backbones "
        "compiled, by batch, and the paper's in brackets: "
    )
    return _side_by_side(records) + (f"\n{words}{', '.join(gains)}.\n" if gains else "")


def paper_gains(records: Sequence[Record]) -> list[tuple[int, float, float]]:
    """Batch, our gain over the compiled head, and the paper's, of the rows of its Table 3."""

    def own(head: str, batch: int) -> float | None:
        return rate(find(records, head=head, batch=batch, **DIRECT))

    printed = paper("table3")["rows"]
    (base,) = (row for row in printed if "compiled" in row["heads"])
    baseline = own("compiled", base["batch"])
    return [
        (row["batch"], rated / baseline, row["examples_per_second"] / base["examples_per_second"])
        for row in printed
        if "sparton" in row["heads"] and baseline and (rated := own("sparton", row["batch"]))
    ]


def _late(records: list[Record]) -> str:
    return _side_by_side(records) + "".join(
        f"\nA step of the joint model{words} takes {ratio:.2f} times that of its slower half.\n"
        for words, ratio in (
            ("", joint_ratio(records, compiled=False)),
            (", compiled,", joint_ratio(records, compiled=True)),
        )
        if ratio
    )


def joint_ratio(records: Sequence[Record], compiled: bool) -> float | None:
    """The time of a joint step over that of the slower of its halves; None if one is missing."""
    find_model = partial(
        find, records, system=OURS, micro_batch=0, compiled=compiled, half_residual=False
    )
    joint, *halves = (rate(find_model(model=model)) for model in (JOINT, SPLADE, COLBERT))
    return min(halves) / joint if joint and all(halves) else None


def _gpus(records: list[Record]) -> str:
    rows = []
    for record in records:
        alone = find(records, gpus=1, micro_batch=record["micro_batch"])
        rate, base = (r.get("examples_per_second_p50") for r in (record, alone))
        gain = (
            [f"{rate / base:.2f}", f"{rate / base / record['gpus']:.0%}"] if rate and base else []
        )
        row = [f"{record['gpus']}", _batch(record), *figures(record)]
        rows.append([*row, *(gain or ["", ""])])
    return markdown(["GPUs", "batch", *FIGURES, "times one GPU", "of linear"], rows)


def _any_batch(records: list[Record]) -> str:
    header = ["", "terms", "batch", *FIGURES]
    rows = [[name(r), f"{r['vocabulary']:,}", _batch(r), *figures(r)] for r in records]
    return markdown(header, rows)


def _steps(records: list[Record]) -> str:
    columns = ["busy", "waits of the host", "of the matrix ceiling"]
    header = ["", "batch", "ms/step", *columns, *(f"{family} ms" for family in FAMILIES)]
    return markdown(header, [_step(record) for record in records if record["status"] == "ok"])


def _step(record: Record) -> list[str]:
    shares = [f"{record['busy_share']:.1%}", f"{record['host_waits']:.1f}"]
    shares.append(f"{record['matrix_ceiling_share']:.1%}")
    times = (record["families_ms"].get(family, 0.0) for family in FAMILIES)
    spent = [f"{ms:.1f}" if ms else "" for ms in times]
    return [name(record), _batch(record), f"{record['step_ms']:.1f}", *shares, *spent]


def name(record: Record) -> str:
    """System or head, and what else makes the cell another."""
    ours = record["system"] == OURS
    words = [record["head"] if ours else "sentence-transformers"]
    if record["compiled"]:
        words.append("compiled backbone" if ours else "compiled")
    if record["half_residual"]:
        words.append("16 bits between layers")
    if record["activity"] == ALL_TERMS:
        words.append("all terms active")
    return ", ".join(words)


def rate(record: Record) -> float | None:
    """Pairs per second of a cell that was measured and believed."""
    return record["examples_per_second_p50"] if record.get("status") == "ok" else None


def figures(record: Record) -> list[str]:
    """A row's numbers under :data:`FIGURES`; what happened where there are none."""
    if record["status"] != "ok":
        return [record["status"].replace("oom", "OOM"), *[""] * (len(FIGURES) - 1)]
    forms = {
        "examples_per_second_p50": "{:,.0f}",
        "step_ms_p50": "{:,.0f}",
        "peak_allocated_gib": "{:.1f}",
        "mfu": "{:.1%}",
        "data_wait_ms": "{:.1f}",
        "seconds_to_first_step": "{:.0f}",
    }
    return [form.format(record[key]) if key in record else "" for key, form in forms.items()]


def _batch(record: Record) -> str:
    parts = f" in {record['micro_batch']}s" if record["micro_batch"] else ""
    return f"{record['batch']:,}{parts}"


def _best_rival(records: Sequence[Record], record: Record) -> float | None:
    """The highest rate of sentence-transformers, of any batch that it manages, on the same texts;
    nothing for what it has no counterpart of."""
    keys = ("model", "lengths", "vocabulary")
    if record["system"] == THEIRS:
        return None
    rates = [
        rate(other)
        for other in records
        if other["system"] == THEIRS and all(other[key] == record[key] for key in keys)
    ]
    return max(filter(None, rates), default=None)
