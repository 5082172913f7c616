"""The measuring harness without a GPU: processes, resume, records, the command line."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import command, gate, processes, records, timing
from benchmarks.head import suites
from benchmarks.head.suites import SHORT, Cell
from benchmarks.study import STUDIES, Settings, Study, load_study

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/benchmark.py"
HEAD, TRAINING = load_study("head"), load_study("training")
GEMM, SOME = Cell(SHORT, suites.GEMM), Cell(SHORT, "eager")


def settings(tmp_path, **changes) -> Settings:
    found = Settings("cpu", 0.01, str(tmp_path / "left"), True, {})
    return found._replace(**changes)


def run_script(*words: object, check: bool = True) -> subprocess.CompletedProcess:
    """Of a commit by name, so that a changed working tree is no reason to measure anew."""
    study, *others = map(str, words)
    common = ("--device", "cpu", "--miniature", "--seconds", "0.01")
    process = subprocess.run(
        [sys.executable, str(SCRIPT), study, *common, *others],
        capture_output=True,
        text=True,
        env={**os.environ, "SPARTON_COMMIT": "here"},
    )
    assert not check or process.returncode == 0, process.stderr
    return process


def parse(study: Study, *words: str) -> dict:
    """The cells that are asked for, by suite."""
    return command.parse_arguments(study, ["--device", "cpu", *words])[-1]


def test_a_suite_is_measured_killed_and_continued(tmp_path):
    output = tmp_path / "head.jsonl"
    part = ("head", "--suite", "heads", "--only", " (gemm_padded|eager|sparton) ")
    part = (*part, "--output", output, "--folder", tmp_path / "left")
    run_script(*part)
    lines = output.read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines]
    assert [record["status"] for record in found] == ["ok"] * 5
    said = {"command", "git_sha", "dirty", "gpu", "driver", "torch", "triton", "seed", "run"}
    for record in found:
        assert said < set(record)
        assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
        assert (record["N"], record["S"], record["V"]) == (6, 8, 611)
    assert found[-1]["errors"].keys() == found[-1]["allowed"].keys()

    # A kill leaves whole lines and perhaps a torn one.
    output.write_text("".join([*lines[:3], lines[3][:40]]))
    assert "5 cells, 2 to measure" in run_script(*part).stdout
    continued = records.read_records(output)
    assert output.read_text().splitlines(keepends=True)[:3] == lines[:3]
    cells = [[records.cell_of(HEAD, r) for r in each] for each in (continued, found)]
    assert cells[0] == cells[1]
    assert len({record["run"] for record in continued}) == 1


def test_records_of_other_code_are_not_continued(tmp_path):
    output = tmp_path / "head.jsonl"
    part = ("head", "--suite", "heads", "--only", "gemm_padded", "--output", output)
    run_script(*part)
    other = [{**record, "git_sha": "other"} for record in records.read_records(output)]
    records.write_records(output, other)
    process = run_script(*part, check=False)
    assert process.returncode == 1
    assert "git_sha = other" in process.stderr
    assert records.read_records(output) == other
    run_script(*part, "--fresh")
    assert records.read_records(output)[0]["git_sha"] == "here"


def test_suites_that_share_cells_share_their_records(tmp_path):
    output = tmp_path / "head.jsonl"
    only = ("--only", "320x.*gemm_padded", "--output", output)
    run_script("head", "--suite", "heads", "bars", *only)
    assert len(records.read_records(output)) == 1
    assert set(suites.TOGETHER) < set(suites.SUITES)


def context(**changes) -> dict:
    keys = ("gpu", "driver", "torch", "triton", "seconds", "miniature", "dirty")
    return {**dict.fromkeys(keys), "suite": "heads", "git_sha": "a", "run": "1"} | changes


def records_file(tmp_path, *found: dict) -> Path:
    path = tmp_path / "head.jsonl"
    lines = [context() | SOME._asdict() | {"status": "ok"} | record for record in found]
    records.write_records(path, lines)
    return path


@pytest.mark.parametrize(
    ("record", "now", "message"),
    [
        ({}, {"seconds": 2.0}, "seconds = None, this is 2.0"),
        ({"dirty": True}, {}, "its code has changes that no commit names"),
        ({}, {"dirty": True}, "this code has changes that no commit names"),
        ({"git_sha": "b"}, {}, "git_sha = b, this is a"),
        ({"git_sha": None}, {"git_sha": None}, "its code has no known commit"),
    ],
)
def test_records_that_may_be_of_another_run_are_not_continued(tmp_path, record, now, message):
    path = records_file(tmp_path, record, {"status": "crashed"}, record)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=message):
        records.resume(HEAD, path, context(**now), {SOME})
    assert path.read_bytes() == before


def test_what_gave_no_result_is_tried_again_if_asked_for(tmp_path):
    results = ("ok", "oom", "red_gate", "crashed", "timeout", "failed", "absent")
    shapes = [f"{n}x8x8" for n in range(1, 9)]
    statuses = dict(zip(shapes, (*results, "crashed"), strict=True))
    path = records_file(tmp_path, *({"shape": s, "status": x} for s, x in statuses.items()))
    asked = {SOME._replace(shape=shape) for shape in shapes[:-1]}
    records.resume(HEAD, path, context(), asked)
    left = {record["shape"]: record["status"] for record in records.read_records(path)}
    assert left == {s: statuses[s] for s in ("1x8x8", "2x8x8", "3x8x8", "8x8x8")}


def test_suites_of_one_file_may_be_runs_of_their_own(tmp_path):
    path = tmp_path / "training.jsonl"
    eager, sparton = TRAINING.suites(settings(tmp_path))["splade"][:2]
    kept = context(suite="gpus", git_sha="b") | eager._asdict() | {"status": "failed"}
    failed = context(suite="splade") | eager._asdict() | {"status": "failed"}
    good = context(suite="splade") | sparton._asdict() | {"status": "oom"}
    records.write_records(path, [kept, failed, good])
    records.resume(TRAINING, path, context(suite="splade"), set())
    assert records.read_records(path) == [kept, failed, good]
    records.resume(TRAINING, path, context(suite="splade"), {eager, sparton})
    assert records.read_records(path) == [kept, good]
    records.discard(TRAINING, ["splade"], path)
    assert records.read_records(path) == [kept]
    records.discard(HEAD, ["splade"], path)
    assert records.read_records(path) == []


def test_a_run_goes_on_with_its_file_and_refuses_what_cannot_be_believed(
    tmp_path, monkeypatch, capsys
):
    """The first of the heads that see the same batches is what the others are compared with."""
    cells = TRAINING.suites(settings(tmp_path))["splade"][:3]
    losses, asked = dict(zip(cells, (2.0, 2.01), strict=False)), []

    def measured(study, missing, *_):
        asked.append(list(missing))
        for cell in missing[:2]:
            loss = losses.get(cell, 2.5)
            record = {"loss_first": loss, "loss_last": loss, "signature": {"loss": loss}}
            record |= dict.fromkeys(("examples_per_second_p50", "examples_per_second_p20"), 1.0)
            record |= {"examples_per_second_p80": 1.0, "status": "ok", "cell_seconds": 1.0}
            yield cell, [record]

    monkeypatch.setattr(command, "run_cells", measured)
    path = tmp_path / "training.jsonl"
    words = ("training", "--suite", "splade", "--only", "sparton splade (eager|sparton) 384")
    words = (*words, "--output", path, "--device", "cpu", "--miniature")
    monkeypatch.setenv("SPARTON_COMMIT", "here")
    for _ in range(2):
        command.main(list(map(str, words)))
    assert asked[0][:3] == cells and asked[1][0] == cells[2]
    found = records.read_records(path)
    assert [record["status"] for record in found] == ["ok", "ok", "red_gate", "red_gate"]
    assert found[2]["error"] == "first loss is 2.5, that of sparton splade eager 384 2"
    assert len({record["run"] for record in found}) == 1
    said = capsys.readouterr().out
    assert "cells left for the same command" in said and "first loss is 2.5" in said


def test_records_name_the_commit(monkeypatch):
    found = records.describe_environment()
    for git in (None, {"sha": "def", "dirty": True}, {"sha": "abc", "dirty": None}):
        described = {**found, "git": git}
        monkeypatch.setattr(records, "describe_environment", lambda d=described: d)
        record = records.record_environment(on_gpu=False)
        assert (record["git_sha"], record["dirty"]) == tuple((git or {}).values() or (None, None))


@pytest.mark.parametrize("name", STUDIES)
def test_studies_declare_each_cell_once(name, tmp_path):
    study = load_study(name)
    assert study.name == name
    words = ["--list", "--suite"] if len(study.suites(options_of(study, tmp_path))) > 1 else []
    found = study.suites(options_of(study, tmp_path))
    cells = parse(study, *words, *(found if words else ()))
    assert cells == {suite: list(listed) for suite, listed in found.items()}
    for suite, listed in found.items():
        assert len(set(listed)) == len({cell.label for cell in listed}) == len(listed)
        assert all(tuple(cell._asdict()) == study.fields() for cell in listed)
        assert study.file_of(suite).startswith(name)


def options_of(study: Study, tmp_path) -> Settings:
    options = {name: option.get("default") for name, option in study.options.items()}
    return settings(tmp_path, options=options, miniature=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "heeds"], "--suite heeds: choose from bars"),
        ([], "choose from bars, heads"),
        (["--suite", "heads", "--only", "spartan"], "--only spartan: no such cell"),
    ],
)
def test_names_of_nothing_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(HEAD, "--list", *words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_miniatures_stay_out_of_the_results(name, capsys):
    with pytest.raises(SystemExit):
        parse(load_study(name), "--miniature")
    assert "--output" in capsys.readouterr().err


def test_a_part_of_the_cells_is_chosen_by_their_names():
    cells = parse(TRAINING, "--list", "--suite", "splade", "--only", r" sparton 384\b")["splade"]
    assert 1 < len(cells) < len(TRAINING.suites(None)["splade"])
    assert {(cell.head, cell.batch) for cell in cells} == {("sparton", 384)}


def test_a_crash_is_a_record_and_the_next_cell_runs(tmp_path):
    broken = Cell("not a shape", "eager", backbone="eager")
    found = dict(processes.run_cells(HEAD, [broken, GEMM], settings(tmp_path)))
    (record,) = found[broken]
    assert record["status"] == "crashed"
    assert "not a shape" in record["error"]
    assert found[GEMM][0]["status"] == "ok"


def test_a_cell_that_hangs_is_killed_and_what_is_left_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(type(HEAD), "limit", 8.0)
    endless = settings(tmp_path, seconds=60)
    [(_, (record,))] = processes.run_cells(HEAD, [GEMM], endless)
    assert record["status"] == "timeout"


def test_a_miniature_has_a_temporary_folder_of_its_own():
    parsed = [
        command.parse_arguments(load_study("collections"), ["--device", "cpu", "--list", *words])
        for words in ([], ["--miniature"])
    ]
    (_, real, _), (_, toy, _) = parsed
    assert real.folder != toy.folder
    assert all(each.folder.endswith(records.code_digest()) for each in (real, toy))


def test_a_folder_is_of_one_run_at_a_time(tmp_path):
    with command.alone_in(tmp_path / "left"):
        refused = pytest.raises(SystemExit, match="left: name another --folder")
        with refused, command.alone_in(tmp_path / "left"):
            pass
        with command.alone_in(tmp_path / "other"):
            pass
    with command.alone_in(tmp_path / "left"):
        pass


def test_nothing_begins_after_the_deadline(tmp_path):
    deadline = time.monotonic() - 1
    assert not list(processes.run_cells(HEAD, [GEMM], settings(tmp_path), deadline))


def test_processes_wait_for_their_turn(tmp_path):
    worker = processes.Worker(HEAD, [GEMM], settings(tmp_path))
    worker.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        worker._process.wait(0.5)
    worker.stop()
    assert worker._process.poll() is not None


def test_what_gives_no_results_is_a_record_too():
    def raising(error: Exception):
        def measure():
            raise error

        return gate.outcome(measure)

    wrapped = ValueError("while compiling")
    wrapped.__cause__ = torch.OutOfMemoryError("no memory")
    assert raising(torch.OutOfMemoryError("no memory")) == raising(wrapped) == [{"status": "oom"}]
    [failed] = raising(ValueError("E must be 64"))
    assert failed == {"status": "failed", "error": "ValueError: E must be 64"}
    assert raising(ImportError("no package")) == [{"status": "absent", "error": "no package"}]
    assert gate.outcome(lambda: {"status": "ok"}) == [{"status": "ok"}]


def test_no_time_without_passing(tmp_path):
    calls = []
    found = settings(tmp_path)
    for error, status in ((0.1, "ok"), (0.2, "red_gate"), (float("nan"), "red_gate")):
        record = gate.timed_if_right({"x": error}, {"x": 0.1}, lambda: calls.append(1), found)
        assert (record["status"], "p50_ms" in record) == (status, status == "ok")
        assert bool(calls) == (status == "ok")
        calls.clear()


def test_the_conditions_are_those_of_the_device_in_use(monkeypatch):
    """By its UUID, as ``nvidia-smi --id`` takes it, not by a number."""
    uuids = [uuid.UUID(int=n) for n in range(2)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number])
    )
    commands = []
    monkeypatch.setattr(timing.subprocess, "Popen", lambda words, **_: commands.append(words[-1]))
    timing.ask_conditions(0.5, timing.device_id())
    assert commands[0].endswith("--id=GPU-00000000-0000-0000-0000-000000000001")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_all_threads_share_the_fastest_core_for_as_long_as_it_measures(monkeypatch):
    cores, stop = os.sched_getaffinity(0), threading.Event()
    monkeypatch.setattr(timing, "_gpu_times", lambda run, calls: [run()] * calls)
    core = timing._fastest_core(lambda: -next(iter(os.sched_getaffinity(0))), 1e-3)
    assert core == max(cores)
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with pytest.raises(RuntimeError), timing._one_core(core):
            for thread in (0, other.native_id):
                assert os.sched_getaffinity(thread) == {core}
            raise RuntimeError
        assert os.sched_getaffinity(other.native_id) == os.sched_getaffinity(0) == cores
    finally:
        stop.set()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_cores_are_tried_by_the_calls_and_left(monkeypatch):
    """Where the system lets them be chosen, and where it does not; long calls need no trial."""
    cores, tried = os.sched_getaffinity(0), []

    def times(run, calls):
        tried.append((os.sched_getaffinity(0), calls))
        return [run()] * calls

    monkeypatch.setattr(timing, "_gpu_times", times)
    assert timing._fastest_core(lambda: 1.0, timing.TRIAL_SECONDS / 2.5) in cores
    assert tried == [({core}, 3) for core in cores]
    assert os.sched_getaffinity(0) == cores
    assert timing._fastest_core(lambda: 1.0, 1.0) in cores
    assert len(tried) == len(cores)

    def refuse(thread, cores):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with timing._one_core(timing._fastest_core(lambda: 1.0, 1e-3)):
        assert os.sched_getaffinity(0) == cores


def test_quantiles_are_of_the_times_after_the_warm_up():
    figures = timing.measure(lambda: time.sleep(1e-3), "cpu", 0.02)
    assert 1 <= figures["p20_ms"] <= figures["p50_ms"] <= figures["p80_ms"] < 20
    assert figures["repeats"] >= timing.FEWEST_REPEATS
