"""Write the vectors of a collection, by any model that evaluate.py reads, for search elsewhere.

    python scripts/export_vectors.py runs/.../model --beir FOLDER --side documents \\
        --output documents.jsonl
    python scripts/export_vectors.py runs/.../model --beir FOLDER --side queries \\
        --output queries.jsonl

Sparse vectors become JSON lines of id and weights by term, token vectors a safetensors file and
the ids beside it: see docs/models.md. The output appears when it is complete; an interrupted run
starts again from the beginning.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import transformers
from rich.console import Console

from command_line import one_sentence
from sparton.datasets.collection import beir_file
from sparton.datasets.files import DataFile, locate
from sparton.datasets.preparation import Reading
from sparton.datasets.texts import TextTable, text_table
from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import choose_device, load_retriever
from sparton.models.csr import AutoencoderEncoder
from sparton.models.encoder import Encoder
from sparton.retrieval.encoding import KINDS, encode_texts
from sparton.retrieval.output import replacing
from sparton.types import Kind
from vector_export.arguments import ENDINGS, SIDES, check, ids_file, parser
from vector_export.files import Part, Written, write_ids, write_sparse, write_tokens

PART = 16_384  # texts whose vectors are in memory at once
BEIR_FILES = {"documents": "corpus.jsonl", "queries": "queries.jsonl"}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    transformers.utils.logging.disable_progress_bar()
    with one_sentence("export_vectors.py", "nothing was written, the same command starts again"):
        export(arguments)


def export(arguments: argparse.Namespace) -> None:
    """All of it; ValueError or OSError says what is wrong and what to do."""
    kind, device = check(arguments), choose_device(arguments.device)
    files = find_texts(arguments)
    lengths = {f"{SIDES[arguments.side]}_length": arguments.length}
    encoder, tokenizer = load_retriever(arguments.model, **lengths, device=device)
    check_kind(arguments.model, encoder, kind)
    names = term_names(encoder) if kind == "sparse" else []
    texts = text_table(arguments.side, files, Reading(on_error=arguments.on_error))
    parts = encode_parts(arguments, encoder, tokenizer, texts, kind)
    output: Path = arguments.output
    if kind == "sparse":
        with replacing(output) as fresh:
            written = write_sparse(
                fresh,
                parts,
                names,
                compress=output.suffix == ".gz",
                quantize=arguments.quantize,
                contents=bool(arguments.contents),
            )
    else:
        with replacing(output) as fresh, replacing(ids_file(output)) as ids:
            write_ids(ids, all_ids(texts))
            written = write_tokens(fresh, parts, len(texts))
    show(arguments, kind, written)


def find_texts(arguments: argparse.Namespace) -> list[DataFile]:
    if arguments.beir:
        return [beir_file(arguments.beir, BEIR_FILES[arguments.side])]
    return locate(arguments.files)


def check_kind(model: str, encoder: Encoder, kind: Kind) -> None:
    """Refuse a kind of vectors that the encoder does not give.

    Raises:
        ValueError: names the model and an ending that fits it.
    """
    if kind not in encoder.kinds:
        (given,) = encoder.kinds
        raise ValueError(
            f"{model} gives {KINDS[given]} and no {KINDS[kind]}: name an --output that ends in "
            f"{' or '.join(ENDINGS[given])}"
        )


def term_names(encoder: Encoder) -> list[str]:
    """What the columns of sparse vectors are called: tokens, or the numbers of latents. Rows
    beyond the tokenizer, which pad a vocabulary, are called after their number.

    Raises:
        ValueError: two columns share a name.
    """
    columns = range(encoder.vocabulary_size)
    if isinstance(encoder, AutoencoderEncoder):
        return [str(column) for column in columns]
    tokens = encoder.term_names(columns)
    names = [f"[row {column}]" if name is None else name for column, name in enumerate(tokens)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the model's tokenizer has two tokens {twice!r}: rename one of them")
    return names


def encode_parts(
    arguments: argparse.Namespace,
    encoder: Encoder,
    tokenizer: PackedTokenizer,
    texts: TextTable,
    kind: Kind,
) -> Iterator[Part]:
    """The texts and their vectors, in the order of the files."""
    starts = range(0, len(texts), PART)
    for number, start in enumerate(starts, start=1):
        cells = texts.table.rows[start : start + PART]
        ids, contents = cells["id"].to_pylist(), cells["text"].to_pylist()
        encoded = encode_texts(
            encoder,
            tokenizer,
            contents,
            SIDES[arguments.side],
            precision=arguments.precision,
            kinds=(kind,),
            max_terms=arguments.max_terms,
            vector_dtype=arguments.dtype or "float16",
            progress=f"{arguments.side}, part {number} of {len(starts)}",
        )
        yield Part(ids, contents, encoded)


def all_ids(texts: TextTable) -> Iterator[str]:
    for chunk in texts.table.rows.data.column("id").chunks:
        yield from chunk.to_pylist()


def show(arguments: argparse.Namespace, kind: Kind, written: Written) -> None:
    """The closing line."""
    each = f"{written.entries / written.texts:.1f} {'weights' if kind == 'sparse' else 'vectors'}"
    none = f", {written.empty:,} of them without any" if written.empty else ""
    Console().print(
        f"{written.texts:,} {arguments.side} of {each}{none}, written to {arguments.output}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    main()
