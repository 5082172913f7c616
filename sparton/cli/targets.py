"""Settings of objects that a configuration describes, beside the parameters of what makes them."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Unpack, get_args, get_origin

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from sparton.cli.nearest import did_you_mean, nearest

_OF_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")


def refuse_unknown_settings(cfg: DictConfig, places: Iterable[str]) -> None:
    """Refuse settings that nothing takes, of all objects below some places of a configuration.

    Raises:
        ValueError: names the setting and what was meant, or what is no object.
    """
    plain = OmegaConf.to_container(cfg, resolve=False)
    for place in places:
        for where, node in _objects(plain[place], place):  # type: ignore[index, call-overload]
            taken = parameters(node["_target_"], where)
            for key in node:
                if message := refusal(f"{where}.{key}", key, node["_target_"], taken, where):
                    raise ValueError(message)


def refusal(
    typed: str, key: str, target: str, taken: Sequence[str] | None, place: str
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


def parameters(target: str, place: str) -> list[str] | None:
    """Names of what a class or function takes; None where it takes any.

    Raises:
        ValueError: there is no such class or function.
    """
    try:
        found = get_object(target)
    except Exception as error:  # whatever an import may raise
        raise ValueError(f"{place}._target_={target}: {str(error).splitlines()[0]}") from error
    try:
        taken = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # of a built-in function
        return None
    names = []
    for each in taken:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            names.append(each.name)
        elif each.kind == each.VAR_KEYWORD:
            if get_origin(each.annotation) is not Unpack:
                return None
            names += get_args(each.annotation)[0].__annotations__
    return names


def _objects(node: object, place: str) -> Iterator[tuple[str, dict]]:
    """All nodes with a ``_target_`` from a place on, with where they are."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield place, node
        for key, value in node.items():
            yield from _objects(value, f"{place}.{key}")
    elif isinstance(node, list):
        for row, value in enumerate(node):
            yield from _objects(value, f"{place}.{row}")
