"""The command line of mining."""

import argparse
from pathlib import Path

from command_line import flag, given, refuse
from hard_negatives.parts import check_output
from hard_negatives.selection import Rule
from sparton.evaluation import check_model, check_term_bounds
from sparton.retrieval.bm25 import BM25
from sparton.retrieval.encoding import AUTOCAST

DEFAULTS = {
    "split": "train", "seed": 0, "k1": 0.9, "b": 0.4, "precision": "fp32",
    "teacher_kind": "cross-encoder", "teacher_activation": False, "teacher_batch": 64,
}  # fmt: skip
OF_CROSS_ENCODERS = ["teacher_activation", "teacher_batch", "teacher_length"]


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_input(parser.add_argument_group("examples and collection"))
    group = parser.add_argument_group("miner")
    group.add_argument("--miner", default="bm25", help="bm25, or a model of this project")
    group.add_argument("--k1", type=float, help="of BM25; default: 0.9")
    group.add_argument("--b", type=float, help="of BM25; default: 0.4")
    group.add_argument("--query-length", type=int, help="default: as the model was trained")
    group.add_argument("--document-length", type=int, help="default: as the model was trained")
    group.add_argument("--max-document-terms", type=int, help="keep a document's largest weights")
    group.add_argument(
        "--precision", choices=list(AUTOCAST),
        help="of models as miner or --teacher-kind retriever; default: fp32",
    )  # fmt: skip
    group.add_argument("--device", help="default: a GPU if there is one")
    add_choice(parser.add_argument_group("choice"))
    group = parser.add_argument_group("teacher")
    group.add_argument("--teacher", help="scores positives and negatives, for distillation")
    group.add_argument(
        "--teacher-kind", choices=("cross-encoder", "retriever"),
        help="a cross-encoder of sentence-transformers, the default, or a model of this project",
    )  # fmt: skip
    group.add_argument(
        "--teacher-activation", action="store_true", default=None,
        help="apply the cross-encoder's own activation; default: its logits",
    )  # fmt: skip
    group.add_argument(
        "--teacher-batch", type=int, help="pairs that a cross-encoder scores at once; default: 64"
    )
    group.add_argument("--teacher-length", type=int, help="tokens of a cross-encoder's pair")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, required=True, help="file.jsonl or file.jsonl.gz")
    group.add_argument("--ids", action="store_true", help="write ids; default: texts")
    group.add_argument(
        "--short", choices=("keep", "pad", "drop"), default="keep",
        help="examples with too few negatives: keep what there is; pad: repeat it, and drop "
        "examples without any; drop",
    )  # fmt: skip
    return parser


def add_input(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("files", nargs="*", help="names or patterns; JSON lines, TSV or Parquet")
    group.add_argument("--collection", nargs="+", help="records of id, text and perhaps title")
    group.add_argument("--queries", nargs="+", help="texts of the queries: the files hold ids")
    group.add_argument("--beir", help="folder: pairs of its judgments, mined in its corpus")
    group.add_argument("--split", help="of the BEIR folder's judgments; default: train")
    group.add_argument(
        "--columns", nargs="+", metavar="NAME[=KNOWN]",
        help="question=query renames; for TSV: the names in order",
    )  # fmt: skip
    group.add_argument("--on-error", choices=("stop", "skip"), default="stop")
    group.add_argument("--limit", type=int, help="read this many examples")
    group.add_argument(
        "--exclude-self", action="store_true",
        help="a document with the query's own id is no negative (ArguAna, Quora)",
    )  # fmt: skip


def add_choice(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--negatives", type=int, default=7, help="of each example")
    group.add_argument("--skip", type=int, default=0, help="leave out this many first ranks")
    group.add_argument(
        "--depth", type=int, default=100, help="last rank; the query's positives do not count"
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
        "(NV-Retriever, arXiv 2407.15831); scores are the teacher's if there is one",
    )  # fmt: skip


def check(arguments: argparse.Namespace) -> Rule:
    """Refuse what could not work, before anything is read.

    Raises:
        ValueError: names the argument.
    """
    check_output(arguments.output)
    rule = Rule(
        arguments.negatives,
        arguments.skip,
        arguments.depth,
        arguments.sample,
        DEFAULTS["seed"] if arguments.seed is None else arguments.seed,
        arguments.margin,
        arguments.share,
    )
    rule.check()
    if not arguments.sample:
        refuse(arguments, ["seed"], "mining without --sample")
    if not arguments.beir:
        refuse(arguments, ["split"], "mining without --beir")
    check_term_bounds(**{"--max-document-terms": arguments.max_document_terms})
    _check_models(arguments)
    if arguments.beir and (arguments.files or arguments.queries or arguments.collection):
        raise ValueError("--beir FOLDER stands alone: it names examples, queries and collection")
    if arguments.beir and (arguments.columns or arguments.limit is not None):
        raise ValueError("--columns and --limit do not apply to --beir")
    for name, value in given(arguments, ["limit", "teacher_batch", "teacher_length"]).items():
        if value < 1:
            raise ValueError(f"{flag(name)} {value} must be at least 1")
    if not arguments.beir and not arguments.files:
        raise ValueError("name files of training examples, or --beir FOLDER")
    if arguments.queries and not arguments.collection:
        raise ValueError("--queries means examples of ids, which need --collection too")
    by_id = bool(arguments.beir or arguments.queries)
    for name in ("ids", "exclude_self"):
        if getattr(arguments, name) and not by_id:
            raise ValueError(f"{flag(name)} needs examples with ids: --beir, or --queries")
    return rule


def _check_models(arguments: argparse.Namespace) -> None:
    """Miner and teacher: folders that do not exist, and options of another kind than theirs."""
    by_words = arguments.miner == "bm25"
    ignored = ["query_length", "document_length", "max_document_terms"] if by_words else ["k1", "b"]
    if by_words and not (arguments.teacher and arguments.teacher_kind == "retriever"):
        ignored.append("precision")
    refuse(arguments, ignored, f"--miner {arguments.miner}")
    if not arguments.teacher:
        refuse(arguments, ["teacher_kind", *OF_CROSS_ENCODERS], "mining without --teacher")
    elif arguments.teacher_kind == "retriever":
        refuse(arguments, OF_CROSS_ENCODERS, "--teacher-kind retriever")
    BM25(**given(arguments, ["k1", "b"]))  # refuses what is out of range
    for role, model in (("miner", arguments.miner), ("teacher", arguments.teacher)):
        if model and not (role == "miner" and by_words):
            try:
                check_model(model)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"--{role} {error}") from None


def fill_in(arguments: argparse.Namespace) -> None:
    """Give the options that were left out their defaults, when :func:`check` has seen which."""
    for name, default in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
