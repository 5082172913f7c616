"""Encode a collection once: ``python encode.py model=PATH data=FOLDER output=DOCS gpus=2``."""

import sys
from pathlib import Path

from sparton.cli.commands import encode
from sparton.cli.errors import one_sentence

if __name__ == "__main__":
    with one_sentence("encode.py", encode.INTERRUPTED):
        encode.main(sys.argv[1:], Path(__file__))
