"""The whole path in three minutes: BM25, a training, and what was learned.

python scripts/quickstart.py              # what make quickstart runs
python scripts/quickstart.py seed=1       # overrides go to train.py
"""

import os
import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from rich.console import Console
from rich.table import Table

import sparton
from sparton.cli import schema
from sparton.evaluation import TaskResult, evaluate_bm25, evaluate_encoder, explain
from sparton.types import RetrievalTask

ROOT = Path(__file__).resolve().parents[1]
TERMS = 32
THREADS = str(min(4, os.cpu_count() or 1))  # so small a model gains nothing from many
console = Console()


def main() -> None:
    overrides = ["experiment=quickstart", *sys.argv[1:]]
    schema.register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides, return_hydra_config=True)
        folder = ROOT / cfg.hydra.run.dir
    task = instantiate(cfg.evaluation.test.quickstart)
    console.rule("[bold]1. Before training")
    console.print(
        f"{len(task.documents.ids):,} generated documents, {len(task.queries.ids)} test queries. "
        "Two words in five of a query are synonyms of what its document says."
    )
    results = {"BM25": evaluate_bm25(task)}
    show(results)
    console.rule("[bold]2. Training")
    console.print(f"[bold]python train.py {' '.join(overrides)}", highlight=False)
    command = [sys.executable, "train.py", *overrides]
    trained = subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": THREADS} | os.environ)
    if trained.returncode:
        sys.exit(trained.returncode)
    console.rule("[bold]3. After training")
    model = sparton.load(folder / "model")
    results["trained"] = evaluate_encoder(model.encoder, model.tokenizer, task, progress=False)
    show(results)
    if "sparse" in model.encoder.kinds:
        show_terms(model, task)


def show(results: dict[str, TaskResult]) -> None:
    table = Table("test queries", "NDCG@10", "active query terms", "active document terms")
    for name, result in results.items():
        terms = (f"{count:,.0f}" for count in (result.query_terms, result.document_terms))
        table.add_row(name, f"{result.metrics['ndcg@10']:.3f}", *terms)
    console.print(table)


def show_terms(model: sparton.Retriever, task: RetrievalTask) -> None:
    """The weighted terms of the first query's document; what its text does not say stands out."""
    query, grades = task.queries.texts[0], task.qrels[task.queries.ids[0]]
    text = task.documents.texts[task.documents.ids.index(max(grades, key=grades.__getitem__))]
    console.print(f"[dim]query[/]     {query}\n[dim]document[/]  {text}", highlight=False)
    console.print("[dim]its terms[/] [green]+ learned, not in the text[/]   * in the query")
    said, asked = set(text.replace(".", "").split()), set(query.split())
    for term, weight in explain(model.encoder, model.tokenizer, text, k=TERMS):
        marks = ("+" if term not in said else " ") + ("*" if term in asked else " ")
        style = "dim" if term in said else "bold green"
        console.print(f"{marks} {term:<15} {weight:.2f} {'━' * round(8 * weight)}", style=style)


if __name__ == "__main__":
    main()
