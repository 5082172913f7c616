"""``evaluate.py`` refuses what it would ignore, before any task is read, and reports tasks once."""

import json
import logging
import runpy
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from sparton.cli.evaluation import _echoes_held
from sparton.datasets.collection import beir_folder
from sparton.evaluation import evaluate_encoder, load_retriever
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertHead
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.retrieval.indexes.divided import DividedIndex
from sparton.training.distributed import World
from sparton.training.outcome import ECHO
from tests.evaluation.problems import DOCUMENTS, make_task, write_beir
from tests.test_evaluation import ROOT, refusal

HEADS = {
    "splade": EagerHead,
    "colbert": lambda: ColbertHead(16),
    "any length": lambda: ColbertHead(16, normalize=False),
}
RERANK = ["encoder.search=rerank", "encoder.rerank_depth=2", "metrics=[recall@2]"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, make in HEADS.items():
        backbone = tiny(DOCUMENTS.values(), hidden_size=32, layers=1, max_length=32)
        encoder = build_encoder(backbone, make())
        save_encoder(encoder, folder / name, query_length=8, document_length=12)
    return {name: f"model={folder / name}" for name in HEADS} | {"bm25": "model=bm25"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluated(monkeypatch, *arguments: str) -> dict:
    """What the script, run in this process on ``toy``, writes."""
    task = ["evaluation=beir_folder", "evaluation.path=toy"]
    task = [] if any(each.startswith("evaluation=") for each in arguments) else task
    shutil.rmtree("out", ignore_errors=True)
    command = ["evaluate.py", "device=cpu", *task, "output=out", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    return json.loads(Path("out/results.json").read_text())["tasks"][0]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("bm25", ["document_length=40"], "model=bm25 is no encoder and ignores document_length=40"),
        ("bm25", ["width=4"], "model=bm25 is no encoder and ignores width=4: leave that out"),
        (
            "splade",
            ["width=4"],
            "width=4 narrows the token vectors of a ColbertEncoder, and this is",
        ),
        ("colbert", ["width=99"], "the token vectors of this model work with the widths 1 to 16"),
        ("bm25", ["query_length=4"], "model=bm25 is no encoder and ignores query_length=4: leave"),
        ("bm25", ["bm25.k1=-1"], "BM25 needs numbers k1 >= 0"),
        ("bm25", ["bm25.k1=word"], "bm25.k1=word: must be a number"),
        ("bm25", ["bm25.k=50"], "recall@100 looks deeper than the bm25.k=50 documents"),
        ("bm25", ["bm25.k=0"], "bm25.k=0: must be a whole number from 1 on"),
        ("bm25", ["device=gpu"], "device=gpu cannot be used"),
        ("splade", ["encoder.k=50"], "recall@100 looks deeper than the encoder.k=50 documents"),
        ("splade", ["encoder.precision=fp4"], "encoder.precision=fp4 must be fp32"),
        ("splade", ["encoder.precision=fp8"], "precision=fp8 needs a CUDA GPU of compute"),
        ("splade", ["encoder.search=maxsim"], "which SpladeEncoder does not give"),
        ("splade", ["bm25.k1=1.2"], "search=sparse with this model takes no BM25 and ignores bm25"),
        ("colbert", ["bm25.b=0.1"], "search=maxsim with this model takes no BM25 and ignores bm25"),
        ("colbert", [*RERANK, "bm25.k=9"], "bm25.k1 and bm25.b, and ignores bm25.k=9: leave that"),
        (
            "colbert",
            [*RERANK, "bm25.b=2"],
            "BM25 needs numbers k1 >= 0 and 0 <= b <= 1, got k1=0.9, b=2",
        ),
        ("colbert", ["encoder.search=rerank", "encoder.rerank_depth=9"], "the rerank_depth=9 doc"),
        ("colbert", ["encoder.max_query_terms=9"], "encoder.max_query_terms=9 keeps the largest"),
        ("colbert", ["index=compressed", "index.nbits=3"], "nbits=3 must be 1, 2, 4 or 8"),
        ("colbert", ["index=compressed", "index.probe=3"], "did you mean index.probes=3?"),
        ("splade", ["index=compressed"], "which search=sparse does not compare with SpladeEncoder"),
        ("splade", ["index=compressed"], "needs token vectors"),
        (
            "any length",
            ["index=compressed"],
            "of length 1, which ColbertEncoder with head.normalize=false does not give: set index=",
        ),
        ("splade", ["encoder.pool_factor=2"], "of SpladeEncoder there are sparse vectors alone"),
        ("colbert", ["encoder.pool_factor=0.5"], "pool_factor=0.5 must be at least 1"),
        ("splade", ["index=compressed"], ": set index=exact"),
        (
            "colbert",
            [*RERANK, "encoder.max_document_terms=9"],
            "no part in search=rerank with this encoder: leave it out",
        ),
    ],
)
def test_settings_are_refused_before_any_task_is_read(
    models, monkeypatch, model, arguments, message
):
    said = refusal(monkeypatch, models[model], "evaluation=in_domain", *arguments)
    assert said.startswith("evaluate.py: ")
    assert message in said and "\n" not in said
    assert not list(Path().iterdir())


def test_a_split_that_the_files_lack_is_refused(models, monkeypatch):
    write_beir(Path("toy"))
    toy = ["evaluation=beir_folder", "evaluation.path=toy"]
    said = refusal(monkeypatch, models["bm25"], *toy, "split=dev")
    assert "split=dev has no judgments in this evaluation: try split=test" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize("override", ["hydra.run.dir=there", "++hydra.sweep.dir=there"])
def test_a_folder_that_nothing_is_written_into_is_refused(models, monkeypatch, override):
    said = refusal(monkeypatch, models["bm25"], "evaluation=quickstart", override)
    assert f"writes to output=FOLDER and ignores {override}: leave that out" in said
    assert not list(Path().iterdir())


def test_results_of_other_settings_are_not_lost(models, monkeypatch):
    write_beir(Path("toy"))
    found = evaluated(monkeypatch, "model=bm25", "bm25.k1=1")
    kept = Path("out/results.json").read_bytes()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    said = refusal(
        monkeypatch, models["bm25"], "evaluation=beir_folder", "evaluation.path=toy", "output=out"
    )
    assert "output=out holds the results of other settings (bm25.k1=1): name another fold" in said
    assert Path("out/results.json").read_bytes() == kept
    again = evaluated(monkeypatch, "model=bm25", "bm25.k1=1")
    assert again["metrics"] == found["metrics"]


def test_the_first_stage_of_rerank_takes_the_settings_of_bm25(models, monkeypatch):
    write_beir(Path("toy"))
    retriever = load_retriever(models["colbert"].removeprefix("model="))
    options = {"search": "rerank", "rerank_depth": 2, "metrics": ["recall@2"], "progress": False}
    plain = evaluate_encoder(*retriever, make_task(), **options)
    other = evaluate_encoder(*retriever, make_task(), **options, k1=0.0)
    assert plain.metrics != other.metrics
    for arguments, expected in (([], plain), (["bm25.k1=0"], other)):
        found = evaluated(monkeypatch, models["colbert"], *RERANK, *arguments)
        assert found["metrics"] == pytest.approx(expected.metrics)


@pytest.mark.quick(1)
@pytest.mark.parametrize("search", [["metrics=[recall@2]"], RERANK])
def test_a_compressed_index_is_searched_in_the_place_of_the_exact_one(models, monkeypatch, search):
    """In its stages, too; the bytes of it are told."""
    write_beir(Path("toy"))
    exact = evaluated(monkeypatch, models["colbert"], *search)
    sizes = []
    for setting in ("index.nbits=8", "index.nbits=1", "index.staged=true"):
        found = evaluated(monkeypatch, models["colbert"], *search, "index=compressed", setting)
        sizes.append(found["speed"]["index_bytes"])
        assert found["search"] == exact["search"] and found["metrics"].keys() == {*exact["metrics"]}
    assert sizes[1] < sizes[0] < sizes[2] + sizes[0] and found["metrics"]["recall@2"] > 0


def test_fewer_and_narrower_vectors_make_a_smaller_index(models, monkeypatch):
    write_beir(Path("toy"))
    found = [
        evaluated(monkeypatch, models["colbert"], *arguments)
        for arguments in ([], ["width=8"], ["encoder.pool_factor=2"])
    ]
    sizes = [each["speed"]["index_bytes"] for each in found]
    assert sizes[0] > max(sizes[1:]) and found[2]["document_vectors"] < found[1]["document_vectors"]


@pytest.mark.parametrize(
    ("error", "ranks", "waits"),
    [(RuntimeError, 2, [ECHO]), (RuntimeError, 1, []), (ValueError, 2, [])],
)
def test_a_rank_waits_to_be_ended_where_its_error_may_be_an_echo(monkeypatch, error, ranks, waits):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(error), _echoes_held(World(0, ranks, torch.device("cpu"))):
        raise error("Connection closed by peer")
    assert waited == waits


@pytest.mark.parametrize("index", ["exact", "compressed"])
def test_exhaustive_search_is_shared_with_the_gpus_of_the_other_ranks(models, monkeypatch, index):
    write_beir(Path("toy"))
    words, made = [models["colbert"], f"index={index}"], []
    alone = evaluated(monkeypatch, *words)
    monkeypatch.setattr("sparton.cli.devices.neighbours", lambda world: [world.device] * 2)

    class Watched(DividedIndex):
        def __init__(self, documents, devices, *rest):
            made.append(devices)
            super().__init__(documents, devices, *rest)

    monkeypatch.setattr("sparton.retrieval.indexes.exact.DividedIndex", Watched)
    shared = evaluated(monkeypatch, *words)
    assert made == [[torch.device("cpu")] * 3] * (index == "exact")
    assert shared["metrics"] == alone["metrics"]


def test_several_folders_are_evaluated_by_their_names(monkeypatch):
    for name in ("toy", "other"):
        write_beir(Path(name))
    evaluated(monkeypatch, "model=bm25", "evaluation=folders", "evaluation.paths=[toy,other]")
    found = json.loads(Path("out/results.json").read_text())["tasks"]
    assert [(each["name"], each["run"]) for each in found] == [
        ("toy", "runs/toy.trec"),
        ("other", "runs/other.trec"),
    ]


def test_tasks_are_reported_once(monkeypatch, capsys, caplog):
    write_beir(Path("toy"))
    evaluated(monkeypatch, "model=bm25")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("toy/test")]
    assert said == [
        "toy/test: 1 of 6 documents are empty; kept",
        "toy/test: 6 documents, 3 judged queries",
    ]
    with caplog.at_level("INFO"):
        logging.getLogger().addHandler(caplog.handler)  # which Hydra has replaced
        beir_folder("toy")
    assert caplog.messages == said, "whoever reads it later is told again"


def test_results_of_another_model_in_the_same_place_are_not_lost(models, monkeypatch):
    """A link, as runs/latest is, is another model after the next training."""
    write_beir(Path("toy"))
    link = Path("latest")
    link.symlink_to(models["splade"].removeprefix("model="))
    evaluated(monkeypatch, "model=latest")
    kept = Path("out/results.json").read_bytes()
    link.unlink()
    link.symlink_to(models["any length"].removeprefix("model="))
    task = ["evaluation=beir_folder", "evaluation.path=toy"]
    said = refusal(monkeypatch, "model=latest", *task, "output=out")
    assert "output=out holds the results of" in said and "splade, and this is" in said
    assert Path("out/results.json").read_bytes() == kept
