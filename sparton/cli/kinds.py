"""What an annotation says of the values that a configuration can hold: text, numbers, true and
false, null, and lists and mappings of them."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

_PLAIN = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "text",
    NoneType: "null",
}  # fmt: skip
_ACCEPTED = {bool: bool, int: int, float: int | float, str: str, Path: str, NoneType: NoneType}


def fits(value: object, annotation: Any) -> bool:
    """Whether a value is of a type. So is every value where the type is none of those above, and
    the settings of an object, which may become one.

    Args:
        value: with plain lists and dicts, as ``OmegaConf.to_container`` gives them.
    """
    if isinstance(value, dict) and "_target_" in value:
        return True
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin in _PLAIN:
        # To Python, true and false are whole numbers.
        return isinstance(value, _ACCEPTED[origin]) and (
            origin is bool or not isinstance(value, bool)
        )
    if origin in (list, Sequence) and inner:
        if isinstance(value, str):
            return fits(value, inner[0])  # text is a sequence of characters
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if origin is tuple and inner and Ellipsis not in inner:
        if not isinstance(value, list) or len(value) != len(inner):
            return False
        return all(fits(each, kind) for each, kind in zip(value, inner, strict=True))
    if origin in (dict, Mapping) and inner:
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    return True


def takes_null(annotation: Any) -> bool:
    """Whether null is of a type, as far as it says what it is."""
    if get_origin(annotation) in (Union, UnionType):
        return any(map(takes_null, get_args(annotation)))
    unknown = annotation in (inspect.Parameter.empty, Any, object)
    return unknown or annotation in (None, NoneType) or isinstance(annotation, str | TypeVar)


def in_words(annotation: Any) -> str:
    """What :func:`fits` a type, as in "a whole number, or null"; "" where everything does."""
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType):
        words = dict.fromkeys(in_words(each) for each in inner)
        return "" if "" in words else ", or ".join(words)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (list, Sequence):
        return "a list, as in [a,b]"
    if origin is tuple and inner and Ellipsis not in inner:
        return f"a list of {len(inner)} values"
    if origin in (dict, Mapping):
        return "values with names, as in {a: b}"
    return _PLAIN.get(origin, "")
