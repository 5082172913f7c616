"""The whole path in three minutes: BM25, an untrained encoder, training, and what was learned.

python scripts/quickstart.py              # what make quickstart runs
python scripts/quickstart.py seed=1       # overrides go to train.py
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from sparton.cli import schema
from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import (
    TaskResult,
    evaluate_bm25,
    evaluate_encoder,
    explain,
    load_retriever,
)
from sparton.models.assembly import build_encoder
from sparton.models.encoder import Encoder
from sparton.models.splade import SpladeEncoder
from sparton.training.picture import draw_run
from sparton.types import RetrievalTask

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TERMS = 32

# So small a model gains nothing from many threads, and OpenMP threads that spin while they wait
# make a step ten times slower as soon as another program uses a core.
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1)),
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
console = Console()


class Missed(NamedTuple):
    """A query whose document BM25 does not find, with the document's row and its two ranks."""

    query: str
    row: int
    bm25_rank: int | None
    trained_rank: int | None


def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)
    disable_progress_bar()
    overrides = ["experiment=quickstart", *sys.argv[1:]]
    schema.register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides, return_hydra_config=True)
        folder = Path(cfg.hydra.run.dir)
    task = instantiate(cfg.evaluation.test.quickstart)
    console.rule("[bold]1. Before training")
    describe(task)
    results = {
        "BM25": evaluate_bm25(task),
        "untrained": evaluate_encoder(*untrained(cfg), task, progress=False),
    }
    console.print(comparison(results))
    console.rule("[bold]2. Training")
    train(overrides)
    console.rule("[bold]3. After training")
    encoder, tokenizer = load_retriever(ROOT / folder / "model", device=DEVICE)
    results["trained"] = evaluate_encoder(encoder, tokenizer, task, progress=False)
    console.print(comparison(results))
    show_terms(encoder, tokenizer, task, find_missed(task, results["BM25"], results["trained"]))
    level = evaluate_bm25(instantiate(cfg.evaluation.dev.quickstart)).metrics["ndcg@10"]
    picture = draw_run(ROOT / folder, {"BM25": level}, title="Quickstart")
    show_next_steps(picture, time.perf_counter() - start)


def describe(task: RetrievalTask) -> None:
    console.print(
        f"{len(task.documents.ids):,} generated documents, {len(task.queries.ids)} test queries. "
        "Two words in five of a query are synonyms of what its document says."
    )


def untrained(cfg: DictConfig) -> tuple[SpladeEncoder, PackedTokenizer]:
    """The very model that train.py starts from."""
    torch.manual_seed(cfg.seed)
    encoder = build_encoder(instantiate(cfg.backbone), instantiate(cfg.head))
    if not isinstance(encoder, SpladeEncoder):
        sys.exit(
            "quickstart.py shows the terms of a SPLADE model: for other kinds run "
            "python train.py experiment=quickstart head=..."
        )
    encoder.to(DEVICE)
    return encoder, PackedTokenizer(encoder.tokenizer, cfg.query_length, cfg.document_length)


def train(overrides: list[str]) -> None:
    console.print(f"[bold]python train.py {' '.join(overrides)}", highlight=False)
    finished = subprocess.run(
        [sys.executable, "train.py", *overrides], cwd=ROOT, env=ENVIRONMENT | os.environ
    )
    if finished.returncode:
        sys.exit(finished.returncode)


def comparison(results: dict[str, TaskResult]) -> Table:
    table = Table(title="test queries", title_justify="left")
    table.add_column("")
    for column in ("NDCG@10", "active query terms", "active document terms"):
        table.add_column(column, justify="right")
    best = max(result.metrics["ndcg@10"] for result in results.values())
    for name, result in results.items():
        figures = (
            f"{result.metrics['ndcg@10']:.3f}",
            f"{result.query_terms:,.0f}",
            f"{result.document_terms:,.0f}",
        )
        table.add_row(name, *figures, style="bold" if result.metrics["ndcg@10"] == best else None)
    return table


def find_missed(task: RetrievalTask, bm25: TaskResult, trained: TaskResult) -> Missed:
    """The query that gains most: the model ranks its document high, BM25 low."""
    found = []
    for number, query_id in enumerate(task.queries.ids):
        grades = task.qrels[query_id]
        row = task.documents.ids.index(max(grades, key=grades.__getitem__))
        ranks = [rank_of(row, result, number) for result in (bm25, trained)]
        found.append(Missed(task.queries.texts[number], row, *ranks))
    return min(found, key=lambda each: (each.trained_rank or 10**6, -(each.bm25_rank or 10**6)))


def rank_of(row: int, result: TaskResult, query: int) -> int | None:
    places = (result.run.rows[query] == row).nonzero()[0]
    return int(places[0]) + 1 if places.size else None


def show_terms(
    encoder: Encoder, tokenizer: PackedTokenizer, task: RetrievalTask, example: Missed
) -> None:
    """One document's weighted terms; what the text does not say stands out."""
    text = task.documents.texts[example.row]
    console.print("\nThe query that gains most over BM25, and its document as the model sees it")
    console.print(f"[dim]query[/]     {example.query}", highlight=False)
    console.print(f"[dim]document[/]  {text}", highlight=False)
    ranks = [rank or "not found" for rank in (example.bm25_rank, example.trained_rank)]
    console.print("[dim]its rank[/]  BM25: {}, trained: {}".format(*ranks), highlight=False)
    console.print("[dim]its terms[/] [green]+ learned, not in the text[/]   * in the query")
    said, asked = set(text.replace(".", "").split()), set(example.query.split())
    terms = explain(encoder, tokenizer, text, k=TERMS)
    table = Table.grid(padding=(0, 2))
    for pair in zip(terms[: TERMS // 2], terms[TERMS // 2 :]):
        table.add_row(*(term_line(term, weight, said, asked) for term, weight in pair))
    console.print(table)


def term_line(term: str, weight: float, said: set[str], asked: set[str]) -> Text:
    marks = ("+" if term not in said else " ") + ("*" if term in asked else " ")
    style = "dim" if term in said else "bold green"
    return Text(f"{marks} {term:<15} {weight:.2f} {'━' * round(8 * weight):<12}", style)


def show_next_steps(picture: Path, seconds: float) -> None:
    console.print(f"\n[dim]picture, with BM25[/]  {picture}", highlight=False, soft_wrap=True)
    console.print(f"\n{seconds:.0f} seconds in all. What to try next:", highlight=False)
    for command, purpose in (
        ("python train.py experiment=quickstart head=eager", "the common head, the same curve"),
        ("python train.py -m experiment=quickstart batch=64,128,256", "a sweep"),
        ("python train.py backbone=distilbert batch=32 steps=2000 data=text_files "
         "data.files=FILE", "your own pairs: CSV, TSV, JSON lines, Parquet"),
    ):  # fmt: skip
        console.print(f"  {command}  [dim]# {purpose}[/]", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
