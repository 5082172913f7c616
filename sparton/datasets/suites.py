"""Suites: collections that are evaluated together, each by its own rules, from any source."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sparton.arguments import refuse_other
from sparton.datasets.collection import OnUnknown, beir_folder
from sparton.datasets.downloads import hub_task, ir_datasets_task
from sparton.datasets.tasks import Builders
from sparton.types import RetrievalTask, TextForm

Entry = Mapping[str, Any]

READERS: dict[str, Callable[..., RetrievalTask]] = {
    "ir_datasets": ir_datasets_task,
    "folders": beir_folder,
    "hub": hub_task,
}
_OF_ALL = ("name", "exclude_self", "on_unknown")  # arguments of readers that a suite sets itself
LENGTHS, PROMPTS = TextForm._fields[:2], TextForm._fields[2:]
KEYS = (*READERS, *TextForm._fields)


def suite(
    collections: Mapping[str, Entry | None],
    source: str,
    *,
    each: Entry | None = None,
    names: Sequence[str] | None = None,
    exclude_self: bool = True,
    excluded_grade: int | None = None,
    on_unknown: OnUnknown = "error",
) -> Builders:
    """What reads each collection of a suite, by its name.

    Args:
        collections: name to what is this collection's own, see ``each``.
        source: where collections are read from: "ir_datasets", "folders" in the layout of BEIR or
            its zip files, or the "hub" of Hugging Face.
        each: what holds for every collection that does not say otherwise. Under the name of a
            source the first argument of its reader
            (:func:`~sparton.datasets.downloads.ir_datasets_task`,
            :func:`~sparton.datasets.collection.beir_folder`,
            :func:`~sparton.datasets.downloads.hub_task`), or several of its arguments by name; in
            them ``{name}`` stands for the collection's. And the fields of a
            :class:`~sparton.types.TextForm`: lengths and prompts of its texts.
        names: the collections that are evaluated; None for all, empty for none.
        exclude_self: leave a document with the query's own id out of its ranking, as BEIR does in
            every collection.
        excluded_grade: documents that are judged so are left out of the ranking of that query.
        on_unknown: as in :func:`~sparton.datasets.collection.beir_folder`.

    Raises:
        ValueError: a source, a name or a key that does not exist, or a collection that the source
            does not have.
    """
    refuse_other(READERS, source=source)
    chosen = list(collections) if names is None else list(names)
    for name in chosen:
        if name not in collections:
            raise ValueError(f"names={chosen}: there is no {name}, but {', '.join(collections)}")
    usual = _checked("each", each or {})
    builders: Builders = {}
    for name in chosen:
        own = _checked(f"collections.{name}", collections[name] or {})
        read = READERS[source]
        arguments = _arguments(read, usual.get(source)) | _arguments(read, own.get(source))
        if not arguments:
            elsewhere = [place for place in READERS if place in {*usual, *own}]
            raise ValueError(f"source={source} has no {name}: try source={' or '.join(elsewhere)}")
        form = {key: value for key, value in {**usual, **own}.items() if key in TextForm._fields}
        builders[name] = partial(
            _build,
            partial(
                read,
                **{key: value.replace("{name}", name) for key, value in arguments.items()},
                name=name,
                exclude_self=exclude_self,
                on_unknown=on_unknown,
            ),
            TextForm(**form),
            excluded_grade,
        )
    return builders


def _checked(place: str, entry: Entry) -> Entry:
    """An entry whose keys and values can be read."""
    for key, value in entry.items():
        if key not in KEYS:
            raise ValueError(f"{place}.{key}={value}: there is no {key}, but {', '.join(KEYS)}")
        count = type(value) is int and value >= 1
        if key in LENGTHS and value is not None and not count:
            raise ValueError(f"{place}.{key}={value}: must be a number of tokens from 1 on")
        if key in PROMPTS and not isinstance(value, str | None):
            raise ValueError(f"{place}.{key}={value}: must be a text")
        if key in READERS:
            parameters = inspect.signature(READERS[key]).parameters
            taken = [argument for argument in parameters if argument not in _OF_ALL]
            for argument, given in _arguments(READERS[key], value).items():
                if argument not in taken:
                    raise ValueError(
                        f"{place}.{key}.{argument}: {key} takes no {argument}, but "
                        f"{', '.join(taken)}"
                    )
                if not isinstance(given, str):
                    raise ValueError(f"{place}.{key}.{argument}={given}: must be a text")
    return entry


def _arguments(read: Callable[..., RetrievalTask], place: Any) -> dict[str, Any]:
    """The arguments of a reader; a text is its first."""
    if isinstance(place, str):
        return {next(iter(inspect.signature(read).parameters)): place}
    return dict(place or {})


def _build(
    read: Callable[[], RetrievalTask], form: TextForm, excluded_grade: int | None
) -> RetrievalTask:
    task = read()._replace(form=form)
    if excluded_grade is None:
        return task
    excluded = {
        query: frozenset(name for name, grade in grades.items() if grade == excluded_grade)
        for query, grades in task.qrels.items()
    }
    kept = {
        query: {name: grade for name, grade in grades.items() if name not in excluded[query]}
        for query, grades in task.qrels.items()
    }
    return task._replace(qrels=kept, excluded=excluded)
