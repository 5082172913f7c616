"""The process of one cell: ``python -m head_benchmark.worker``, started by runner.py.

Reads the cell and the settings from the command line, imports what it needs, waits for a line on
standard input, measures, and writes one line of JSON to standard output.
"""

import json
import os
import sys
from collections.abc import Sequence

from head_benchmark.cells import Settings, prepare, run
from head_benchmark.suites import Cell


def main(arguments: Sequence[str]) -> None:
    # Libraries may print; standard output is for the record alone.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cell, settings = (json.loads(text) for text in arguments)
    work = prepare(Cell(**cell), Settings(**settings))
    if not sys.stdin.readline():
        sys.exit("nobody waits for this cell any more")
    answer.write(json.dumps(run(work)) + "\n")
    answer.flush()
    # Tearing down CUDA in order takes longer than many a measurement.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
