"""Preparation and loading, each measured in a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from data_benchmark.files import NUM_NEGATIVES, open_files
from data_benchmark.processes import usages
from data_benchmark.texts import DOCUMENT_LENGTH, QUERY_LENGTH, build_tokenizer
from sparton.datasets.loader import train_loader
from sparton.datasets.tokenization import PackedTokenizer
from sparton.types import TrainBatch

Result = TypeVar("Result")
Record = dict[str, Any]

SCRIPTS = Path(__file__).resolve().parents[1]
RESUMED_STEP = 50_000


def in_fresh_process(action: str, *arguments: Any) -> Record:
    """Memory and time of imports are then nobody else's. Not by multiprocessing, whose processes
    would start workers in another way than training does."""
    paths = (str(SCRIPTS), os.environ.get("PYTHONPATH", ""), str(SCRIPTS.parent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = (sys.executable, "-m", "data_benchmark.measuring", action, json.dumps(arguments))
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_preparation(folder: str, form: str) -> Record:
    """The pass over the files that makes tables of them, and what opening these costs."""
    import datasets  # noqa: F401  (its memory and time are not those of preparing)

    path = Path(folder)
    before, _ = usages()
    with watch_memory() as peak:
        seconds, data = timed(lambda: open_files(path, form))
    after, _ = usages()
    tables = path.with_suffix(".cache")
    return {
        "examples": len(data),
        "prepare_s": seconds,
        "prepare_cpu_s": after.cpu_seconds - before.cpu_seconds,
        "prepare_bytes": max(peak) - before.own_bytes,
        "table_bytes": sum(path.stat().st_size for path in tables.rglob("*.arrow")),
    }


def measure_loading(
    folder: str, form: str, tokenizer_name: str | None, workers: int, batch: int, seconds: float
) -> Record:
    """Batches taken as fast as they come, for a while after every worker has given some."""
    tokenizer = packed_tokenizer(tokenizer_name)
    open_s, data = timed(lambda: open_files(Path(folder), form))

    def batches(start: int, steps: int, num_workers: int) -> Iterator[TrainBatch]:
        return iter(
            train_loader(
                data,
                tokenizer,
                batch=batch,
                steps=steps,
                start_step=start,
                num_negatives=NUM_NEGATIVES[form],
                num_workers=num_workers,
                unique_positives=True,
            )
        )

    resume_s, _ = timed(lambda: next(batches(RESUMED_STEP, RESUMED_STEP + 1, 0)))
    started = time.perf_counter()
    loader = batches(0, 10**9, workers)
    next(loader)
    first_s = time.perf_counter() - started
    for _ in range(6 * workers):
        next(loader)
    found = take(loader, seconds)
    del loader
    return {"open_s": open_s, "resume_s": resume_s, "first_batch_s": first_s, **found}


def packed_tokenizer(name: str | None) -> PackedTokenizer:
    """Of a folder or a name on the hub; None: the one that the texts were made for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name) if name else build_tokenizer()
    return PackedTokenizer(tokenizer, QUERY_LENGTH, DOCUMENT_LENGTH)


@contextmanager
def watch_memory(every: float = 0.5) -> Iterator[list[int]]:
    """This process's own bytes again and again."""
    found, done = [usages()[0].own_bytes], Event()

    def watch() -> None:
        while not done.wait(every):
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


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
