"""What is refused of the arguments of functions; commands tell of it in words of their own."""

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import NamedTuple


class ArgumentError(ValueError):
    """A ValueError whose sentence names arguments of the function that raised it.

    Whoever calls that function for a user who types something else, flags or overrides, renders the
    sentence anew with :meth:`told`.

    Args:
        sentence: where ``{name}`` stands for an argument with its value, ``{name:name}`` for its
            name alone, and ``{}`` for the next of ``parts``.
        parts: what else the sentence says.
        arguments: values of the arguments that it names.
    """

    def __init__(self, sentence: str, *parts: object, **arguments: object) -> None:
        self._sentence, self._parts, self._arguments = sentence, parts, arguments
        self._names = {each: each for each in arguments}  # what they are called
        super().__init__(self.told(lambda name: name, _python))

    def told(self, name: Callable[[str], str], setting: Callable[[str, object], str]) -> str:
        """The sentence with arguments called by ``name``, and ``setting`` for name and value."""
        if not self._parts and not self._arguments:
            return self._sentence
        shown = {
            each: _Shown(name(self._names[each]), setting(self._names[each], value))
            for each, value in self._arguments.items()
        }
        return self._sentence.format(*self._parts, **shown)

    def renamed(self, **names: str) -> "ArgumentError":
        """The same of a function whose arguments of these names are called otherwise."""
        other = ArgumentError(self._sentence, *self._parts, **self._arguments)
        other._names = {each: names.get(called, called) for each, called in self._names.items()}
        other.args = (other.told(lambda name: name, _python),)
        return other


def refuse_ignored(because: str, **arguments: object) -> None:
    """Refuse arguments that were given, which means that they are not None, and have no effect.

    Raises:
        ArgumentError: names them.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if given:
        names = ", ".join(f"{{{name}:name}}" for name in given)
        raise ArgumentError(f"{{}} ignores {names}: leave that out", because, **given)


def refuse_below(least: int, **arguments: float | None) -> None:
    """Refuse numbers below a bound; None is none.

    Raises:
        ArgumentError: names the first.
    """
    for name, value in arguments.items():
        if value is not None and not value >= least:  # NaN neither
            raise ArgumentError(f"{{{name}}} must be at least {least}", **{name: value})


def refuse_uncounted(least: int, **arguments: object) -> None:
    """Refuse what is no whole number from a bound on; None is none.

    Raises:
        ArgumentError: names the first.
    """
    for name, value in arguments.items():
        counts = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
        if value is not None and not counts:
            wanted = f"{{{name}}} must be a whole number of at least {least}"
            raise ArgumentError(wanted, **{name: value})


def refuse_lone_text(texts: object) -> None:
    """Refuse a text in the place of several, whose characters would be taken for texts.

    Raises:
        ValueError: shows how it begins.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts is the single text {texts[:40]!r}: put it into a list")


def refuse_other(choices: Iterable[object], **arguments: object) -> None:
    """Refuse values that are not among a few.

    Raises:
        ArgumentError: names the first, and the choices.
    """
    *others, last = known = tuple(choices)
    for name, value in arguments.items():
        if value not in known:
            told = f"{', '.join(map(str, others))} or {last}"
            raise ArgumentError(f"{{{name}}} must be {{}}", told, **{name: value})


class Instance(NamedTuple):
    """The value of an argument that is an object of some class, whatever its settings."""

    kind: str

    def __str__(self) -> str:
        return f"{self.kind}(...)"


class _Shown(NamedTuple):
    """An argument in a sentence."""

    name: str
    setting: str

    def __format__(self, form: str) -> str:
        return self.name if form == "name" else self.setting


def _python(name: str, value: object) -> str:
    return f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"
