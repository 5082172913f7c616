"""Mine hard negatives for training examples: rank a collection for each query, keep what is wrong.

    python scripts/mine_hard_negatives.py train.jsonl.gz --output data/distillation/mined.jsonl \\
        --miner runs/.../model --skip 5 --depth 100 --sample --share 0.95 --teacher CROSS_ENCODER
    python train.py data=distillation loss=margin_mse num_negatives=7

Examples come in every shape that training reads (data/README.md), as ids with --queries and
--collection, or from a BEIR folder with --beir. Negatives that they have are replaced. Without
--collection, texts are mined among all positives of the files.

Never a negative: a positive of the query anywhere in the files, the query itself, and texts that
differ from these in white space or case only. An interrupted run goes on when started again with
the same arguments; the output appears when it is complete.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from command_line import one_sentence
from hard_negatives import parts
from hard_negatives.arguments import check, fill_in, parser
from hard_negatives.examples import (
    Documents,
    PositiveDocuments,
    Positives,
    TableDocuments,
    distinct,
    hash_documents,
)
from hard_negatives.miners import SLAB, Encoding, Miner, bm25_miner, model_miner
from hard_negatives.mining import Mining, Output
from hard_negatives.selection import Rule
from hard_negatives.teachers import Teacher, cross_encoder, retriever
from sparton.datasets.files import locate
from sparton.datasets.preparation import Columns, Reading
from sparton.datasets.sources import Records, beir_pairs, id_records, text_records
from sparton.datasets.texts import text_table
from sparton.evaluation import choose_device

# Where and in what batches is computed; may differ when a run goes on.
PRACTICAL = ("output", "device", "teacher_batch")


class Source(NamedTuple):
    """The examples, the collection to mine in, and what identifies their content."""

    records: Records
    collection: TableDocuments | None
    content: list[str]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    with one_sentence("error", "the same command goes on"):
        mine(arguments)


def mine(arguments: argparse.Namespace) -> None:
    """All of it; ValueError or OSError says what is wrong and what to do."""
    rule, device = check(arguments), choose_device(arguments.device)
    fill_in(arguments)
    source = read(arguments)
    with parts.lock(arguments.output):
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in PRACTICAL
        }
        settings["content of the files"] = source.content
        settings["rows of a part and a slab"] = [parts.PART, SLAB]
        for name in (arguments.miner, arguments.teacher):
            if name and Path(name).is_dir():
                settings[f"files of {name}"] = list(_states(Path(name)))
        parts.agree(arguments.output, settings)
        encoding = Encoding(
            arguments.query_length,
            arguments.document_length,
            arguments.max_document_terms,
            arguments.precision,
            device,
        )
        teacher = load_teacher(arguments, encoding)
        mining = prepare(arguments, source, rule, teacher, encoding)
        counts = parts.mine_parts(arguments.output, len(source.records), mining.part)
        parts.assemble(arguments.output, len(source.records), settings, counts)
    show(arguments, counts)


def read(arguments: argparse.Namespace) -> Source:
    """The tables of examples and collection, prepared once; every fault is named by file and line.

    Raises:
        FileNotFoundError, ValueError: from the readers of training.
    """
    common: dict[str, Any] = {"on_error": arguments.on_error}
    collection = locate(arguments.collection) if arguments.collection else None
    if arguments.beir:
        records = beir_pairs(arguments.beir, arguments.split, **common)
    else:
        common |= {"columns": columns(arguments.columns), "limit": arguments.limit}
        if arguments.queries:
            records = id_records(arguments.files, arguments.queries, arguments.collection, **common)
        else:
            records = text_records(arguments.files, **common)
    content = [records.table.folder.name]
    if records.texts is not None:
        return Source(records, TableDocuments(records.texts[1]), content)
    if collection is None:
        return Source(records, None, content)
    table = text_table("collection", collection, Reading())
    content.append(table.table.folder.name)
    return Source(records, TableDocuments(table), content)


def columns(names: list[str] | None) -> Columns | None:
    """A mapping if the names are written NAME=KNOWN, else a list."""
    if names and all("=" in name for name in names):
        return dict(name.split("=", 1) for name in names)
    return names


def load_teacher(arguments: argparse.Namespace, encoding: Encoding) -> Teacher | None:
    if arguments.teacher is None:
        return None
    if arguments.teacher_kind == "retriever":
        return retriever(
            arguments.teacher, encoding._replace(query_length=None, document_length=None)
        )
    return cross_encoder(
        arguments.teacher,
        device=str(encoding.device),
        batch=arguments.teacher_batch,
        max_length=arguments.teacher_length,
        logits=not arguments.teacher_activation,
    )


def prepare(
    arguments: argparse.Namespace,
    source: Source,
    rule: Rule,
    teacher: Teacher | None,
    encoding: Encoding,
) -> Mining:
    """The collection encoded or counted. Positives outside of it join it, to be scored and never
    to be mined, if a margin to the miner's score needs them."""
    positives = Positives(source.records)
    outside: Documents | None = None
    if source.collection is None:
        own = positives.places[distinct(positives)]
        collection: Documents = PositiveDocuments(source.records, own)
        hashes = hash_documents(collection)
    else:
        collection = source.collection
        hashes = hash_documents(collection)
        if rule.has_margin and teacher is None:
            missing = positives.places[distinct(positives, hashes)]
            outside = PositiveDocuments(source.records, missing)
            hashes = np.concatenate([hashes, hash_documents(outside)])
    documents = [collection] if outside is None else [collection, outside]
    miner = load_miner(arguments, documents, encoding)
    output = Output(arguments.short, arguments.ids, arguments.exclude_self)
    return Mining(source.records, positives, documents, hashes, miner, teacher, rule, output)


def load_miner(
    arguments: argparse.Namespace, documents: list[Documents], encoding: Encoding
) -> Miner:
    if arguments.miner == "bm25":
        return bm25_miner(documents, k1=arguments.k1, b=arguments.b, device=encoding.device)
    folder = parts.working_folder(arguments.output)
    return model_miner(arguments.miner, documents, encoding, folder)


def show(arguments: argparse.Namespace, counts: Mapping[str, int]) -> None:
    """The closing summary."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    short = {"keep": "kept as they are", "pad": "padded or dropped", "drop": "dropped"}
    rows = [
        ("examples read", "examples"),
        ("examples written", "written"),
        ("negatives found", "negatives"),
        (f"examples with fewer than {arguments.negatives}, {short[arguments.short]}", "short"),
        ("  of which without any", "none"),
        ("  of which dropped", "dropped"),
        ("candidates in the windows", "candidates"),
        ("candidates refused by the margin", "refused"),
        ("pairs scored by the teacher", "teacher_pairs"),
    ]
    for label, name in rows:
        table.add_row(label, f"{counts.get(name, 0):,}")
    console = Console()
    console.print(str(arguments.output), soft_wrap=True, highlight=False)
    console.print(table)
    if arguments.short == "keep" and counts.get("none"):
        console.print(
            "Examples without negatives train with num_negatives=0 only; to leave them out: "
            "data.require_negatives=true data.on_error=skip",
            soft_wrap=True,
        )


def _states(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            state = file.stat()
            yield f"{file.relative_to(folder)} {state.st_size} {state.st_mtime_ns}"


if __name__ == "__main__":
    main()
