"""From texts to tables, with an encoder whose results are known; and ``evaluate.py`` as a user
calls it."""

import errno
import io
import json
import os
import re
import resource
import runpy
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from sparton.datasets.tokenization import PackedTokenizer
from sparton.evaluation import (
    evaluate_bm25,
    evaluate_encoder,
    explain,
    explain_match,
    load_retriever,
    mean_metrics,
    results_table,
    write_results,
    write_task_run,
)
from sparton.models.backbones import tiny
from sparton.models.folders import encoder_lengths, save_encoder
from sparton.models.heads import EagerHead, SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.pipelines.averaging import average_models
from sparton.retrieval.trec import read_run
from sparton.types import TextCollection
from tests.evaluation.problems import (
    DOCUMENTS,
    WORDS,
    LexicalEncoder,
    make_task,
    packed_words,
    rankings,
    write_beir,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tokenizer() -> PackedTokenizer:
    return packed_words()


def test_encoder_from_texts_to_metrics(tokenizer):
    result = evaluate_encoder(LexicalEncoder(), tokenizer, make_task(), progress=False)
    assert rankings(result) == {
        "q0": ["d0", "own", "d1"],
        "q1": ["d2"],
        "own": ["own", "d1", "d0"],
    }
    scores = {query: [score for _, score in found] for query, found in result.run.rankings()}
    assert scores == {"q0": [2.25, 1.25, 1.0], "q1": [1.0], "own": [2.25, 2.0, 1.25]}
    ndcg = ((2 + 1 / np.log2(4)) / (2 + 1 / np.log2(3)) + 1 + 1 / np.log2(3)) / 3
    assert result.metrics["ndcg@10"] == pytest.approx(ndcg, abs=1e-12)
    assert result.metrics["mrr@10"] == pytest.approx((1 + 1 + 1 / 2) / 3, abs=1e-12)
    assert result.metrics["recall@100"] == result.metrics["recall@1000"] == 1
    assert result.query_terms == pytest.approx((3 + 1 + 3) / 3)
    assert result.document_terms == pytest.approx((3 + 3 + 2 + 0 + 2 + 3) / 6)
    assert result.flops == pytest.approx(((3 + 2 + 2) + 1 + (2 + 3 + 3)) / 18)
    assert set(result.seconds) == {"documents", "queries", "index", "search"}
    assert min(result.seconds.values()) > 0


def test_terms_may_be_capped_on_each_side(tokenizer):
    encoder = SpladeEncoder(tiny(WORDS, hidden_size=16, layers=1), SpartonHead())
    with torch.no_grad():
        encoder.backbone.decoder.bias.add_(5)

    def terms(**caps):
        result = evaluate_encoder(encoder, tokenizer, make_task(), progress=False, **caps)
        return result.query_terms, result.document_terms

    everything = terms()
    assert min(everything) > 4
    assert terms(max_query_terms=2) == (2, everything[1])
    assert terms(max_document_terms=3) == (everything[0], 3)
    beyond = encoder.vocabulary_size + 1
    assert terms(max_query_terms=beyond, max_document_terms=10**9) == everything


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_a_bound_of_the_terms_is_a_positive_number(tokenizer, value):
    for side in ("query", "document"):
        with pytest.raises(ValueError, match=f"max_{side}_terms={value}: must be a whole number"):
            evaluate_encoder(
                LexicalEncoder(), tokenizer, make_task(), **{f"max_{side}_terms": value}
            )


def test_own_document_is_left_out_only_where_the_task_says_so(tokenizer):
    result = evaluate_encoder(
        LexicalEncoder(), tokenizer, make_task(exclude_self=True), progress=False
    )
    assert rankings(result) == {"q0": ["d0", "own", "d1"], "q1": ["d2"], "own": ["d1", "d0"]}
    assert result.metrics["mrr@10"] == 1


def test_bm25_on_the_same_task():
    result = evaluate_bm25(make_task(exclude_self=True))
    assert rankings(result)["q0"] == ["d0", "own"]
    assert rankings(result)["q1"] == ["d2"]
    assert rankings(result)["own"][0] in ("d0", "d1")
    assert result.metrics["recall@100"] == pytest.approx((1 / 2 + 1 + 1) / 3)
    assert result.query_terms == pytest.approx(5 / 3)


def test_depth_and_metrics_are_chosen_together(tokenizer):
    result = evaluate_encoder(
        LexicalEncoder(), tokenizer, make_task(), metrics=["mrr@2"], k=2, progress=False
    )
    assert result.run.rows.shape == (3, 2)
    assert list(result.metrics) == ["mrr@2"]
    for evaluate in (evaluate_bm25, lambda task, **k: evaluate_encoder(None, None, task, **k)):
        with pytest.raises(ValueError, match="recall@100 looks deeper than the k=10 "):
            evaluate(make_task(), k=10)
        with pytest.raises(ValueError, match="recall@100-l2 looks deeper than the k=10 "):
            evaluate(make_task(), k=10, metrics=["map", "recall@100-l2"])


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["mrr@10", "ndgc@10"], r"metrics=\['mrr@10', 'ndgc@10'\]: ndgc@10 is no metric: choose"),
        ([10], r"metrics=\[10\]: 10 is no metric"),
        ("ndcg@10", r"metrics=ndcg@10: must be a list of metrics"),
        ([], r"metrics=\[\]: must be a list of metrics"),
    ],
)
def test_metrics_that_do_not_exist_are_refused_before_anything_is_encoded(metrics, message):
    for evaluate in (evaluate_bm25, lambda task, **k: evaluate_encoder(None, None, task, **k)):
        with pytest.raises(ValueError, match=message):
            evaluate(make_task(), metrics=metrics)


@pytest.mark.parametrize("side", ["documents", "queries"])
def test_task_without_texts(tokenizer, side):
    task = make_task()._replace(**{side: TextCollection([], [])})
    with pytest.raises(ValueError, match=f"task toy has no {side}"):
        evaluate_encoder(LexicalEncoder(), tokenizer, task, progress=False)


def test_explain_decodes_a_text_into_weighted_terms(tokenizer):
    terms = explain(LexicalEncoder(), tokenizer, "dog crimson dog", side="document")
    assert terms == [("crimson", 1.0), ("dog", 1.0), ("red", 0.5)]
    assert explain(LexicalEncoder(), tokenizer, "red", side="query", k=1) == [("red", 1.0)]


@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_explanations_of_no_terms_are_refused(k, tokenizer):
    for asked in (explain, partial(explain_match, document="red")):
        with pytest.raises(ValueError, match=f"k={k} must be a whole number of at least 1"):
            asked(LexicalEncoder(), tokenizer, "red", k=k)


@pytest.fixture
def results(tokenizer):
    first = evaluate_encoder(LexicalEncoder(), tokenizer, make_task("a/b c"), progress=False)
    return [first, evaluate_bm25(make_task("other"))]


def test_means_weigh_tasks_equally(results):
    for metric, mean in mean_metrics(results).items():
        assert mean == pytest.approx(
            (results[0].metrics[metric] + results[1].metrics[metric]) / 2, abs=1e-12
        )
    assert mean_metrics(results)["recall@100"] < results[0].metrics["recall@100"]


def test_table_has_a_row_per_task_and_the_mean_and_fits_a_terminal(results):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(results_table(results, title="toy model"))
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert "…" not in "".join(lines)
    found, cost = [line for line in lines if line.strip().startswith("a/b c")]
    means = [line for line in lines if line.strip().startswith("mean")]
    for row, metrics in ((found, results[0].metrics), (means[0], mean_metrics(results))):
        for metric in ("ndcg@10", "mrr@10", "recall@100", "recall@1000"):
            assert f"{metrics[metric]:.4f}" in row
    speed = results[0].speed
    for figure in (f"{speed.documents_per_second:,.0f}", f"{speed.latency.p95:,.1f}"):
        assert figure in cost
    sizes = [each.speed.index_bytes / 1e6 for each in results]
    assert f"{sum(sizes) / 2:,.1f}" in means[1] and "docs/s" in "".join(lines)


def test_written_results_can_be_read_again(results, tmp_path):
    write_results(results, tmp_path / "new" / "folder", {"model": "toy"})
    folder = tmp_path / "new" / "folder"
    for result in results:
        write_task_run(result, folder)
    content = json.loads((folder / "results.json").read_text())
    assert content["model"] == "toy"
    assert content["mean"] == mean_metrics(results)
    assert [task["name"] for task in content["tasks"]] == ["a/b c", "other"]
    assert content["tasks"][0]["metrics"] == results[0].metrics
    for task, result in zip(content["tasks"], results, strict=True):
        again = dict(read_run(folder / task["run"]).rankings())
        assert again == {
            query: [(name, pytest.approx(score)) for name, score in found]
            for query, found in result.run.rankings()
        }


@pytest.fixture
def beir(tmp_path) -> Path:
    return write_beir(tmp_path / "toy")


@pytest.fixture
def model(tmp_path) -> Path:
    torch.manual_seed(0)
    backbone = tiny(DOCUMENTS.values(), hidden_size=32, layers=1, max_length=32)
    encoder = SpladeEncoder(backbone, EagerHead())
    save_encoder(encoder, tmp_path / "model", query_length=6, document_length=12)
    return tmp_path / "model"


def test_retriever_comes_with_its_lengths(model):
    encoder, tokenizer = load_retriever(model)
    assert (tokenizer.query_length, tokenizer.document_length) == (6, 12)
    _, tokenizer = load_retriever(model, 5, 20)
    assert (tokenizer.query_length, tokenizer.document_length) == (5, 20)
    with pytest.raises(ValueError, match="document_length=500"):
        load_retriever(model, document_length=500)
    assert encoder(tokenizer.queries(["red cat"])).shape == (1, encoder.vocabulary_size)


@pytest.mark.parametrize("said", [1024, int(1e30), 20])
def test_texts_are_cut_at_the_positions_of_a_model_whose_tokenizer_says_more(model, said):
    """As of most models on the hub, which say no other length."""
    for file in ("sparton.json", "sentence_bert_config.json"):
        (model / file).unlink()
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": said}))
    encoder, tokenizer = load_retriever(model)
    assert encoder.max_length == 32
    most = min(said, 32)
    assert (tokenizer.query_length, tokenizer.document_length) == (most, most)
    assert encoder(tokenizer.documents(["cat " * 500])).isfinite().all()
    average_models([model, model], model.parent / "mean")
    assert encoder_lengths(model.parent / "mean") == (most, most)
    with pytest.raises(ValueError, match="query_length=33 is more than the 32 positions"):
        load_retriever(model, query_length=33)


@pytest.mark.parametrize("name", ["no/such/folder", "/nowhere", "../nowhere"])
def test_missing_model_folder(name):
    with pytest.raises(FileNotFoundError, match=f"{name}: no such folder; give a folder"):
        load_retriever(name)


def test_the_folder_of_a_run_says_where_its_model_is(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(FileNotFoundError, match=f"its model is {tmp_path}/model"):
        load_retriever(tmp_path)
    for run in ("seed-1", "seed-0"):
        (tmp_path / "study" / run / "model").mkdir(parents=True)
    message = f"folder of runs: a model is {tmp_path}/study/seed-0/model, one of 2$"
    with pytest.raises(FileNotFoundError, match=message):
        load_retriever(tmp_path / "study")
    (tmp_path / "study/config.json").write_text("{}")  # a model, whatever lies below it
    with pytest.raises(ValueError, match="model_type"):
        load_retriever(tmp_path / "study")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="model_type"):
        load_retriever(tmp_path)


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), "device=cpu", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_script_evaluates_bm25(tmp_path, beir):
    task = (f"evaluation.path={beir}", "evaluation=beir_folder", "evaluation.exclude_self=true")
    done = run_script(tmp_path, "model=bm25", *task)
    assert done.returncode == 0, done.stderr
    (output,) = (tmp_path / "runs" / "evaluate").iterdir()
    content = json.loads((output / "results.json").read_text())
    expected = evaluate_bm25(make_task(exclude_self=True))
    assert content["mean"] == pytest.approx(expected.metrics)
    assert f"{expected.metrics['ndcg@10']:.4f}" in done.stdout
    assert content["config"]["model"] == "bm25"
    assert content["environment"]["packages"]["torch"] == version("torch")
    found = {q: [name for name, _ in each] for q, each in expected.run.rankings()}
    again = read_run(output / content["tasks"][0]["run"]).rankings()
    assert {query: [name for name, _ in each] for query, each in again} == found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "toy"]


@pytest.mark.slow
def test_script_evaluates_a_model_folder(tmp_path, beir, model):
    output = tmp_path / "out"
    done = run_script(
        tmp_path,
        f"model={model}",
        "evaluation=beir_folder",
        f"evaluation.path={beir}",
        f"output={output}",
    )
    assert done.returncode == 0, done.stderr
    task = json.loads((output / "results.json").read_text())["tasks"][0]
    encoder, tokenizer = load_retriever(model)
    expected = evaluate_encoder(encoder, tokenizer, make_task(), progress=False)
    assert task["metrics"] == pytest.approx(expected.metrics)
    assert task["document_terms"] == pytest.approx(expected.document_terms)
    assert "documents" in done.stderr, "progress is shown"


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path, beir, model, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums depend on it
    task = ("evaluation=beir_folder", f"evaluation.path={beir}")
    results = []
    for gpus in (1, 2):
        output = tmp_path / f"of_{gpus}"
        done = run_script(tmp_path, f"model={model}", *task, f"output={output}", f"gpus={gpus}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("written to") == 1
        (found,) = json.loads((output / "results.json").read_text())["tasks"]
        results.append((found["metrics"], found["flops"], (output / found["run"]).read_bytes()))
    assert results[0] == results[1]


@pytest.mark.slow
def test_what_all_processes_refuse_is_said_once(tmp_path, beir):
    arguments = ("evaluation=beir_folder", f"evaluation.path={beir}", "gpus=2")
    (tmp_path / "empty").mkdir()
    done = run_script(tmp_path, f"model={tmp_path}/empty", *arguments)
    assert done.returncode == 1
    assert done.stderr.count("evaluate.py: ") == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "model has no value: set model=..., see the first lines of the command's own file"),
        (("model=bm25", "evaluation=big_beir"), "evaluation has no option big_beir. Its options: "),
        (
            ("model=bm25", "evaluation=beir_folder"),
            "set evaluation.path=..., see the files in configs/evaluation",
        ),
        (("model=./nowhere", "evaluation=quickstart"), "./nowhere: no such folder"),
        (("model=bm25", "evaluation=in_domain"), "corpus.jsonl[.gz] does not exist"),
        (("model=./nowhere", "evaluation=in_domain"), "./nowhere: no such folder"),
        (("model=bm25", "evaluation=quickstart", "split=train"), "split=train has no tasks"),
        (("model=bm25", "evaluation=in_domain", "split=every"), "try dev or test"),
        (("model=bm25", "evaluation=none"), "evaluation: choose one with collections, such"),
        (
            ("model=./nowhere", "evaluation=quickstart", "encoder.max_query_terms=0"),
            "encoder.max_query_terms=0: must be a whole number",
        ),
        (
            ("model=./nowhere", "evaluation=in_domain", "encoder.max_document_terms=many"),
            "encoder.max_document_terms=many: must be a whole number",
        ),
        (
            ("model=bm25", "evaluation=in_domain", "metrics=[ndgc@10]"),
            "evaluate.py: metrics=['ndgc@10']: ndgc@10 is no metric: choose from hits,",
        ),
        (
            ("model=./nowhere", "evaluation=in_domain", "encoder.metrics=ndcg@10"),
            "encoder.metrics=ndcg@10: must be a list of metrics",
        ),
        (
            ("model=bm25", "evaluation=quickstart", "encoder.search=sparse"),
            "model=bm25 is no encoder and ignores encoder.search=sparse",
        ),
        (("model=bm25", "evaluation=quickstart", "device=gpu"), "device=gpu cannot be used"),
        (("model=bm25", "evaluation=quickstart", "gpus=2"), "is no encoder and ignores gpus=2"),
        (("model=./nowhere", "evaluation=quickstart", "gpus=0"), "gpus=0"),
        (("model=bm25", "evaluation=quickstart", "device=cuda:99"), "): try device=cpu"),
    ],
    ids=[
        "no_model",
        "evaluation",
        "no_path",
        "model",
        "data",
        "model_before_tasks",
        "split",
        "key_that_is_no_split",
        "no_tasks",
        "no_query_terms",
        "document_terms",
        "metric",
        "metrics",
        "settings_of_encoders",
        "device",
        "gpus_of_words",
        "no_gpus",
        "no_gpu",
    ],
)
def test_script_refuses_before_any_work(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(monkeypatch, *arguments)
    assert list(tmp_path.iterdir()) == []


def refusal(monkeypatch, *arguments: str) -> str:
    """What the script, run in this process, says when it gives up; no traceback is possible."""
    device = () if any(each.startswith("device=") for each in arguments) else ("device=cpu",)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *device, *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    assert stop.value.code not in (None, 0)
    return str(stop.value.code)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("bm25.k=50", "evaluate.py: recall@100 looks deeper than the bm25.k=50 documents"),
        ("bm25.b=2", "evaluate.py: BM25 needs numbers k1 >= 0 and 0 <= b <= 1, got k1=0.9, b=2"),
    ],
)
def test_script_says_in_one_sentence_what_it_cannot_do(tmp_path, monkeypatch, argument, message):
    monkeypatch.chdir(tmp_path)
    arguments = ("model=bm25", "evaluation=quickstart", argument)
    said = refusal(monkeypatch, *arguments)
    assert said.startswith(message)
    assert "\n" not in said
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match=re.escape(message.removeprefix("evaluate.py: "))):
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")


def test_script_on_a_full_disk_leaves_no_results_of_rankings_that_are_not_there(
    tmp_path, monkeypatch
):
    """The limit on the size of a file lets through results.json, but not the rankings."""
    monkeypatch.chdir(tmp_path)
    # The limit holds for child processes, too: git must not die while it rewrites its index.
    monkeypatch.setenv("GIT_OPTIONAL_LOCKS", "0")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        said = refusal(monkeypatch, "model=bm25", "evaluation=quickstart", "output=out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    failed = "out/runs/quickstart.trec"
    assert said.startswith(f"evaluate.py: {failed} could not be written; files may not be so large")
    assert "or name another place and run the same command again" in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_results_that_cannot_be_written_leave_the_earlier_ones(results, tmp_path, monkeypatch):
    write_results(results, tmp_path, {"model": "first"})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"results\.json could not be written; .*No space left"):
        write_results(results, tmp_path, {"model": "second"})
    monkeypatch.undo()
    assert json.loads((tmp_path / "results.json").read_text())["model"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_script_makes_one_folder_of_any_overrides(tmp_path, beir, monkeypatch, capsys):
    """Slashes and hundreds of characters in the overrides, and a line that is not wrapped."""
    deep = tmp_path / ("long" * 30) / ("name" * 30)
    deep.parent.mkdir()
    beir.rename(deep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    task = ("evaluation=beir_folder", f"evaluation.path={deep}", "evaluation.on_unknown=ignore")
    with (deep / "qrels" / "test.tsv").open("a") as file:
        file.write("q0\tunheard-of\t1\n")
    arguments = ["evaluate.py", "device=cpu", "model=bm25", *task]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    (output,) = (tmp_path / "runs" / "evaluate").iterdir()
    assert (output / "results.json").is_file()
    assert len(output.name) < 140
    assert f"written to runs/evaluate/{output.name}" in capsys.readouterr().out.splitlines()
    said = refusal(monkeypatch, "model=bm25", *task[:2])
    assert "'unheard-of' is judged but not" in said
    assert "set evaluation.on_unknown=ignore" in said
