"""Hydra with the configurations of this package and the user's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import fill
from typing import Any, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from sparton.cli.command_line import Request, options_parser
from sparton.cli.misspelt import explain_refusal, parse, refuse_additions
from sparton.cli.schema import SCHEMAS, register
from sparton.cli.shipped import shipped


@dataclass(frozen=True)
class Composer:
    """Composes, shows and runs what a command line asks for.

    Attributes:
        request: the command line.
        schema: the type of its configurations.
        engine: Hydra, while it is open.
    """

    request: Request
    schema: type
    engine: Any

    def variants(self) -> list[DictConfig]:
        """What would run, with Hydra's own node; of a sweep, a configuration for each of the values
        that are swept.

        Raises:
            ValueError: an override that is none, or of something that does not exist; several
                values for a setting, and no sweep.
        """
        values: list[list[str]] = []
        for override in parse(self.request.overrides, self.engine.config_loader):
            if override.is_sweep_override():
                key = override.get_key_element()
                values.append([f"{key}={value}" for value in override.sweep_string_iterator()])
            else:
                values.append([str(override.input_line)])
        firsts = [each[0] for each in values]
        others = [
            [*firsts[:place], value, *firsts[place + 1 :]]
            for place, each in enumerate(values)
            for value in each[1:]
        ]
        found = [self._checked(overrides) for overrides in (firsts, *others)]
        if others and not self.sweeps(found[0]):
            pairs = zip(self.request.overrides, values, strict=True)
            swept = next(typed for typed, each in pairs if len(each) > 1)
            key, _, value = swept.partition("=")
            raise ValueError(
                f"{swept}: several values are a sweep, which -m runs; a list is {key}=[{value}]"
            )
        return found

    def _checked(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of these overrides, all of which are read by something."""
        try:
            cfg = self._composed(overrides)
        except (HydraException, OmegaConfBaseException) as error:
            loader = self.engine.config_loader
            why = explain_refusal(error, overrides, loader, self._composed)
            raise ValueError(why) from error
        refuse_additions(cfg, overrides)
        return cfg

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        name = self.request.config_name
        try:
            cfg = compose(name, list(overrides), return_hydra_config=True)
        except ValueError as error:  # Hydra's own, where a group is null
            raise ConfigCompositionException(str(error)) from error
        except MarkedYAMLError as error:  # in a file of the user's own
            mark = error.problem_mark
            place = f"{mark.name}, line {mark.line + 1}: " if mark else ""
            raise ValueError(f"{place}not YAML: {error.problem}") from error
        if OmegaConf.get_type(cfg) is not self.schema:
            raise ValueError(
                f"{name}.yaml is no configuration of this command: its defaults do not begin with "
                f"that of {shipped('configs')}. Give the file another name"
            )
        return cfg

    def sweeps(self, cfg: DictConfig) -> bool:
        """Whether one of the :meth:`variants` is a cell of a sweep."""
        return self.request.sweep or cfg.hydra.mode == RunMode.MULTIRUN

    def run(self, task: TaskFunction, configure_logging: bool = True) -> Any:
        """Run ``task`` in a folder that Hydra makes, and give what it returns."""
        overrides = [*self.request.overrides, "hydra.mode=RUN"]
        name = self.request.config_name
        return self.engine.run(name, task, overrides, configure_logging).return_value

    def sweep(self, task: TaskFunction) -> Any:
        """Run ``task`` for every combination of the values that are swept."""
        overrides = [*self.request.overrides, "hydra.mode=MULTIRUN"]
        return self.engine.multirun(self.request.config_name, task, overrides)


@contextmanager
def composer(request: Request, command: str) -> Iterator[Composer]:
    """Open Hydra on the folders of configurations; what is in several of them is taken from the
    first that has it.

    Args:
        command: one of those that the schemas are of.
    """
    register()
    *own, packaged = config_folders(request.config_dir)
    name = request.config_name
    with initialize_config_dir(str(packaged), job_name=name, version_base="1.3"):
        engine: Any = GlobalHydra.instance().hydra
        loader = engine.config_loader
        search_path = loader.get_search_path()
        for folder in own:
            search_path.prepend("own", f"file://{folder}", SearchPathQuery(provider="main"))
        loader.repository.initialize_sources(search_path)
        _hide_groups(loader.repository, SCHEMAS[command])
        yield Composer(request, SCHEMAS[command], engine)


def _hide_groups(repository: Any, schema: type) -> None:
    """A group of files whose name is that of a plain setting of a command is none for it. Hydra has
    no public way to say so: to it, every folder on its search path is a group."""
    plain = {field.name for field in fields(schema) if get_origin(field.type) is not dict}
    exists = repository.group_exists
    repository.group_exists = lambda config_path: config_path not in plain and exists(config_path)


def _list_groups(engine: Any, schema: type) -> None:
    """Let the help list the groups that a command has, without the parts of their files, in lines
    of a terminal's width."""
    own = {field.name for field in fields(schema) if get_origin(field.type) is dict}
    own |= {"suite"} if "evaluation" in own else set()
    own |= {"regularizer", "experiment", "debug"} if "optimizer" in own else set()
    listed = engine.format_config_groups

    def format_config_groups(predicate: Callable[[str], bool], compact: bool = True) -> str:
        def shown(name: str) -> bool:
            group, _, below = name.partition("/")
            return predicate(name) and (group == "hydra" or (group in own and below != "base"))

        lines = listed(shown, compact).splitlines()
        return "\n".join(fill(line, 80, subsequent_indent="  ") for line in lines)

    engine.format_config_groups = format_config_groups


def config_folders(own: Path | None) -> list[Path]:
    """Where configurations are looked for, in that order: the folder that ``--config-dir`` names,
    ``configs`` where the command is typed, and those of this package."""
    folders = [own] if own is not None else []
    if Path("configs").is_dir():
        folders.append(Path("configs").resolve())
    packaged = shipped("configs")
    return [*(folder for folder in folders if folder != packaged), packaged]


def show(request: Request, command: str) -> None:
    """Answer ``--help``, ``--cfg``, ``--info`` and the other options that run nothing."""
    asked, parser = request.shows, options_parser(command)
    assert asked is not None
    parser.add_argument("overrides", nargs="*", help="setting=value, group=option")  # for its help
    with composer(request, command) as opened:
        engine, name, overrides = opened.engine, request.config_name, asked.overrides
        if asked.help:
            _list_groups(engine, SCHEMAS[command])
            engine.app_help(name, parser, asked)
        elif asked.hydra_help:
            engine.hydra_help(name, parser, asked)
        elif asked.cfg:
            engine.show_cfg(name, overrides, asked.cfg, asked.package, asked.resolve)
        elif asked.info:
            engine.show_info(asked.info, name, overrides)
        else:
            engine.shell_completion(name, overrides)
