"""The command ``sparton``: what it can do, and where that is done.

A command is a module of ``sparton.cli.commands``, with _ for -, that has ``main(arguments)``, and a
line in the table below. It raises what a user can mend as one of
``sparton.cli.errors.EXPECTED_ERRORS``; a constant ``INTERRUPTED`` may say what becomes of its work
where it is interrupted.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from sparton import __version__

COMMANDS = {
    "train": "train a retriever, or a sweep of them: sparton train head=sparton batch=512",
    "evaluate": "measure a model or BM25: sparton evaluate model=PATH evaluation=small_beir",
    "encode": "encode a collection once: sparton encode model=PATH data=FOLDER output=DOCS",
    "search": "search an encoded collection: sparton search DOCS --query TEXT",
    "delete": "delete documents of an encoded collection: sparton delete DOCS --ids ID ID",
    "compare": "say whether one run is better than another: sparton compare RUN RUN",
    "average": "average the weights of models: sparton average MODEL MODEL --output PATH",
    "pairs": "make queries for texts that have none: sparton pairs FOLDER --output FILE",
    "mine": "find hard negatives, and score them by a teacher",
    "adapt": "train a masked-language-modelling head on texts",
    "idf": "weigh the terms of queries by their rarity in texts",
    "embed": "keep dense embeddings of texts, to train sparse autoencoders on",
    "export": "encode texts into plain files of vectors, for programs of your own",
    "tune": "search the fastest configurations of the kernels for this GPU",
    "card": "write an evaluation's results into a model's card: sparton card PATH",
    "push-vectors": "put encoded documents into a search engine, or write its files",
    "push": "upload a model to the Hugging Face hub: sparton push PATH USER/NAME",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the words behind ``sparton`` ask for; None for those of this process."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command, *rest = words
    if said := _said(command):
        _say(said)
    elif command in COMMANDS:
        from sparton.cli.errors import one_sentence

        module = import_module(f"sparton.cli.commands.{command.replace('-', '_')}")
        with one_sentence(f"sparton {command}", getattr(module, "INTERRUPTED", "")):
            module.main(rest)
    else:
        near = get_close_matches(command, COMMANDS, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        sys.exit(f"sparton: there is no command {command}{guess} (of {', '.join(COMMANDS)})")


def _say(words: str) -> None:
    """On standard output, if somebody reads it."""
    try:
        sys.stdout.write(words)
        sys.stdout.flush()
    except OSError:
        # What else says errors takes half a second to import.
        from sparton.cli.errors import one_sentence

        with one_sentence("sparton"):
            raise


def _said(command: str) -> str:
    """What needs no command."""
    if command in ("-h", "--help"):
        return _help()
    return f"sparton {__version__}\n" if command == "--version" else ""


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}\n" for name, does in COMMANDS.items()]
    return (
        "usage: sparton COMMAND ...\n\nTrain, evaluate and publish retrievers: learned sparse "
        "(SPLADE), late interaction (ColBERT).\n\n"
        f"{''.join(lines)}\nsparton COMMAND --help tells more; sparton --version, the version.\n"
    )
