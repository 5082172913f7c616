"""Which tasks a configuration names, in the words of a command line."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.utils import instantiate
from omegaconf import MissingMandatoryValue

from sparton.cli.errors import explain
from sparton.cli.tasks import (
    are_ours,
    build_first,
    dev_identity,
    has_dev_tasks,
    hold_out_dev,
    task_builders,
)
from sparton.datasets.collection import beir_folder
from sparton.datasets.downloads import fetching_nothing, hub_task, ir_datasets_task
from sparton.datasets.mixture import Mixture
from sparton.datasets.quickstart import pairs
from sparton.types import RetrievalTask, TextCollection, TextForm
from tests.composing import composed
from tests.datasets.test_downloads import registered  # noqa: F401, a fixture
from tests.evaluation.problems import QRELS, write_beir


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """``a`` has a dev split, ``b`` has none."""
    paths = [write_beir(tmp_path / name) for name in ("a", "b")]
    shutil.copy(paths[0] / "qrels/test.tsv", paths[0] / "qrels/dev.tsv")
    return paths


def tasks(*overrides: str) -> dict[str, list[str]]:
    """By split, the names of the tasks that are built without a fault."""
    cfg = composed(*overrides, name="evaluate")
    found = {split: task_builders(cfg, split) for split in ("dev", "test")}
    for builders in found.values():
        for build in builders.values():
            assert build().qrels
    return {split: list(builders) for split, builders in found.items()}


def test_folders(folders):
    a, b = folders
    both = {"dev": ["a"], "test": ["a", "b"]}
    assert tasks("evaluation=folders", f"evaluation.paths=[{a},{b}]") == both
    assert tasks("evaluation=beir_folder", f"evaluation.path={b}") == {"dev": [], "test": ["b"]}


def test_trec_files(folders):
    a, _ = folders
    (a / "covid.txt").write_text("q0 0 d0 1\n")
    names = {"documents": "corpus.jsonl", "queries": "queries.jsonl", "qrels": "covid.txt"}
    given = [f"evaluation.{name}={a / file}" for name, file in names.items()]
    assert tasks("evaluation=trec", *given) == {"dev": [], "test": ["covid"]}
    dev = f"evaluation.dev_qrels={a / 'qrels/dev.tsv'}"
    assert tasks("evaluation=trec", *given, dev) == {"dev": ["dev"], "test": ["covid"]}


def test_ids_of_ir_datasets(registered):  # noqa: F811
    one = ["evaluation=ir_datasets", f"evaluation.dataset={registered}"]
    assert tasks(*one) == {"dev": [], "test": [registered]}
    assert tasks(*one, f"evaluation.dev_dataset={registered}")["dev"] == [registered]
    several = f"evaluation.datasets=[{registered}]"
    assert tasks("evaluation=ir_datasets", several)["test"] == [registered]


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ("folders", "evaluation.paths has no value: set evaluation.paths=..., see the files in c"),
        ("beir_folder", "evaluation.path has no value: set evaluation.path=..."),
        ("trec", "evaluation.documents has no value: set evaluation.documents=..."),
        ("ir_datasets", "name collections of ir_datasets, such as beir/scifact/test"),
    ],
)
def test_an_evaluation_of_nothing_says_what_to_set(evaluation, message):
    with pytest.raises(Exception) as caught:
        task_builders(composed(f"evaluation={evaluation}", name="evaluate"), "test")
    assert message in explain(caught.value)
    assert isinstance(caught.value, MissingMandatoryValue) == ("no value" in message)


def test_tasks_of_one_file_are_refused_before_they_are_built():
    cfg = composed("evaluation=none", "+evaluation.test={nq/dev: {}, nq-dev: {}}")
    with pytest.raises(ValueError, match=r"nq/dev and nq-dev .* runs/nq-dev\.trec"):
        task_builders(cfg, "test")


def test_a_training_holds_a_share_out_where_its_evaluation_has_no_dev_split(folders):
    a, b = folders
    for path in folders:
        shutil.copy(path / "qrels/test.tsv", path / "qrels/train.tsv")
        (path / "corpus.jsonl").write_text((path / "corpus.jsonl").read_text().replace('""', '"x"'))
    pairs = sum(grade >= 1 for grades in QRELS.values() for grade in grades.values())
    for path, dev in ((a, "a"), (b, "holdout")):
        data = ["data=beir_folder", f"data.sources.pairs.path={path}"]
        cfg = composed(*data, "evaluation=beir_folder", f"evaluation.path={path}")
        rest, builders = hold_out_dev(cfg, instantiate(cfg.data))
        assert (list(builders), has_dev_tasks(cfg)) == ([dev], True)
        assert (len(rest) == pairs) == (dev == "a")
    cfg = composed(*data, "evaluation=none")
    assert hold_out_dev(cfg, instantiate(cfg.data))[1] == {} and not has_dev_tasks(cfg)


def test_all_ranks_have_the_digest_of_the_tasks_that_one_of_them_reads(folders):
    def on_both(tasks: list[RetrievalTask]) -> dict[str, str]:
        """What two ranks find; a rank is told the larger of both numbers."""
        numbers: list[int] = []
        main = SimpleNamespace(largest=lambda number: numbers.append(number) or number)
        of_main = dev_identity(tasks, main)
        other = SimpleNamespace(largest=lambda number: max([number, *numbers]))
        assert dev_identity([], other) == of_main
        return of_main

    task = beir_folder(str(folders[0]))
    same, found = on_both([beir_folder(str(folders[1]))]), on_both([task])
    assert found == same != {"evaluation.dev.content": "0"} == on_both([])
    ids, texts = task.documents
    others = [
        task._replace(documents=TextCollection(ids, [*texts[:-1], "another text"])),
        task._replace(queries=TextCollection(task.queries.ids[:-1], task.queries.texts[:-1])),
        task._replace(qrels={key: dict.fromkeys(grades, 1) for key, grades in QRELS.items()}),
        task._replace(excluded={task.queries.ids[0]: frozenset(ids[:1])}),
        task._replace(exclude_self=True),
        task._replace(form=TextForm(query_length=3)),
    ]
    assert len({str(on_both([each])) for each in [task, *others]}) == 1 + len(others)


def test_an_evaluation_of_ones_own_names_the_settings_of_its_holdout_that_it_changes():
    cfg = composed("evaluation=none", "+evaluation.holdout={most: 20}")
    rest, builders = hold_out_dev(cfg, Mixture({"quickstart": pairs()}))
    assert len(builders["holdout"]().queries.ids) == 20 and len(rest) == len(pairs()) - 20


def test_a_share_out_of_range_is_named_as_the_setting():
    cfg = composed("evaluation=holdout", "evaluation.holdout.share=0.7")
    with pytest.raises(ValueError) as caught:
        hold_out_dev(cfg, SimpleNamespace())
    assert explain(caught.value).startswith("evaluation.holdout.share=0.7 of the examples")


class Recorded:
    """One of two processes, which notes what happened up to the barrier."""

    def __init__(self, *, is_main: bool) -> None:
        self.is_main, self.before_barrier = is_main, None
        self.happened: list[str] = []

    def barrier(self) -> None:
        self.before_barrier = list(self.happened)

    def building(self, name: str, build=lambda: None):
        def noted() -> RetrievalTask:
            self.happened.append(name)
            return build()

        return noted


def test_other_processes_read_while_the_main_one_does():
    main, other = Recorded(is_main=True), Recorded(is_main=False)
    for world in (main, other):
        build_first([world.building("own")], [world.building("shared")], world, together=True)
    assert main.before_barrier == ["own", "shared"]
    assert other.before_barrier == ["shared"]
    alone = Recorded(is_main=False)
    build_first([], [alone.building("shared")], alone, together=False)
    assert alone.before_barrier == []


def test_what_is_wrong_the_main_process_tells_alone():
    def broken() -> RetrievalTask:
        raise ValueError("malformed")

    main, other = Recorded(is_main=True), Recorded(is_main=False)
    build_first([], [other.building("shared", broken)], other, together=True)
    assert other.before_barrier == ["shared"]
    with pytest.raises(ValueError, match="malformed"):
        build_first([], [main.building("shared", broken)], main, together=True)
    assert main.before_barrier is None


def test_other_processes_fetch_nothing(registered):  # noqa: F811
    fetched = []

    def fetch() -> RetrievalTask:
        fetched.append(ir_datasets_task(registered))
        return fetched[0]

    other = Recorded(is_main=False)
    build_first([], [other.building("shared", fetch)], other, together=True)
    assert (other.before_barrier, fetched) == (["shared"], [])
    assert fetch().qrels  # outside it is as ever
    with fetching_nothing():
        for ask in (lambda: hub_task("nobody/nothing"), lambda: ir_datasets_task(registered)):
            with pytest.raises(ConnectionError, match="another process does"):
                ask()


def test_of_tasks_of_users_nobody_knows_what_they_fetch(folders):
    own = composed("evaluation=beir_folder", f"evaluation.path={folders[0]}", name="evaluate")
    listed = composed("evaluation=zero_shot", "data_dir=data", name="evaluate")
    users = composed(
        "evaluation=zero_shot", "+evaluation.test.mine._target_=shop.tasks.build", name="evaluate"
    )
    assert are_ours(own, "test") and are_ours(own, "dev") and are_ours(listed, "test")
    assert not are_ours(users, "test") and are_ours(users, "dev")
