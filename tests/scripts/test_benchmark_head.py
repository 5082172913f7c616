"""The head benchmark without a GPU: cells, processes, resume, records."""

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
from rich.console import Console

import benchmark_head
from head_benchmark import cells, environment, runner, suites, timing
from head_benchmark.heads import HEADS
from head_benchmark.suites import SUITES, Cell

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/benchmark_head.py"
SHAPE = suites.SHORT


def settings(tmp_path, **changes) -> cells.Settings:
    return cells.Settings("cpu", str(tmp_path / "cache"), 0.01, miniature=True)._replace(**changes)


def run_script(*words: object, check: bool = True) -> subprocess.CompletedProcess:
    """Of a commit by name, so that a changed working tree is no reason to measure anew."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--miniature", "--seconds", "0.01"]
    environment = {**os.environ, "SPARTON_COMMIT": "here"}
    process = subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, env=environment
    )
    assert not check or process.returncode == 0, process.stderr
    return process


@pytest.mark.parametrize("suite", SUITES)
def test_suites_name_each_cell_once_and_things_that_exist(suite):
    listed = SUITES[suite]
    assert len(set(listed)) == len(listed)
    for cell in listed:
        assert cell.head in {*HEADS, suites.GEMM, suites.GEMM_AS_IS, suites.NO_HEAD}
        assert cell.mode in suites.MODES
        assert cell.pattern in {*suites.PATTERNS, suites.CAPTURED}
        assert cell.backbone in ("", "eager", "compiled")
        assert cell.shape == suites.CAPTURED or suites.shape_of(cell.shape).V


def test_shapes_are_read_from_their_names():
    assert suites.shape_of("3x17x101") == suites.Shape(((3, 17, 17),), 101)
    with pytest.raises(ValueError, match="3x17"):
        suites.shape_of("3x17")


def test_the_truth_comes_once_before_the_first_cell_that_needs_it(tmp_path):
    measured = [
        Cell(SHAPE, suites.GEMM),
        Cell(SHAPE, "eager"),
        Cell(SHAPE, "sparton", suites.FORWARD_BACKWARD),
        Cell(SHAPE, "eager", pattern="random_1pct"),
    ]
    jobs = runner.with_truths(measured, settings(tmp_path))
    heads = [job.head for job in jobs]
    assert heads == [suites.GEMM, suites.TRUTH, "eager", "sparton", suites.TRUTH, "eager"]
    path = settings(tmp_path).truth_file(measured[1])
    path.parent.mkdir()
    path.touch()
    assert len(runner.with_truths(measured, settings(tmp_path))) == len(jobs) - 1
    assert len(runner.with_truths(measured, settings(tmp_path, miniature=False))) == len(jobs)


@pytest.mark.slow
def test_a_suite_is_measured_killed_and_continued(tmp_path):
    output = tmp_path / "head.jsonl"
    part = ("--suite", "heads", "--heads", suites.GEMM, "eager", "sparton", "--output", output)
    part = (*part, "--cache", tmp_path / "cache")
    run_script(*part)
    lines = output.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    assert [record["status"] for record in records] == ["ok"] * 5
    for record in records:
        assert {"command", "git_sha", "dirty", "gpu", "driver", "torch", "triton", "seed"} < set(
            record
        )
        assert 0 < record["p20_ms"] <= record["p50_ms"] <= record["p80_ms"]
        assert (record["N"], record["S"], record["V"]) == (6, 8, 611)
    assert records[-1]["errors"].keys() == records[-1]["allowed"].keys()

    # A kill leaves whole lines and perhaps a torn one.
    output.write_text("".join([*lines[:3], lines[3][:40]]))
    assert "3 of them" in run_script(*part).stdout
    continued = runner.read_records(output)
    assert output.read_text().splitlines(keepends=True)[:3] == lines[:3]
    assert [runner.cell_of(r) for r in continued] == [runner.cell_of(r) for r in records]
    assert len({record["run"] for record in continued}) == 1


@pytest.mark.slow
def test_records_of_other_code_are_not_continued(tmp_path):
    output = tmp_path / "head.jsonl"
    part = ("--suite", "heads", "--heads", suites.GEMM, "--output", output)
    run_script(*part)
    other = [{**record, "git_sha": "other"} for record in runner.read_records(output)]
    runner.write_records(output, other)
    process = run_script(*part, check=False)
    assert process.returncode == 1
    assert "git_sha = other" in process.stderr
    assert runner.read_records(output) == other
    run_script(*part, "--fresh")
    assert runner.read_records(output)[0]["git_sha"] != "other"


def context(**changes) -> dict:
    keys = dict.fromkeys((*benchmark_head.SAME_RUN, "captured", "dirty"))
    return {**keys, "git_sha": "a", "run": "1"} | changes


def records_file(tmp_path, *records: dict) -> Path:
    path = tmp_path / "head.jsonl"
    runner.write_records(path, [context() | SOME._asdict() | {"status": "ok"} | r for r in records])
    return path


SOME = Cell(SHAPE, "eager")
SEEN = Cell(suites.CAPTURED, "eager", pattern=suites.CAPTURED)._asdict()


@pytest.mark.parametrize(
    ("record", "now", "message"),
    [
        ({}, {"seconds": 2.0}, "seconds = None, this is 2.0"),
        ({"dirty": True}, {}, "its code has changes that no commit names"),
        ({}, {"dirty": True}, "this code has changes that no commit names"),
        ({**SEEN, "captured": "one"}, {"captured": "two"}, "captured = one, this is two"),
    ],
)
def test_records_that_may_be_of_another_run_are_not_continued(tmp_path, record, now, message):
    path = records_file(tmp_path, {}, {**SEEN, "captured": "one", "status": "crashed"}, record)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=message):
        benchmark_head.resume(path, context(**now), {SOME})
    assert path.read_bytes() == before


def test_a_capture_may_join_records_without_one(tmp_path):
    path = records_file(tmp_path, {})
    benchmark_head.resume(path, context(captured="one"), {SOME})
    path = records_file(tmp_path, {}, {**SEEN, "captured": "one"})
    benchmark_head.resume(path, context(), {SOME})
    assert len(runner.read_records(path)) == 2


def test_what_crashed_or_hung_is_tried_again_if_asked_for(tmp_path):
    results = ("ok", "oom", "red_gate", "crashed", "timeout")
    shapes = [f"{n}x8x8" for n in range(1, 7)]
    statuses = dict(zip(shapes, (*results, "crashed"), strict=True))
    path = records_file(tmp_path, *({"shape": s, "status": x} for s, x in statuses.items()))
    asked = {SOME._replace(shape=shape) for shape in shapes[:-1]}
    benchmark_head.resume(path, context(), asked)
    left = {record["shape"]: record["status"] for record in runner.read_records(path)}
    assert left == {s: statuses[s] for s in ("1x8x8", "2x8x8", "3x8x8", "6x8x8")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "eager", "spartan"], "--heads spartan: not in heads; choose from gemm_padded"),
        (["--shapes", "1x2x3"], f"--shapes 1x2x3: not in heads; choose from {suites.TABLE1}"),
        (["--captured", "missing.pt"], "--captured missing.pt: no such file"),
        (["--captured", __file__], "test_benchmark_head.py cannot be read"),
    ],
)
def test_names_of_nothing_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark_head.parse_arguments(["--suite", "heads", "--device", "cpu", "--list", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_truths_are_part_of_the_estimate(capsys):
    cells = [Cell(SHAPE, suites.GEMM), SOME, SOME._replace(mode=suites.FORWARD_BACKWARD)]
    benchmark_head.list_cells("heads", cells, Console(width=100))
    seconds = 4 * benchmark_head.SECONDS_PER_CELL
    assert f"3 cells, 1 truths, about {seconds:.0f} s" in capsys.readouterr().out


def test_suites_that_share_cells_share_their_records(tmp_path):
    output = tmp_path / "head.jsonl"
    part = ("--heads", suites.GEMM, "--shapes", suites.TABLE1, "--output", output)
    run_script("--suite", "heads", "bars", *part)
    assert len(runner.read_records(output)) == 1
    assert set(suites.FILES) == set(SUITES)


def test_parts_and_miniatures_stay_out_of_the_results():
    for words in (["--heads", "eager"], ["--miniature"]):
        with pytest.raises(SystemExit):
            benchmark_head.parse_arguments(["--suite", "heads", "--device", "cpu", *words])


def test_records_name_the_commit(monkeypatch):
    arguments = benchmark_head.parse_arguments(["--suite", "heads", "--list", "--device", "cpu"])
    found = environment.describe_environment()
    for git in (None, {"sha": "def", "dirty": True}, {"sha": "abc", "dirty": None}):
        described = {**found, "git": git}
        monkeypatch.setattr(environment, "describe_environment", lambda d=described: d)
        record = benchmark_head.environment(arguments)
        assert (record["git_sha"], record["dirty"]) == tuple((git or {}).values() or (None, None))


def test_a_crash_is_a_record_and_the_next_cell_runs(tmp_path):
    broken = Cell("not a shape", suites.GEMM)
    found = dict(runner.run_cells([broken, Cell(SHAPE, suites.GEMM)], settings(tmp_path)))
    assert found[broken]["status"] == "crashed"
    assert "not a shape" in found[broken]["error"]
    assert found[Cell(SHAPE, suites.GEMM)]["status"] == "ok"


def test_cells_without_a_truth_say_why(tmp_path):
    other = tmp_path / "other.pt"
    torch.save({}, other)
    cell = Cell(suites.CAPTURED, "eager", pattern=suites.CAPTURED)
    asked = settings(tmp_path, captured=str(other))
    [_, (_, record)] = runner.run_cells(runner.with_truths([cell], asked), asked)
    assert record["status"] == "crashed"
    assert "other.pt is no captured batch" in record["error"]


def test_a_cell_that_hangs_is_killed(tmp_path):
    worker = runner.Worker(Cell(SHAPE, suites.GEMM), settings(tmp_path, seconds=60))
    assert worker.finish(limit=2)["status"] == "timeout"


def test_nothing_begins_after_the_deadline(tmp_path):
    jobs = [Cell(SHAPE, suites.GEMM)]
    assert not list(runner.run_cells(jobs, settings(tmp_path), deadline=time.monotonic()))


def test_out_of_memory_is_a_result_also_within_a_compiler():
    def exhausted():
        raise torch.OutOfMemoryError("no memory")

    def wrapped():
        try:
            exhausted()
        except torch.OutOfMemoryError as error:
            raise ValueError("while compiling") from error

    def another():
        raise ValueError("no memory")

    assert cells.run(exhausted) == cells.run(wrapped) == {"status": "oom"}
    with pytest.raises(ValueError):
        cells.run(another)


def test_the_conditions_are_those_of_the_device_in_use(monkeypatch):
    """By its UUID, as ``nvidia-smi --id`` takes it, not by a number."""
    uuids = [uuid.UUID(int=n) for n in range(2)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number])
    )
    commands = []
    monkeypatch.setattr(timing.subprocess, "Popen", lambda words, **_: commands.append(words[-1]))
    timing._watch(0.5)
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
