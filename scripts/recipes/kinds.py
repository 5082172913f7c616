"""Every kind of retriever on SQuAD and ACL: on pairs, on mined negatives, and distilled.

Negatives come from BM25; the teacher is the late-interaction model that was trained on pairs, which
also discards negatives that it holds for relevant.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.pool import JUDGED
from recipes.steps import SPARTON, Step
from sparton.models.backbones import minilm_folder

STUDY, TASKS = "in_domain_models", 4
PREFIX = "kinds-"  # of the steps' names, which the records are without
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


def kinds(arguments: argparse.Namespace) -> Iterator[Step]:
    """All steps, each after those that it builds on."""
    data, output = arguments.data, folder_of(arguments)
    corpora = [str(data / folder) for folder in JUDGED.values()]
    mlm, idf = output / "minilm-mlm", output / "idf.json"
    adapt = (*arguments.adapt, "--output", str(mlm))
    yield Step(f"{PREFIX}adapt", (*SPARTON, "adapt", *adapt, *corpora), mlm)
    words = ("--tokenizer", str(minilm_folder()), "--output", str(idf))
    yield Step(f"{PREFIX}idf", (*SPARTON, "idf", *corpora, *words), idf)
    for name in JUDGED:
        yield mining("mine", name, data, output / "mined" / f"{name}.jsonl", ())
    yield evaluation("bm25", "bm25", data, output)
    yield evaluation("dense", str(minilm_folder()), data, output)
    yield from trainings(arguments, "pairs", ())
    half = ("backbone.half_residual=true",)
    yield from trainings(arguments, "pairs-half-residual", half, systems=["splade"])
    teacher = output / TEACHER / "model"
    judged = ("--teacher", str(teacher), "--teacher-kind", "retriever", "--share", "0.95")
    for name in JUDGED:
        scored = output / "scored" / f"{name}.jsonl"
        yield mining("score", name, data, scored, judged, needs=(f"{PREFIX}{TEACHER}",))
    explicit = ("data=squad_acl_mined", f"num_negatives={arguments.negatives}")
    mined = tuple(f"{PREFIX}mine-{name}" for name in JUDGED)
    from_mined = (*explicit, *sources(output / "mined"))
    yield from trainings(arguments, "mined", from_mined, needs=mined)
    scored_by = tuple(f"{PREFIX}score-{name}" for name in JUDGED)
    from_scored = (*explicit, *sources(output / "scored"))
    yield from trainings(arguments, "distilled", from_scored, loss="infonce_kl", needs=scored_by)


def mining(
    verb: str,
    name: str,
    data: Path,
    output: Path,
    words: tuple[str, ...],
    needs: tuple[str, ...] = (),
) -> Step:
    """Negatives of one collection's training queries, by BM25."""
    command = (*SPARTON, "mine", "--beir", str(data / JUDGED[name]), "--ids")
    choice = ("--depth", "50", "--sample", "--short", "pad", "--output", str(output))
    return Step(f"{PREFIX}{verb}-{name}", (*command, *choice, *words), output, needs)


def evaluation(name: str, model: str, data: Path, output: Path) -> Step:
    """The test sets with a system that is not trained here."""
    folder = output / name
    words = (f"model={model}", "evaluation=in_domain", f"data_dir={data}", f"output={folder}")
    done = folder / "results.json"
    step = f"{PREFIX}{name}"
    return Step(step, ("evaluate.py", *words), done, study=STUDY, label=name, tasks=TASKS)


def trainings(
    arguments: argparse.Namespace,
    kind: str,
    overrides: tuple[str, ...],
    loss: str | None = None,
    systems: Iterable[str] = SYSTEMS,
    needs: tuple[str, ...] = (),
) -> Iterator[Step]:
    """Systems, trained on one kind of data and tested. Another loss than the experiment's is the
    loss of each half of the joint system."""
    output = folder_of(arguments)
    mlm = f"backbone.name={output / 'minilm-mlm'}"
    for system in systems:
        folder = output / f"{system}-{kind}"
        words = [f"experiment={SYSTEMS[system]}", f"data_dir={arguments.data}", *overrides]
        words += [mlm] if system in ADAPTED else []
        if system == "inference-free":
            words.append(f"query_encoder.weights={output / 'idf.json'}")
        places = ("@loss.sparse", "@loss.tokens") if system == "joint" else ("",)
        words += [f"loss{place}={loss}" for place in places if loss]
        words += [*arguments.overrides, f"hydra.run.dir={folder}"]
        own = [f"{PREFIX}adapt"] if system in ADAPTED else []
        own += [f"{PREFIX}idf"] if system == "inference-free" else []
        yield Step(
            f"{PREFIX}{folder.name}",
            ("train.py", *words),
            folder / "results.json",
            (*own, *needs),
            study=STUDY,
            label=folder.name,
            tasks=TASKS,
        )


def folder_of(arguments: argparse.Namespace) -> Path:
    return arguments.output / "kinds"


def sources(folder: Path) -> tuple[str, ...]:
    """Overrides of ``data=squad_acl_mined``: the files of a folder."""
    return tuple(f"data.sources.{name}.files={folder / name}.jsonl" for name in JUDGED)
