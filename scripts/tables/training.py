"""Whole training runs: ours and sentence-transformers', on one GPU and on several."""

from collections.abc import Sequence
from functools import partial

from benchmarks.training.figures import SHOWN
from benchmarks.training.suites import (
    ALL_TERMS,
    BERT_BASE,
    COLBERT,
    FUSED,
    IN_16_BIT,
    IN_FP8,
    JOINT,
    OURS,
    OWN_WORDS,
    PROFILED_IN_FP8,
    SCORES,
    SPLADE,
    SUITES,
    THEIRS,
)
from tables.records import Record, find, markdown, paper, table

DIRECT = {
    "micro_batch": 0,
    "compiled": True,
    "half_residual": False,
    "activity": OWN_WORDS,
    "model": SPLADE,
}


# What a training in FP8 and one in 16 bits have in common.
WORK = ("model", "head", "batch", "micro_batch", "half_residual", "lengths")

DROP_INS = {
    (SPLADE, THEIRS): "`SparseEncoder`",
    (SPLADE, FUSED): "`SparseEncoder`, `fuse(model)`",
    (COLBERT, THEIRS): "`MultiVectorEncoder`",
    (COLBERT, SCORES): "`MultiVectorEncoder`, `fuse_scores(loss)`",
    (COLBERT, FUSED): "`MultiVectorEncoder`, both",
    (COLBERT, IN_16_BIT): "`MultiVectorEncoder`, both, scores in 16 bits",
}


def in_order(suite: str, records: Sequence[Record]) -> list[Record]:
    """The records of a suite, in the order of its cells."""
    return [record for cell in SUITES[suite] if (record := find(records, cell))]


def _side_by_side(records: Sequence[Record]) -> str:
    header = ["", "batch", *SHOWN, "times sentence-transformers"]
    rows = []
    for record in records:
        own, best = rate(record), _best_rival(records, record)
        ratio = f"{own / best:.2f}" if own and best else ""
        rows.append([name(record), _batch(record), *figures(record), ratio])
    return markdown(header, rows)


@table("training_splade", "training", "splade", "training --suite splade")
def splade(records: list[Record]) -> str:
    """SPLADE, every head, beside sentence-transformers."""
    records = in_order("splade", records)
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
        (row["batch"], rated / baseline, base["hours"] / row["hours"])
        for row in printed
        if "sparton" in row["heads"] and baseline and (rated := own("sparton", row["batch"]))
    ]


@table("training_modernbert", "training", "modernbert", "training --suite modernbert")
def modernbert(records: list[Record]) -> str:
    """SPLADE on ModernBERT-base, beside sentence-transformers."""
    attentions = {r["attention"] for r in records if "attention" in r}
    said = f"\nAttention of sentence-transformers: {', '.join(sorted(attentions))}.\n"
    return _side_by_side(in_order("modernbert", records)) + (said if attentions else "")


@table("training_colbert", "training", "colbert", "training --suite colbert")
def late(records: list[Record]) -> str:
    """ColBERT and the joint model, beside sentence-transformers."""
    records = in_order("colbert", records)
    return _side_by_side(records) + "".join(
        f"\nA step of the joint model{words} takes {ratio:.2f} times that of its slower half.\n"
        for words, compiled in (("", False), (", compiled,", True))
        if (ratio := joint_ratio(records, compiled))
    )


def joint_ratio(records: Sequence[Record], compiled: bool) -> float | None:
    """The time of a joint step over that of the slower of its halves; None if one is missing."""
    find_model = partial(
        find, records, system=OURS, micro_batch=0, compiled=compiled, half_residual=False
    )
    joint, *halves = (rate(find_model(model=model)) for model in (JOINT, SPLADE, COLBERT))
    found = [half for half in halves if half]
    return min(found) / joint if joint and len(found) == len(halves) else None


@table("training_gpus", "training", "gpus", "training --suite gpus")
def gpus(records: list[Record]) -> str:
    """The same work on each of several GPUs."""
    return _beside_one_gpu(in_order("gpus", records))


@table("training_decoders_gpus", "training", "decoders_gpus", "training --suite decoders_gpus")
def decoders_gpus(records: list[Record]) -> str:
    """The same of causal language models, whole on each GPU and sharded."""
    return _beside_one_gpu(in_order("decoders_gpus", records))


def _beside_one_gpu(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        same = {key: record[key] for key in ("backbone", "micro_batch")}
        own, base = rate(record), rate(find(records, gpus=1, **same))
        gain = ["", ""]
        if own and base:
            gain = [f"{own / base:.2f}", f"{own / base / record['gpus']:.0%}"]
        rows.append([name(record), _batch(record), *figures(record), *gain])
    return markdown(["", "batch", *SHOWN, "times one GPU", "of linear"], rows)


@table("training_any_batch", "training", "any_batch", "training --suite any_batch")
def any_batch(records: list[Record]) -> str:
    """Batches and vocabularies beyond a GPU's memory."""
    rows = [
        [name(r), f"{r['vocabulary']:,}", _batch(r), *figures(r)]
        for r in in_order("any_batch", records)
    ]
    return markdown(["", "terms", "batch", *SHOWN], rows)


@table("training_parts", "training", "parts", "training --suite parts")
def parts(records: list[Record]) -> str:
    """A step in micro-batches, beside the same at once."""
    rows = []
    for record in in_order("parts", records):
        alike = {key: record[key] for key in (*WORK, "compiled")}
        whole = find(records, **alike | {"micro_batch": 0})
        own, base = rate(record), rate(whole)
        times = f"{base / own:.2f}" if own and base else ""
        rows.append([name(record), _batch(record), *figures(record), times])
    return markdown(["", "batch", *SHOWN, "times the step at once"], rows)


@table("training_decoders", "training", "decoders", "training --suite decoders")
def decoders(records: list[Record]) -> str:
    """SPLADE from causal language models, beside sentence-transformers with the same adapters."""
    return _side_by_side(in_order("decoders", records))


@table("integrations", "training", "integrations", "training --suite integrations")
def integrations(records: list[Record]) -> str:
    """sentence-transformers as it comes and with the drop-ins of this project."""
    rows = []
    for record in in_order("integrations", records):
        plain = find(records, model=record["model"], system=THEIRS)
        words = [DROP_INS[record["model"], record["system"]]]
        if rate(record) and rate(plain):
            for key, form in (("examples_per_second_p50", ",.0f"), ("peak_allocated_gib", ".1f")):
                words += [f"{record[key]:{form}}", f"{record[key] / plain[key]:.2f}"]
            words.append(f"{record['loss']:.3f}")
        else:
            words += [record["status"].replace("oom", "OOM"), *[""] * 4]
        rows.append(words)
    header = ["", "pairs/s", "times its own", "peak GiB", "of its own", "loss"]
    return markdown(header, rows)


def name(record: Record) -> str:
    """System or head, and what else makes the cell another."""
    theirs = record["system"].startswith(THEIRS)
    words = ["sentence-transformers" if theirs else record["head"]]
    if record["system"] in (IN_FP8, PROFILED_IN_FP8):
        words.append("products in FP8")
    if record["backbone"] != BERT_BASE:
        words.append(record["backbone"])
    if record["lora"]:
        words.append(f"LoRA of rank {record['lora']}")
    if record["checkpointed"]:
        words.append("checkpointed")
    if record["gpus"] > 1:
        words.append(f"{record['gpus']} GPUs")
    if record["sharded"]:
        words.append("sharded")
    if record["compiled"]:
        words.append("compiled" if theirs else "compiled backbone")
    if record["half_residual"]:
        words.append("16 bits between layers")
    if record["activity"] == ALL_TERMS:
        words.append("all terms active")
    return ", ".join(words)


def rate(record: Record) -> float | None:
    """Pairs per second of a cell that was measured and believed."""
    return record["examples_per_second_p50"] if record.get("status") == "ok" else None


def figures(record: Record) -> list[str]:
    """A row's numbers under :data:`SHOWN`; what happened where there are none."""
    if record["status"] != "ok":
        return [record["status"].replace("oom", "OOM"), *[""] * (len(SHOWN) - 1)]
    return [words(record) for words in SHOWN.values()]


def _batch(record: Record) -> str:
    parts = f" in {record['micro_batch']}s" if record["micro_batch"] else ""
    return f"{record['batch']:,}{parts}"


def _best_rival(records: Sequence[Record], record: Record) -> float | None:
    """The highest rate of sentence-transformers, of any batch that it manages, on the same texts;
    nothing for what it has no counterpart of."""
    keys = ("model", "backbone", "lora", "lengths", "vocabulary")
    if record["system"] == THEIRS:
        return None
    rates = [
        rate(other)
        for other in records
        if other["system"] == THEIRS and all(other[key] == record[key] for key in keys)
    ]
    return max(filter(None, rates), default=None)
