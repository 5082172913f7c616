"""The steps of the zero-shot study: what is prepared, trained, averaged and tested."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.ingredients import (
    CHOSEN,
    EXPERIMENTS,
    LOSSES,
    MIXED,
    RECIPES,
    SPARSE,
    WHOLE_QUERIES,
    Ingredient,
    recipe,
)
from recipes.pool import JUDGED, TO_MINE
from recipes.steps import SPARTON, Step
from recipes.untrained import HEADS
from sparton.models.backbones import minilm_folder

STUDY, TASKS = "zero_shot", 6
PRECISION_STUDY, PRECISIONS = "precision", ("fp32", "fp16", "bf16", "fp8")
UNTRAINED = "colbert-untrained-"
WHOLE = "-whole-queries"
CUT = ("colbert-best-plain-wide",)  # trained with queries of 32 tokens
LATE = "colbert-base"  # the late-interaction teacher
BM25 = {"bm25": (0.9, 0.4), "bm25-lucene": (1.2, 0.75)}
TARGETS = ("cranfield", "medline")
STARTS = {
    "frozen": ("--frozen", "--head-lr", "2e-3"),
    "wide": ("--lr", "5e-5"),
}


def zero_shot(arguments: argparse.Namespace) -> Iterator[Step]:
    """All steps, the most important first."""
    yield from preparation(arguments)
    trained = dict.fromkeys(
        (kind, name, 0) for kind in RECIPES for name in RECIPES[kind] if name in CHOSEN[kind]
    )
    trained |= dict.fromkeys((kind, name, 0) for kind in RECIPES for name in RECIPES[kind])
    trained |= dict.fromkeys(
        (kind, name, seed)
        for seed in range(1, arguments.seeds)
        for kind in CHOSEN
        for name in CHOSEN[kind]
    )
    for kind, name, seed in trained:
        yield training(arguments, kind, name, seed)
    for trained_on_less in CUT:
        model = str(arguments.output / trained_on_less / "model")
        given = (f"{trained_on_less}{WHOLE}", model, arguments, (WHOLE_QUERIES,))
        yield evaluation(*given, needs=(trained_on_less,))
    yield from precisions(arguments)
    for kind in MIXED:
        for name, parts in MIXED[kind].items():
            yield from average(arguments, f"{kind}-{name}", [step_name(kind, x, 0) for x in parts])
    if arguments.seeds > 1:
        for kind in CHOSEN:
            for name in CHOSEN[kind]:
                seeds = [step_name(kind, name, seed) for seed in range(arguments.seeds)]
                yield from average(arguments, f"{kind}-{name}-average", seeds)


def preparation(arguments: argparse.Namespace) -> Iterator[Step]:
    data, output, parent = arguments.data, arguments.output, str(minilm_folder())
    corpora = [str(data / folder) for folder in JUDGED.values()]
    mlm = output / "minilm-mlm"
    adapt = (*SPARTON, "adapt", *arguments.adapt)
    yield Step("adapt", (*adapt, "--output", str(mlm), *corpora), mlm)
    idf = output / "idf.json"
    words = ("--tokenizer", parent, "--output", str(idf))
    yield Step("idf", (*SPARTON, "idf", *corpora, *words), idf)
    script = ("scripts/recipes/pool.py", "--data", str(data), *arguments.pool)
    for name, extra in (("pool", ()), ("target", ("--collections", *TARGETS))):
        yield Step(name, (*script, "--output", str(output / name), *extra), output / name)
    pool = str(output / "pool/corpus.jsonl")
    for name, rates in STARTS.items():
        folder = output / f"minilm-{name}"
        words = (*adapt, *rates, "--output", str(folder), pool)
        yield Step(f"adapt-{name}", words, folder, ("pool",))
    words = ("--tokenizer", parent, "--output", str(output / "idf-pool.json"))
    yield Step("idf-pool", (*SPARTON, "idf", pool, *words), output / "idf-pool.json", ("pool",))
    for name, (k1, b) in BM25.items():
        yield evaluation(name, "bm25", arguments, (f"bm25.k1={k1}", f"bm25.b={b}"))
    yield evaluation("parent", parent, arguments)
    models = output / "untrained"
    yield Step("untrained", ("scripts/recipes/untrained.py", "--output", str(models)), models)
    for name in HEADS:
        made = str(models / name)
        yield evaluation(f"{UNTRAINED}{name}", made, arguments, needs=("untrained",))
    for pool in ("pool", "target"):
        for miner in ("bm25", "parent"):
            yield from mining(arguments, pool, miner)


def mining(arguments: argparse.Namespace, pool: str, miner: str) -> Iterator[Step]:
    """Seven negatives of queries of all sources by a miner, with all teachers' scores, in one run
    that encodes the collection once for each model; and a file for each source."""
    folder, parent = arguments.output / pool, str(minilm_folder())
    late = str(arguments.output / LATE / "model")
    by_source = scored_folder(arguments, pool, miner)
    output = by_source.with_suffix(".jsonl")
    words = [*SPARTON, "mine", str(folder / TO_MINE), "--ids"]
    words += ["--queries", str(folder / "queries.jsonl")]
    words += ["--collection", str(folder / "corpus.jsonl")]
    words += ["--miner", parent if miner == "parent" else miner, "--depth", "50", "--sample"]
    words += ["--short", "pad", "--output", str(output)]
    words += ["--teacher", parent, "--teacher", "bm25", "--teacher", late]
    words += ["--teacher-kind", "retriever", "--share", "0.98"]
    name = f"{pool}-{miner}"
    yield Step(f"mine-{name}", tuple(words), output, (pool, LATE))
    words = ["scripts/recipes/by_source.py", str(output), "--output", str(by_source)]
    yield Step(f"sort-{name}", tuple(words), by_source, (f"mine-{name}",))


def scored_folder(arguments: argparse.Namespace, pool: str, miner: str) -> Path:
    return Path(arguments.output, f"scored/{pool}-{miner}")


def evaluation(
    name: str,
    model: str,
    arguments: argparse.Namespace,
    words: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    study: str = STUDY,
) -> Step:
    """All tests with a model that is there."""
    folder = arguments.output / name
    given = (f"model={model}", "evaluation=zero_shot", f"data_dir={arguments.data}", *words)
    command = ("evaluate.py", *given, f"output={folder}")
    return Step(name, command, folder / "results.json", needs, study, name, TASKS)


def precisions(arguments: argparse.Namespace) -> Iterator[Step]:
    """All tests with the first model of every kind, encoded in every precision."""
    models = {f"{kind}-base": str(arguments.output / f"{kind}-base/model") for kind in RECIPES}
    for name, model in ({"parent": str(minilm_folder())} | models).items():
        needs = (name,) if name in models else ()
        for precision in PRECISIONS:
            words = (f"encoder.precision={precision}",)
            step = f"{name}-{precision}"
            yield evaluation(step, model, arguments, words, needs, study=PRECISION_STUDY)


def average(arguments: argparse.Namespace, name: str, trained: Sequence[str]) -> Iterator[Step]:
    """The mean of the weights of several trainings, and its tests."""
    models = [str(arguments.output / each / "model") for each in trained]
    made, model = f"{name}-model", arguments.output / name / "model"
    words = (*SPARTON, "average", *models, "--output", str(model))
    yield Step(made, words, model, tuple(trained))
    yield evaluation(name, str(model), arguments, needs=(made,))


def step_name(kind: str, name: str, seed: int) -> str:
    return f"{kind}-{name}" + (f"-seed-{seed}" if seed else "")


def training(arguments: argparse.Namespace, kind: str, name: str, seed: int) -> Step:
    """One training with a recipe, and its tests."""
    whole = recipe(kind, RECIPES[kind][name])
    folder = arguments.output / step_name(kind, name, seed)
    words = [f"experiment={EXPERIMENTS[kind]}", "evaluation=zero_shot", "data=squad_acl_mined"]
    words += [f"data_dir={arguments.data}", f"seed={seed}"]
    needs = []
    if kind in SPARSE:
        start = whole.start or "mlm"
        words.append(f"backbone.name={arguments.output / f'minilm-{start}'}")
        needs.append(f"adapt-{whole.start}" if whole.start else "adapt")
    if kind == "inference-free":
        words.append(f"query_encoder.weights={arguments.output / 'idf.json'}")
        needs += ["idf", "idf-pool"]
    words += data_words(arguments, whole, needs)
    losses = LOSSES.get(kind, ("loss",))
    if whole.teachers is not None:
        words += [f"{place.replace('loss.', 'loss@loss.')}=infonce_kl" for place in losses]
        words += [f"{place}.{setting}" for place in losses for setting in whole.loss]
    terms, tokens = ("head.sparse.", "head.tokens.") if kind == "joint" else ("head.", "head.")
    own = (*(whole.sparse if kind in SPARSE else ()), *whole.settings)
    settings = [each.format(output=arguments.output, terms=terms, tokens=tokens) for each in own]
    if kind == "inference-free":
        settings = [each for each in settings if not each.startswith("query_regularizer")]
    words += ["micro_batch=null", *settings, *arguments.overrides, f"hydra.run.dir={folder}"]
    done = folder / "results.json"
    label = f"{kind}-{name}"
    return Step(folder.name, ("train.py", *words), done, tuple(needs), STUDY, label, TASKS)


def data_words(arguments: argparse.Namespace, whole: Ingredient, needs: list[str]) -> list[str]:
    """Overrides of ``data=squad_acl_mined`` that name the sources of a recipe; adds the steps that
    make their files to ``needs``."""
    parts = [("pool", source) for source in dict.fromkeys((*JUDGED, *whole.sources))]
    parts += [(whole.collection, "crops")] if whole.collection else []
    words = [f"num_negatives={7 if whole.miners else 0}"]
    for pool, source in parts:
        files = [str(arguments.output / pool / f"{source}.jsonl")]
        made = [pool]
        if whole.miners:
            folders = [scored_folder(arguments, pool, miner) for miner in whole.miners]
            files = [str(folder / f"{source}.jsonl") for folder in folders]
            made += [f"sort-{pool}-{miner}" for miner in whole.miners]
        needs += [step for step in made if step not in needs]
        name = source if pool == "pool" else pool
        fields = {
            "_target_": "sparton.datasets.sources.id_records",
            "_partial_": "true",
            "files": f"[{','.join(files)}]",
            "queries": str(arguments.output / pool / "queries.jsonl"),
            "collection": str(arguments.output / pool / "corpus.jsonl"),
            "negatives": "required" if whole.miners else "none",
        }
        if whole.miners:
            teachers = whole.home if source in JUDGED and whole.home else whole.teachers
            weights = ",".join(str(weight) for weight in teachers or (1, 1, 1))
            fields["teachers"] = f"{{weights: [{weights}], scaling: min_max}}"
        listed = ", ".join(f"{key}: {value}" for key, value in fields.items())
        words.append(f"{'' if name in JUDGED else '+'}data.sources.{name}={{{listed}}}")
    return words
