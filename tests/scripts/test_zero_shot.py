"""The study's steps: what is done, in which order they run, and that its trainings are
configurations that exist."""

import argparse
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import zero_shot as study
from recipes import by_source, ingredients, kinds, pool, steps, zero_shot
from recipes.steps import Failed, Place, Runner, Step
from sparton.cli.checks import check
from tests.composing import composed


def test_a_study_goes_on_with_tests_that_are_missing(tmp_path):
    step = Step("x", (), tmp_path / "results.json", tasks=4)
    assert not step.is_done
    for number in range(1, 5):
        step.done.write_text(json.dumps({"tasks": [{"name": f"{n}"} for n in range(number)]}))
        assert step.is_done == (number == 4)
    other = Step("y", (), tmp_path / "idf.json")
    assert not other.is_done
    other.done.write_text("{}")
    assert other.is_done


def test_what_was_done_with_other_words_is_known(tmp_path):
    """What somebody else has put there is taken as it is."""
    step = step_that(tmp_path, "x")
    trial = step._replace(words=(*step.words, "steps=20"))
    assert trial.otherwise == ""
    (tmp_path / "x").touch()
    assert trial.otherwise == ""
    (tmp_path / "x").unlink()
    run([trial], tmp_path)
    assert not trial.is_done  # its script takes no such word
    assert step.otherwise == ""
    run([step], tmp_path)
    assert (step.is_done, step.otherwise, trial.otherwise) == (True, "", "without steps=20")
    trial.keep_words()
    assert step.otherwise == "with steps=20"
    assert trial._replace(words=trial.words[::-1]).otherwise == "in another order"


def test_what_is_asked_for_brings_along_what_it_needs(tmp_path):
    listed = [Step(n, (), tmp_path / n, tuple(needs)) for n, *needs in ("a", "b", "cab", "dc")]
    names = {"c": "abc", "d": "abcd", "b": "b", "[ab]": "ab"}
    for pattern, expected in names.items():
        assert [step.name for step in steps.chosen(listed, [pattern])] == [*expected]
    with pytest.raises(ValueError, match="no step is called e"):
        steps.chosen(listed, ["a", "e"])


# Leaves its file, after it has looked for that of another step and waited for a third's to begin.
SCRIPT = """
import sys, time
from pathlib import Path
own, needed, beside = sys.argv[1:]
Path(own + '.began').touch()
assert needed == '-' or Path(needed).exists()
until = time.monotonic() + 20
while beside != '-' and not Path(beside + '.began').exists():
    assert time.monotonic() < until
    time.sleep(0.02)
if not own.endswith('bad'):
    Path(own).touch()
"""


def step_that(folder: Path, name: str, needs: str = "", beside: str = "") -> Step:
    paths = [str(folder / each) if each else "-" for each in (name, needs, beside)]
    needed = (needs,) if needs else ()
    return Step(name, ("-c", SCRIPT, *paths), folder / name, needed, study="s", label=name)


def run(listed: list[Step], folder: Path, jobs: int = 2, stop_after: float | None = None):
    """What was recorded, and what was said."""
    said, recorded = io.StringIO(), []
    console = Console(file=said, width=200)
    where = [Place("", 1)] * jobs
    note = lambda step, seconds: recorded.append((step.name, seconds is None))  # noqa: E731
    try:
        Runner(listed, where, folder / "logs", note, stop_after, console).run()
    except Failed as failed:
        return recorded, f"failed: {failed}"
    return recorded, said.getvalue()


def test_steps_run_side_by_side_and_after_what_they_need(tmp_path):
    listed = [
        step_that(tmp_path, "last", needs="first"),
        step_that(tmp_path, "first", beside="second"),
        step_that(tmp_path, "second", beside="first"),
    ]
    recorded, _ = run(listed, tmp_path)
    assert {name for name, _ in recorded} == {"first", "second", "last"}
    assert recorded[-1] == ("last", False)
    assert run(listed, tmp_path)[0] == [("last", True), ("first", True), ("second", True)]


def test_a_failure_holds_up_what_needs_it_and_nothing_else(tmp_path):
    listed = [
        step_that(tmp_path, "bad"),
        step_that(tmp_path, "after", needs="bad"),
        step_that(tmp_path, "other"),
    ]
    recorded, said = run(listed, tmp_path, jobs=1)
    assert ([name for name, _ in recorded], said) == (["other"], "failed: bad")


def test_nothing_begins_after_the_time_is_up(tmp_path):
    recorded, said = run([step_that(tmp_path, "x")], tmp_path, stop_after=0)
    assert not recorded and "1 steps are left" in said


def test_gpus_are_taken_in_turn(monkeypatch):
    monkeypatch.setattr(steps.os, "sched_getaffinity", lambda _: range(12))
    where = steps.places(4, ["0", "1"])
    assert [place.gpu for place in where] == ["0", "1", "0", "1"]
    assert where[0].environment()["OMP_NUM_THREADS"] == "3"
    assert where[1].environment()["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.fixture
def data(tmp_path) -> Path:
    """Two judged folders of two documents, of which training knows the first, and Debian pairs."""
    for folder in pool.JUDGED.values():
        (tmp_path / folder / "qrels").mkdir(parents=True)
        texts = {"d1": "one two three four five six seven eight nine ten", "d2": "never seen"}
        for name, entries in (("corpus", texts), ("queries", {"q1": f"ask {folder}"})):
            lines = [json.dumps({"_id": key, "text": text}) for key, text in entries.items()]
            (tmp_path / folder / f"{name}.jsonl").write_text("\n".join(lines))
        (tmp_path / folder / "qrels/train.tsv").write_text("q1\td1\t1\n")
    (tmp_path / "debian").mkdir()
    pair = {"query": "a game", "positive": "It is a game of many long and rare words indeed."}
    for name in pool.DEBIAN:
        (tmp_path / f"debian/{name}.jsonl").write_text(json.dumps(pair) + "\n")
    return tmp_path


def make_pool(data: Path, monkeypatch, *words: str) -> dict[str, list[dict[str, str]]]:
    output = data / "pool"
    given = ["pool.py", "--data", str(data), "--output", str(output), *words]
    monkeypatch.setattr(sys, "argv", given)
    pool.main()
    files = sorted(output.iterdir())
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in files}


def test_a_pool_has_what_training_knows_and_crops_of_it(data, monkeypatch):
    made = make_pool(data, monkeypatch, "--mined", "4")
    sources = ["squad", "acl", *pool.DEBIAN, "crops"]
    assert set(made) == {"corpus", "queries", "to_mine", *sources}
    assert made["to_mine"] == [pair for name in sources for pair in made[name][:4]]
    ids = [document["_id"] for document in made["corpus"]]
    assert ids == ["squad-d1", "acl-d1", *(f"{name}-d0" for name in pool.DEBIAN)]
    assert made["acl"] == [{"query_id": "acl-q1", "positive_id": "acl-d1"}]
    texts = {each["_id"]: each["text"] for each in made["corpus"] + made["queries"]}
    assert texts["acl-q1"] == "ask acl_title_abstract"
    assert len(made["crops"]) == 2 * len(ids)
    for pair in made["crops"]:
        words = texts[pair["query_id"]].split()
        assert len(words) > 1
        assert {word.strip(".") for word in words} <= set(
            texts[pair["positive_id"]].replace(".", "").split()
        )


def test_a_study_without_the_pairs_of_debian_begins_nothing(tmp_path, monkeypatch):
    """Its recipes would be others, under the same names."""
    for folder in (*pool.JUDGED.values(), *zero_shot.TARGETS):
        (tmp_path / folder).mkdir()
    began: list[list[Step]] = []
    monkeypatch.setattr(
        study, "Runner", lambda steps, *_: SimpleNamespace(run=lambda: began.append(steps))
    )
    words = ["zero_shot.py", "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--only"]
    monkeypatch.setattr(sys, "argv", [*words, "splade-crops"])
    with pytest.raises(SystemExit, match=f"{tmp_path} has no debian"):
        study.main()
    assert not began
    (tmp_path / "debian").mkdir()
    study.main()
    monkeypatch.setattr(sys, "argv", [*words, "kinds-*"])  # which learns from two sets alone
    (tmp_path / "debian").rmdir()
    study.main()
    assert len(began) == 2


@pytest.fixture
def ask(data, monkeypatch):
    """Calls the study with these words; what it would run, and what it says."""
    for folder in (*pool.JUDGED.values(), *zero_shot.TARGETS):
        (data / folder).mkdir(exist_ok=True)
    began: list[Step] = []
    runner = lambda steps, *_: SimpleNamespace(run=lambda: began.extend(steps))  # noqa: E731
    monkeypatch.setattr(study, "Runner", runner)

    def call(*words: str) -> list[Step]:
        began.clear()
        given = ["--data", str(data), "--output", str(data / "out"), "--only", "splade-base"]
        monkeypatch.setattr(sys, "argv", ["zero_shot.py", *given, *words])
        study.main()
        return [*began]

    return call


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--", "steps=20"), "splade-base"),
        (("--pool", "--limit 100"), "pool"),
        (("--adapt", "--steps 5"), "adapt"),
    ],
)
def test_a_study_does_not_count_the_steps_of_a_trial(ask, tmp_path, words, name, capsys):
    """Also where what was asked for has the same words and was built on what has not."""
    trial = ("--results", str(tmp_path / "results"), *words)
    for step in ask(*trial):
        step.keep_words()
        step.done.parent.mkdir(parents=True, exist_ok=True)
        step.done.write_text(json.dumps({"tasks": [{}] * step.tasks}))
    with pytest.raises(SystemExit, match=rf"made otherwise than {name} is now, with .*--output"):
        ask()
    ask("--list", "--only", name)
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: done with ") and words[-1].split()[-1] in said
    assert [step.name for step in ask(*trial)] == ["splade-base"]


@pytest.mark.parametrize(
    "words",
    [("--", "steps=20"), ("--adapt", "--steps 5"), ("--pool", "--limit 9"), ("--negatives", "1")],
)
def test_figures_of_a_trial_stay_out_of_the_results(ask, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        ask(*words)
    assert "in results/: name a folder with --results" in capsys.readouterr().err
    assert ask("--results", str(tmp_path / "results"), *words)
    ask("--list", *words)


def test_a_pool_of_collections_has_all_their_documents_and_no_queries(data, monkeypatch):
    made = make_pool(data, monkeypatch, "--collections", "squad")
    assert set(made) == {"corpus", "crops", "queries", "to_mine"}
    assert [document["_id"] for document in made["corpus"]] == ["squad-d1", "squad-d2"]
    assert not any(query["text"] == "ask squad" for query in made["queries"])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> argparse.Namespace:
    return argparse.Namespace(
        data=tmp_path_factory.mktemp("data"), output=Path("out"), adapt=["--steps", "1"], pool=[],
        seeds=2, negatives=3, overrides=["steps=20"],
    )  # fmt: skip


def compose(step: Step):
    cfg = composed(*(word for word in step.words[1:] if not word.startswith("hydra.")))
    check(cfg, world_size=1)
    return cfg


@pytest.mark.slow
def test_every_training_of_every_kind_composes(arguments):
    trainings = [step for step in kinds.kinds(arguments) if step.words[0] == "train.py"]
    assert len(trainings) == 3 * len(kinds.SYSTEMS) + 1  # one with a half residual
    for step in trainings:
        cfg = compose(step)
        assert cfg.steps == 20 and cfg.num_negatives == (0 if "pairs" in step.name else 3)


@pytest.mark.slow
def test_every_recipe_composes(arguments):
    for kind, recipes in ingredients.RECIPES.items():
        for name in recipes:
            cfg = compose(zero_shot.training(arguments, kind, name, 0))
            assert cfg.steps == 20 and set(cfg.evaluation.test) >= {"squad_dev", "cranfield"}


def test_a_recipe_is_what_its_ingredients_say(arguments):
    step = zero_shot.training(arguments, "joint", "best-target", 1)
    cfg = compose(step)
    assert (cfg.seed, cfg.num_negatives, cfg.optimizer.lr) == (1, 7, 5e-5)
    assert cfg.backbone.name == "out/minilm-frozen"
    assert set(cfg.data.sources) == {"squad", "acl", "crops", *pool.DEBIAN, "target"}
    target = cfg.data.sources.target
    assert target.files == [
        f"out/scored/target-{miner}/crops.jsonl" for miner in ("bm25", "parent")
    ]
    assert target.teachers.weights == [2, 1, 0]
    for half in (cfg.loss.sparse, cfg.loss.tokens):
        assert half.weights.infonce == 0.2
        assert half.losses.kl_divergence.teacher_temperature == 0.1
    assert {"adapt-frozen", "sort-target-parent"} <= set(step.needs)
    plain = zero_shot.training(arguments, "splade", "base", 0)
    assert set(compose(plain).data.sources) == {"squad", "acl"} and set(plain.needs) == {
        "adapt",
        "pool",
    }


# What a study has of its own: its data, which model is kept, where it lies, how it is logged.
OWN = {
    "study", "data", "data_dir", "evaluation", "micro_batch", "log_every", "checkpoint_every",
    "num_workers", "examples",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("colbert", "best-whole"),
        ("splade", "best-whole-long"),
        ("joint", "best-whole-long"),
        ("inference-free", "whole-distilled-warmer"),
    ],
)
def test_an_experiment_for_own_data_is_the_recipe_of_the_study(arguments, kind, name):
    alone = argparse.Namespace(**vars(arguments) | {"overrides": []})
    step = zero_shot.training(alone, kind, name, 0)
    files = ("backbone.name=", "query_encoder.weights=")
    start = [word for word in step.words if word.startswith(files)]
    cfg = composed(f"experiment={kind.replace('-', '_')}_from_dense", *start)
    recipe = compose(step)
    of_both = [{key: each[key] for key in each if key not in OWN} for each in (cfg, recipe)]
    assert of_both[0] == of_both[1]
    assert cfg.data.teachers.weights == recipe.data.sources.squad.teachers.weights[:2]
    assert recipe.data.sources.squad.teachers.weights[2] == 0
    other = compose(zero_shot.training(alone, kind, "best", 0))
    assert {key for key in other if key not in OWN and other[key] != cfg[key]} >= {"query_length"}


def test_a_text_that_gave_no_pair_has_no_query_of_another():
    short, long = "b c d e", "a b c d e f g h"
    pairs = [{"query": short, "positive": each} for each in ("a f g h", long)]
    for pair in pairs:
        assert [*pool.placed([pair], [short, long])] == [(short, 1)]


def test_mined_examples_are_sorted_by_the_source_of_their_query(tmp_path, monkeypatch):
    names = ("squad-q1", "crops-spans-acl-7", "squad-q2")
    lines = [json.dumps({"query_id": name, "negative_ids": []}) + "\n" for name in names]
    (tmp_path / "mined.jsonl").write_text("".join(lines))
    given = ["by_source.py", str(tmp_path / "mined.jsonl"), "--output", str(tmp_path / "sorted")]
    monkeypatch.setattr(sys, "argv", given)
    by_source.main()
    files = {file.name: file.read_text() for file in (tmp_path / "sorted").iterdir()}
    assert files == {"squad.jsonl": lines[0] + lines[2], "crops.jsonl": lines[1]}


def test_every_step_comes_after_those_it_needs_are_known(arguments):
    listed = [*zero_shot.zero_shot(arguments), *kinds.kinds(arguments)]
    names = [step.name for step in listed]
    assert len(set(names)) == len(names)
    assert all(need in names for step in listed for need in step.needs)
    assert len({step.done for step in listed}) == len(names)
