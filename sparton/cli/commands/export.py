"""Write the vectors of a collection, by any trained model, for search elsewhere.

    sparton export MODEL --beir FOLDER --side document --output documents.jsonl
    sparton export MODEL --beir FOLDER --side query --output queries.jsonl

Sparse vectors become JSON lines of id and weights by term, token vectors a safetensors file and
the ids beside it: see docs/guides/vectors.md. The output appears when it is complete; an
interrupted run starts again from the beginning.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sparton.cli.commands.flags import (
    add_precision,
    add_reading,
    command_parser,
    flags_named,
    given,
    reading_of,
)
from sparton.types import PLURAL, SIDES, Side

INTERRUPTED = "nothing was written, the same command starts again"
OF_KIND = {"sparse": ["max_terms", "quantize", "contents"], "tokens": ["dtype"]}
UNITS = {"sparse": "weights", "tokens": "vectors"}


def main(arguments: Sequence[str]) -> None:
    """``sparton export``."""
    parsed = _parser().parse_args(arguments)

    from sparton.arguments import refuse_ignored
    from sparton.cli.collections import beir_texts
    from sparton.datasets.files import locate
    from sparton.datasets.preparation import Reading
    from sparton.datasets.texts import text_table
    from sparton.pipelines.vector_files import format_of
    from sparton.retrieval.encoding import KINDS

    side: Side = parsed.side
    with flags_named(path="--output"):
        target = format_of(parsed.output, parsed.kind)
        others = (name for kind, names in OF_KIND.items() if kind != target.kind for name in names)
        refuse_ignored(f"a file of {KINDS[target.kind]}", **given(parsed, [*others]))
        settings = given(parsed, OF_KIND[target.kind])
        file = target(parsed.output, overwrite=parsed.overwrite, **settings)
        files = [beir_texts(parsed.beir, side)] if parsed.beir else locate(parsed.files)

        reading = Reading(**reading_of(parsed))

        # Only now, as it takes seconds: what is wrong so far has been said.
        import transformers

        from sparton.pipelines import export_vectors

        transformers.utils.logging.disable_progress_bar()
        written = export_vectors(
            parsed.model,
            partial(text_table, PLURAL[side], files, reading),
            file,
            side,
            length=parsed.length,
            precision=parsed.precision,
            device=parsed.device,
        )
    each = f"{written.entries / written.texts:.1f} {UNITS[file.kind]}"
    none = f", {written.empty:,} of them without any" if written.empty else ""
    print(f"{written.texts:,} {PLURAL[side]} of {each}{none}, written to {parsed.output}")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("export", __doc__)
    parser.add_argument("model", help="folder or hub name, as evaluate takes it")
    group = parser.add_argument_group("texts")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--beir", type=Path, help="folder: its corpus or its queries, all of them")
    source.add_argument(
        "--files",
        nargs="+",
        help="names or patterns: JSON lines, JSON, TSV, CSV or Parquet of id and text",
    )
    add_reading(group)
    group.add_argument("--side", choices=SIDES, required=True, help="encode each text as")
    group.add_argument("--length", type=int, help="tokens of a text; default: as trained")
    group = parser.add_argument_group("encoding")
    add_precision(group)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output", type=Path, required=True,
        help=".jsonl or .jsonl.gz for sparse vectors, .safetensors for token vectors",
    )  # fmt: skip
    group.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    group.add_argument(
        "--kind", choices=list(OF_KIND), help="default: what the ending of --output is for"
    )
    group.add_argument("--max-terms", type=int, help="keep a text's largest weights")
    group.add_argument(
        "--quantize", type=int, metavar="N", help="write round(N * weight), without zeros"
    )
    group.add_argument("--contents", action="store_true", default=None, help="write the texts, too")
    group.add_argument(
        "--dtype", choices=("float16", "float32"), help="of token vectors; default: float16"
    )
    return parser
