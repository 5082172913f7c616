"""``sparton.train``: a training from Python, with the settings of the command line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.errors import InstantiationException

from sparton.cli import entry
from sparton.cli.command_line import read_request
from sparton.cli.commands.train import set_environment
from sparton.cli.errors import EXPECTED_ERRORS, explain
from sparton.cli.overrides import written
from sparton.reading import read_json


class TrainedRun(NamedTuple):
    """What a training has left.

    Attributes:
        folder: of the run, with ``metrics.jsonl``, ``manifest.json``, checkpoints and logs.
        model: the folder of the best model on the dev tasks, or of the last where there are none.
        results: what ``results.json`` holds, the metrics of that model on every test task and their
            mean; None where nothing was tested.
    """

    folder: Path
    model: Path
    results: dict[str, Any] | None


def train(*overrides: str, **settings: object) -> TrainedRun:
    """Train a retriever in this process, as ``sparton train`` does.

    The run has the folder that the command would give it: it goes on from a checkpoint there, and
    is refused where another process writes into it. What is logged goes to ``train.log`` there.
    Where PyTorch has not been imported, environment variables are set for it as the command does.

    Args:
        overrides: as they are typed behind the command, ``"experiment=quickstart"`` or
            ``"optimizer.lr=1e-4"``.
        settings: the same for names of the top level, ``batch=64`` or ``head="colbert"``.

    Raises:
        ValueError: a setting does not exist, or there is nothing that could train; nothing is
            written then.
        OSError: files or models are missing, or the disk is full.
        BlockingIOError: another process writes into the folder of this run.
        CheckpointError: the checkpoints of the folder are of other settings, or damaged.
        NonFiniteLossError: the loss became NaN or infinite.
        DeviceMemoryError: the device has no more memory.
        RunError: with ``gpus`` above 1, one of the processes failed.
    """
    for override in overrides:
        if not isinstance(override, str):
            raise ValueError(
                f"{override!r} is no override: each is a text of its own, as in "
                'train("experiment=quickstart", "optimizer.lr=1e-4"), or *LIST'
            )
    words = [*overrides, *(f"{name}={written(value)}" for name, value in settings.items())]
    request = read_request(words, "train")
    if request.shows or request.sweep:
        raise ValueError("options such as -m and --help are for the command: sparton train ...")
    if "torch" not in sys.modules:
        set_environment()
    program = [sys.executable, "-m", "sparton", "train"]
    with _hydra_as_before():
        try:
            folder = entry.train(request, program, as_command=False)
        except EXPECTED_ERRORS as error:
            built = isinstance(error, InstantiationException) and error.__cause__
            found = built or error  # Hydra wraps errors of the objects that it builds
            if (told := explain(error)) != str(found):
                found.add_note(f"As a setting of sparton.train: {told}")
            raise found from None
    assert folder is not None
    results = folder / "results.json"
    tested = read_json(results) if results.exists() else None
    return TrainedRun(folder, folder / "model", tested)


@contextmanager
def _hydra_as_before() -> Iterator[None]:
    """Whoever uses Hydra in this process finds it afterwards as it was."""
    plugins, state = Plugins.instance(), Singleton.get_state()
    state["instances"][Plugins] = plugins  # which would be looked for again
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        Singleton.set_state(state)
