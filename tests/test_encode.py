"""``encode.py``, ``search.py`` and ``evaluate.py documents=``: what users type, print and get."""

import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import datasets
import pytest

import sparton
from sparton.encoded import delete_texts, open_encoded
from sparton.retrieval.trec import read_run
from sparton.training.processes import Ended
from tests.encoded.problems import files, save_model
from tests.evaluation.problems import DOCUMENTS, QUERIES, write_beir
from tests.test_evaluation import ROOT

pytestmark = pytest.mark.slow

KINDS = ("splade", "colbert", "joint", "three")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: save_model(folder / kind, kind, words=DOCUMENTS.values()) for kind in KINDS}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_beir(Path("toy"))


def run(monkeypatch, script: str, *arguments: object) -> None:
    """A script, run in this process."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(ROOT / script), run_name="__main__")


def encode(monkeypatch, model: Path, *arguments: object, output: str = "docs") -> None:
    words = [f"model={model}", "data=toy", f"output={output}", "device=cpu", "progress=false"]
    run(monkeypatch, "encode.py", *words, *arguments)


def refused(monkeypatch, capsys, script: str, *arguments: object) -> str:
    """The sentence with which a script ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, script, *arguments)
    assert str(ended.value).startswith(f"{script}: ") and "\n" not in str(ended.value)
    return str(ended.value)


def test_a_folder_in_the_layout_of_beir_is_encoded_and_searched(models, monkeypatch, capsys):
    encode(monkeypatch, models["joint"], "rows_per_shard=4")
    said = capsys.readouterr().out.splitlines()[-1]
    found = open_encoded("docs")
    assert said.startswith("6 documents of ") and "weights and " in said
    assert said.endswith(" MiB") and "in docs: 2 shards, " in said
    assert list(found.ids) == list(DOCUMENTS)

    retriever = sparton.load(models["joint"], device="cpu")
    own = retriever.index(list(DOCUMENTS.values()), list(DOCUMENTS))
    for documents in ("docs", Path("docs"), found):
        for ours, theirs in zip(
            retriever.index(documents).search(list(QUERIES.values()), 3),
            own.search(list(QUERIES.values()), 3),
            strict=True,
        ):
            assert [hit.id for hit in ours] == [hit.id for hit in theirs] != []
            scores = [[hit.score for hit in hits] for hits in (ours, theirs)]
            assert scores[0] == pytest.approx(scores[1], abs=2e-3)

    run(monkeypatch, "search.py", "index=docs", "query=red, cat? (a=b)", "k=2", "device=cpu")
    found = [line.split("\t") for line in capsys.readouterr().out.splitlines() if "\t" in line]
    hits = own.search(["red, cat? (a=b)"], 2)[0]
    assert [name for _, name in found] == [hit.id for hit in hits]
    monkeypatch.setattr(sys, "stdin", io.StringIO("red cat\n\ngreen\n"))
    run(monkeypatch, "search.py", "docs", "--k", 1, "--device", "cpu")
    said = capsys.readouterr().out.splitlines()
    assert [line.count("\t") for line in said[-4:]] == [1, 0, 1, 0], "an empty line ends each"
    run(monkeypatch, "search.py", "docs", "--queries", "toy", "--output", "run.trec", "k=2")
    rankings = dict(read_run("run.trec").rankings())
    expected = own.search([QUERIES["q0"]], 2)[0]
    assert [name for name, _ in rankings["q0"]] == [hit.id for hit in expected]
    rows = [
        {"docno": name, "number": row, "text": QUERIES[name]} for row, name in enumerate(QUERIES)
    ]
    Path("own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    capsys.readouterr()
    words = ["docs", "--queries", "own.jsonl", "--columns", "docno=_id"]
    run(monkeypatch, "search.py", *words, "--k", 2, "--output", "own.trec")
    said = capsys.readouterr().out.splitlines()[-1]
    assert (
        "of 6 documents for 3 queries (_id, text; not used: 'number'), written to own.trec" in said
    )
    assert dict(read_run("own.trec").rankings()) == rankings


def test_ids_that_no_run_can_hold_are_refused_before_the_search(models, monkeypatch, capsys):
    Path("docs.tsv").write_text("two words\tred cat\nd2\tgreen\n")
    Path("asked.tsv").write_text("q 1\tred cat\n")
    encode(monkeypatch, models["splade"])
    encode(monkeypatch, models["splade"], "data=docs.tsv", output="spaced")
    monkeypatch.setattr(
        "sparton.retriever.TextIndex.search", lambda *_, **__: pytest.fail("searched")
    )
    for documents, queries, name in (("docs", "asked.tsv", "q 1"), ("spaced", "toy", "two words")):
        words = [documents, "--queries", queries, "--output", "run.trec"]
        said = refused(monkeypatch, capsys, "search.py", *words)
        assert f"the identifier '{name}' is empty or holds white space" in said


def test_a_compressed_index_is_built_by_the_first_search_alone(models, monkeypatch, capsys):
    encode(monkeypatch, models["colbert"])
    words = ["index=docs", "query=red cat", "nbits=8", "device=cpu"]
    run(monkeypatch, "search.py", *words)
    first = [line for line in capsys.readouterr().out.splitlines() if "\t" in line]
    assert [path.name for path in Path("docs/indexes").iterdir()] == [
        "compressed-8-bits-cpu.safetensors"
    ]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr("sparton.retrieval.indexes.compression.train_codec", never)
    run(monkeypatch, "search.py", *words)
    assert [line for line in capsys.readouterr().out.splitlines() if "\t" in line] == first != []
    message = "--nbits 3 must be 1, 2, 4 or 8"
    assert message in refused(monkeypatch, capsys, "search.py", *words[:2], "nbits=3")
    for kind, has in (("splade", "none"), ("three", "dense vectors, too")):
        encode(monkeypatch, models[kind], output=kind)
        said = refused(monkeypatch, capsys, "search.py", f"index={kind}", *words[1:])
        assert f"--nbits 8 compresses token vectors, and {kind} has {has}: leave it out" in said


def test_collections_of_ir_datasets_and_of_the_hub_are_encoded(models, monkeypatch, capsys):
    from tests.datasets.test_downloads import CORPUS, write_hub

    hub = write_hub(Path("hub"), {"corpus": {"test": CORPUS, "dev": CORPUS[:1]}})
    encode(monkeypatch, models["splade"], "source=hub", "data=hub")
    assert list(open_encoded("docs").ids) == ["d1", "d2"]
    part = f"data={{repository: {hub}, split: dev}}"
    encode(monkeypatch, models["splade"], "source=hub", part, output="part")
    assert list(open_encoded("part").ids) == ["d1"]


def test_a_folder_that_datasets_saved_is_encoded(models, monkeypatch):
    texts = [{"_id": name, "text": text} for name, text in DOCUMENTS.items()]
    datasets.Dataset.from_list(texts).save_to_disk("saved", num_shards=2)
    encode(monkeypatch, models["splade"], "data=saved", output="arrow")
    encode(monkeypatch, models["splade"])
    arrow, usual = open_encoded("arrow"), open_encoded("docs")
    assert list(arrow.ids) == list(DOCUMENTS) and arrow.facts.parts == usual.facts.parts


def test_documents_are_found_alike_where_they_were_encoded_before(models, monkeypatch, capsys):
    task = ["evaluation=beir_folder", "evaluation.path=toy", "device=cpu", "encoder.k=5"]
    for kind in KINDS:
        model = f"model={models[kind]}"
        encode(monkeypatch, models[kind], output=kind)
        words = [model, *task, "metrics=[ndcg@5]"]
        run(monkeypatch, "evaluate.py", *words, f"documents={kind}", f"output={kind}-stored")
        run(monkeypatch, "evaluate.py", *words, f"output={kind}-anew")
        stored, anew = (
            json.loads(Path(f"{kind}-{how}", "results.json").read_text())["tasks"][0]
            for how in ("stored", "anew")
        )
        assert stored["metrics"] == anew["metrics"]
        assert stored["speed"]["documents_per_second"] is None
        runs = [Path(f"{kind}-{how}", "runs", "toy.trec").read_text() for how in ("stored", "anew")]
        assert [line.split()[:4] for line in runs[0].splitlines()] == [
            line.split()[:4] for line in runs[1].splitlines()
        ]

    def told(*arguments: str) -> str:
        words = [f"model={models['splade']}", *task, "metrics=[ndcg@5]", *arguments]
        return refused(monkeypatch, capsys, "evaluate.py", *words)

    assert "splade was encoded with precision=fp32 and not bf16" in told(
        "documents=splade", "encoder.precision=bf16"
    )
    assert "length=24 and not 9" in told("documents=splade", "document_length=9")
    assert "max_terms=None and not 3" in told("documents=splade", "encoder.max_document_terms=3")
    assert "joint was encoded by another model" in told("documents=joint")
    assert "nowhere holds no encoded texts" in told("documents=nowhere")
    assert "ignores documents=splade" in refused(
        monkeypatch, capsys, "evaluate.py", "model=bm25", "documents=splade", *task[:2]
    )
    lines = Path("toy/corpus.jsonl").read_text()
    Path("toy/corpus.jsonl").write_text(lines.replace("green bird", "green dog"))
    assert "holds other texts than the task toy has under the same ids" in told("documents=splade")
    Path("toy/corpus.jsonl").write_text(lines.replace('"d4"', '"d5"'))
    Path("toy/qrels/test.tsv").write_text("q0\td0\t1\n")
    assert "document 4 is 'd4' and not 'd5'" in told("documents=splade")
    Path("toy/corpus.jsonl").write_text(lines + '{"_id": "more", "title": "", "text": "x"}\n')
    count = len(lines.splitlines())
    assert f"holds {count} documents, and the task toy has {count + 1}" in told("documents=splade")
    write_beir(Path("other"))
    two = ["evaluation=folders", "evaluation.paths=[toy,other]", "documents=splade"]
    assert "there is no splade/toy: encode them with that as output" in refused(
        monkeypatch, capsys, "evaluate.py", f"model={models['splade']}", *two
    )


def test_each_of_several_tasks_has_documents_of_its_own(models, monkeypatch, capsys):
    write_beir(Path("other"))
    lines = Path("other/corpus.jsonl").read_text()
    Path("other/corpus.jsonl").write_text(lines.replace("green bird", "green dog"))
    model, tasks = models["splade"], ["toy", "other"]
    for name in tasks:
        encode(monkeypatch, model, f"data={name}", output=f"all/{name}")
    words = [f"model={model}", "evaluation=folders", "evaluation.paths=[toy,other]", "device=cpu"]
    run(monkeypatch, "evaluate.py", *words, "documents=all", "output=stored")
    run(monkeypatch, "evaluate.py", *words, "output=anew")
    stored, anew = (
        json.loads(Path(how, "results.json").read_text())["tasks"] for how in ("stored", "anew")
    )
    assert [task["name"] for task in stored] == tasks
    assert [task["metrics"] for task in stored] == [task["metrics"] for task in anew]
    assert [task["speed"]["documents_per_second"] for task in stored] == [None, None]
    Path("all/other").rename("all/toy2")
    Path("all/toy").rename("all/other")
    Path("all/toy2").rename("all/toy")
    assert "all/toy holds other texts than the task toy has" in refused(
        monkeypatch, capsys, "evaluate.py", *words, "documents=all", "output=swapped"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["side=documents"], "side=documents: must be query or document"),
        (["kinds=[words]"], "kinds=['words']: there are sparse, tokens, dense"),
        (["gpus=0"], "gpus=0 must be at least 1"),
        (["precision=fp4"], "precision=fp4 must be fp32, bf16, fp16 or fp8"),
        (["precision=fp8"], "precision=fp8 needs a CUDA GPU of compute capability 8.9 or later"),
        (
            ["vector_dtype=int8"],
            "vector_dtype=int8 must be float16, bfloat16, float32 or ",
        ),
        (["on_error=ask"], "on_error=ask must be stop or skip"),
        (["data=[]"], "data=[]: name a folder, or files as in [a.jsonl,b.jsonl]"),
        (["data=nowhere"], "nowhere"),
        (["source=web"], "source=web: must be files, ir_datasets or hub"),
        (["source=ir_datasets", "data=[a,b]"], "data=['a', 'b']: name a collection of ir_datasets"),
        (["source=ir_datasets", "data=beir/scifakt"], "knows no dataset 'beir/scifakt'"),
        (["source=hub", "data={repository: a, name: b}"], "name a data set of the hub, as in"),
        (["model=bm25"], "model=bm25 is no encoder: name a trained model"),
        (["model=no/such/folder"], "no/such/folder"),
        (["output=toy"], "toy is there and holds no encoded texts: choose another output"),
        (["outptu=x"], "outptu"),
        (["gpus=2", "device=cuda:1"], "gpus=2 are as many devices, and device=cuda:1 is one"),
        (["-m"], "one collection is encoded at a time: leave -m out"),
    ],
)
def test_what_cannot_be_encoded_is_refused(words, message, models, monkeypatch, capsys):
    given = {word.partition("=")[0]: word for word in words}
    usual = [f"model={models['splade']}", "data=toy", "output=docs"]
    kept = [word for word in usual if word.partition("=")[0] not in given]
    assert message in refused(monkeypatch, capsys, "encode.py", *kept, *words)
    assert not Path("docs").exists()


def test_what_a_folder_has_is_said_and_not_encoded_again(models, monkeypatch, capsys):
    def said(*words: str, data: str = "toy") -> list[str]:
        capsys.readouterr()
        encode(monkeypatch, models["splade"], f"data={data}", *words)
        return capsys.readouterr().out.splitlines()

    def no_workers(*_: object) -> None:
        raise AssertionError("there is nothing to encode")

    assert "6 documents of " in said("rows_per_shard=6")[-1]
    assert said()[-1].endswith(" MiB") and ": 1 shard, " in said()[-1]
    Path("more.jsonl").write_text('{"_id": "new", "text": "red dog"}\n')
    said("append=true", data="more.jsonl")
    monkeypatch.setattr("sparton.cli.encoding.run_workers", no_workers)
    for words in ([], ["gpus=2"]):
        told = said(*words)
        assert told[-2] == "complete already" and told[-1].startswith("7 documents of ")
    assert said("append=true")[-2] == "these texts are there already"

    delete_texts("docs", ["new", "d0", "d1"])
    told = said(data="more.jsonl")
    assert told[-2] == (
        "complete already; 1 of these documents is deleted: append=true brings it back"
    )
    assert told[-1].startswith("4 documents of ") and told[-1].endswith(" MiB, 3 deleted")
    assert said("append=true", data="more.jsonl")[-2] == "1 document brought back"
    assert said()[-2] == (
        "complete already; 2 of these documents are deleted: append=true brings them back"
    )
    told = said("append=true")
    assert told[-2] == "2 documents brought back" and told[-1].startswith("7 documents of ")
    assert open_encoded("docs").ids[6] == "new"


def test_a_folder_that_was_encoded_otherwise_is_refused_with_the_remedy(
    models, monkeypatch, capsys
):
    encode(monkeypatch, models["joint"], "pool_factor=2", "kinds=[tokens]")
    for words, message in (
        (["pool_factor=3", "kinds=[tokens]"],
         "docs was encoded with pool_factor=2.0 and not 3.0: set pool_factor=2.0 to go on, or "
         "choose another output"),
        (["pool_factor=2"], "kinds=[tokens] and not ['sparse', 'tokens']: set kinds=[tokens] to"),
        (["pool_factor=2", "kinds=[tokens]", "length=9", "vector_dtype=float32"],
         "docs was encoded with vector_dtype=float16 and not float32, length=24 and not 9: set "
         "vector_dtype=float16 and length=24 to go on, or choose another output"),
        ([f"model={models['splade']}"],
         f"docs was encoded by another model, {models['joint']} as it was then: choose another "
         "output"),
    ):  # fmt: skip
        usual = [f"model={models['joint']}", "data=toy", "output=docs", "device=cpu"]
        told = refused(monkeypatch, capsys, "encode.py", *usual, *words)
        assert message in told and "width" not in told


def test_a_setting_without_a_value_is_named(monkeypatch, capsys):
    said = refused(monkeypatch, capsys, "encode.py", "data=toy", "output=docs")
    assert "model has no value: set model=..." in said


def test_what_cannot_be_searched_is_refused(models, monkeypatch, capsys):
    encode(monkeypatch, models["splade"])
    encode(monkeypatch, models["splade"], "side=query", output="queries")
    for words, message in (
        (["docs", "--output", "x"], "a search without queries of files ignores --output: leave"),
        (["docs", "--queries", "toy"], "--queries toy make a run: say where it goes by --output"),
        (["docs", "--k", "0"], "--k 0 must be at least 1"),
        (["nowhere", "--query", "x"], "nowhere holds no encoded texts (encoding.json is missing)"),
        (["docs", "--query", "x", "--model", "no/such/one"], "--model no/such/one: no such folder"),
        (["docs", "--query", "x", "--model", models["joint"]], "docs was encoded by another model"),
        (["docs", "--query", "x", "--precision", "fp4"], "precision=fp4 must be fp32"),
        (["queries", "--query", "x"], "queries holds queries, and documents are searched"),
        (["docs", "--queries", "toy", "--output", "toy"], "--output toy exists: name another"),
    ):
        assert message in refused(monkeypatch, capsys, "search.py", *words)
    with pytest.raises(ValueError, match="docs has ids of its own: leave ids out"):
        sparton.load(models["splade"], device="cpu").index("docs", ["a"])


def test_vectors_in_full_precision_are_searched_with_such(models, monkeypatch):
    encode(monkeypatch, models["colbert"], "vector_dtype=float32")
    retriever = sparton.load(models["colbert"], device="cpu")
    hits = retriever.index("docs").search(list(QUERIES.values()), 6)
    own = retriever.index(list(DOCUMENTS.values()), list(DOCUMENTS))
    for ours, theirs in zip(hits, own.search(list(QUERIES.values()), 6), strict=True):
        assert [hit.id for hit in ours] == [hit.id for hit in theirs] != []


def at_work(output: Path) -> list[int]:
    """The processes that claim a shard; a claim may be seen before it is signed, and end."""
    found = []
    for claim in output.glob("claims/*"):
        with suppress(OSError):
            _, _, process = claim.read_text().rpartition(" ")
            found += [int(process)] if process else []
    return found


def test_a_command_with_two_workers_of_which_one_is_killed(models, monkeypatch):
    texts = [{"_id": str(row), "text": f"red cat {row}"} for row in range(4000)]
    Path("toy/corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    encode(monkeypatch, models["splade"], "rows_per_shard=20", output="alone")
    words = [f"model={models['splade']}", "data=toy", "output=docs", "rows_per_shard=20"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(Path("cache"))}
    command = [sys.executable, str(ROOT / "encode.py"), *words, "gpus=2", "device=cpu"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while not (workers := at_work(Path("docs"))):
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(workers[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    killed = r"worker [01] was ended by SIGKILL \(out of the machine's own memory, perhaps\): the"
    assert len(re.findall(killed, said)) == 1, said
    assert "4,000 documents of" in said
    assert files(Path("docs")) == files(Path("alone"))


def test_what_all_workers_refuse_is_said_once(models):
    words = [f"model={models['splade']}", "data=toy", "output=docs"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(Path("cache"))}
    words.append("kinds=[tokens]")  # which a worker refuses, when it has read the model
    command = [sys.executable, str(ROOT / "encode.py"), *words, "gpus=2", "device=cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.count("encode.py: ") == 1, done.stderr
    assert "SpladeEncoder gives no token vectors" in done.stderr
    assert not Path("docs").exists()


@pytest.mark.parametrize(
    ("ended", "message"),
    [(Ended(-9, 1), "worker 1 was ended by SIGKILL"), (Ended(1, 0), None)],
)
def test_workers_that_end_before_there_is_a_folder(ended, message, models, monkeypatch, capsys):
    monkeypatch.setattr("sparton.cli.encoding.run_workers", lambda *_: ended)
    with pytest.raises(SystemExit) as caught:
        encode(monkeypatch, models["splade"], "gpus=2")
    if message is None:  # the worker has said why
        assert caught.value.code == 1
    else:
        assert message in str(caught.value)
        assert "nothing is encoded yet, and the same command goes on" in str(caught.value)
