"""Encoding of collections, beside sentence-transformers and beside the model alone."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from benchmarks.encoding.models import (
    HEADS,
    PRECISION,
    as_rows,
    forward_alone,
    ours,
    theirs,
    tokens_alone,
    write_model,
)
from benchmarks.gate import passes, relative_errors
from benchmarks.screen import Columns, Record, figure, in_words
from benchmarks.study import Measured, Settings, Study
from benchmarks.texts import documents

CHECKED = 48  # texts whose representations are compared
SLACK = 2.0  # times the error of sentence-transformers in the same precision
ROUNDING = 1e-3  # of fp16, in which token vectors are stored, and of fp32 in another order
# Of FP8, whose numbers have three bits behind the first, in four products of each layer.
FP8_ERROR = 0.15
OURS, IN_FP8, THEIRS = "sparton", "sparton fp8", "sentence-transformers"
ALONE, TOKENS = "forward alone", "tokens alone"


class Cell(NamedTuple):
    """One kind of model of one size, encoded by one library.

    Attributes:
        batch: texts of a batch; 0 where the library chooses.
    """

    kind: str
    size: str
    library: str
    batch: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind} {self.size} {self.library}{f' {self.batch}' if self.batch else ''}"


class EncodingStudy(Study[Cell]):
    """Texts per second of ``encode_texts`` as it comes, tokenisation and copies included.

        python scripts/benchmark.py encoding                 # results/<gpu>/encoding.jsonl
        python scripts/benchmark.py encoding --device cpu --threads 1 --texts 64 --seconds 1

    Generated documents of 159 tokens, and models with random weights. Ours are compared first with
    sentence-transformers in fp32: their error may be twice its own in the same precision, or 0.15
    with layers in FP8. "forward alone" is the model on tokens that lie on the device, and "tokens
    alone" the making of tokens on the host: the lower of the two is what a rate is measured by.
    """

    name = "encoding"
    cell = Cell
    seconds = 3.0
    limit = 900.0
    needs_gpu = False
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "texts": {"type": int, "default": 16_384},
        "sizes": {"nargs": "+", "default": ["base", "minilm"]},
        "kinds": {"nargs": "+", "default": list(HEADS)},
        "batches": {"type": int, "nargs": "+", "default": [32, 256], "help": "of the others"},
        "threads": {"type": int, "default": 0, "help": "of a CPU"},
    }
    columns: ClassVar[Columns] = {
        "texts/s": figure("texts_per_s", ",.1f"),
        "of the floor": figure("share", ".0%"),
        "entries a text": figure("entries", ",.1f"),
    }

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        options = settings.options
        sizes = ["tiny"] if settings.miniature else options["sizes"]
        others = [(THEIRS, batch) for batch in options["batches"]]
        narrow = [(IN_FP8, 0)] if settings.device == "cuda" else []
        libraries = [(ALONE, 0), (TOKENS, 0), (OURS, 0), *narrow, *others]
        cells = [Cell(k, s, *each) for s, k, each in product(sizes, options["kinds"], libraries)]
        return {self.name: cells}

    def context(self, suite: str, settings: Settings) -> Record:
        threads = settings.options["threads"] or torch.get_num_threads()
        return {"texts": number_of_texts(settings), "threads": threads}

    def process_of(self, cell: Cell) -> tuple[str, str]:
        return cell.kind, cell.size

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        if settings.options["threads"]:
            torch.set_num_threads(settings.options["threads"])
        first, texts = cells[0], documents()
        path = write_model(Path(settings.folder), first.kind, first.size)
        number = number_of_texts(settings)
        return partial(self.measure, path, [texts[row] for row in range(number)], settings)

    def measure(self, path: Path, texts: Sequence[str], settings: Settings, cell: Cell) -> Record:
        device, usual = settings.device, PRECISION[settings.device]
        precision = "fp8" if cell.library == IN_FP8 else usual
        if cell.library in (ALONE, TOKENS):
            part = forward_alone if cell.library == ALONE else tokens_alone
            alone = part(path, texts, device, precision)
            return {"texts_per_s": _rate(alone, device, settings.seconds), "status": "ok"}
        record: Record = {"precision": precision}
        if cell.library in (OURS, IN_FP8):
            encode = ours(path, device, precision)
            sample = texts[:CHECKED]
            truth, eager = (
                as_rows(theirs(path, cell.kind, device, 32, each)(sample))
                for each in ("fp32", usual)
            )
            errors = relative_errors({"reps": as_rows(encode(sample))}, {"reps": truth})
            allowed = relative_errors({"reps": eager}, {"reps": truth})["reps"]
            bound = FP8_ERROR if cell.library == IN_FP8 else SLACK * allowed + ROUNDING
            record |= {"errors": errors, "allowed": {"reps": bound}}
            if not passes(errors, record["allowed"]) or not truth.any():
                return record | {"status": "red_gate"}
            extent = encode(texts[: 4 * CHECKED]).extent
            record["entries"] = (extent.entries or extent.tokens) / extent.texts
        else:
            encode = theirs(path, cell.kind, device, cell.batch, precision)

        # The same texts for both libraries. Each sorts them by length, and those of a batch are
        # less alike where there are fewer: of an eighth, though it would do for the slower one,
        # batches of 256 have 3.5 % more padding.
        def run() -> int:
            encode(texts)
            return len(texts)

        return record | {"texts_per_s": _rate(run, device, settings.seconds), "status": "ok"}

    def beside(self, cell: Cell, record: Record, earlier: Sequence[tuple[Cell, Record]]) -> Record:
        """The share of the lower rate of the two that no encoding is without."""
        floors = [cell._replace(library=library, batch=0) for library in (ALONE, TOKENS)]
        known = [found for other, found in earlier if other in floors and found["status"] == "ok"]
        if cell in floors or len(known) < len(floors):
            return {}
        return {"share": record["texts_per_s"] / min(found["texts_per_s"] for found in known)}

    def words(self, record: Record) -> str:
        return in_words(self.columns, record)


def number_of_texts(settings: Settings) -> int:
    return 64 if settings.miniature else settings.options["texts"]


def _rate(run: Callable[[], int], device: str, seconds: float) -> float:
    """Texts per second of the fastest of several runs, after one that is not timed."""
    run()
    best, begin = 0.0, time.perf_counter()
    while not best or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        number = run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, number / (time.perf_counter() - start))
    return best


STUDY = EncodingStudy()
