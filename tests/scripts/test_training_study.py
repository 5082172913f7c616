"""The benchmark of whole trainings without a GPU: suites, workload, watching, gate."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.records import read_records
from benchmarks.study import Settings
from benchmarks.training import commands, decoders, figures, study, suites, workload
from benchmarks.training.suites import LENGTHS, OURS, SUITES, Cell, plan
from sparton.models.backbones import pretrained, random_bert, random_xlm_roberta

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/benchmark.py"
EAGER, SPARTON = (Cell(OURS, suites.SPLADE, head, 384) for head in ("eager", "sparton"))
CELLS = [cell for cells in SUITES.values() for cell in cells]
MINIATURE = suites.MINIATURE_VOCABULARY


def run_script(folder: Path, study: str, *words: str) -> list[dict]:
    """The records of a call."""
    output = folder / "records.jsonl"
    common = ("--device", "cpu", "--miniature", "--folder", str(folder / "work"))
    command = [sys.executable, str(SCRIPT), study, *common, "--output", str(output), *words]
    subprocess.run(command, check=True)
    return read_records(output)


def test_suites_name_heads_that_exist_and_batches_that_divide():
    heads = {path.stem for path in (SCRIPT.parents[1] / "configs/head").glob("*.yaml")}
    for cells in SUITES.values():
        assert len(set(cells)) == len({cell.label for cell in cells}) == len(cells)
    for cell in CELLS:
        assert (cell.head in heads) == (cell.trainer == OURS)
        assert cell.batch == cell.local_batch * cell.gpus
        assert cell.lengths in LENGTHS


@pytest.mark.parametrize("miniature", [False, True])
def test_cells_that_are_compared_log_the_same_steps(miniature):
    for cell in CELLS:
        found = plan(cell, 20.0, miniature)
        assert found.windows >= suites.WARM_UP_WINDOWS + suites.FEWEST_WINDOWS
        assert found.batch % cell.gpus == 0
        for other in filter(lambda other: figures.same_losses(cell, other), CELLS):
            assert plan(other, 20.0, miniature).log_every == found.log_every
            assert plan(other, 20.0, miniature).batch == found.batch


@pytest.mark.parametrize("build", [random_bert, random_xlm_roberta])
def test_every_word_is_a_token_and_lengths_keep_their_limits(tmp_path, build):
    lengths, vocabulary = LENGTHS[suites.SPLADE], 3000
    workload.write_pairs(tmp_path / "pairs.jsonl", vocabulary, lengths, 300)
    build(vocabulary, 32, 1, 2).tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for side, (shortest, longest) in zip(("query", "positive"), lengths, strict=True):
        texts = [json.loads(line)[side] for line in (tmp_path / "pairs.jsonl").open()]
        rows = tokenizer(texts)["input_ids"]
        assert [len(row) - 2 for row in rows] == [len(text.split()) for text in texts]
        assert tokenizer.unk_token_id not in {token for row in rows for token in row}
        assert min(map(len, rows)) >= shortest and max(map(len, rows)) <= longest
        assert abs(sum(map(len, rows)) / len(rows) - (shortest + longest) / 2) < longest / 12


@pytest.mark.parametrize("kind", [suites.BERT_BASE, suites.MODERNBERT_BASE])
def test_some_terms_are_active_or_nearly_all(tmp_path, kind):
    from sparton.datasets.tokenization import PackedTokenizer

    shares = {}
    for activity in (suites.OWN_WORDS, suites.ALL_TERMS):
        folder = tmp_path / activity
        workload.write_model(folder, MINIATURE, activity, miniature=True, kind=kind)
        backbone = pretrained(str(folder))
        tokens = PackedTokenizer(backbone.tokenizer, 16, 16).documents(
            ["w7 w8 w9", "w100 w200 w300 w7"]
        )
        with torch.no_grad():
            logits = backbone.decoder(backbone.eval()(tokens))
        shares[activity] = (logits[:5].amax(0) > 0).float().mean().item()
    assert 0 < shares[suites.OWN_WORDS] < 0.2
    assert shares[suites.ALL_TERMS] > 0.5
    assert backbone.model.config.model_type == kind.removesuffix("-base")


def windows(*losses: float, **more: float) -> list[figures.Record]:
    line = {"step_ms": 100.0, "tokens_per_second": 7.0, "memory_allocated_mib": 1024.0}
    speeds = (1.0, 2.0, 30.0, 10.0, 20.0)
    return [
        {"step": 11 * number, "loss": loss, "examples_per_second": speed, **line, **more}
        for number, (loss, speed) in enumerate(zip(losses, speeds, strict=True), 1)
    ]


def test_figures_leave_the_warm_up_out_but_not_its_memory():
    lines = windows(5.0, 4.0, 3.0, 2.0, 1.0, loss_query_flops=0.5)
    lines[0]["memory_allocated_mib"] = 2048.0
    first = dict(lines[0], step=1, loss=9.0, examples_per_second=0.1)
    arrivals, recompiled = [8.5, 9.0, 10.0, 11.0, 12.0, 13.0], [3, 3, 4, 4, 5, 5]
    found = figures.summary([first, *lines], arrivals, recompiled, log_every=11)
    assert [found[f"examples_per_second_p{q}"] for q in (20, 50, 80)] == [10.0, 20.0, 30.0]
    assert found["peak_allocated_gib"] == 2.0
    assert found["seconds_to_first_step"] == pytest.approx(8.0)
    assert (found["recompilations"], found["recompilations_after_warm_up"]) == (5, 1)
    assert (found["loss_first"], found["loss_last"], found["windows"]) == (5.0, 1.0, 3)
    assert found["signature"] == {"loss": 5.0, "loss_query_flops": 0.5}
    assert "mfu" not in found and "peak_reserved_gib" not in found


def judged(cell: Cell, last: float = 1.5, status: str = "ok", **signature: float) -> tuple:
    first = {"loss": 2.0, "loss_document_flops": 16.0} | signature
    record = {"loss_first": first["loss"], "loss_last": last, "signature": first}
    return cell, record | {"status": status}


def test_heads_that_agree_pass():
    earlier = [judged(EAGER), judged(SPARTON._replace(batch=512), loss=9.0)]
    assert figures.objection(*judged(SPARTON), []) is None
    assert figures.objection(*judged(SPARTON, loss=2.01, loss_document_flops=16.2), earlier) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"last": float("nan")}, "went from 2.0 to nan"),
        ({"loss": float("inf")}, "went from inf"),
        ({"last": 3.0}, "rose from 2 to 3"),
        ({"loss": 2.3, "last": 2.0}, "first loss is 2.3, that of sparton splade eager 384 2"),
        # A representation that is 6 % too large.
        ({"loss_document_flops": 16 * 1.06**2}, "first loss_document_flops is 17.98"),
    ],
)
def test_heads_that_disagree_are_refused(found, words):
    assert words in (figures.objection(*judged(SPARTON, **found), [judged(EAGER)]) or "")


def test_what_failed_is_no_measure_of_others():
    earlier = [judged(EAGER, status="red_gate", loss=9.0), judged(SPARTON, loss=2.1)]
    assert figures.objection(*judged(SPARTON._replace(compiled=True)), earlier) is None


def test_a_run_is_watched_and_its_end_has_a_name(tmp_path):
    def ended(code: str) -> dict:
        words = [sys.executable, "-c", f"import sys\n{code}"]
        return study.watch(words, tmp_path, tmp_path).outcome()

    assert ended("pass") == {"status": "ok"}
    assert ended("sys.exit('torch.OutOfMemoryError: CUDA')")["status"] == "oom"
    assert ended("raise ValueError('no')") == {
        "status": "failed",
        "error": "exit code 1: ValueError: no",
    }


def test_lines_are_seen_when_they_come(tmp_path):
    code = (
        "import sys, time\n"
        "log = open('metrics.jsonl', 'w', buffering=1)\n"
        "for step in range(3):\n"
        "    print('Recompiling function f', file=sys.stderr, flush=True)\n"
        "    log.write('{}\\n'); time.sleep(0.4)\n"
    )
    watched = study.watch([sys.executable, "-c", code], tmp_path, tmp_path)
    assert watched.recompiled == [1, 2, 3]
    assert watched.arrivals[0] < watched.arrivals[1] < watched.arrivals[2]


def test_the_conditions_are_those_of_the_device_that_is_named(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(study, "ask_conditions", lambda delay, device: asked.append(device))
    monkeypatch.setattr(study, "read_conditions", lambda _: {"sm_mhz": 1.0})
    (tmp_path / "metrics.jsonl").write_text("{}\n" * (suites.WARM_UP_WINDOWS + 1))
    (tmp_path / "errors.txt").touch()
    for device in ("GPU-7", None):
        study.Watched(tmp_path, device).look(1.0)
    assert asked == ["GPU-7"]


def test_a_cell_sees_its_gpus_and_the_first_of_them_is_asked(tmp_path, monkeypatch):
    cell, seen = SPARTON._replace(gpus=2), []

    def watch(words, folder, run, gpus, device):
        seen.append((gpus, device))
        watched = study.Watched(run, device)
        watched.code = watched.errors.write_text("no\n")
        return watched

    monkeypatch.setattr(study, "watch", watch)
    monkeypatch.setattr(study, "prepare", lambda *_: ("model", "pairs"))
    monkeypatch.setattr(study, "device_id", lambda: "GPU-7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for device in ("cuda", "cpu"):
        settings = Settings(device, 20.0, str(tmp_path), True, {})
        assert study.STUDY.measure(cell, settings)["status"] == "failed"
    assert seen == [(2, "GPU-7"), (2, None)]


@pytest.mark.parametrize(
    ("visible", "shown"), [(None, "0,1"), ("3", "3"), ("5,GPU-7,6", "5,GPU-7"), ("", "")]
)
def test_devices_that_are_visible_are_respected(visible, shown, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert commands.environment(tmp_path, 2)["CUDA_VISIBLE_DEVICES"] == shown


@pytest.mark.skipif(find_spec("accelerate") is None, reason="its trainer needs accelerate")
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_step_of_theirs_is_on_one_gpu(gpus, tmp_path, monkeypatch):
    """On several, transformers would take as many batches."""
    from benchmarks.training import rival

    trained = []
    args = SimpleNamespace(n_gpu=gpus)
    trainer = SimpleNamespace(args=args, train=lambda: trained.append(gpus))
    parts = (None, None, lambda **_: trainer, dict)
    monkeypatch.setattr(rival, "build", lambda *_: parts)
    monkeypatch.setattr(rival.Dataset, "from_json", lambda _: None)
    place = commands.Place("model", "pairs.jsonl", str(tmp_path))
    if gpus > 1:
        with pytest.raises(ValueError, match=r"2 GPUs would share a step.* CUDA_VISIBLE_DEVICES"):
            rival.main(SPARTON, plan(SPARTON, 20.0, True), place, True)
    else:
        rival.main(SPARTON, plan(SPARTON, 20.0, True), place, True)
    assert trained == ([] if gpus > 1 else [gpus])


@pytest.mark.parametrize("cell", SUITES["decoders"][::4] + SUITES["splade"][:1])
def test_a_miniature_leaves_no_model_for_others(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(decoders.Decoder, "write", lambda self, folder, _: folder.mkdir())
    monkeypatch.setattr(workload, "write_model", lambda folder, *_: folder.mkdir())
    monkeypatch.setattr(workload, "write_pairs", lambda path, *_: path.touch())
    toy, real = (
        workload.prepare(tmp_path, cell, plan(cell, 20.0, miniature), miniature)
        for miniature in (True, False)
    )
    assert toy[0] != real[0] and toy[1] != real[1]


@pytest.mark.slow
def test_heads_compute_the_same_in_real_runs(tmp_path):
    cells = r"^sparton splade ((eager|sparton) 384|sparton 384 in 64s)$"
    only = ("--suite", "splade", "--only", cells)
    records = run_script(tmp_path, "training", *only)
    assert [record["status"] for record in records] == ["ok"] * 3, records
    first, *others = (record["signature"] for record in records)
    assert first["loss_document_flops"] > 0
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)
    assert records[0]["config"]["batch"] == plan(EAGER, 20.0, miniature=True).batch
    assert records[0]["cell_command"][:2] == ["python", "train.py"]
    assert str(tmp_path) not in json.dumps(records[0]["cell_command"])
    assert {"git_sha", "gpu", "torch", "versions", "run"} <= set(records[0])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="its trainer needs accelerate")
@pytest.mark.parametrize(
    ("suite", "cell"),
    [
        ("splade", " splade 384 in 64s"),
        ("colbert", " colbert 384"),
    ],
)
def test_sentence_transformers_trains_on_the_same_workload(tmp_path, suite, cell):
    only = ("--suite", suite, "--only", f"^sentence_transformers{cell}$")
    (record,) = run_script(tmp_path, "training", *only)
    assert record["status"] == "ok", record
    assert record["examples_per_second_p50"] > 0


@pytest.mark.skipif(find_spec("accelerate") is None, reason="its trainer needs accelerate")
def test_variants_differ_in_what_is_fused(tmp_path):
    from benchmarks.training import rival

    workload.write_model(tmp_path, MINIATURE, suites.OWN_WORDS, miniature=True)
    found = {}
    for cell in SUITES["integrations"]:
        model, loss, *_ = rival.build(cell, str(tmp_path), 0)
        function = getattr(loss, "similarity_fct", None)
        scores = getattr(function, "func", function)
        fused = "forward" in vars(model[0]), getattr(scores, "__module__", "")[:7]
        found[cell.model, cell.system.removeprefix(suites.THEIRS)] = fused
    theirs = "sentenc"
    assert found == {
        ("splade", ""): (False, ""),
        ("splade", "_fused"): (True, ""),
        ("colbert", ""): (False, theirs),
        ("colbert", "_scores"): (False, "sparton"),
        ("colbert", "_fused"): (True, "sparton"),
        ("colbert", "_bf16"): (True, "sparton"),
    }


def test_both_systems_tokenise_on_the_cores_that_they_may_use(monkeypatch):
    monkeypatch.setattr(commands.os, "sched_getaffinity", lambda _: range(4))
    found = [commands.num_workers(SPARTON._replace(gpus=gpus), False) for gpus in (1, 2, 4)]
    assert found == [3, 1, 1]


def test_commands_name_no_place_on_this_machine():
    place = commands.Place("model", "pairs.jsonl", "run")
    for cell in CELLS:
        words = commands.command(cell, plan(cell, 20.0), place, False)
        assert str(commands.ROOT) not in " ".join(commands.shown(words))
        assert ("--nproc_per_node=4" in words) == (cell.gpus == 4)
