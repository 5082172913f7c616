"""Any number of processes encode one collection: whoever dies, the bytes are the same."""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from sparton.encoded import claims
from sparton.encoded.claims import Watch, claimed
from tests.encoded.problems import files, peak_memory, save_model, work

pytestmark = pytest.mark.slow

NUMBER, ROWS = 160, 8  # texts, and texts of a shard
PATIENCE = 60  # seconds


@pytest.fixture(scope="module")
def forked() -> Iterator[multiprocessing.context.ForkServerContext]:
    """Processes that have imported everything when they start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.encoded.problems"])
    yield context


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory, forked) -> dict[str, bytes]:
    """What one process writes that nobody disturbs."""
    output = tmp_path_factory.mktemp("one") / "docs"
    finish(start(forked, model, output, 1))
    return files(output)


def start(forked, model: Path, output: Path, workers: int) -> list:
    started = [
        forked.Process(target=work, args=(model, output, rank, workers, NUMBER, ROWS))
        for rank in range(workers)
    ]
    for process in started:
        process.start()
    return started


def finish(started: list) -> None:
    for process in started:
        process.join(PATIENCE)
        assert process.exitcode == 0


def test_a_complete_folder_holds_what_it_says_and_nothing_else(expected):
    shards = {f"shards/{number:05d}.safetensors" for number in range(NUMBER // ROWS)}
    assert set(expected) == {"encoding.json", "ids.arrow", *shards}


def test_three_processes_write_the_bytes_of_one(model, tmp_path, forked, expected):
    finish(start(forked, model, tmp_path / "docs", 3))
    assert files(tmp_path / "docs") == expected


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_processes_that_are_killed_cost_nothing_but_time(
    workers, model, tmp_path, forked, expected
):
    chosen, output, killed = random.Random(workers), tmp_path / "docs", 0
    for _ in range(3):
        started = start(forked, model, output, workers)
        while not list(output.glob("shards/*.safetensors")) and started[0].is_alive():
            time.sleep(0.01)
        for process in chosen.sample(started, chosen.randint(1, workers)):
            time.sleep(chosen.uniform(0, 0.15))
            killed += process.is_alive()
            process.kill()
        if workers > 1 and chosen.random() < 0.5:
            continue  # the next ones come while some of these are still there
        for process in started:
            process.kill()
            process.join(PATIENCE)
    finish(start(forked, model, output, workers))
    assert killed > 1
    assert files(output) == expected


def test_the_others_do_what_one_that_died_was_at(model, tmp_path, forked, expected):
    output = tmp_path / "docs"
    (first, second) = start(forked, model, output, 2)
    while not list(output.glob("shards/*.safetensors")):
        time.sleep(0.01)
    first.kill()
    finish([second])
    assert files(output) == expected


def test_memory_does_not_grow_with_the_collection(tmp_path, forked):
    """4,000 texts more, of 25 KB each, take less than 64 MiB, whatever the allocator keeps and
    however many shards are read and written at once."""
    wide = save_model(tmp_path / "wide", "wide")
    with ProcessPoolExecutor(1, mp_context=forked) as pool:
        few, many, at_once = (
            pool.submit(peak_memory, wide, tmp_path / str((number, rows)), number, rows).result()
            for number, rows in ((2000, 250), (6000, 250), (6000, 6000))
        )
    assert many < few + 2**26, (few, many, at_once)
    assert at_once > few + 2**26, (few, many, at_once)


def test_a_claim_is_one_processs_own_and_ends_with_its_work(tmp_path):
    path = tmp_path / "claims" / "7"
    with claimed(path) as mine, claimed(path) as again:
        assert mine and not again
        Watch().drop_dead(path)
        assert path.is_file(), "this process lives"
    assert not path.exists()
    with pytest.raises(RuntimeError), claimed(path):
        raise RuntimeError
    assert not path.exists()


class Clock:
    """A machine's own clock, which goes as the test says."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_claims_of_the_dead_are_dropped_and_those_of_the_living_are_not(tmp_path, monkeypatch):
    path, watch, clock = tmp_path / "7", Watch(), Clock()
    monkeypatch.setattr(claims, "time", clock)
    path.write_text("another-machine 1")
    for seconds, beats in ((0, False), (50, True), (50, False), (9, False)):
        clock.now += seconds
        if beats:
            os.utime(path, (0, 0))  # whatever the other's clock says
        watch.drop_dead(path)
        assert path.is_file()
    clock.now += 2
    watch.drop_dead(path)
    assert not path.exists()
    monkeypatch.setattr(claims.socket, "gethostname", lambda: "here")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    path.write_text(f"here {child}")
    watch.drop_dead(path)
    assert not path.exists()


def test_a_process_that_works_long_keeps_its_claim(tmp_path, monkeypatch):
    path, watch, clock = tmp_path / "7", Watch(), Clock()
    monkeypatch.setattr(claims, "time", clock)
    monkeypatch.setattr(claims, "HEARTBEAT", 0.001)
    monkeypatch.setattr(claims, "_is_gone", lambda _: False)
    with claimed(path):
        for _ in range(10):
            watch.drop_dead(path)
            assert path.is_file()
            changed, began = path.stat().st_mtime_ns, time.monotonic()
            while path.stat().st_mtime_ns == changed:
                assert time.monotonic() < began + PATIENCE
                time.sleep(0.001)
            clock.now += claims.PATIENCE + 1
