"""Commands in processes of their own that need not import PyTorch again: each is forked off one
that has."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PROGRAM = """
import json, os, sys
import sparton.cli.main, sparton.cli.assembly, sparton.cli.evaluation, sparton.pipelines
for line in sys.stdin:
    words, folder, environment, before, streams = json.loads(line)
    if not (child := os.fork()):
        os.chdir(folder)
        os.environ.update(environment)
        for number, path in enumerate(streams, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        exec(before)
        sparton.cli.main.main(words)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    """Of a process of this clone: its sources come before what else is on the path."""
    paths = str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


class Forked:
    """Runs commands of ``sparton`` one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def __call__(
        self, words: Sequence[str], folder: Path, before: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """``sparton`` with these words in a folder that exists, with more variables in its
        environment, after some code."""
        streams = [folder / f".{name}" for name in ("stdout", "stderr")]
        request = [list(words), str(folder), environment, before, list(map(str, streams))]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in streams))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
