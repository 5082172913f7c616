"""The command line of the export."""

import argparse
from pathlib import Path

from command_line import refuse
from sparton.evaluation import check_model, check_term_bounds
from sparton.retrieval.encoding import AUTOCAST, KINDS
from sparton.retrieval.tokens import VECTOR_DTYPES
from sparton.types import Kind, Side

SIDES: dict[str, Side] = {"documents": "document", "queries": "query"}
ENDINGS: dict[Kind, tuple[str, ...]] = {
    "sparse": (".jsonl", ".jsonl.gz"),
    "tokens": (".safetensors",),
}
OF_SPARSE = ("max_terms", "quantize", "contents")
OF_TOKENS = ("dtype",)


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or hub name, as evaluate.py takes it")
    group = parser.add_argument_group("texts")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--beir", type=Path, help="folder: its corpus or its queries, all of them")
    source.add_argument(
        "--files", nargs="+", help="names or patterns: JSON lines, TSV or Parquet of id and text"
    )
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop")
    group.add_argument("--side", choices=list(SIDES), required=True, help="encode the texts as")
    group.add_argument("--length", type=int, help="tokens of a text; default: as trained")
    group = parser.add_argument_group("encoding")
    group.add_argument("--precision", choices=list(AUTOCAST), default="fp32")
    group.add_argument("--device", help="default: a GPU if there is one")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output", type=Path, required=True,
        help=".jsonl or .jsonl.gz for sparse vectors, .safetensors for token vectors",
    )  # fmt: skip
    group.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    group.add_argument(
        "--kind", choices=list(KINDS), help="default: what the ending of --output is for"
    )
    group.add_argument("--max-terms", type=int, help="keep a text's largest weights")
    group.add_argument(
        "--quantize", type=int, metavar="N", help="write round(N * weight), without zeros"
    )
    group.add_argument("--contents", action="store_true", default=None, help="write the texts, too")
    group.add_argument("--dtype", choices=VECTOR_DTYPES, help="of token vectors; default: float16")
    return parser


def check(arguments: argparse.Namespace) -> Kind:
    """Refuse what could not work, before anything is read; the kind of vectors to write.

    Raises:
        ValueError, FileNotFoundError: names the argument.
    """
    if arguments.model == "bm25":
        raise ValueError("bm25 has no vectors to export: name a trained model")
    check_model(arguments.model)
    check_term_bounds(**{"--max-terms": arguments.max_terms})
    for name in ("length", "quantize"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    kind = _kind(arguments)
    ignored = OF_TOKENS if kind == "sparse" else OF_SPARSE
    refuse(arguments, ignored, f"a file of {KINDS[kind]}")
    written = [arguments.output]
    if kind == "tokens":
        written.append(ids_file(arguments.output))
    for file in written:
        if file.is_dir():
            raise ValueError(f"{file} is a folder: name another --output")
        if file.exists() and not arguments.overwrite:
            raise ValueError(f"{file} exists: name another --output, or replace it by --overwrite")
    return kind


def ids_file(output: Path) -> Path:
    """The ids of the texts whose token vectors are in ``output``, beside it."""
    return output.with_name(f"{output.name.removesuffix('.safetensors')}.ids")


def _kind(arguments: argparse.Namespace) -> Kind:
    name = arguments.output.name
    for kind, endings in ENDINGS.items():
        if name.endswith(endings):
            if arguments.kind in (None, kind):
                return kind
            raise ValueError(
                f"--output {arguments.output} is for {KINDS[kind]}: with --kind {arguments.kind} "
                f"it must end in {' or '.join(ENDINGS[arguments.kind])}"
            )
    ways = (f"{' or '.join(endings)} for {KINDS[kind]}" for kind, endings in ENDINGS.items())
    raise ValueError(f"--output {arguments.output} must end in {', '.join(ways)}")
