"""What is wrong with overrides that Hydra cannot compose, or that nothing would read."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparton.cli.kinds import in_words
from sparton.cli.nearest import did_you_mean, nearest
from sparton.cli.overrides import written
from sparton.cli.targets import parameters, refusal

Compose = Callable[[Sequence[str]], DictConfig]
_OF_EVALUATIONS = ("dev", "test", "every")


def refuse_additions(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse what overrides have added to a configuration and nothing reads.

    Raises:
        ValueError: names the override and what was meant.
    """
    for override in parse(overrides):
        group = override.package or "/" in override.key_or_group or override.is_hydra_override()
        if group or not (override.is_add() or override.is_force_add()):
            continue
        first, *keys = override.key_or_group.split(".")
        if first not in top_level(cfg):
            raise ValueError(_unknown(override, cfg, 0))
        if first == "evaluation" and keys and keys[0] not in _OF_EVALUATIONS:
            guess = nearest(keys[0], _OF_EVALUATIONS)
            told = did_you_mean([guess and f"evaluation.{guess}"])
            raise ValueError(f"{override.input_line}: no evaluation reads {keys[0]}{told}")
        node, place = cfg[first], first
        for key in keys:
            if not isinstance(node, DictConfig):
                break
            if target := node.get("_target_"):
                line, taken = str(override.input_line), parameters(target, place)
                if message := refusal(line, key, target, taken, place):
                    raise ValueError(message)
            node, place = node.get(key), f"{place}.{key}"


def explain_refusal(
    error: Exception, overrides: Sequence[str], loader: ConfigLoader, compose: Compose
) -> str:
    """Why a configuration could not be composed, in terms of the first override that is wrong; of
    Hydra's own words the first line where no override is.

    Args:
        error: Hydra's.
        compose: makes the configuration of other overrides.
    """
    try:
        parsed = parse(overrides)
    except ValueError as wrong:
        return str(wrong)
    try:
        base = compose([])
        groups, mounts = dict(_groups(loader)), _mounts(base)
        for override in parsed:
            if message := _group_refusal(override, groups, mounts):
                return message
        chosen = [each for each in parsed if _chooses(each, groups) or each.is_hydra_override()]
        if chosen:
            base = compose([str(each.input_line) for each in chosen])
        for override in parsed:
            if override not in chosen and (message := _value_refusal(override, base, mounts)):
                return message
    except (HydraException, OmegaConfBaseException):
        pass  # a file of the user's own is wrong, of which Hydra has told
    told: BaseException | None = error
    while told and not str(told):  # Hydra's own word for an error of OmegaConf's has none
        told = told.__cause__ or told.__context__
    return str(told or type(error).__name__).splitlines()[0]


def parse(overrides: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """The overrides, taken apart; with a ``loader`` the options of a ``glob`` can be listed.

    Raises:
        ValueError: names the first that is none.
    """
    parser, parsed = OverridesParser.create(loader), []
    for each in overrides:
        if "=" not in each and not each.startswith("~"):
            raise ValueError(f"{each}: a setting has a value, as in batch=64")
        try:
            parsed.append(parser.parse_override(each))
        except HydraException as error:
            if "=~" in each:
                raise ValueError(f"{each}: ~ is not read here; write $HOME in its place") from error
            key, _, value = each.partition("=")
            if value and not re.search(r"""[\[\]{}()'"$]""", value):
                told = f'as text it is "{key}={written(value)}"'
            else:
                told = "a shell must leave spaces, quotes and braces alone, as within '...'"
                told += "" if each.isascii() else """, and text like this has quotes: 'x=["é"]'"""
            raise ValueError(
                f"{each}: no setting can be read from this ({str(error).splitlines()[0]}); {told}"
            ) from error
    return parsed


def top_level(cfg: DictConfig) -> list[str]:
    """Names of the settings and groups of the top level."""
    return list(get_type_hints(OmegaConf.get_type(cfg)))


def _groups(loader: Any, parent: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every group with its options, but for Hydra's own and those that a command does not know."""
    for name in loader.list_groups(parent):
        group = f"{parent}/{name}" if parent else name
        if group != "hydra" and loader.repository.group_exists(config_path=group):
            yield group, loader.get_group_options(group)
            yield from _groups(loader, group)


def _mounts(cfg: DictConfig) -> list[str]:
    """The groups of the defaults, as overrides choose them: ``regularizer@query_regularizer``."""
    return [name for name in cfg.hydra.runtime.choices if not name.startswith("hydra/")]


def _chooses(override: Override, groups: Mapping[str, Sequence[str]]) -> bool:
    """Whether an override chooses an option of a group."""
    return override.key_or_group in groups and not isinstance(override.value(), dict)


def _group_refusal(
    override: Override, groups: Mapping[str, Sequence[str]], mounts: Sequence[str]
) -> str | None:
    """What is wrong with the choice of an option of a group."""
    line, name, value = override.input_line, override.key_or_group, override.value()
    if override.is_hydra_override():
        return None
    key = f"{name}@{override.package}" if override.package else name
    if not _chooses(override, groups):
        if override.package is None and "/" not in name:
            return None
        near = nearest(name, groups)
        guess = near and f"{key.replace(name, near, 1)}={value}"
        return f"{line}: there is no group {name}{did_you_mean([guess])}"
    for option in value if isinstance(value, list) else [value]:
        option = "null" if option is None else option
        folder, _, file = f"{name}/{option}".rpartition("/")
        if file not in groups.get(folder, ()):
            near = nearest(str(option), groups[name])
            told = did_you_mean([near and f"{key}={near}"]) or "."
            if "/" in str(option) and name == "backbone":
                told = f"; a model of this name is backbone.name={option}."
            options = ", ".join(groups[name])
            return f"{line}: {name} has no option {option}{told} Its options: {options}"
    if key not in mounts and not override.is_add():
        places = [mount for mount in mounts if mount.partition("@")[0] == name]
        right = " or ".join(f"{place}={value}" for place in places or [f"+{key}"])
        return f"{line}: the group {name} is chosen as {right}"
    if key in mounts and (override.is_add() or override.is_force_add()):
        return f"{line}: {key} has a choice already; another is {key}={value}"
    return None


def _value_refusal(override: Override, base: DictConfig, mounts: Sequence[str]) -> str | None:
    """What is wrong with the value of a setting."""
    node: Any = base
    keys = override.key_or_group.split(".")
    for depth, key in enumerate(keys):
        if not isinstance(node, DictConfig) or key not in list(node):
            added = depth and (override.is_add() or override.is_force_add())
            return None if added else _unknown(override, base, depth)
        node = node._get_node(key)
    line, name, value = override.input_line, override.key_or_group, override.value()
    for mount in mounts:
        if mount.rpartition("@")[2] == name and not isinstance(value, dict):
            return f"{line}: {name} is chosen from a group: {mount}={value}"
    if override.is_delete():
        return None
    if override.is_add() and not isinstance(value, dict | list):
        return f"{line}: {name} has a value already; another is {name}={value}"
    try:
        OmegaConf.update(copy.deepcopy(base), name, value, merge=True)
    except OmegaConfBaseException as error:
        kind = in_words(get_type_hints(OmegaConf.get_type(base)).get(name))
        return f"{line}: must be {kind}" if kind else f"{line}: {str(error).splitlines()[0]}"
    return None


def _unknown(override: Override, cfg: DictConfig, depth: int) -> str:
    """That the key of an override at a depth of its path does not exist, and what does."""
    line, path = override.input_line, override.key_or_group.split(".")
    place, key, rest = ".".join(path[:depth]), path[depth], path[depth + 1 :]
    assigned = "" if override.is_delete() else f"={override.get_value_string()}"
    sign = "~" if override.is_delete() else ""
    if not depth:
        names = top_level(cfg)
        near = nearest(key, names)
        guesses = [".".join([near, *rest])] if near else _endings(cfg, path)
        guesses = _with_dots(cfg, key) or guesses
        told = did_you_mean(f"{sign}{guess}{assigned}" for guess in guesses)
        return f"{line}: there is no setting {key}{told or '; --help shows all'}"
    node = OmegaConf.select(cfg, place)
    if not isinstance(node, DictConfig):
        return f"{line}: {place} is a value and has no {key}"
    names = [str(each) for each in node if not str(each).startswith("_")]
    near = nearest(key, names)
    taken = {} if near or "_target_" not in node else parameters(node["_target_"], place) or {}
    if key in taken and not override.is_delete():
        return f"{line}: {place} leaves that to {node['_target_']}; +{line} sets it"
    near = near or nearest(key, taken)
    guess = near and f"{sign}{'.'.join([place, near, *rest])}{assigned}"
    told = did_you_mean([guess]) or f"; it has {', '.join(names) or 'no settings'}"
    return f"{line}: {place} has no {key}{told}"


def _with_dots(cfg: DictConfig, key: str) -> list[str]:
    """Settings whose dots were written as underscores, as arguments of Python are."""
    cuts = [place for place, letter in enumerate(key) if letter == "_"]
    dotted = [f"{key[:cut]}.{key[cut + 1 :]}" for cut in cuts]
    return [each for each in dotted if OmegaConf.select(cfg, each, default=cfg) is not cfg]


def _endings(cfg: DictConfig, path: Sequence[str]) -> list[str]:
    """Settings of groups whose names end as a path does, or as one that is near to it."""
    plain = OmegaConf.to_container(OmegaConf.masked_copy(cfg, top_level(cfg)))
    settings = list(_settings(plain, ()))
    near = nearest(path[-1], {setting[-1] for setting in settings})
    for last in (path[-1], near):
        wanted = (*path[:-1], last)
        found = [setting for setting in settings if setting[-len(wanted) :] == wanted]
        if found:
            return [".".join(setting) for setting in sorted(found, key=len)[:2]]
    return []


def _settings(node: object, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of all settings below a node."""
    if isinstance(node, dict):
        for key, value in node.items():
            if not str(key).startswith("_"):
                yield from _settings(value, (*place, str(key)))
    else:
        yield place
