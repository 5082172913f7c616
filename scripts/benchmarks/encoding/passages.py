"""Passages like those of MS MARCO from texts to answers: encoded, stored, indexed and searched."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.encoding.collections import (
    ENCODE,
    EVALUATE,
    files_of,
    on_devices,
    prepare_documents,
    run_command,
    steady_rate,
    words_to_encode,
    write_collection,
)
from benchmarks.encoding.models import PRECISION, write_model
from benchmarks.screen import Columns, Record, figure, in_words
from benchmarks.study import Measured, Settings, Study
from benchmarks.texts import passages

QUERIES = 6980  # of MS MARCO's dev set
MINIATURE = 400
FEWEST_FOUND = 0.5  # mean reciprocal rank of the passages that queries are words of


class Cell(NamedTuple):
    """Passages, and by how many GPUs they are encoded; one searches."""

    passages: int
    gpus: int

    @property
    def label(self) -> str:
        return f"{self.passages:,} passages {self.gpus} GPU{'s' if self.gpus > 1 else ''}"


class PassagesStudy(Study[Cell]):
    """Seconds and bytes of a collection from its texts to 6,980 answers, by the commands.

        python scripts/benchmark.py passages --gpus 2       # results/<gpu>/passages.jsonl
        python scripts/benchmark.py passages --device cpu --miniature --output FILE

    Generated passages with MS MARCO's distribution of lengths, and a SPLADE of BERT-base's size
    with random weights. A query has words of a passage, which search must find.
    """

    name = "passages"
    cell = Cell
    limit = 3600.0
    needs_gpu = False
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "passages": {"type": int, "default": 8_800_000},
        "gpus": {"type": int, "nargs": "+", "default": [1]},
    }
    columns: ClassVar[Columns] = {
        "texts/s": figure("texts_per_s", ",.0f"),
        "start s": figure("start_s", ".1f"),
        "encode s": figure("encode_s", ".1f"),
        "bytes a passage": figure("bytes_each", ".0f"),
        "index s": figure("index_s", ".1f"),
        "search s": figure("search_s", ".1f"),
    }

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        number = MINIATURE if settings.miniature else settings.options["passages"]
        return {self.name: [Cell(number, gpus) for gpus in settings.options["gpus"]]}

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        root, number = Path(settings.folder), cells[0].passages
        folder = root / f"passages-{number}"
        write_collection(folder, passages(), number, max(number // QUERIES, 1))
        model = write_model(root, "splade", "tiny" if settings.miniature else "base")
        prepare_documents(folder)
        return partial(self.measure, folder, model, settings)

    def measure(self, folder: Path, model: Path, settings: Settings, cell: Cell) -> Record:
        words = words_to_encode(folder, settings, MINIATURE)
        words = [f"model={model}", *words, *on_devices(cell.gpus, settings)]
        encoded = run_command(ENCODE, words, folder.parent / "encoded")
        rate = steady_rate(encoded.output, cell.gpus, "--passages")
        size = sum(file.stat().st_size for file in files_of(encoded))
        words = [f"model={model}", "evaluation=beir_folder", f"evaluation.path={folder}"]
        words.append(f"documents={encoded.output}")
        words.append(f"encoder.precision={PRECISION[settings.device]}")
        words += ["metrics=[mrr@10]", *on_devices(1, settings)]
        searched = run_command(EVALUATE, words, folder.parent / "searched")
        (task,) = json.loads((searched.output / "results.json").read_text())["tasks"]
        for each in (encoded, searched):
            shutil.rmtree(each.output)
        found = task["metrics"]["mrr@10"]
        record = {
            "texts_per_s": round(rate, 1),
            "start_s": round(encoded.seconds - cell.passages / rate, 2),
            "encode_s": round(encoded.seconds, 2),
            "bytes": size,
            "bytes_each": round(size / cell.passages, 1),
            "index_s": round(task["seconds"]["index"], 2),
            "queries_s": round(task["seconds"]["queries"], 2),
            "search_s": round(task["seconds"]["search"], 2),
            "evaluate_s": round(searched.seconds, 2),
            "speed": task["speed"],
            "mrr": round(found, 4),
        }
        return record | {"status": "ok" if found >= FEWEST_FOUND else "red_gate"}

    def words(self, record: Record) -> str:
        return in_words(self.columns, record)


STUDY = PassagesStudy()
