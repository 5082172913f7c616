"""Search a collection that sparton encode has written, with the model that encoded it.

    sparton search DOCS --query 'where is the cat?'
    sparton search DOCS --queries queries.jsonl --output run.trec
    sparton search DOCS                         # asks for one after the other
    sparton search DOCS --nbits 2 --query TEXT  # token vectors compressed

A query finds scores and ids, the best first; an empty line ends what one that was asked for has
found. Queries of a file, or of a folder in the layout of BEIR, become a run in the format of TREC.
Settings may also be written as train and evaluate have them: index=DOCS query='...'.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparton.cli.commands.flags import (
    add_reading,
    check_query,
    command_parser,
    flag,
    flags_named,
    reading_of,
)

if TYPE_CHECKING:
    from sparton.datasets.files import DataFile
    from sparton.datasets.preparation import Reading
    from sparton.retriever import TextIndex

_PROMPT = "query> "
_SETTINGS = (
    "query", "queries", "columns", "on_error", "output", "k", "nbits", "model", "device",
    "precision",
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """``sparton search``."""
    parsed = _parser().parse_args(_as_flags(arguments))

    from sparton.arguments import ArgumentError, refuse_ignored
    from sparton.cli.collections import text_files

    with flags_named():
        check_query(parsed.query, parsed.k)
        if parsed.queries is None:
            ignored = {name: getattr(parsed, name) for name in ("output", "columns", "on_error")}
            refuse_ignored("a search without queries of files", **ignored)
        elif parsed.output is None:
            raise ArgumentError(
                "{queries} make a run: say where it goes by {output:name}",
                queries=" ".join(parsed.queries),
                output=None,
            )
        elif parsed.output.exists():
            raise ArgumentError("{output} exists: name another", output=parsed.output)
        files = None if parsed.queries is None else text_files(parsed.queries, "query")

    # Only now, as it takes seconds: what is wrong so far has been said.
    import transformers

    from sparton.datasets.preparation import Reading
    from sparton.encoded import open_encoded
    from sparton.evaluation import check_model
    from sparton.retrieval.encoding import check_precision
    from sparton.retrieval.indexes.compression import CompressedIndexBuilder
    from sparton.retrieval.indexes.exact import exact_index
    from sparton.retriever import load

    transformers.utils.logging.disable_progress_bar()
    check_precision(parsed.precision)
    with flags_named():
        build = exact_index if parsed.nbits is None else CompressedIndexBuilder(parsed.nbits)
    documents = open_encoded(parsed.index)
    kinds = documents.facts.settings.kinds
    if parsed.nbits is not None and ("tokens" not in kinds or "dense" in kinds):
        has = "dense vectors, too" if "dense" in kinds else "none"
        raise ValueError(
            f"--nbits {parsed.nbits} compresses token vectors, and {parsed.index} has {has}: leave "
            "it out"
        )
    model = documents.facts.name if parsed.model is None else parsed.model
    try:
        check_model(model)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--model {error}") from error
    retriever = load(model, device=parsed.device, precision=parsed.precision)
    index = retriever.index(documents, build=build)
    if files is not None:
        with flags_named():
            reading = Reading(**reading_of(parsed))
            _write_run(index, files, reading, parsed.output, parsed.k or 1000)
    elif parsed.query is not None:
        _show(index, parsed.query, parsed.k or 10)
    else:
        for query in _asked():
            _show(index, query, parsed.k or 10)
            print(flush=True)


def _show(index: "TextIndex", query: str, k: int) -> None:
    for hit in index.search([query], k)[0]:
        print(f"{hit.score:.4f}\t{hit.id}", flush=True)


def _write_run(
    index: "TextIndex", files: "list[DataFile]", reading: "Reading", output: Path, k: int
) -> None:
    """Search with all queries of some files."""
    from sparton.datasets.texts import text_table
    from sparton.retrieval.run import Run
    from sparton.retrieval.trec import check_identifiers, write_run
    from sparton.writing import replacing

    table = text_table("queries", files, reading)
    ids, texts = table.take(range(len(table)))
    for name, text in zip(ids, texts, strict=True):
        if not text.strip():
            raise ValueError(f"the query {name} has no text: leave it out of the file")
    check_identifiers([*ids, *map(str, index.ids)])  # before the work
    hits = index.search(texts, k, progress=True)
    scores = {name: {str(hit.id): hit.score for hit in own} for name, own in zip(ids, hits)}
    with replacing(output) as fresh:
        write_run(Run.from_scores(scores), fresh)
    number = len(index.ids)
    columns = " | ".join(table.table.facts["columns"])
    print(
        f"the best {min(k, number):,} of {number:,} documents for {len(ids):,} queries"
        f"{columns and f' ({columns})'}, written to {output}"
    )


def _asked() -> Iterator[str]:
    """Lines that a user types, or that another program writes, until there are no more."""
    shown = sys.stdin.isatty()
    while True:
        if shown:
            print(_PROMPT, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _as_flags(words: Sequence[str]) -> list[str]:
    """Settings as flags; what follows a flag, or ``--``, is a value and stays."""
    found: list[str] = []
    for number, word in enumerate(words):
        if word == "--":
            return [*found, *words[number:]]
        before = words[number - 1] if number else ""
        found.append(word if before.startswith("-") and "=" not in before else _as_flag(word))
    return found


def _as_flag(word: str) -> str:
    """``query=TEXT`` as ``--query=TEXT``, and ``index=DOCS`` as ``DOCS``."""
    name, _, value = word.partition("=")
    if name == "index":
        return value
    return f"{flag(name)}={value}" if name in _SETTINGS and name != word else word


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("search", __doc__)
    parser.add_argument("index", metavar="DOCS", help="folder of sparton encode")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--query", metavar="TEXT", help="its text; without queries they are asked for"
    )
    asked.add_argument(
        "--queries", nargs="+", metavar="FILE",
        help="JSON lines, TSV, CSV, Parquet or Arrow of id and text, or a folder of BEIR's layout",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="RUN", help="of --queries, as TREC has it")
    add_reading(parser)
    parser.add_argument("--k", type=int, help="most results of a query; default: 10, of a run 1000")
    parser.add_argument(
        "--nbits", type=int, help="compress token vectors to 1, 2, 4 or 8 bits for every dimension"
    )
    parser.add_argument("--model", help="folder or hub name; default: where it was when it encoded")
    parser.add_argument("--precision", help="fp32, bf16, fp16 or fp8; default: by device")
    parser.add_argument("--device", help="default: a GPU if there is one")
    return parser
