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
        shows: the options, where one of them asks that something be shown, and nothing run.
    """

    config_name: str
    overrides: tuple[str, ...] = ()
    sweep: bool = False
    config_dir: Path | None = None
    shows: argparse.Namespace | None = None

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
    options, rest = options_parser(config_name).parse_known_args(arguments)
    for word in rest:
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            raise ValueError(f"there is no option {word}: settings have no dashes: {name}=...")
    folder = options.config_dir
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--config-dir={folder}: no such folder")
    options.overrides = rest
    asked = options.help, options.hydra_help, options.shell_completion, options.cfg, options.info
    shows = options if any(asked) else None
    folder = folder and folder.resolve()
    return Request(options.config_name, tuple(rest), options.multirun, folder, shows)


def options_parser(config_name: str) -> argparse.ArgumentParser:
    """The options of Hydra's that commands have. (Hydra's own parser fails in Python 3.14.)"""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--multirun", "-m", action="store_true", help="run a sweep")
    parser.add_argument("--run", "-r", action="store_true", help="run once, which is usual")
    parser.add_argument("--config-name", "-cn", default=config_name, help="the file to begin with")
    parser.add_argument("--config-dir", "-cd", type=Path, help="a folder of your own files")
    parser.add_argument("--help", "-h", action="store_true", help="what the command does")
    parser.add_argument("--hydra-help", action="store_true", help="this list")
    parser.add_argument(
        "--shell-completion", "-sc", action="store_true", help="install=SHELL or uninstall=SHELL"
    )
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="show the settings")
    parser.add_argument("--resolve", action="store_true", help="with --cfg, resolve references")
    parser.add_argument("--package", "-p", help="with --cfg, show this part alone")
    known = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    parser.add_argument(
        "--info", "-i", nargs="?", const="all", choices=known, help="show what Hydra makes of it"
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are for others to tell."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
