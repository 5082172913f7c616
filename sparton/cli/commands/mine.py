"""Mine hard negatives for training examples: rank a collection for each query, keep what is wrong.

    sparton mine train.jsonl.gz --output data/distillation/mined.jsonl \\
        --miner runs/.../model --skip 5 --depth 100 --sample --share 0.95 \\
        --teacher CROSS_ENCODER
    sparton train data=distillation loss=margin_mse num_negatives=7

Examples come in every shape that training reads (docs/guides/data.md), as ids with --queries and
--collection, or from a BEIR folder with --beir. Negatives that they have are replaced. Without
--collection, texts are mined among all positives of the files.

Never a negative: a positive of the query anywhere in the files, the query itself, and texts that
differ from these in white space or case only. An interrupted run goes on when started again with
the same arguments; the output appears when it is complete.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparton.arguments import refuse_below, refuse_ignored
from sparton.cli.commands.flags import (
    add_precision,
    add_reading,
    command_parser,
    flag,
    flags_named,
    given,
    reading_of,
)
from sparton.cli.commands.train import set_environment

if TYPE_CHECKING:
    from sparton.datasets.lookup import Records
    from sparton.datasets.texts import TextTable
    from sparton.pipelines.mining import Rule
    from sparton.pipelines.mining.miners import Miner
    from sparton.pipelines.mining.teachers import Teacher

INTERRUPTED = "the same command goes on"
BM25, RETRIEVER, CROSS_ENCODER = "bm25", "retriever", "cross-encoder"
OF_BM25 = ["k1", "b"]
OF_MODELS = ["query_length", "document_length", "max_document_terms"]
OF_CROSS_ENCODERS = ["teacher_activation", "teacher_batch", "teacher_length"]


def main(arguments: Sequence[str]) -> None:
    """``sparton mine``."""
    set_environment()
    parsed = _parser().parse_args(arguments)

    from sparton.pipelines.mining import mine_hard_negatives
    from sparton.pipelines.mining.parts import check_output

    with flags_named():
        check_output(parsed.output)
        _check_input(parsed)
        teachers = _teachers(parsed)
        rule, miners = _rule(parsed), _miners(parsed)
        examples, collection = _read(parsed)
        counts = mine_hard_negatives(
            examples,
            parsed.output,
            collection=collection,
            miners=miners,
            rule=rule,
            teachers=teachers,
            short=parsed.short,
            ids=parsed.ids,
            exclude_self=parsed.exclude_self,
            device=parsed.device,
        )
    _show(parsed, counts)


def _check_input(parsed: argparse.Namespace) -> None:
    """Refuse examples and collections that do not go together, before anything is read."""
    if parsed.beir and (parsed.files or parsed.queries or parsed.collection):
        raise ValueError("--beir FOLDER stands alone: it names examples, queries and collection")
    if parsed.beir and (parsed.columns or parsed.limit is not None):
        raise ValueError("--columns and --limit do not apply to --beir")
    refuse_below(1, limit=parsed.limit)
    if not parsed.beir:
        refuse_ignored("mining without --beir", split=parsed.split)
    if not parsed.beir and not parsed.files:
        raise ValueError("name files of training examples, or --beir FOLDER")
    if parsed.queries and not parsed.collection:
        raise ValueError("--queries means examples of ids, which need --collection too")
    for option in ("ids", "exclude_self"):
        if getattr(parsed, option) and not (parsed.beir or parsed.queries):
            raise ValueError(f"{flag(option)} needs examples with ids: --beir, or --queries")


def _rule(parsed: argparse.Namespace) -> "Rule":
    from sparton.pipelines.mining import Rule

    rule = Rule(**given(parsed, [*Rule.__annotations__]))
    if not rule.sample:
        refuse_ignored("mining without --sample", seed=parsed.seed)
    return rule


def _miners(parsed: argparse.Namespace) -> "list[Miner]":
    from sparton.pipelines.mining import BM25Miner, TrainedModel

    names = parsed.miner or [BM25]
    if BM25 not in (*names, *parsed.teacher):
        refuse_ignored(f"--miner {names[0]}", **given(parsed, OF_BM25))
    if set(names) == {BM25}:
        ignored = OF_MODELS if RETRIEVER in _kinds(parsed) else [*OF_MODELS, "precision"]
        refuse_ignored("--miner bm25", **given(parsed, ignored))
    of_bm25, of_models = given(parsed, OF_BM25), given(parsed, [*OF_MODELS, "precision"])
    return [
        BM25Miner(**of_bm25) if name == BM25 else TrainedModel(name, **of_models) for name in names
    ]


def _kinds(parsed: argparse.Namespace) -> list[str]:
    """The kinds of the teachers: bm25 where one is called so, else as --teacher-kind says."""
    models = [name for name in parsed.teacher if name != BM25]
    told = parsed.teacher_kind
    if len(told) > 1 and len(told) != len(models):
        raise ValueError(
            f"{len(told)} times --teacher-kind for {len(models)} models as --teacher: give one for "
            "all, or one for each, in their order; bm25 takes none"
        )
    kinds = iter(told if len(told) > 1 else (told or [CROSS_ENCODER]) * len(models))
    return [BM25 if name == BM25 else next(kinds) for name in parsed.teacher]


def _teachers(parsed: argparse.Namespace) -> "list[Teacher]":
    from sparton.pipelines.mining import BM25Miner, CrossEncoder, TrainedModel

    settings, kinds = given(parsed, OF_CROSS_ENCODERS), _kinds(parsed)
    asked = " and ".join(dict.fromkeys(kinds))
    if asked in ("", BM25):
        ignoring = "--teacher bm25" if asked else "mining without --teacher"
        refuse_ignored(ignoring, teacher_kind=parsed.teacher_kind or None, **settings)
    if CROSS_ENCODER not in kinds:
        refuse_ignored(f"--teacher-kind {RETRIEVER}", **settings)
    own = {name.removeprefix("teacher_"): value for name, value in settings.items()}
    build: dict[str, Callable[[str], Teacher]] = {
        BM25: lambda _: BM25Miner(**given(parsed, OF_BM25)),
        RETRIEVER: lambda name: TrainedModel(name, **given(parsed, ["precision"])),
        CROSS_ENCODER: lambda name: CrossEncoder(name, **own),
    }
    with flags_named(batch="--teacher-batch", length="--teacher-length"):
        return [build[kind](name) for kind, name in zip(kinds, parsed.teacher)]


def _read(parsed: argparse.Namespace) -> "tuple[Records, TextTable | None]":
    """The tables of examples and, where these are texts, of the collection, prepared once; every
    fault is named by file and line."""
    from sparton.datasets.files import locate
    from sparton.datasets.preparation import Reading
    from sparton.datasets.sources import beir_pairs, id_records, text_records
    from sparton.datasets.texts import text_table

    if parsed.beir:
        settings = given(parsed, ["split", "on_error"])
        return beir_pairs(parsed.beir, **settings), None
    settings = {**reading_of(parsed), "limit": parsed.limit}
    if parsed.queries:
        return id_records(parsed.files, parsed.queries, parsed.collection, **settings), None
    collection = locate(parsed.collection) if parsed.collection else None
    examples = text_records(parsed.files, **settings)
    if collection is None:
        return examples, None
    return examples, text_table("collection", collection, Reading())


def _show(parsed: argparse.Namespace, counts: Mapping[str, int]) -> None:
    """The closing summary."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    short = {
        "keep": "kept as they are",
        "pad": "padded or dropped",
        "drop": "dropped",
        "former": "kept, with their former ones where there are none",
    }
    rows = [
        ("examples read", "examples"),
        ("examples written", "written"),
        ("negatives found", "negatives"),
        (f"examples with too few negatives, {short[parsed.short]}", "short"),
        ("  of which without any", "none"),
        ("  of which dropped", "dropped"),
        ("candidates in the windows", "candidates"),
        ("candidates refused by share or margin", "refused"),
        ("pairs scored by teachers", "teacher_pairs"),
    ]
    for label, name in rows:
        table.add_row(label, f"{counts.get(name, 0):,}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(str(parsed.output))
    console.print(table)
    if parsed.short == "keep" and counts.get("none"):
        console.print(
            "Examples without negatives are ranked among the documents of their batch, which "
            "loss=infonce alone does; to leave them out: data.negatives=required data.on_error=skip"
        )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mine", __doc__)
    _add_input(parser.add_argument_group("examples and collection"))
    group = parser.add_argument_group("miner")
    group.add_argument(
        "--miner", action="append",
        help="bm25, the default, or a model of this project; several times for several, each of "
        "which makes an example with its own negatives out of every example",
    )  # fmt: skip
    group.add_argument("--k1", type=float, help="of BM25, as miner and teacher; default: 0.9")
    group.add_argument("--b", type=float, help="of BM25, as miner and teacher; default: 0.4")
    group.add_argument("--query-length", type=int, help="default: as the model was trained")
    group.add_argument("--document-length", type=int, help="default: as the model was trained")
    group.add_argument("--max-document-terms", type=int, help="keep a document's largest weights")
    add_precision(group, "of models as miner or --teacher-kind retriever; default: by device")
    _add_choice(parser.add_argument_group("choice"))
    group = parser.add_argument_group("teachers")
    group.add_argument(
        "--teacher", action="append", default=[],
        help="bm25 or a model; scores positives and negatives, for distillation; several times for "
        "several, of which the first counts for --margin and --share",
    )  # fmt: skip
    group.add_argument(
        "--teacher-kind", action="append", default=[], choices=(CROSS_ENCODER, RETRIEVER),
        help="a cross-encoder of sentence-transformers, the default, or a retriever: a model of "
        "this project, sparse, late-interaction or dense; once, or for each model as --teacher",
    )  # fmt: skip
    group.add_argument(
        "--teacher-activation", action="store_true", default=None,
        help="apply the cross-encoder's own activation; default: its logits",
    )  # fmt: skip
    group.add_argument(
        "--teacher-batch", type=int, help="pairs that a cross-encoder scores at once; default: 64"
    )
    group.add_argument(
        "--teacher-length", type=int, help="tokens of a cross-encoder's pair; default: its own"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, required=True, help="file.jsonl or file.jsonl.gz")
    group.add_argument("--ids", action="store_true", help="write ids; default: texts")
    group.add_argument(
        "--short", choices=("keep", "pad", "drop", "former"), default="keep",
        help="examples with too few negatives: keep, the default, what there is; pad: repeat it, "
        "and drop examples without any; drop; former: keep, and those without any have the "
        "negatives that they had",
    )  # fmt: skip
    return parser


def _add_input(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "files", nargs="*", help="names or patterns; JSON lines, JSON, TSV, CSV or Parquet"
    )
    group.add_argument("--collection", nargs="+", help="records of id, text and perhaps title")
    group.add_argument("--queries", nargs="+", help="texts of the queries: the files hold ids")
    group.add_argument("--beir", help="folder: pairs of its judgments, mined in its corpus")
    group.add_argument("--split", help="of the BEIR folder's judgments; default: train")
    add_reading(group)
    group.add_argument("--limit", type=int, help="read this many examples, drawn at random")
    group.add_argument(
        "--exclude-self", action="store_true",
        help="a document with the query's own id is no negative (ArguAna, Quora)",
    )  # fmt: skip


def _add_choice(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--negatives", type=int, help="of each example; default: 7")
    group.add_argument("--skip", type=int, help="leave out this many first ranks; default: 0")
    group.add_argument(
        "--depth", type=int, help="last rank, without the query's positives; default: 100"
    )
    group.add_argument("--sample", action="store_true", help="by chance; default: the first ranks")
    group.add_argument("--seed", type=int, help="of the chance; default: 0")
    group.add_argument(
        "--margin", type=float,
        help="a negative scores less than the positive by more than this",
    )  # fmt: skip
    group.add_argument(
        "--share", type=float,
        help="a negative scores less than this share of the positive, for example 0.95 "
        "(NV-Retriever, arXiv 2407.15831); scores are the first teacher's if there is one",
    )  # fmt: skip
