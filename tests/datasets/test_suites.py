"""Suites: which collections, from where, and read how."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ir_datasets
import pytest
from omegaconf import OmegaConf

from sparton.datasets.suites import suite
from sparton.types import TextForm
from tests.composing import CONFIGS, composed
from tests.datasets.test_downloads import ASKED, CORPUS, JUDGED, registered, write_hub  # noqa: F401
from tests.evaluation.problems import QRELS, write_beir

Rules = dict[str, Any]


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    write_beir(tmp_path / "a")
    write_beir(tmp_path / "elsewhere")
    return {
        "each": {"folders": f"{tmp_path}/{{name}}", "document_length": 256},
        "collections": {
            "a": None,
            "b": {
                "folders": {"path": str(tmp_path / "elsewhere"), "split": "test"},
                "query_length": 512,
                "query_prompt": "argue: ",
            },
        },
    }


def test_each_collection_is_read_by_its_own_rules(rules: Rules) -> None:
    tasks = {name: build() for name, build in suite(**rules, source="folders").items()}
    assert [(name, task.name) for name, task in tasks.items()] == [("a", "a"), ("b", "b")]
    assert tasks["a"].form == TextForm(document_length=256)
    assert tasks["b"].form == TextForm(512, 256, "argue: ", None)
    for task in tasks.values():
        assert task.exclude_self and task.qrels == QRELS and not task.excluded
    other = suite(**rules, source="folders", names=["b"], exclude_self=False)
    assert list(other) == ["b"] and not other["b"]().exclude_self
    assert suite(**rules, source="folders", names=[]) == {}


def test_one_switch_says_where_all_are_read_from(rules: Rules, registered: str) -> None:  # noqa: F811
    path = rules["each"]["folders"].replace("{name}", "hub")
    names = {"default": JUDGED, "corpus": CORPUS, "queries": ASKED}
    write_hub(Path(path), {name: {"test": rows} for name, rows in names.items()})
    where, collection = registered.split("/")
    rules["each"] |= {"ir_datasets": f"{where}/{{name}}", "hub": path}
    rules["collections"] |= {collection: {"hub": {"split": "test"}}}
    for source in ("ir_datasets", "hub"):
        task = suite(**rules, source=source, names=[collection])[collection]()
        assert (task.name, task.form) == (collection, TextForm(document_length=256))
        assert task.qrels == {"q1": {"d1": 2, "d2": 0}}


def test_documents_that_a_judgment_excludes(rules: Rules, tmp_path: Path) -> None:
    with (tmp_path / "a/qrels/test.tsv").open("a") as file:
        file.write("q0\town\t-100\nq0\td4\t-100\n")
    task = suite(**rules, source="folders", names=["a"], excluded_grade=-100)["a"]()
    assert task.qrels == QRELS
    assert task.excluded == {"q0": {"own", "d4"}, "q1": set(), "own": set()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "disk"}, "source='disk' must be ir_datasets, folders or hub"),
        ({"source": "hub"}, "source=hub has no a: try source=folders"),
        ({"names": ["c"]}, r"names=\['c'\]: there is no c, but a, b"),
        ({"each": {"folder": "x"}}, "each.folder=x: there is no folder, but ir_datasets, folders"),
        (
            {"each": {"folders": {"paht": "x"}}},
            "each.folders.paht: folders takes no paht, but ",
        ),
        (
            {"collections": {"a": {"folders": {"exclude_self": False}}}},
            "a.folders.exclude_self: folders takes no exclude_self, but path, split, qrels$",
        ),
        ({"each": {"folders": {"split": 7}}}, "each.folders.split=7: must be a text"),
        (
            {"collections": {"a": {"query_length": 0}}},
            "a.query_length=0: must be a number of toke",
        ),
        ({"collections": {"a": {"query_length": True}}}, "a.query_length=True: must be a number"),
        ({"collections": {"a": {"query_prompt": 3}}}, "a.query_prompt=3: must be a text"),
    ],
)
def test_what_cannot_be_meant_is_refused(rules: Rules, change: Rules, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        suite(**{"source": "folders", **rules, **change})


SUITES = sorted(path.stem for path in (CONFIGS / "suite").glob("*.yaml"))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Ids that are asked of ir_datasets, whose registry must have each; nothing is downloaded."""
    asked: set[str] = set()

    def read(dataset_id: str, **_: Any) -> Any:
        dataset = ir_datasets.load(dataset_id)
        assert dataset.has_docs() and dataset.has_queries() and dataset.has_qrels()
        asked.add(dataset_id)
        return ORDINARY

    monkeypatch.setitem(suite.__globals__["READERS"], "ir_datasets", read)
    yield asked


ORDINARY = suite.__globals__["RetrievalTask"]("x", None, None, {})


@pytest.mark.parametrize("name", SUITES)
def test_ir_datasets_knows_all_collections_of_our_suites(name: str, known: set[str]) -> None:
    cfg = composed("evaluation=none", f"+suite@evaluation.test={name}", "+evaluation.source=x")
    node = OmegaConf.to_container(cfg.evaluation.test, resolve=False)
    assert isinstance(node, dict)
    builders = suite(node["collections"], "ir_datasets", each=node["each"])
    for build in builders.values():
        build()
    assert (
        len(known)
        == len(builders)
        == {"beir": 13, "nanobeir": 13, "miracl": 18, "bright": 12}[name]
    )


def test_dev_is_apart_from_the_collections_that_are_tested() -> None:
    for name in ("small_beir", "beir13", "nanobeir", "miracl", "bright"):
        evaluation = composed(f"evaluation={name}").evaluation
        tested = evaluation.test.names or list(evaluation.test.collections)
        dev = evaluation.dev.get("names") or list(evaluation.dev.get("collections", ()))
        assert not {*tested} & {*dev}
        assert dev or evaluation.holdout.share > 0


def test_the_protocol_of_small_beir() -> None:
    evaluation = composed("evaluation=small_beir").evaluation
    assert evaluation.test.exclude_self
    builders = suite(
        evaluation.test.collections,
        "folders",
        each=OmegaConf.to_container(evaluation.test.each, resolve=True),
        names=evaluation.test.names,
    )
    forms = {name: build.args[1] for name, build in builders.items()}  # type: ignore[attr-defined]
    assert forms.pop("arguana") == TextForm(query_length=512, document_length=256)
    assert list(forms) == ["fiqa", "nfcorpus", "scidocs", "scifact"]
    assert {*forms.values()} == {TextForm(document_length=256)}
