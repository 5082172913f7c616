"""The README's first figures: ours beside what people use otherwise."""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.encoding import study as encoding
from benchmarks.head.suites import FORWARD_BACKWARD, TABLE1
from benchmarks.head.suites import Cell as HeadCell
from benchmarks.kernels import KernelCell
from benchmarks.maxsim.shapes import BOTH
from benchmarks.search.compressed import EXHAUSTIVE, MANY, RIVALS, SMALL
from benchmarks.search.study import Cell as SearchCell
from benchmarks.training.suites import COLBERT, OURS, SPLADE, THEIRS
from benchmarks.training.suites import Cell as TrainingCell
from tables.maxsim import PEERS, fastest, provider_name
from tables.records import TABLES, Record, find, markdown, mebibytes, milliseconds, read_devices
from tables.training import figures, rate

ENCODING = "encoding documents with SPLADE, BERT-base"
SEARCH = SearchCell(EXHAUSTIVE, SMALL, *MANY)
MAXSIM = KernelCell("128x128_32x300", BOTH, "sparton")
TRAININGS = (
    TrainingCell(OURS, SPLADE, "sparton", 384),
    TrainingCell(OURS, COLBERT, "colbert", 384, lengths=COLBERT),
)
Row = Callable[[Sequence[Record]], list[str]]
NAMES = {SPLADE: "SPLADE", COLBERT: "ColBERT"}


def summary() -> str:
    """A row for each kind of work, from the first device on which both sides of it were measured in
    one run."""
    kinds: list[tuple[str, Row]] = [("head", _head), ("maxsim", _maxsim)]
    kinds += [("training", partial(_training, cell)) for cell in TRAININGS]
    kinds += [("encoding", _encoding), ("compressed_search", _search)]
    rows = []
    for study, row in kinds:
        rows += [found for records in read_devices(study) if (found := row(records))][:1]
    return markdown(["", "sparton", "others", "GPU"], rows) or "Not measured yet.\n"


def _head(records: Sequence[Record]) -> list[str]:
    ours, compiled, hybrid = (
        find(records, HeadCell(TABLE1, head, FORWARD_BACKWARD))
        for head in ("sparton", "compiled", "sparton_hybrid")
    )
    if not all("p50_ms" in record for record in (ours, compiled, hybrid)):
        return []
    rivals = f"{_cost(compiled)} (`torch.compile`); {_cost(hybrid)} (the paper's design)"
    return ["SPLADE head, forward and backward", _cost(ours), rivals, ours["gpu"]]


def _maxsim(records: Sequence[Record]) -> list[str]:
    ours, best = find(records, MAXSIM), fastest(records, MAXSIM, PEERS)
    if "p50_ms" not in ours or not best:
        return []
    rival = f"{_cost(best)} ({provider_name(best['provider'])})"
    work = "MaxSim, 128 queries x 128 documents, forward and backward"
    return [work, _cost(ours), rival, ours["gpu"]]


def _training(cell: TrainingCell, records: Sequence[Record]) -> list[str]:
    """Beside the fastest of sentence-transformers' at the same batch."""
    records = [record for record in records if record["suite"] == cell.model]
    ours = find(records, cell)
    theirs = [r for r in records if r["system"] == THEIRS and r["batch"] == cell.batch and rate(r)]
    if not (rate(ours) and theirs):
        return []
    best = max(theirs, key=lambda record: record["examples_per_second_p50"])
    work = f"training {NAMES[cell.model]}, BERT-base, batch {cell.batch}"
    return [work, _rate(ours), f"{_rate(best)} (sentence-transformers)", ours["gpu"]]


def _encoding(records: Sequence[Record]) -> list[str]:
    """Beside the fastest of sentence-transformers'."""
    records = [r for r in records if (r["kind"], r["size"]) == (SPLADE, "base")]
    measured = [
        [r for r in records if r["library"] == library and "texts_per_s" in r]
        for library in (encoding.OURS, encoding.THEIRS)
    ]
    if not all(measured):
        return []
    best = [max(each, key=lambda record: record["texts_per_s"]) for each in measured]
    ours, theirs = (f"{record['texts_per_s']:,.0f} texts/s" for record in best)
    return [ENCODING, ours, f"{theirs} ({encoding.THEIRS})", best[0]["gpu"]]


def _search(records: Sequence[Record]) -> list[str]:
    """Beside fast-plaid with as many bits, which finds as many of the best documents."""
    ours = find(records, SEARCH)
    name = next((name for name, nbits in RIVALS.items() if nbits == ours.get("nbits")), "")
    theirs = find(records, SEARCH._replace(provider=name))
    if not all("queries_per_s" in record for record in (ours, theirs)):
        return []
    rates = [f"{record['queries_per_s']:,.0f} queries/s" for record in (ours, theirs)]
    work = f"search among {SEARCH.documents:,} documents' token vectors of {ours['nbits']} bits"
    return [work, rates[0], f"{rates[1]} (fast-plaid)", ours["gpu"]]


def _cost(record: Record) -> str:
    return f"{milliseconds(record)} ms, {mebibytes(record)} MiB"


def _rate(record: Record) -> str:
    pairs, _, peak, *_ = figures(record)
    return f"{pairs} pairs/s, {peak} GiB"


TABLES["summary"] = summary
