"""What a study declares; the harness does the rest."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from benchmarks.screen import Columns, Record, timed_columns, timed_words

Measured = Record | list[Record]
# By name: the module that holds STUDY.
STUDIES = {
    "head": "benchmarks.head.study",
    "maxsim": "benchmarks.maxsim.study",
    "maxsim_backward": "benchmarks.maxsim.backwards",
    "attention": "benchmarks.attention.study",
    "search": "benchmarks.search.study",
    "compressed_search": "benchmarks.search.compressed",
    "data": "benchmarks.data.study",
    "encoding": "benchmarks.encoding.study",
    "collections": "benchmarks.encoding.collections",
    "passages": "benchmarks.encoding.passages",
    "training": "benchmarks.training.study",
}


class Settings(NamedTuple):
    """What all cells of a call have in common.

    Attributes:
        device: cuda or cpu.
        seconds: how long a cell is timed.
        folder: where cells leave what others need: texts, models.
        miniature: whether every problem shrinks, to try the program.
        options: the study's own.
    """

    device: str
    seconds: float
    folder: str
    miniature: bool
    options: Mapping[str, Any]


class Cell(Protocol):
    """One measurement: a NamedTuple whose fields are fields of its record. Cells of a suite differ
    in them."""

    def __hash__(self) -> int: ...

    def _asdict(self) -> dict[str, Any]: ...

    @property
    def label(self) -> str: ...


C = TypeVar("C", bound=Cell)


class Study(ABC, Generic[C]):
    """Cells, how they are measured, and how that is shown.

    Attributes:
        name: of the study, and of its file of records where :meth:`file_of` has no other.
        cell: makes a cell of its fields.
        seconds: how long a cell is timed, unless ``--seconds`` says otherwise.
        limit: seconds after which a cell is given up, its preparation apart.
        needs_gpu: whether a machine without a GPU can only try the program.
        suites_apart: whether the suites of one file are runs of their own; otherwise a file is one
            run, and a cell that several of its suites have is measured once.
        options: of its command line alone, by name: what add_argument takes.
        columns: of the table at the end, by heading: a record's words.
    """

    name: str
    cell: Callable[..., C]
    seconds = 0.7
    limit = 240.0
    needs_gpu = True
    suites_apart = False
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    columns: ClassVar[Columns] = timed_columns()

    @abstractmethod
    def suites(self, settings: Settings) -> dict[str, list[C]]:
        """Cells by suite, in the order in which they are measured."""

    @abstractmethod
    def prepare(self, cells: Sequence[C], settings: Settings) -> Callable[[C], Measured]:
        """All that a process does before its turn, in which it must not touch the device.

        Returns:
            What measures one of the cells. Its record has a status, and lacks what concerns the
            whole run; a list of them where a cell has many.
        """

    def fields(self) -> tuple[str, ...]:
        """Names of a cell's fields."""
        return tuple(inspect.signature(self.cell).parameters)

    def process_of(self, cell: C) -> Hashable:
        """What cells that share a process have in common."""
        return cell

    def context(self, suite: str, settings: Settings) -> Record:
        """What every record of a suite says, and what must not change while it is measured."""
        return {}

    def file_of(self, suite: str) -> str:
        """The name of the file that has the suite's records."""
        return self.name

    def objection(self, cell: C, record: Record, earlier: Sequence[tuple[C, Record]]) -> str | None:
        """Why a record cannot be believed beside earlier ones of its suite; None if it can."""
        return None

    def beside(self, cell: C, record: Record, earlier: Sequence[tuple[C, Record]]) -> Record:
        """What earlier records of its suite add to one that can be believed."""
        return {}

    def words(self, record: Record) -> str:
        """What a line of the screen says of a cell that was measured."""
        return timed_words(record)


def load_study(name: str) -> Study[Any]:
    return import_module(STUDIES[name]).STUDY
