"""Train every kind of retriever on SQuAD and ACL pairs, and measure all of them on four test sets.

    python scripts/in_domain.py                       # everything, then results/<device>/
    python scripts/in_domain.py --list
    python scripts/in_domain.py --only colbert-pairs -- steps=20

Each step is one command of this repository; those that are done are left out, so a stopped study
goes on where it was. What follows ``--`` goes to every training. Negatives come from BM25; the
teacher of the distilled runs is the late-interaction model that was trained on pairs, which also
discards negatives that it holds for relevant.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from sparton.models.backbones import minilm_folder

ROOT = Path(__file__).resolve().parents[1]
STUDY = "in_domain_models"
COLLECTIONS = {"squad": "squad", "acl": "acl_title_abstract"}
TESTS = (*COLLECTIONS.values(), "cranfield", "medline")
# How each system is trained on pairs alone; the experiments say the rest.
SYSTEMS = {
    "splade": "in_domain",
    "colbert": "colbert_in_domain",
    "joint": "joint_in_domain",
    "inference-free": "inference_free_in_domain",
    "csr": "csr_in_domain",
}
ADAPTED = ("splade", "joint", "inference-free")  # those that need a head of MiniLM's
TEACHER = "colbert-pairs"
SPARTON = ("-m", "sparton")


class Step(NamedTuple):
    """A command, and what is there when it is done."""

    name: str
    words: tuple[str, ...]
    done: Path


def main() -> None:
    arguments = parse_arguments()
    console = Console(highlight=False)
    steps = list(study(arguments))
    if arguments.only:
        if unknown := set(arguments.only) - {step.name for step in steps}:
            sys.exit(f"in_domain.py: no step is called {', '.join(sorted(unknown))}: see --list")
        steps = [step for step in steps if step.name in arguments.only]
    for step in steps:
        done = is_done(step)
        console.print(f"{step.name}: {'done' if done else shlex.join(step.words)}", soft_wrap=True)
        if arguments.list:
            continue
        if not done and subprocess.run((sys.executable, *step.words), cwd=ROOT).returncode:
            sys.exit(f"in_domain.py: {step.name} failed; the same command goes on from there")
        if step.done.name == "results.json":
            record(step, arguments.results)


def is_done(step: Step) -> bool:
    """``results.json`` grows with each test: it is done when it has all of them."""
    if not step.done.exists() or step.done.name != "results.json":
        return step.done.exists()
    return len(json.loads(step.done.read_text())["tasks"]) == len(TESTS)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the four sets")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/in_domain_models")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--negatives", type=int, default=3, help="explicit ones of a query")
    parser.add_argument("--adapt-steps", type=int, default=1000, help="of masked-language training")
    parser.add_argument("--only", nargs="+", metavar="STEP")
    parser.add_argument("--list", action="store_true", help="show the steps, do nothing")
    parser.add_argument("overrides", nargs="*", help="of every training")
    arguments = parser.parse_args()
    for name in ("data", "output", "results"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    for folder in TESTS:
        if not (arguments.data / folder).is_dir():
            parser.error(f"--data {arguments.data} has no {folder}: see docs/data_sets.md")
    return arguments


def study(arguments: argparse.Namespace) -> Iterator[Step]:
    """All steps, each after those that it builds on."""
    data, output = arguments.data, arguments.output
    corpora = [str(data / folder) for folder in COLLECTIONS.values()]
    mlm, idf = output / "minilm-mlm", output / "idf.json"
    adapt = ("--steps", str(arguments.adapt_steps), "--output", str(mlm))
    yield Step("adapt", (*SPARTON, "adapt", *adapt, *corpora), mlm)
    words = ("--tokenizer", str(mlm), "--output", str(idf))
    yield Step("idf", (*SPARTON, "idf", *corpora, *words), idf)
    for name in COLLECTIONS:
        yield mining("mine", name, data, output / "mined" / f"{name}.jsonl", ())
    yield evaluation("bm25", "bm25", data, output)
    yield evaluation("dense", str(minilm_folder()), data, output)
    yield from trainings(arguments, "pairs", ())
    half = ("backbone.half_residual=true",)
    yield from trainings(arguments, "pairs-half-residual", half, systems=["splade"])
    teacher = output / TEACHER / "model"
    judged = ("--teacher", str(teacher), "--teacher-kind", "retriever", "--share", "0.95")
    for name in COLLECTIONS:
        yield mining("score", name, data, output / "scored" / f"{name}.jsonl", judged)
    explicit = ("data=squad_acl_mined", f"num_negatives={arguments.negatives}")
    yield from trainings(arguments, "mined", (*explicit, *sources(output / "mined")))
    scored = (*explicit, *sources(output / "scored"))
    yield from trainings(arguments, "distilled", scored, loss="infonce_kl")


def mining(verb: str, name: str, data: Path, output: Path, words: tuple[str, ...]) -> Step:
    """Negatives of one collection's training queries, by BM25."""
    command = (*SPARTON, "mine", "--beir", str(data / COLLECTIONS[name]), "--ids")
    choice = ("--depth", "50", "--sample", "--short", "pad", "--output", str(output))
    return Step(f"{verb}-{name}", (*command, *choice, *words), output)


def evaluation(name: str, model: str, data: Path, output: Path) -> Step:
    """The test sets with a system that is not trained here."""
    folder = output / name
    words = (f"model={model}", "evaluation=in_domain", f"data_dir={data}", f"output={folder}")
    return Step(name, ("evaluate.py", *words), folder / "results.json")


def trainings(
    arguments: argparse.Namespace,
    kind: str,
    overrides: tuple[str, ...],
    loss: str | None = None,
    systems: Iterable[str] = SYSTEMS,
) -> Iterator[Step]:
    """Systems, trained on one kind of data and tested. Another loss than the experiment's is the
    loss of each half of the joint system."""
    mlm = f"backbone.name={arguments.output / 'minilm-mlm'}"
    for system in systems:
        folder = arguments.output / f"{system}-{kind}"
        words = [f"experiment={SYSTEMS[system]}", f"data_dir={arguments.data}", *overrides]
        words += [mlm] if system in ADAPTED else []
        if system == "inference-free":
            words.append(f"query_encoder.weights={arguments.output / 'idf.json'}")
        places = ("@loss.sparse", "@loss.tokens") if system == "joint" else ("",)
        words += [f"loss{place}={loss}" for place in places if loss]
        words += [*arguments.overrides, f"hydra.run.dir={folder}"]
        yield Step(folder.name, ("train.py", *words), folder / "results.json")


def sources(folder: Path) -> tuple[str, ...]:
    """Overrides of ``data=squad_acl_mined``: the files of a folder."""
    return tuple(f"data.sources.{name}.files={folder / name}.jsonl" for name in COLLECTIONS)


def record(step: Step, results: Path) -> None:
    """Put the run's figures among the published ones."""
    command = [sys.executable, "scripts/record_runs.py", "--study", STUDY, "--label", step.name]
    subprocess.run([*command, "--results", results, step.done.parent], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
