"""Evaluation tasks, and texts to encode, that are downloaded at their first use: of ir_datasets,
and of the Hugging Face hub."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sparton.datasets.collection import Located, OnUnknown, build_task
from sparton.datasets.files import DataFile, RecordError
from sparton.datasets.judgments import Judgment, parse_grade
from sparton.datasets.preparation import OnError, Placed, Tally
from sparton.datasets.records import parse_text
from sparton.datasets.store import fingerprint
from sparton.datasets.texts import TextTable, prepare_texts
from sparton.types import RetrievalTask, Side

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
EXCLUDED = -100
_IR_PARTS: dict[Side, str] = {"document": "docs", "query": "queries"}
_BRIGHT = {"documents": "content", "examples": "query"}  # its configurations, and their texts
_may_fetch: ContextVar[bool] = ContextVar("may_fetch", default=True)


@contextmanager
def fetching_nothing() -> Iterator[None]:
    """Within, what would ask ir_datasets or the hub is refused with a ConnectionError: another
    process fetches it, and two would fetch it twice."""
    before = _may_fetch.set(False)
    try:
        yield
    finally:
        _may_fetch.reset(before)


def _refuse_to_fetch(name: str) -> None:
    if not _may_fetch.get():
        raise ConnectionError(f"{name} is not fetched here: another process does")


def ir_datasets_task(
    dataset_id: str,
    *,
    name: str | None = None,
    exclude_self: bool = False,
    on_unknown: OnUnknown = "error",
) -> RetrievalTask:
    """Read a collection with queries and judgments through ir_datasets, which downloads it once.

    Args:
        dataset_id: for example ``beir/scifact/test``.
        name: shown in tables; by default the id.
        exclude_self: leave a document with the query's own id out of its ranking.
        on_unknown: as in :func:`~sparton.datasets.collection.beir_folder`.

    Raises:
        ValueError: an id that ir_datasets does not know, or one without documents, queries or
            judgments.
        OSError: the download failed.
    """
    dataset = _ir_dataset(dataset_id, "docs", "queries", "qrels")
    with _fetching(dataset_id):
        judgments = (
            Judgment(each.query_id, each.doc_id, parse_grade(each.relevance), number)
            for number, each in enumerate(dataset.qrels_iter(), start=1)
        )
        return build_task(
            name or dataset_id,
            _located(_ir_records(dataset_id, dataset, "document")),
            _located(_ir_records(dataset_id, dataset, "query")),
            judgments,
            place=lambda number: f"{dataset_id}, judgment {number}",
            on_unknown=on_unknown,
            exclude_self=exclude_self,
        )


def ir_datasets_texts(dataset_id: str, side: Side, *, cache_dir: str | None = None) -> TextTable:
    """Documents or queries of a collection of ir_datasets, on disk.

    Args:
        dataset_id: for example ``beir/scifact``.
        side: which of the two.
        cache_dir: see :func:`~sparton.datasets.store.stored_table`.

    Raises:
        ValueError: an id that ir_datasets does not know, or without such texts.
        OSError: the download failed.
    """
    import ir_datasets

    dataset = _ir_dataset(dataset_id, _IR_PARTS[side])
    key = fingerprint([], kind="texts", source=[ir_datasets.__version__, dataset_id, side])
    with _fetching(dataset_id):
        return prepare_texts(
            dataset_id, key, lambda _: _ir_records(dataset_id, dataset, side), "stop", cache_dir
        )


def _ir_dataset(dataset_id: str, *parts: str) -> Any:
    """A collection that has these parts."""
    import ir_datasets

    try:
        dataset = ir_datasets.load(dataset_id)
    except KeyError as error:
        raise ValueError(
            f"ir_datasets knows no dataset {dataset_id!r}: see https://ir-datasets.com, or give a "
            "folder in the layout of BEIR to beir_folder"
        ) from error
    for part in parts:
        if not getattr(dataset, f"has_{part}")():
            raise ValueError(f"{dataset_id} of ir_datasets has no {part}: name a split, as /test")
    return dataset


@contextmanager
def _fetching(dataset_id: str) -> Iterator[None]:
    _refuse_to_fetch(dataset_id)
    try:
        yield
    except OSError as error:
        raise OSError(
            f"ir_datasets could not fetch {dataset_id} ({error}). Without a connection, "
            "beir_folder reads the same collection from files in the layout of BEIR"
        ) from error


def _ir_records(dataset_id: str, dataset: Any, side: Side) -> Iterator[Placed]:
    records = getattr(dataset, f"{_IR_PARTS[side]}_iter")()
    origin = _Published(dataset_id, side)
    for number, record in enumerate(records, start=1):
        yield Placed(origin, number, (record[0], record.default_text().strip()))


class _Published(NamedTuple):
    """A part of a published data set; an :class:`~sparton.datasets.preparation.Origin`."""

    name: str
    unit: str

    def place(self, number: int) -> str:
        return f"{self.name}, {self.unit} {number}"


def _located(records: Iterable[Placed]) -> Iterator[Located]:
    """Place, id and text of every record."""
    return ((each.file.place(each.number), *each.value) for each in records)


def hub_task(
    repository: str,
    split: str = "test",
    *,
    subset: str = "",
    name: str | None = None,
    exclude_self: bool = False,
    on_unknown: OnUnknown = "error",
) -> RetrievalTask:
    """Read a data set of the Hugging Face hub in the layout of mteb and of NanoBEIR, or in that of
    BRIGHT; it is downloaded once.

    In the former its configurations are ``corpus`` (``_id`` or ``id``, ``text``, perhaps
    ``title``), ``queries`` (``_id`` or ``id``, ``text``), and ``qrels`` or ``default``
    (``query-id``, ``corpus-id``, and ``score`` unless all are 1). The configuration of a subset
    begins with its name and a hyphen. In the latter they are ``documents`` (``id``, ``content``)
    and ``examples`` (``id``, ``query``, ``gold_ids``, ``excluded_ids``), whose splits are
    collections; what is excluded is judged -100, as in ir_datasets.

    Args:
        repository: "owner/name", or a folder with the same files.
        split: of each configuration; where one has a single split, that is taken.
        subset: for example a language of a multilingual data set.
        name: shown in tables; by default that of the repository, the subset and the split.
        exclude_self, on_unknown: as in :func:`~sparton.datasets.collection.beir_folder`.

    Raises:
        ValueError: a data set in another layout, or malformed content, naming configuration and
            row.
        ConnectionError: the hub did not give it.
    """
    names, title = _configurations(repository), repository.rsplit("/", 1)[-1]
    if names.keys() >= _BRIGHT.keys():
        documents, queries, judged = "documents", "examples", "examples"
        parts, read = [title, split], _bright_judgments
    else:
        documents, queries, judged = _mteb_configurations(repository, names, subset)
        parts, read = [title, subset, split], _mteb_judgments
    place = f"{repository}, {judged} {split}"
    return build_task(
        name or "/".join(part for part in parts if part),
        _located(_hub_records(repository, documents, split)),
        _located(_hub_records(repository, queries, split)),
        read(place, _rows(repository, judged, split)),
        place=lambda number: f"{place}, row {number}",
        on_unknown=on_unknown,
        exclude_self=exclude_self,
    )


def hub_texts(
    repository: str,
    side: Side,
    split: str = "test",
    *,
    subset: str = "",
    on_error: OnError = "stop",
    cache_dir: str | None = None,
) -> TextTable:
    """Documents or queries of a data set of the Hugging Face hub, on disk.

    Args:
        repository, split, subset: as :func:`hub_task` has them; judgments are not needed.
        side: which of the two.
        on_error: "skip" leaves malformed records out.
        cache_dir: see :func:`~sparton.datasets.store.stored_table`.

    Raises:
        ValueError: a data set in another layout, or a malformed record.
        ConnectionError: the hub did not give it.
    """
    names, document = _configurations(repository), side == "document"
    if names.keys() >= _BRIGHT.keys():
        configuration = "documents" if document else "examples"
    else:
        configuration = f"{subset}-" * bool(subset) + ("corpus" if document else "queries")
    if configuration not in names:
        raise ValueError(
            f"{repository} has the configurations {', '.join(names)}: {configuration} is needed, "
            "as of mteb and NanoBEIR"
        )
    rows = _rows(repository, configuration, split)
    held = [DataFile(repository, Path(each["filename"])) for each in rows.cache_files]
    source = [repository, configuration, split]
    key = fingerprint(held, kind="texts", source=source, on_error=on_error)

    def read(tally: Tally) -> Iterator[Placed]:
        return _hub_records(repository, configuration, split, tally)

    return prepare_texts(f"{repository} {configuration}", key, read, on_error, cache_dir)


def _configurations(repository: str) -> dict[str, None]:
    """The names of a data set's configurations, in order."""
    from datasets import get_dataset_config_names

    return dict.fromkeys(_fetched(repository, partial(get_dataset_config_names, repository)))


def _mteb_configurations(
    repository: str, names: Collection[str], subset: str
) -> tuple[str, str, str]:
    """The names of those with the documents, the queries and the judgments."""
    before = f"{subset}-" if subset else ""
    documents, queries = f"{before}corpus", f"{before}queries"
    judgments = (f"{before}qrels",) if subset else ("qrels", "default")
    judged = next((each for each in judgments if each in names), None)
    if documents not in names or queries not in names or judged is None:
        raise ValueError(
            f"{repository} has the configurations {', '.join(names)}: {documents}, {queries} and "
            f"{' or '.join(judgments)} are needed, as of mteb and NanoBEIR"
        )
    return documents, queries, judged


def _rows(repository: str, configuration: str, split: str) -> "Dataset":
    from datasets import load_dataset

    splits = _fetched(repository, partial(load_dataset, repository, configuration))
    if split not in splits and len(splits) > 1:
        raise ValueError(
            f"{repository} has no {split} of {configuration}: it has {', '.join(splits)}"
        )
    return splits[split] if split in splits else next(iter(splits.values()))


def _fetched(repository: str, fetch: Callable[[], T]) -> T:
    _refuse_to_fetch(repository)
    try:
        return fetch()
    except Exception as error:  # the hub's client raises errors of several libraries
        raise ConnectionError(
            f"{repository} could not be read from the Hugging Face hub ({error}): check the name "
            "and the connection; beir_folder reads files in the layout of BEIR"
        ) from error


def _hub_records(
    repository: str, configuration: str, split: str, tally: Tally | None = None
) -> Iterator[Placed]:
    """The texts of a configuration.

    Args:
        tally: is told of malformed records; None stops at the first.
    """
    column = _BRIGHT.get(configuration)
    origin = _Published(f"{repository}, {configuration} {split}", "row")
    for number, row in enumerate(_rows(repository, configuration, split), start=1):
        try:
            record = row if column is None else {"id": row["id"], "text": row[column]}
            yield Placed(origin, number, parse_text(record))
        except (KeyError, RecordError) as error:
            expected = f"an id and the text {column} are expected: " if column else ""
            if tally is None:
                raise ValueError(f"{origin.place(number)}: {expected}{error}") from error
            tally.reject(origin.place(number), f"{expected}{error}")


def _mteb_judgments(place: str, rows: Iterable[dict[str, Any]]) -> Iterator[Judgment]:
    for number, row in enumerate(rows, start=1):
        try:
            query, document = str(row["query-id"]), str(row["corpus-id"])
            yield Judgment(query, document, parse_grade(row.get("score", 1)), number)
        except (KeyError, RecordError) as error:
            raise ValueError(
                f"{place}, row {number}: query-id, corpus-id and an integer score are expected, "
                f"not {row}"
            ) from error


def _bright_judgments(place: str, rows: Iterable[dict[str, Any]]) -> Iterator[Judgment]:
    for number, row in enumerate(rows, start=1):
        for grade, key in ((1, "gold_ids"), (EXCLUDED, "excluded_ids")):
            documents = row.get(key)
            if not isinstance(documents, list | None):
                raise ValueError(f"{place}, row {number}: {key} must be a list of ids")
            for document in documents or ():
                if document != "N/A":
                    yield Judgment(str(row["id"]), str(document), grade, number)
