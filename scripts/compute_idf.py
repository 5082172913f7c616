"""Count the inverse document frequencies of a collection's tokens, the weights of static queries.

    python scripts/compute_idf.py data/squad data/acl_title_abstract \\
        --tokenizer models/minilm-mlm --output models/idf.json
    python train.py query_encoder=static query_encoder.weights=models/idf.json

Several collections count as one. The formula is BM25's, see sparton/models/idf.py.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sparton.datasets.collection import beir_file, read_texts
from sparton.datasets.files import DataFile
from sparton.models.checkpoint import load_tokenizer
from sparton.models.idf import idf_of_collection, write_idf


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "corpora", nargs="+", type=Path, help="folders with corpus.jsonl[.gz], or such files"
    )
    parser.add_argument("--tokenizer", required=True, help="model folder or hub name")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    try:
        files = [corpus_file(path) for path in arguments.corpora]
        tokenizer = load_tokenizer(arguments.tokenizer)
        texts = (text for file in files for _, _, text in read_texts(file))
        with progress() as bar:
            task = bar.add_task("texts", total=None)
            idf = idf_of_collection(texts, tokenizer, advance=lambda n: bar.advance(task, n))
        write_idf(idf, arguments.output)
    except (OSError, ValueError) as error:
        raise SystemExit(f"compute_idf.py: {error}") from error
    console.print(f"{len(idf):,} of {len(tokenizer):,} tokens occur")
    ranked = sorted(idf.items(), key=lambda item: item[1])
    for label, some in (("lowest", ranked[:8]), ("highest", ranked[-8:])):
        console.print(f"{label}: {named(some)}", markup=False, highlight=False)
    console.print(f"written to {arguments.output}", soft_wrap=True)


def corpus_file(path: Path) -> DataFile:
    return DataFile(str(path), path) if path.is_file() else beir_file(path, "corpus.jsonl")


def progress() -> Progress:
    count = TextColumn("{task.completed:,.0f}")
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def named(weights: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{token} {value:.2f}" for token, value in weights)


if __name__ == "__main__":
    main()
