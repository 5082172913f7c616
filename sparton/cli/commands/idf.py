"""Count the inverse document frequencies of a collection's tokens, the weights of static queries.

    sparton idf data/squad --tokenizer MODEL --output models/idf.json
    sparton train query_encoder=static query_encoder.weights=models/idf.json

Several collections count as one. The formula is BM25's, see sparton.pipelines.compute_idf.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from sparton.cli.commands.flags import command_parser, refuse_existing

INTERRUPTED = "nothing was written, the same command starts again"


def main(arguments: Sequence[str]) -> None:
    """``sparton idf``."""
    parser = command_parser("idf", __doc__)
    parser.add_argument(
        "corpora", nargs="+", type=Path, help="folders with corpus.jsonl[.gz], or such files"
    )
    parser.add_argument("--tokenizer", required=True, help="model folder or hub name")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parsed = parser.parse_args(arguments)
    refuse_existing(parsed.output)

    from sparton.datasets.collection import beir_texts

    texts = beir_texts(parsed.corpora, or_files=True)

    # Only now, as it takes seconds: what is wrong so far has been said.
    from sparton.models.checkpoint import load_tokenizer
    from sparton.pipelines import compute_idf

    tokenizer = load_tokenizer(parsed.tokenizer)
    idf = compute_idf(texts, tokenizer, parsed.output)
    print(f"{len(idf):,} of {len(tokenizer):,} tokens occur")
    ranked = sorted(idf.items(), key=lambda item: item[1])
    for label, some in (("lowest", ranked[:8]), ("highest", ranked[-8:])):
        print(f"{label}: {_named(some)}")
    print(f"written to {parsed.output}")


def _named(weights: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{token} {value:.2f}" for token, value in weights)
