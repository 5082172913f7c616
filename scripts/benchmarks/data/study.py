"""Preparation and loading of training data, each in a process of its own."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, NamedTuple, TypeVar

from benchmarks.data.figures import LOADING, PREPARATION
from benchmarks.data.files import open_files, tables_of, write_files
from benchmarks.records import code_digest
from benchmarks.screen import Columns, Record, in_words
from benchmarks.study import Measured, Settings, Study
from benchmarks.texts import DOCUMENT_LENGTH, QUERY_LENGTH, build_tokenizer
from sparton.datasets.loader import BatchStream, train_loader
from sparton.datasets.tokenization import PackedTokenizer
from sparton.models.checkpoint import load_tokenizer
from sparton.types import TrainBatch

Result = TypeVar("Result")
RESUMED_STEP = 50_000
TICKS = os.sysconf("SC_CLK_TCK")


class Cell(NamedTuple):
    """Loading by some worker processes."""

    examples: int
    workers: int

    @property
    def label(self) -> str:
        return f"{self.examples:,} loaded by {self.workers}"


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


class DataStudy(Study[Cell]):
    """Speed and memory of preparing training files and of loading batches from them.

        python scripts/benchmark.py data --examples 200000 26000000 --workers 1 2 --folder /scratch

    Files of generated text, 35 tokens a query and 159 a document, are written in the real shapes,
    then prepared and read through the functions that training uses, by growing numbers of worker
    processes. Nothing is done with the batches, so their rate is what training may use up at most.
    """

    name = "data"
    cell = Cell
    seconds = 6.0
    limit = 3600.0
    needs_gpu = False
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "examples": {"type": int, "nargs": "+", "default": [1_000_000]},
        "workers": {"type": int, "nargs": "+", "default": [1, 2, 4]},
        "batch": {"type": int, "default": 384},
        "tokenizer": {"help": "folder or hub name; default: a generated one"},
    }
    columns: ClassVar[Columns] = {**PREPARATION, **LOADING}

    def suites(self, settings: Settings) -> dict[str, list[Cell]]:
        options = settings.options
        examples = [500] if settings.miniature else options["examples"]
        return {self.name: [Cell(*each) for each in product(examples, options["workers"])]}

    def context(self, suite: str, settings: Settings) -> Record:
        cpu = {"cpu": cpu_model(), "cpus": os.cpu_count()}
        return cpu | {name: settings.options[name] for name in ("batch", "tokenizer")}

    def prepare(self, cells: Sequence[Cell], settings: Settings) -> Callable[[Cell], Measured]:
        return lambda cell: self.measure(cell, settings)

    def measure(self, cell: Cell, settings: Settings) -> Record:
        """More workers than there are cores, which no training has, are absent."""
        cores = len(os.sched_getaffinity(0))
        if cell.workers > cores:
            return {"status": "absent", "error": f"{cores} cores are here"}
        folder = Path(settings.folder) / f"examples-{cell.examples}"
        prepared = preparation(folder, cell)
        return {**prepared, **measure_loading(folder, cell, settings), "status": "ok"}

    def words(self, record: Record) -> str:
        return in_words(LOADING, record)


def preparation(folder: Path, cell: Cell) -> Record:
    """Figures of this code's preparation, which the cells of as many examples share. What other
    code has left is made anew."""
    left, code = folder.with_suffix(".json"), code_digest()
    found = json.loads(left.read_text(encoding="utf-8")) if left.exists() else {}
    if found.get("code") != code:
        left.parent.mkdir(parents=True, exist_ok=True)
        found = {"code": code, "figures": written_and_prepared(folder, cell)}
        left.write_text(json.dumps(found), encoding="utf-8")
    return found["figures"]


def written_and_prepared(folder: Path, cell: Cell) -> Record:
    """Both in processes of their own: neither's memory is that of what comes after."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        write = pool.submit(timed, partial(write_files, folder, cell.examples))
        seconds, size = write.result()
        prepared = pool.submit(measure_preparation, folder).result()
    return {"file_bytes": size, "write_s": seconds, **prepared}


def measure_preparation(folder: Path) -> Record:
    """The pass over the files that makes tables of them."""
    import datasets  # noqa: F401  (its memory and time are not those of preparing)

    before, _ = usages()
    with watch_memory() as peak:
        seconds, data = timed(lambda: open_files(folder))
    after, _ = usages()
    return {
        "examples": len(data),
        "prepare_s": seconds,
        "prepare_cpu_s": after.cpu_seconds - before.cpu_seconds,
        "prepare_bytes": max(peak) - before.own_bytes,
        "table_bytes": sum(path.stat().st_size for path in tables_of(folder).rglob("*.arrow")),
    }


def measure_loading(folder: Path, cell: Cell, settings: Settings) -> Record:
    """Batches taken as fast as they come, for a while after every worker has given some."""
    name = settings.options["tokenizer"]
    words = load_tokenizer(name) if name else build_tokenizer()
    tokenizer = PackedTokenizer(words, QUERY_LENGTH, DOCUMENT_LENGTH)
    open_s, data = timed(lambda: open_files(folder))

    def load(start: int, stop: int, workers: int) -> Iterator[TrainBatch]:
        stream = BatchStream(data, tokenizer, settings.options["batch"], unique_positives=True)
        return iter(train_loader(stream, start, stop, num_workers=workers))

    resume_s, _ = timed(lambda: next(load(RESUMED_STEP, RESUMED_STEP + 1, 0)))

    def begin() -> Iterator[TrainBatch]:
        batches = load(0, 10**9, cell.workers)
        next(batches)
        return batches

    first_s, loader = timed(begin)
    for _ in range(6 * cell.workers):
        next(loader)
    found = take(loader, settings.seconds)
    del loader
    return {"open_s": open_s, "resume_s": resume_s, "first_batch_s": first_s, **found}


@contextmanager
def watch_memory() -> Iterator[list[int]]:
    """This process's own bytes, twice a second."""
    found, done = [usages()[0].own_bytes], Event()

    def watch() -> None:
        while not done.wait(0.5):
            found.append(usages()[0].own_bytes)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def timed(action: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def take(loader: Iterator[TrainBatch], seconds: float) -> Record:
    """What batches cost for some seconds."""
    before = usages()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    count = tokens = pairs = 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        batch = next(loader)
        count += 1
        pairs += batch.queries.num_sequences
        tokens += batch.queries.num_tokens + batch.documents.num_tokens
    main_cpu = time.process_time() - begin_cpu
    after = usages()
    faults, grown = (
        sum(getattr(b, name) - getattr(a, name) for a, b in zip(before, after))
        for name in ("page_faults", "own_bytes")
    )
    worker_cpu = after[1].cpu_seconds - before[1].cpu_seconds
    return {
        "steps": count,
        "pairs_per_s": pairs / elapsed,
        "tokens_per_pair": tokens / pairs,
        "pairs_per_worker_cpu_s": pairs / (worker_cpu or main_cpu),
        "main_cpu_ms_per_batch": 1e3 * main_cpu / count,
        "page_faults_per_pair": faults / pairs,
        "main_bytes": after[0].own_bytes,
        "workers_bytes": after[1].own_bytes,
        "mapped_bytes": after[0].mapped_bytes + after[1].mapped_bytes,
        "grown_bytes": grown,
    }


class Usage(NamedTuple):
    """Of one process, or of several together.

    Attributes:
        cpu_seconds: spent so far, of all threads.
        page_faults: pages read from disk so far.
        own_bytes: memory that nobody else needs and that no file stands for.
        mapped_bytes: its proportional share of files mapped into memory, which the system gives up
            whenever it needs the room, and of memory shared with other processes.
    """

    cpu_seconds: float = 0.0
    page_faults: int = 0
    own_bytes: int = 0
    mapped_bytes: int = 0

    def __add__(self, other: tuple) -> "Usage":
        return Usage(*(a + b for a, b in zip(self, other)))


def usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kibibytes = {name: int(value) for name, value, *_ in map(str.split, lines)}
    own = kibibytes["Pss_Anon:"]
    cpu = (int(fields[11]) + int(fields[12])) / TICKS
    return Usage(cpu, int(fields[9]), own << 10, (kibibytes["Pss:"] - own) << 10)


def usages() -> tuple[Usage, Usage]:
    """Of this process, and of its child processes together."""
    children = [usage(child.pid) for child in active_children() if child.pid]
    return usage(os.getpid()), sum(children, Usage())


STUDY = DataStudy()
