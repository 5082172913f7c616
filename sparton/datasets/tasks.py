"""Several evaluation tasks from what a user names in one line: folders, ids or TREC files."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from sparton.arguments import refuse_other
from sparton.datasets.collection import (
    Located,
    OnUnknown,
    beir_folder,
    beir_name,
    build_task,
    has_judgments,
)
from sparton.datasets.columns import COLLECTION
from sparton.datasets.downloads import ir_datasets_task
from sparton.datasets.files import RecordError, detect_format, locate
from sparton.datasets.judgments import read_judgments
from sparton.datasets.records import parse_text_or_fields
from sparton.datasets.tables import Columns, open_table
from sparton.digests import texts_digest
from sparton.types import RetrievalTask

Builders = dict[str, Callable[[], RetrievalTask]]
Missing = Literal["error", "skip"]

# Of ir_datasets, those whose queries are documents of their own collection.
_EXCLUDE_SELF = ("beir/arguana", "beir/quora")


def tasks_digest(tasks: Iterable[RetrievalTask]) -> str:
    """A digest of all that tasks evaluate on, whatever files they come from."""

    def texts() -> Iterator[str]:
        for task in tasks:
            for side in (task.documents, task.queries):
                yield str(len(side.ids))
                yield from side.ids
                yield from side.texts
            yield json.dumps(task.qrels, sort_keys=True)
            yield json.dumps({key: sorted(ids) for key, ids in sorted(task.excluded.items())})
            yield repr((task.exclude_self, task.form))

    return texts_digest(texts())


def beir_folders(
    paths: Sequence[str],
    split: str = "test",
    *,
    missing: Missing = "error",
    exclude_self: bool = False,
    on_unknown: OnUnknown = "error",
) -> Builders:
    """What reads each of several folders in the layout of BEIR, by the folder's name.

    Args:
        paths: of the folders.
        split: name of the judgments in ``qrels``.
        missing: what a folder without such judgments does: "skip" leaves it out.
        exclude_self, on_unknown: as in :func:`~sparton.datasets.collection.beir_folder`.

    Raises:
        ValueError: no folder, or the same one twice.
    """
    refuse_other(get_args(Missing), missing=missing)
    if isinstance(paths, str) or not all(paths) or not paths:
        raise ValueError(f"paths={paths!r}: name folders in the layout of BEIR, as in [PATH,PATH]")
    counts = Counter(map(beir_name, paths))
    builders: Builders = {}
    for path in paths:
        name = beir_name(path)
        name = name if counts[name] == 1 else str(path)
        if name in builders:
            raise ValueError(f"paths={list(paths)}: {path} is there twice")
        if missing == "error" or has_judgments(path, split):
            builders[name] = partial(
                beir_folder, path, split, exclude_self=exclude_self, on_unknown=on_unknown
            )
    return builders


def ir_datasets_tasks(
    datasets: Sequence[str | None],
    *,
    missing: Missing = "error",
    exclude_self: bool | None = None,
    on_unknown: OnUnknown = "error",
) -> Builders:
    """What reads each of several collections of ir_datasets, by its id.

    Args:
        datasets: ids such as ``beir/scifact/test``.
        missing: whether it is an "error" that none is named; "skip" gives nothing.
        exclude_self: leave a document with the query's own id out of its ranking; None does so in
            ArguAna and Quora of BEIR.
        on_unknown: as in :func:`~sparton.datasets.collection.beir_folder`.

    Raises:
        ValueError: no collection is named.
    """
    names = [] if isinstance(datasets, str) else [name for name in datasets if name]
    if not names and missing == "error":
        raise ValueError(
            f"datasets={datasets!r}: name collections of ir_datasets, such as beir/scifact/test; "
            "https://ir-datasets.com lists them"
        )
    return {
        name: partial(
            ir_datasets_task,
            name,
            exclude_self=name.startswith(_EXCLUDE_SELF) if exclude_self is None else exclude_self,
            on_unknown=on_unknown,
        )
        for name in names
    }


def trec_files(
    documents: str | Sequence[str],
    queries: str | Sequence[str],
    qrels: str | None,
    *,
    missing: Missing = "error",
    columns: Columns | None = None,
    exclude_self: bool = False,
    on_unknown: OnUnknown = "error",
) -> Builders:
    """What reads the task of :func:`trec_task`, by the name of its judgments; nothing where none
    are named and ``missing`` is "skip"."""
    if qrels is None:
        if missing == "error":
            raise ValueError("qrels=None: name the file of the judgments")
        return {}
    build = partial(
        trec_task,
        *(documents, queries, qrels),
        columns=columns,
        exclude_self=exclude_self,
        on_unknown=on_unknown,
    )
    return {Path(qrels).name.partition(".")[0]: build}


def trec_task(
    documents: str | Sequence[str],
    queries: str | Sequence[str],
    qrels: str,
    *,
    name: str | None = None,
    columns: Columns | None = None,
    exclude_self: bool = False,
    on_unknown: OnUnknown = "error",
) -> RetrievalTask:
    """A task of files: texts of documents and queries by id, and judgments in the format of TREC.

    Args:
        documents, queries: files or patterns of JSON lines, JSON, TSV, CSV, Parquet or Arrow with
            an id, a text and perhaps a title; lines of TSV without a header are an id and a text.
        qrels: lines ``query 0 document grade``, or the three columns of BEIR; gzipped or not.
        name: shown in tables; by default that of the judgments.
        columns: names in both files to ``_id``, ``text`` and ``title``.
        exclude_self, on_unknown: as in :func:`~sparton.datasets.collection.beir_folder`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: malformed or contradictory content, naming file and line.
    """
    judgments, *others = locate(qrels)
    if others:
        raise ValueError(
            f"qrels={qrels} fits {judgments.name} and {len(others)} more: name the one file of the "
            "judgments"
        )
    return build_task(
        name or judgments.path.name.partition(".")[0],
        _texts(documents, columns),
        _texts(queries, columns),
        read_judgments(judgments),
        place=judgments.place,
        on_unknown=on_unknown,
        exclude_self=exclude_self,
    )


def _texts(files: str | Sequence[str], columns: Columns | None) -> Iterator[Located]:
    """Place, id and text of every record."""
    for file in locate(files):
        table = open_table(file, detect_format(file), columns, COLLECTION, lambda _: None)
        for number, raw in table.records:
            try:
                yield (file.place(number), *parse_text_or_fields(table.decode(raw)))
            except RecordError as error:
                raise ValueError(f"{file.place(number)}: {error}") from error
