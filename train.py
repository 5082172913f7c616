"""Train a retriever: ``python train.py head=sparton batch=512``; configs/ holds every choice."""

import sys
from pathlib import Path

from sparton.cli.commands import train
from sparton.cli.errors import one_sentence

if __name__ == "__main__":
    with one_sentence("train.py", train.INTERRUPTED):
        train.main(sys.argv[1:], Path(__file__))
