"""The command lines of ``sparton train`` and ``sparton evaluate``: overrides, and Hydra's options.

Hydra would read them by itself. They are read here first, so that what they ask for is checked
before Hydra makes a folder for it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn


class Request(NamedTuple):
    """What a command line asks for.

    Attributes:
        config_name: of the file that is read first.
        overrides: as they were typed.
        sweep: whether every combination of the values that are listed shall run.
        config_dir: a folder of the user's own configurations.
        shows: whether something is to be shown and nothing to run.
    """

    config_name: str
    overrides: tuple[str, ...] = ()
    sweep: bool = False
    config_dir: Path | None = None
    shows: bool = False

    def again(self) -> list[str]:
        """The words that make another process read the same configurations in the same way."""
        words = [f"--config-name={self.config_name}"]
        if self.config_dir is not None:
            words.append(f"--config-dir={self.config_dir}")
        return words + [each for each in self.overrides if of_hydra(each)]


def of_hydra(override: str) -> bool:
    """Whether an override changes how Hydra runs, not what is run."""
    return override.lstrip("+~").startswith(("hydra.", "hydra/"))


def read_request(arguments: Sequence[str], config_name: str) -> Request:
    """The words behind a command; ``config_name`` where they name no other.

    Raises:
        ValueError: an option that does not exist, or whose value is not right.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--config-name", "-cn", default=config_name)
    parser.add_argument("--config-dir", "-cd", type=Path)
    for flags in (("--help", "-h"), ("--hydra-help",), ("--shell-completion", "-sc")):
        parser.add_argument(*flags, action="store_true", dest="shows")
    parser.add_argument("--cfg", "-c", "--info", "-i", nargs="?", const="all", dest="shown")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    options, rest = parser.parse_known_args(arguments)
    for word in rest:
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            raise ValueError(f"there is no option {word}: settings have no dashes: {name}=...")
    folder = options.config_dir
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--config-dir={folder}: no such folder")
    shows = options.shows or options.shown is not None
    folder = folder and folder.resolve()
    return Request(options.config_name, tuple(rest), options.multirun, folder, shows)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are for others to tell."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
