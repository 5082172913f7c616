"""What the overrides of a command line say: the name of a folder, and what was asked for."""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from pathlib import PurePath

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

_LONGEST_NAME = 120
_NO_OVERRIDES = "defaults"
_NOT_TEXT = {"null", "true", "false", "inf", "nan"}


def typed_overrides(hydra_config: DictConfig | HydraConf) -> list[str]:
    """The overrides of a command line with their ``${...}``, which settings alone look up."""
    words = OmegaConf.to_container(OmegaConf.create(hydra_config.overrides.task), resolve=False)
    assert isinstance(words, list)
    return words


def folder_name(overrides: Sequence[str], left_out: Collection[str] = ()) -> str:
    """Overrides as the name of one folder: what a shell, Hydra and a file system take unquoted.

    Other characters become ``_``; a long name is cut and ends in a digest of the whole text.

    Args:
        left_out: settings and groups of the top level that the name does not tell.
    """
    named = (each for each in overrides if top_level(each) not in left_out)
    text = "+".join(sorted(named)).replace("=", "-")
    name = re.sub(r"[^\w.+@-]+", "_", text).lstrip(".") or _NO_OVERRIDES
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def fixed_settings(overrides: Sequence[str]) -> list[str]:
    """The settings that all cells of a sweep with these overrides share, as overrides call them."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    last = {each.key_or_group: each for each in parsed}  # counts, where one is given twice
    return [name for name, each in last.items() if not each.is_sweep_override()]


def cell_name(overrides: Sequence[str], fixed: Collection[str], left_out: Collection[str]) -> str:
    """The name of a cell's folder: what sets it apart in its sweep, or all where nothing does.

    Args:
        overrides: of the cell.
        fixed: what :func:`fixed_settings` says of its sweep.
        left_out: see :func:`folder_name`.
    """
    own = [each for each in overrides if setting_of(each) not in fixed]
    return folder_name(own or overrides, left_out)


def setting_of(override: str) -> str:
    """The setting or group that an override changes."""
    return override.lstrip("+~").partition("=")[0]


def top_level(override: str) -> str:
    """The setting or group of the top level that an override changes, or changes something in."""
    return re.split("[=.@/]", override.lstrip("+~"), maxsplit=1)[0]


def changed_groups(overrides: Sequence[str]) -> list[str]:
    """The groups of the top level in which overrides change something, but for Hydra's own."""
    groups = dict.fromkeys(top_level(each) for each in overrides if "." in setting_of(each))
    return [each for each in groups if each != "hydra"]


def overrides_in(
    overrides: Sequence[str], groups: Collection[str], but: Collection[str] = ()
) -> list[str]:
    """The overrides of settings and groups of the top level, but for those of some dotted keys."""
    own = (each for each in overrides if top_level(each) in groups)
    return [each for each in own if setting_of(each) not in but]


def written(value: object) -> str:
    """A value as it is written in an override: ``null``, ``1``, ``true``, ``[a,b]``, ``'a b'``.

    Raises:
        ValueError: an override cannot hold a value of this type.
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Real():  # those of NumPy, too
            return str(value)
        case PurePath():
            return written(str(value))
        case str():
            plain = (
                re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./@-]*", value)
                and value.lower() not in _NOT_TEXT
            )
            return value if plain else QuotedString(value, Quote.single).with_quotes()
        case Mapping():
            for name in value:
                if isinstance(name, str) and not re.fullmatch(r"[\w./@:-]+", name, re.ASCII):
                    raise ValueError(
                        f"{name!r} is no name in a setting: give it letters of ASCII, digits and "
                        ". _ - / @ : alone"
                    )
            items = (f"{written(name)}:{written(each)}" for name, each in value.items())
            return f"{{{','.join(items)}}}"
        case Sequence():
            return f"[{','.join(map(written, value))}]"
    raise ValueError(f"{value!r} is no value of a setting: give text, numbers, lists or dicts")
