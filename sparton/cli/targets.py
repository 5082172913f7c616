"""Settings of objects that a configuration describes, beside the parameters of what makes them."""

import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Unpack, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparton.cli.kinds import fits, in_words, takes_null
from sparton.cli.nearest import did_you_mean, nearest
from sparton.cli.overrides import written

_MAY_BE_NULL = ("backbone.name",)  # where ``init_from`` brings another backbone
_OF_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")


def refuse_wrong_settings(cfg: DictConfig, places: Iterable[str]) -> None:
    """Refuse settings that nothing takes, and values of a type that is not taken, of all objects
    below some places of a configuration.

    Raises:
        ValueError: names the setting and what was meant, or what it must be, or what is no object.
    """
    for place in places:
        for where, node in _objects(OmegaConf.select(cfg, place), place):
            taken = parameters(node["_target_"], where)
            for key in map(str, node):
                setting = f"{where}.{key}"
                message = refusal(setting, key, node["_target_"], taken, where)
                if message is None and taken and key in taken:
                    message = _refusal_of_value(node, key, taken[key], setting)
                if message:
                    raise ValueError(message)


def _refusal_of_value(node: DictConfig, key: str, annotation: Any, setting: str) -> str | None:
    """Why a setting cannot have its value. What is not known yet is not judged."""
    try:
        value = node[key]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:
        return None
    raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index, call-overload]
    other = re.fullmatch(r"\$\{([\w.]+)\}", raw) if isinstance(raw, str) else None
    if value is None:
        unknown = raw is not None and other is None  # ${hydra:...}, before a run has its folder
        right = unknown or setting in _MAY_BE_NULL or takes_null(annotation)
    else:
        right = fits(value, annotation)
    if right:
        return None
    if other:
        setting = other[1]
    words = in_words(annotation) or "an object, of a class that its _target_ names"
    quoted = f'; as text it is "{setting}={written(str(value))}"'
    is_text = "text" in words and isinstance(value, int | float)
    return f"{setting}={written(value)}: must be {words}{quoted if is_text else ''}"


def refusal(
    typed: str, key: str, target: str, taken: Collection[str] | None, place: str
) -> str | None:
    """Why an object does not take a setting, None where it does.

    Args:
        typed: the setting as a user wrote it, ``+loss.temprature=2`` say.
        key: of the setting.
        target: the class or function.
        taken: its parameters, as :func:`parameters` gives them.
        place: of the object in the configuration.
    """
    if taken is None or key in taken or key in _OF_HYDRA:
        return None
    near, (_, *value) = nearest(key, taken), typed.partition("=")
    told = did_you_mean([near and "".join([f"{place}.{near}", *value])])
    told = told or f"; it takes {', '.join(taken)}"
    return f"{typed}: {target} takes no {key}{told}"


def parameters(target: str, place: str) -> dict[str, Any] | None:
    """Names of what a class or function takes, with their annotations; None where it takes any.

    Raises:
        ValueError: there is no such class or function.
    """
    try:
        found = _located(target)
    except Exception as error:  # whatever an import may raise
        near = None
        if isinstance(error, AttributeError) and error.name:
            near = nearest(error.name, dir(error.obj))
        raise ValueError(f"{place}._target_={target}: {error}{did_you_mean([near])}") from error
    try:
        taken = _signature(found).parameters.values()
    except (TypeError, ValueError):  # of a built-in function
        return None
    annotations: dict[str, Any] = {}
    for each in taken:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            annotations[each.name] = each.annotation
        elif each.kind == each.VAR_KEYWORD:
            if get_origin(each.annotation) is not Unpack:
                return None
            annotations |= get_args(each.annotation)[0].__annotations__
    return annotations


def _located(target: str) -> Any:
    """What a name stands for, modules imported on the way."""
    try:
        return resolve_name(target)
    except AttributeError as error:
        # It passes over a module that is there and cannot be imported, which says why.
        module = f"{getattr(error.obj, '__name__', '')}.{error.name}"
        if hasattr(error.obj, "__path__") and find_spec(module) is not None:
            import_module(module)
        raise


def _signature(found: Any) -> inspect.Signature:
    """With annotations that are text read, unless one names what only type checkers know."""
    try:
        return inspect.signature(found, eval_str=True)
    except Exception:  # whatever the text raises
        return inspect.signature(found)


def _objects(node: object, place: str) -> Iterator[tuple[str, DictConfig]]:
    """All nodes with a ``_target_`` from a place on, with where they are."""
    if isinstance(node, DictConfig) and "_target_" in node:
        yield place, node
    if isinstance(node, DictConfig | ListConfig):
        keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
        for key in keys:
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                yield from _objects(node[key], f"{place}.{key}")
