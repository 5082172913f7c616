"""JSON files of others: what is wrong in one is told in a sentence with its place."""

import json
import math
import reprlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar, cast, overload

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
shown = _SHORT.repr  # a value in a sentence, cut where it is long or deep
Item = TypeVar("Item", str, bool, int, float, list[Any])

LONGEST = 10**9  # of what counts tokens, or anything else that is held in memory one by one
_REMEDY = "correct it, or copy or download the file again"
_NAMES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
}


class RepeatedKeyError(ValueError):
    """A key that an object of JSON has twice, so that its first value would be lost."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{shown(key)} occurs twice in one object")
        self.key = key


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object that JSON describes so; the ``object_pairs_hook`` of whoever reads it.

    Raises:
        RepeatedKeyError: it has a key twice.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        raise RepeatedKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return content


def read_json(path: Path) -> Any:
    """The content of a JSON file whose numbers are finite and in which no key occurs twice.

    Raises:
        ValueError: it is not; names the file and the remedy.
        OSError: it cannot be read.
    """
    try:
        return json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=without_repetition,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{path} is not valid JSON ({reason}): copy or download it again")


class Fields:
    """An object of a JSON file, whose values have the types with which they are asked for.

    A key whose value is null counts as not there. All methods raise ValueError for a value of
    another type, which names the place, the key and the value.

    Args:
        content: of the object.
        place: the file, and where in it the object stands, for messages.
    """

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        self._content, self.place = content, place

    @classmethod
    def of(cls, content: object, place: str) -> "Fields":
        """Any content of a JSON file, which must be an object.

        Raises:
            ValueError: it is not.
        """
        if not isinstance(content, dict):
            raise ValueError(f"{place} must hold a JSON object, not {shown(content)}: {_REMEDY}")
        return cls(content, place)

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    @overload
    def get(self, key: str, kind: type[Item]) -> Item | None: ...
    @overload
    def get(self, key: str, kind: type[Item], default: Item) -> Item: ...
    def get(self, key: str, kind: type[Item], default: Item | None = None) -> Item | None:
        """The value of a key, ``default`` where it is not there. Numbers are no booleans, and a
        whole number is a ``float``, too."""
        value: Any = self._content.get(key)
        if value is None:
            return default
        right = _is_number(value) if kind is float else isinstance(value, kind)
        if not right or (isinstance(value, bool) and kind is not bool):
            self.refuse(key, _NAMES[kind])
        if isinstance(value, str) and not _is_text(value):
            self.refuse(key, "a string of whole characters")
        return cast(Item, value)

    def need(self, key: str, kind: type[Item]) -> Item:
        """As :meth:`get`, of a key that must be there."""
        value = self.get(key, kind)
        if value is None:
            self.refuse(key, _NAMES[kind])
        return value

    def count(self, key: str) -> int | None:
        """A whole number from 1 to 10^9, None where it is not there."""
        value = self.get(key, int)
        if value is not None and not 1 <= value <= LONGEST:
            self.refuse(key, f"a whole number from 1 to {LONGEST}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, None where it is not there."""
        values = self.get(key, list)
        if not all(isinstance(each, str) and _is_text(each) for each in values or ()):
            self.refuse(key, "a list of strings")
        return values

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        values = self.need(key, list)
        if not all(map(_is_number, values)):
            self.refuse(key, "a list of numbers")
        return values

    def is_list(self, key: str) -> bool:
        """Whether the value of a key is a list."""
        return isinstance(self._content.get(key), list)

    def path(self, key: str) -> str:
        """A path within the folder of the model."""
        value = self.need(key, str)
        if not is_within(value):
            self.refuse(key, "a path within the folder")
        return value

    def object(self, key: str) -> "Fields | None":
        """The fields of an object, None where it is not there."""
        value = self._content.get(key)
        return None if value is None else Fields.of(value, f"{self.place}: {key}")

    def need_object(self, key: str) -> "Fields":
        """As :meth:`object`, of a key that must be there."""
        return self.object(key) or Fields.of(self._content.get(key), f"{self.place}: {key}")

    def as_dict(self) -> dict[str, Any]:
        """All values as they are."""
        return dict(self._content)

    def refuse(self, key: str, wanted: str) -> NoReturn:
        """Say that the value of a key is not what it must be.

        Raises:
            ValueError: always.
        """
        found = shown(self._content[key]) if key in self._content else "not there"
        raise ValueError(f"{self.place}: {key} is {found}, and must be {wanted}: {_REMEDY}")


def is_within(path: str) -> bool:
    """Whether a path stays in the folder that it begins in."""
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts


def _is_number(value: object) -> bool:
    """Whether fp64 holds a value as a finite number; JSON has whole numbers of any size."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def _is_text(value: str) -> bool:
    """Whether a string can be encoded; JSON can hold halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:40]} is no finite number")
    return value
