"""Evaluate a retriever: ``python evaluate.py model=PATH evaluation=small_beir``."""

import sys
from pathlib import Path

from sparton.cli.commands import evaluate
from sparton.cli.errors import one_sentence

if __name__ == "__main__":
    with one_sentence("evaluate.py"):
        evaluate.main(sys.argv[1:], Path(__file__))
