"""Steps of a study: commands that leave something, and which other steps they build on."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
SPARTON = ("-m", "sparton")
LONGEST_LOG = 30  # lines of a step's log that are shown when it fails


class Step(NamedTuple):
    """A command, and what is there when it is done.

    Attributes:
        name: of the step, and of its log.
        words: behind ``python``.
        done: a file or folder that is there when the step is done. ``results.json`` grows with each
            test, and is whole with ``tasks`` of them.
        needs: names of the steps that it builds on.
        study: the file of records that its results belong to.
        label: what the records call it.
        tasks: how many its results have.
    """

    name: str
    words: tuple[str, ...]
    done: Path
    needs: tuple[str, ...] = ()
    study: str = ""
    label: str = ""
    tasks: int = 0

    @property
    def is_done(self) -> bool:
        if not self.tasks or not self.done.exists():
            return self.done.exists()
        return len(json.loads(self.done.read_text())["tasks"]) == self.tasks

    @property
    def _words_file(self) -> Path:
        """Of the words with which the step was begun, beside what it leaves."""
        return self.done.with_name(f"{self.done.name}.words.json")

    def keep_words(self) -> None:
        self._words_file.parent.mkdir(parents=True, exist_ok=True)
        self._words_file.write_text(json.dumps(self.words))

    @property
    def otherwise(self) -> str:
        """In which words what is done differs from what the step would do; "" where it does not, or
        where somebody else put it there."""
        if not (self.is_done and self._words_file.exists()):
            return ""
        before, now = json.loads(self._words_file.read_text()), [*self.words]
        if before == now:
            return ""
        others = [f"with {word}" for word in before if word not in now]
        others += [f"without {word}" for word in now if word not in before]
        return ", ".join(others) or "in another order"


class Place(NamedTuple):
    """Where a step may run: a GPU, or "" for whatever there is."""

    gpu: str
    threads: int

    def environment(self) -> dict[str, str]:
        words = {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": str(ROOT)}
        if before := os.environ.get("PYTHONPATH"):
            words["PYTHONPATH"] += f"{os.pathsep}{before}"
        return os.environ | words | ({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {})


def places(jobs: int, gpus: Sequence[str]) -> list[Place]:
    """As many as there are jobs, the GPUs in turn, each with its part of the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    return [Place(gpus[job % len(gpus)] if gpus else "", threads) for job in range(jobs)]


def chosen(
    steps: Sequence[Step], patterns: Collection[str], *, built_on: bool = False
) -> list[Step]:
    """The steps of these names or patterns, and what those of them that are not done build on, in
    their order.

    Args:
        built_on: also what those that are done were built on.

    Raises:
        ValueError: a pattern that fits no step.
    """
    by_name = {step.name: step for step in steps}
    wanted: set[str] = set()
    for pattern in patterns:
        found = [name for name in by_name if fnmatch(name, pattern)]
        if not found:
            raise ValueError(f"no step is called {pattern}: see --list")
        while found:
            if (name := found.pop()) not in wanted:
                wanted.add(name)
                found += by_name[name].needs if built_on or not by_name[name].is_done else ()
    return [step for step in steps if step.name in wanted]


class Failed(Exception):
    """Names the steps that failed."""


class Runner:
    """Runs steps side by side, each as soon as those it needs are done.

    Args:
        steps: in the order of their importance.
        places: where they run.
        logs: folder of a log for each step.
        record: called with each step that has results, and the seconds it took if it ran now.
        stop_after: seconds after which nothing is started.
        console: says what begins and ends.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        places: Sequence[Place],
        logs: Path,
        record: Callable[[Step, float | None], None],
        stop_after: float | None,
        console: Console,
    ) -> None:
        self._waiting = list(steps)
        self._free = list(places)
        self._logs = logs
        self._record = record
        self._stop_after = stop_after
        self._console = console
        self._done: set[str] = set()
        self._failed: list[str] = []
        self._began = time.monotonic()
        self._running: dict[str, tuple[Step, Place, subprocess.Popen[bytes], float]] = {}

    def run(self) -> None:
        """
        Raises:
            Failed: steps ended with an error; all that did not need them has been run.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        for step in [step for step in self._waiting if step.is_done]:
            self._finish(step, None)
        try:
            while self._start() or self._running:
                self._wait()
        finally:
            for _, _, process, _ in self._running.values():
                process.terminate()
            for _, _, process, _ in self._running.values():
                process.wait()
        if self._failed:
            raise Failed(", ".join(self._failed))
        if self._waiting:
            self._console.print(f"{len(self._waiting)} steps are left: the same command goes on")

    def _start(self) -> bool:
        """Start what may begin; whether anything was started."""
        seconds = time.monotonic() - self._began
        if self._stop_after is not None and seconds >= self._stop_after:
            return False
        started = False
        for step in [step for step in self._waiting if self._done.issuperset(step.needs)]:
            if not self._free:
                break
            self._waiting.remove(step)
            place = self._free.pop(0)
            step.keep_words()
            with (self._logs / f"{step.name}.log").open("ab") as log:
                process = subprocess.Popen(
                    (sys.executable, *step.words),
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=place.environment(),
                )
            self._running[step.name] = step, place, process, time.monotonic()
            self._say(f"{step.name}: {shlex.join(step.words)}")
            started = True
        return started

    def _wait(self) -> None:
        """Until one or more of the running steps have ended."""
        while not (ended := list(self._ended())):
            time.sleep(0.2)
        for name, code in ended:
            step, place, _, began = self._running.pop(name)
            self._free.append(place)
            seconds = time.monotonic() - began
            if code or not step.is_done:
                self._failed.append(name)
                log = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
                self._say("\n".join([f"{name}: failed", *log[-LONGEST_LOG:]]))
            else:
                self._say(f"{name}: done in {seconds:.0f} s")
                self._finish(step, seconds)

    def _ended(self) -> Iterator[tuple[str, int]]:
        for name, (_, _, process, _) in self._running.items():
            with suppress(subprocess.TimeoutExpired):
                yield name, process.wait(0)

    def _finish(self, step: Step, seconds: float | None) -> None:
        self._done.add(step.name)
        with suppress(ValueError):
            self._waiting.remove(step)
        if step.study:
            self._record(step, seconds)

    def _say(self, words: str) -> None:
        clock = f"{time.monotonic() - self._began:5.0f} s  "
        self._console.print(clock + words, soft_wrap=True, markup=False)
