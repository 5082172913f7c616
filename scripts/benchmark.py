"""Measure heads, MaxSim, attention, loading of data, encoding and whole trainings, after their
results were checked.

    python scripts/benchmark.py head --suite bars heads      # results/<gpu>/head.jsonl
    python scripts/benchmark.py maxsim --list                # what would be measured
    python scripts/benchmark.py training --help              # what there is to choose

Every cell is measured in a process of its own, or of its problem. Results that differ too much from
full precision get the status red_gate and no time; running out of memory, failing, crashing and
hanging are results too: oom, failed, crashed, timeout; absent is what this machine lacks. A killed
run, started again with the same command on the same machine and the same committed code, goes on at
the missing cells and tries again those that failed, crashed, hung or were absent. Figures of
different files should not be divided by each other: they may come from different cards.
"""

import sys

from benchmarks.command import main

if __name__ == "__main__":
    main(sys.argv[1:], __doc__)
