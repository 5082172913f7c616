"""The harness that measures, and a folder for each study; ``scripts/benchmark.py`` is the program.

A study (study.py) declares its cells, how they are prepared and measured, and how that is shown.
The harness has the command line (command.py), processes (processes.py), timing
(timing.py), the gate before every time (gate.py), records and resuming (records.py), and the screen
(screen.py). Studies import the harness, not each other.
"""
