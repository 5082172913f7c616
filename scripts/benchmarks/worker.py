"""A process of some cells: ``python -m benchmarks.worker``, started by processes.py.

Reads the study, its cells and the settings from the command line, imports and prepares what it
needs, writes a line when it could begin, waits for a line on standard input, and writes one line of
JSON to standard output for each cell: its records.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.gate import outcome
from benchmarks.study import Settings, load_study


def main(words: Sequence[str]) -> None:
    # Libraries may print; standard output is for the records alone.
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    study = load_study(words[0])
    listed, values = (json.loads(text) for text in words[1:])
    settings, cells = Settings(**values), [study.cell(*fields) for fields in listed]
    measure = study.prepare(cells, settings)
    answer.write("ready\n")
    if not sys.stdin.readline():
        sys.exit("nobody waits for these cells any more")
    torch.backends.cuda.matmul.allow_tf32 = False
    for cell in cells:
        begin = time.perf_counter()
        records = outcome(lambda: measure(cell))  # noqa: B023 (called at once)
        seconds = round(time.perf_counter() - begin, 2)
        answer.write(json.dumps([{**record, "cell_seconds": seconds} for record in records]) + "\n")
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    # Tearing down CUDA in order takes longer than many a measurement.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
