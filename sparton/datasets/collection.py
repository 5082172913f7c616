"""Evaluation tasks: a collection, its judged queries, and their graded judgments.

Everything is checked while it is read, so that a fault in a file stops the run before anything is
encoded and not after an hour of it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args
from zipfile import BadZipFile, ZipFile

from sparton.arguments import ArgumentError, refuse_other
from sparton.datasets.files import DataFile, RecordError, read_lines
from sparton.datasets.judgments import Judgment, read_judgments
from sparton.datasets.records import parse_text
from sparton.datasets.values import decode_json
from sparton.types import RetrievalTask, TextCollection

OnUnknown = Literal["error", "ignore"]
Qrels = dict[str, dict[str, int]]
Located = tuple[str, str, str]  # place (for messages), id and text

logger = logging.getLogger(__name__)


@contextmanager
def read_before() -> Iterator[None]:
    """Tasks that were read to check them, and reported then, are read again without a report."""
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def beir_folder(
    path: str,
    split: str = "test",
    *,
    name: str | None = None,
    exclude_self: bool = False,
    qrels: str | None = None,
    on_unknown: OnUnknown = "error",
) -> RetrievalTask:
    """Read a folder in the layout of BEIR; every file may be gzipped.

    ``corpus.jsonl`` has ``_id``, ``title`` (optional) and ``text``; ``queries.jsonl`` has ``_id``
    and ``text``; ``qrels/<split>.tsv`` has query id, document id and integer grade, with or
    without a header, or the four columns of TREC. Queries without a judgment are left out. Grades
    stay as they are.

    Args:
        path: the folder, or the zip file as BEIR gives it out; where there is no such folder,
            ``path`` with .zip at the end is read.
        split: name of the judgments file in ``qrels``.
        name: shown in tables; by default the folder's name and the split.
        exclude_self: leave a document with the query's own id out of its ranking.
        qrels: a judgments file elsewhere, instead of ``qrels/<split>.tsv``.
        on_unknown: what a judgment of an unknown query or document does. ``ignore`` drops and
            counts it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: malformed or contradictory content, or an id with white space, naming file and
            line.
    """
    folder = Path(path)
    documents, queries = (
        read_texts(beir_file(folder, f"{file}.jsonl")) for file in ("corpus", "queries")
    )
    judged = DataFile(qrels, Path(qrels)) if qrels else beir_file(folder, f"qrels/{split}.tsv")
    return build_task(
        name or f"{beir_name(folder)}/{split}",
        documents,
        queries,
        read_judgments(judged),
        place=judged.place,
        on_unknown=on_unknown,
        exclude_self=exclude_self,
    )


def has_judgments(path: str, split: str) -> bool:
    """Whether a folder in the layout of BEIR has judgments of this name."""
    try:
        beir_file(Path(path), f"qrels/{split}.tsv")
    except FileNotFoundError:
        return False
    return True


def beir_name(folder: str | Path) -> str:
    """What a folder in the layout of BEIR, or a zip of one, is called."""
    return Path(folder).resolve().name.removesuffix(".zip")


def beir_file(folder: Path, name: str) -> DataFile:
    """``name`` in ``folder``, plain or with .gz at the end; or within the zip file of BEIR that
    ``folder`` is, or that lies there with .zip at the end in its place."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return DataFile(str(candidate), candidate)
    archive = zip_of(folder)
    if archive.is_file() and not folder.is_dir():
        return _archived(archive, name)
    place = (folder / name).parent
    if place.is_dir():
        held = ", ".join(sorted(each.name for each in place.iterdir()))
        there = f"{place} holds {held or 'nothing'}"
    else:
        there = f"there is no folder {place if folder.is_dir() else folder}"
    raise FileNotFoundError(
        f"{folder / name}[.gz] does not exist; {there}. A folder in the "
        f"layout of BEIR has corpus.jsonl, queries.jsonl and qrels/<split>.tsv, or is {archive}"
    )


def zip_of(folder: Path) -> Path:
    """The zip file of BEIR that ``folder`` is, or that may lie in its place."""
    if folder.suffix == ".zip":
        return folder
    return Path(f"{folder if folder.name else folder.absolute()}.zip")  # "." has no name


def _archived(archive: Path, name: str) -> DataFile:
    """``name`` at the top of a zip file, or in a folder at its top."""
    try:
        with ZipFile(archive) as content:
            members = [each for each in content.namelist() if not each.endswith("/")]
    except BadZipFile as error:
        raise ValueError(f"{archive} is no whole zip file ({error}): get it again") from error
    wanted = (name, f"{name}.gz")
    found = [each for each in members if each in wanted or each.partition("/")[2] in wanted]
    if len(found) != 1:
        raise FileNotFoundError(
            f"{archive} has {'more than one' if found else 'no'} {name}[.gz] at its top or in a "
            f"folder there; it holds {', '.join(members[:20]) or 'nothing'}"
        )
    return DataFile(f"{archive}/{found[0]}", archive, found[0])


def read_texts(file: DataFile) -> Iterator[Located]:
    """Place, id and text of every record of a BEIR corpus or query file."""
    for number, line in read_lines(file):
        try:
            yield (file.place(number), *parse_text(decode_json(line)))
        except RecordError as error:
            raise ValueError(f"{file.place(number)}: {error}") from error


def beir_texts(
    paths: Iterable[Path], name: str = "corpus.jsonl", *, or_files: bool = False
) -> Iterator[str]:
    """The texts of the files ``name`` of folders in the layout of BEIR, or of their zip files, one
    after the other; with ``or_files`` a path may also be such a file.

    Raises:
        FileNotFoundError: a file is missing; nothing has been read then.
        ValueError: from :func:`read_texts`, when the generator gets there; or a file of another
            format, before anything is read.
    """
    files = [
        _json_lines(path)
        if or_files and path.is_file() and path.suffix != ".zip"
        else beir_file(path, name)
        for path in paths
    ]
    return (text for file in files for _, _, text in read_texts(file))


def _json_lines(path: Path) -> DataFile:
    if path.name.lower().removesuffix(".gz").endswith((".csv", ".tsv", ".parquet", ".arrow")):
        raise ValueError(
            f"{path}: texts are read from JSON lines here: convert it, to _id and text"
        )
    return DataFile(str(path), path)


def _by_id(entries: Iterable[Located]) -> dict[str, str]:
    """Id to text. None is there twice, and none holds white space."""
    texts: dict[str, str] = {}
    for place, identifier, text in entries:
        if identifier in texts:
            raise ValueError(f"{place}: the id {identifier!r} occurs a second time")
        if identifier.split() != [identifier]:
            raise ValueError(
                f"{place}: the id {identifier!r} holds white space, which the TREC files of a "
                "run's results cannot express: rename it there and in the judgments"
            )
        texts[identifier] = text
    return texts


def build_task(
    name: str,
    documents: Iterable[Located],
    queries: Iterable[Located],
    judgments: Iterable[Judgment],
    *,
    place: Callable[[int], str],
    on_unknown: OnUnknown = "error",
    exclude_self: bool = False,
) -> RetrievalTask:
    """A task of texts and judgments; queries without a judgment are left out.

    Args:
        name: shown in tables.
        documents, queries: place (for messages), id and text of each.
        judgments: in any order.
        place: of a judgment, by its number.
        on_unknown, exclude_self: as in :func:`beir_folder`.

    Raises:
        ValueError: an id twice, or one with white space; a judgment that contradicts another or,
            with "error", is of an unknown id; or none that is left, or that has a grade above 0.
    """
    refuse_other(get_args(OnUnknown), on_unknown=on_unknown)
    collection, asked = _by_id(documents), _by_id(queries)
    for kind, texts in (("documents", collection), ("queries", asked)):
        if not texts:
            raise ValueError(
                f"{name}: there are no {kind}: the file of them is empty, get it again"
            )
    qrels: Qrels = {}
    ignored = 0
    for judgment in judgments:
        unknown = _unknown(judgment, collection, asked)
        if unknown and on_unknown == "error":
            raise ArgumentError(
                "{}: {}. Use the collection that the judgments were made for, or set {on_unknown} "
                "to leave such judgments out",
                place(judgment.number),
                unknown,
                on_unknown="ignore",
            )
        if unknown:
            ignored += 1
            continue
        grades = qrels.setdefault(judgment.query_id, {})
        known = grades.setdefault(judgment.document_id, judgment.grade)
        if known != judgment.grade:
            raise ValueError(
                f"{place(judgment.number)}: query {judgment.query_id!r} and document "
                f"{judgment.document_id!r} were judged {known} before and {judgment.grade} here: "
                "leave one of them out"
            )
    if not qrels:
        raise ValueError(f"{name}: no judgment is left for any query")
    without = sum(max(grades.values()) < 1 for grades in qrels.values())
    if without == len(qrels):
        raise ValueError(
            f"{name}: no judgment has a grade of 1 or more, so that no document is relevant to any "
            "query: correct the grades"
        )
    judged = {key: text for key, text in asked.items() if key in qrels}
    _report(name, collection, judged, ignored, without)
    return RetrievalTask(
        name,
        TextCollection(list(collection), list(collection.values())),
        TextCollection(list(judged), list(judged.values())),
        {key: qrels[key] for key in judged},
        exclude_self,
    )


def _unknown(judgment: Judgment, documents: dict[str, str], queries: dict[str, str]) -> str | None:
    if judgment.query_id not in queries:
        return f"query {judgment.query_id!r} is judged but not among the {len(queries)} queries"
    if judgment.document_id not in documents:
        return (
            f"document {judgment.document_id!r} is judged but not among the {len(documents)} "
            "documents"
        )
    return None


def _report(
    name: str, documents: dict[str, str], queries: dict[str, str], ignored: int, without: int
) -> None:
    for kind, texts in (("documents", documents), ("queries", queries)):
        empty = sum(not text for text in texts.values())
        if empty:
            logger.warning("%s: %d of %d %s are empty; kept", name, empty, len(texts), kind)
    if ignored:
        logger.warning("%s: ignored %d judgments of unknown ids", name, ignored)
    if without:
        said = "%s: %d of %d judged queries have no relevant document, and count as 0"
        logger.warning(said, name, without, len(queries))
    logger.info("%s: %d documents, %d judged queries", name, len(documents), len(queries))
