"""Where a model's weights come from, and under which terms they may be used."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sparton.models.repository import Source
from sparton.reading import shown

CARD = "README.md"
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


class Origin(NamedTuple):
    """What a model's card says of it.

    Attributes:
        base_model: name on the hub of the model that training began with; None if there is none.
        license: identifier of the hub, such as "apache-2.0"; None where nothing says it.
        datasets: what it was trained on.
    """

    base_model: str | None = None
    license: str | None = None
    datasets: tuple[str, ...] = ()

    @property
    def is_non_commercial(self) -> bool:
        """Whether the licence forbids commercial use, which what is trained from it inherits."""
        return self.license is not None and "-nc" in self.license.lower()


def read_origin(source: str | Path | Source) -> Origin:
    """What the card in a folder or repository says of its model; nothing where there is no card.

    Raises:
        ValueError: the card's front matter is no YAML mapping.
        OSError: the hub has no such repository or revision.
    """
    path = Source.of(source).file(CARD)
    if path is None:
        return Origin()
    front = front_matter(path)
    return Origin(
        next(iter(_strings(front, "base_model", path)), None),
        ", ".join(_strings(front, "license", path)) or None,
        _strings(front, "datasets", path),
    )


def origin_of_trained(source: str | Path | Source) -> Origin:
    """What a model that begins with the weights of ``source`` is to say of itself: those of a
    repository are its base, those of a folder have the folder's base; the terms are inherited.

    Raises:
        ValueError, OSError: as :func:`read_origin`.
    """
    origin, name = read_origin(source), Source.of(source).name
    return origin if Path(name).is_dir() else origin._replace(base_model=name, datasets=())


def front_matter(path: Path) -> dict[str, Any]:
    """The YAML between the first two ``---`` of a card.

    Raises:
        ValueError: it is no mapping.
    """
    try:
        found = _FRONT.match(path.read_text(encoding="utf-8"))
        if found is None:
            return {}
        content = yaml.safe_load(found[1])
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} begins with front matter that is no YAML in UTF-8 "
            f"({' '.join(str(error).split())}): correct or delete it"
        ) from error
    if content is None or isinstance(content, str):
        return {}  # nothing, or a text between two rules
    if not isinstance(content, dict):
        raise ValueError(f"{path} begins with front matter that is no mapping of names to values")
    return content


def _strings(front: dict[str, Any], key: str, path: Path) -> tuple[str, ...]:
    """The value of a key that is a string, or a list of strings, or not there."""
    value = front.get(key) or ()
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, tuple | list) or not all(isinstance(each, str) for each in values):
        raise ValueError(
            f"{path}: {key} is {shown(value)}, and must be a string or a list of strings: "
            "correct it, or take it out"
        )
    return tuple(values)
