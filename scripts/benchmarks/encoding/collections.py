"""``encode.py`` and ``evaluate.py`` as commands, on one GPU and on several."""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.encoding.models import PRECISION, write_model
from benchmarks.processes import SCRIPTS
from benchmarks.screen import Columns, Record, figure, in_words
from benchmarks.study import Measured, Settings, Study
from benchmarks.texts import Texts, documents
from sparton.cli.collections import text_files
from sparton.datasets.preparation import Reading
from sparton.datasets.texts import text_table
from sparton.encoded.facts import read_facts
from sparton.encoded.shards import shard_path
from sparton.writing import replacing_folder

ROOT = SCRIPTS.parent
ENCODE, EVALUATE = "encode", "evaluate"
# Documents of the runs: to encode, to run before, and to evaluate with one query for so many.
ALL, FEW, JUDGED, FOR_A_QUERY = "all", "few", "judged", 40
SHARES = {ALL: 1.0, FEW: 0.01, JUDGED: 0.5}
FOUND = {ENCODE: "digest", EVALUATE: "metrics"}  # of a record; the same for any number of GPUs
MINIATURE = 200
_WORDS = slice(3, 20)  # of a document, which are a query


class Cell(NamedTuple):
    """A command, the kind of model, and on how many GPUs."""

    verb: str
    kind: str
    gpus: int

    @property
    def label(self) -> str:
        return f"{self.verb} {self.kind} {self.gpus} GPU{'s' if self.gpus > 1 else ''}"


class Run(NamedTuple):
    """What a command left, and the wall-clock seconds it took."""

    output: Path
    seconds: float


class CollectionsStudy(Study[Cell]):
    """Texts per second of the commands that encode and evaluate, reading and writing included.

        python scripts/benchmark.py collections --gpus 1 2      # results/<gpu>/collections.jsonl
        python scripts/benchmark.py collections --device cpu --miniature --output FILE

    Generated documents of 159 tokens, and a model of BERT-base's size with random weights. The rate
    of ``encode.py`` is that after each process has written its first shard: start-up is told by
    itself. Each command has run before on few documents, which compiles kernels, and the documents
    of encode.py are prepared: both are done once on a machine, and would count for the first row
    alone. What several processes write, and the metrics they find, must be those of one.
    """

    name = "collections"
    cell = Cell
    limit = 900.0
    needs_gpu = False
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "texts": {"type": int, "default": 24 * 16_384},  # as many shards for each of 2 and 4 GPUs
        "kinds": {"nargs": "+", "default": ["splade", "colbert"]},
        "gpus": {"type": int, "nargs": "+", "default": [1, 2]},
    }
    columns: ClassVar[Columns] = {
        "texts/s": figure("texts_per_s", ",.0f"),
        "start s": figure("start_s", ".1f"),
        "documents s": figure("documents_s", ".1f"),
        "all s": figure("all_s", ".1f"),
    }

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        kinds, gpus = (settings.options[name] for name in ("kinds", "gpus"))
        return {
            self.name: [
                Cell(verb, kind, number)
                for verb in (ENCODE, EVALUATE)
                for kind in kinds
                for number in sorted(gpus)  # one GPU, what the others are compared with, is first
            ]
        }

    def context(self, suite: str, settings: Settings) -> Record:
        return {"texts": number_of(ALL, settings)}

    def process_of(self, cell: Cell) -> Hashable:
        return cell.verb, cell.kind

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        root, kind = Path(settings.folder), cells[0].kind
        for name in SHARES:
            folder, number = folder_of(root, name, settings), number_of(name, settings)
            write_collection(folder, documents(), number, FOR_A_QUERY)
        model = write_model(root, kind, "tiny" if settings.miniature else "base")
        prepare_documents(folder_of(root, ALL, settings))
        shutil.rmtree(run(cells[0]._replace(gpus=1), root, model, settings, FEW).output)
        measure = encode if cells[0].verb == ENCODE else evaluate
        return lambda cell: measure(cell, root, model, settings) | {"status": "ok"}

    def objection(
        self, cell: Cell, record: Record, earlier: Sequence[tuple[Cell, Record]]
    ) -> str | None:
        if cell.gpus == 1:
            return None
        key, alone = FOUND[cell.verb], cell._replace(gpus=1)
        of_one = [found.get(key) for other, found in earlier if other == alone]
        if not any(of_one):
            remedy = f"measure both, with --gpus 1 {cell.gpus} --fresh"
            return f"no {alone.label} was measured before, to compare its {key} with: {remedy}"
        return None if record[key] in of_one else f"its {key} is not that of {alone.label}"

    def words(self, record: Record) -> str:
        return in_words(self.columns, record)


def number_of(name: str, settings: Settings) -> int:
    """How many documents have that name."""
    number = MINIATURE if settings.miniature else settings.options["texts"]
    return max(round(number * SHARES[name]), 1)


def folder_of(root: Path, name: str, settings: Settings) -> Path:
    """Of the documents of that name; other numbers of them have other folders."""
    return root / f"{name}-{number_of(name, settings)}"


def write_collection(folder: Path, texts: Texts, number: int, for_a_query: int) -> None:
    """A folder in the layout of BEIR, with words of one document of so many as queries."""
    if folder.exists():
        return
    asked = range(0, number, for_a_query)
    with replacing_folder(folder) as fresh:
        (fresh / "qrels").mkdir()
        with (fresh / "corpus.jsonl").open("w") as file:
            file.writelines(_line(f"d{row}", texts[row]) for row in range(number))
        with (fresh / "queries.jsonl").open("w") as file:
            words = (" ".join(texts[row].split()[_WORDS]) for row in asked)
            file.writelines(_line(f"q{row}", text) for row, text in zip(asked, words, strict=True))
        with (fresh / "qrels/test.tsv").open("w") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            file.writelines(f"q{row}\td{row}\t1\n" for row in asked)


def prepare_documents(folder: Path) -> None:
    """Read them once, as the first ``encode.py`` of a machine does."""
    text_table("documents", text_files([str(folder)], "document"), Reading())


def _line(key: str, text: str) -> str:
    return json.dumps({"_id": key, "text": text}) + "\n"


def encode(cell: Cell, root: Path, model: Path, settings: Settings) -> Record:
    """The figures, and a digest of all that was written."""
    done = run(cell, root, model, settings, ALL)
    rate = steady_rate(done.output, cell.gpus, "--texts")
    digest = hashlib.sha256()
    for file in files_of(done):
        digest.update(f"{file.relative_to(done.output)}".encode() + file.read_bytes())
    record = {
        "texts_per_s": round(rate, 1),
        "start_s": round(done.seconds - number_of(ALL, settings) / rate, 2),
        "all_s": round(done.seconds, 2),
        "bytes": sum(file.stat().st_size for file in files_of(done)),
        "digest": digest.hexdigest(),
    }
    shutil.rmtree(done.output)
    return record


def files_of(done: Run) -> list[Path]:
    """All files that a command left, in order."""
    return sorted(file for file in done.output.rglob("*") if file.is_file())


def steady_rate(folder: Path, processes: int, option: str) -> float:
    """Texts per second from when as many shards were written as there are processes, to the last
    one.

    Args:
        option: of the study, with which there are more texts.

    Raises:
        ValueError: no process has written a second shard.
    """
    shards = read_facts(folder).shards()
    written = sorted((shard_path(folder, each).stat().st_mtime, len(each.rows)) for each in shards)
    if len(written) <= processes:
        raise ValueError(
            f"{len(written)} shards of {processes} processes have no rate, which is that after the "
            f"first shard of each: raise {option}"
        )
    begin, end = written[processes - 1][0], written[-1][0]
    return sum(number for _, number in written[processes:]) / max(end - begin, 1e-9)


def evaluate(cell: Cell, root: Path, model: Path, settings: Settings) -> Record:
    """The figures, and the metrics."""
    done = run(cell, root, model, settings, JUDGED)
    (task,) = json.loads((done.output / "results.json").read_text())["tasks"]
    seconds = task["seconds"]
    return {
        "texts_per_s": round(number_of(JUDGED, settings) / seconds["documents"], 1),
        **{f"{name}_s": round(value, 3) for name, value in seconds.items()},
        "all_s": round(sum(seconds.values()), 2),
        "start_s": round(done.seconds - sum(seconds.values()), 2),
        "metrics": task["metrics"],
    }


def words_of(cell: Cell, root: Path, model: Path, settings: Settings, name: str) -> list[str]:
    """The arguments of a cell's command on the documents of that name, but for its output."""
    folder = folder_of(root, name, settings)
    if cell.verb == ENCODE:
        words = words_to_encode(folder, settings, MINIATURE)
    else:
        words = ["evaluation=beir_folder", f"evaluation.path={folder}"]
        words.append(f"encoder.precision={PRECISION[settings.device]}")
    return [f"model={model}", *words, *on_devices(cell.gpus, settings)]


def words_to_encode(folder: Path, settings: Settings, miniature: int) -> list[str]:
    """What ``encode.py`` is told of the documents of a folder, of which a miniature has so many."""
    words = [f"data={folder}", f"precision={PRECISION[settings.device]}"]
    return [*words, *([f"rows_per_shard={miniature // 8}"] if settings.miniature else [])]


def on_devices(gpus: int, settings: Settings) -> list[str]:
    """With several GPUs the commands take no device but the CPU, and alone they take the GPU."""
    return [f"gpus={gpus}", *(["device=cpu"] if settings.device == "cpu" else [])]


def run(cell: Cell, root: Path, model: Path, settings: Settings, name: str) -> Run:
    """Run a cell's command on the documents of that name to its end.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    output = root / f"{cell.verb}-{cell.kind}-{cell.gpus}-{name}"
    return run_command(cell.verb, words_of(cell, root, model, settings, name), output)


def run_command(verb: str, words: Sequence[str], output: Path) -> Run:
    """Run a command of this repository to its end.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    shutil.rmtree(output, ignore_errors=True)
    script = f"{verb}.py"
    command = [sys.executable, str(ROOT / script), *words, f"output={output}"]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=output.parent, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"{script}: {(done.stderr or done.stdout)[-1000:]}")
    return Run(output, seconds)


STUDY = CollectionsStudy()
