"""Search an encoded collection: ``python search.py index=DOCS query='where is the cat?'``."""

import sys

from sparton.cli.commands import search
from sparton.cli.errors import one_sentence

if __name__ == "__main__":
    with one_sentence("search.py"):
        search.main(sys.argv[1:])
