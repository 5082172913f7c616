"""Make queries for texts that nobody has asked for: parts of each text, and its rarest words.

    sparton pairs data/squad --output data/unlabelled.jsonl
    sparton train data=text_files data.files=data/unlabelled.jsonl

Several collections count as one. See sparton.pipelines.pair_texts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from sparton.cli.commands.flags import command_parser, refuse_existing

INTERRUPTED = "nothing was written, the same command starts again"


class _Texts:
    """The texts of collections, as often as they are asked for."""

    def __init__(self, corpora: Sequence[Path]) -> None:
        self._corpora = corpora

    def __iter__(self) -> Iterator[str]:
        from sparton.datasets.collection import beir_texts

        return beir_texts(self._corpora, or_files=True)


def main(arguments: Sequence[str]) -> None:
    """``sparton pairs``."""
    parser = command_parser("pairs", __doc__)
    parser.add_argument(
        "corpora", nargs="+", type=Path, help="folders with corpus.jsonl[.gz], or such files"
    )
    parser.add_argument("--output", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument(
        "--by",
        nargs="+",
        default=["spans", "keywords"],
        metavar="WAY",
        help="spans, keywords; default: both",
    )
    parser.add_argument(
        "--per-text", type=int, default=1, help="pairs of each text and way; default: 1"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parsed = parser.parse_args(arguments)
    refuse_existing(parsed.output)
    texts = _Texts(parsed.corpora)
    iter(texts)  # a missing file is said now, as what follows takes seconds

    from sparton.cli.commands.flags import flags_named
    from sparton.pipelines import pair_texts

    with flags_named():
        counts = pair_texts(
            texts, parsed.output, by=parsed.by, per_text=parsed.per_text, seed=parsed.seed
        )
    found = ", ".join(f"{n:,} by {way}" for way, n in counts.items() if way != "too_short")
    print(f"{found}; {counts['too_short']:,} texts are too short")
    print(f"written to {parsed.output}")
