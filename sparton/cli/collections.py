"""Files of texts with ids, as users name them."""

from collections.abc import Sequence
from pathlib import Path

from sparton.datasets.collection import beir_file, zip_of
from sparton.datasets.files import DataFile, locate, was_saved
from sparton.types import Side

_FILES: dict[Side, str] = {"document": "corpus.jsonl", "query": "queries.jsonl"}


def text_files(names: Sequence[str], side: Side) -> list[DataFile]:
    """The files that hold the texts of one side.

    Args:
        names: files or patterns, or folders of ``save_to_disk``; or, alone, a folder in the layout
            of BEIR or its zip file.

    Raises:
        FileNotFoundError: a name that fits nothing.
    """
    path = Path(names[0])
    held = path.is_dir() or path.suffix == ".zip" or zip_of(path).is_file()
    if len(names) == 1 and held and not was_saved(path):
        return [beir_texts(path, side)]
    return locate(names)


def beir_texts(folder: Path, side: Side) -> DataFile:
    """The file of one side in a folder in the layout of BEIR, or in its zip file.

    Raises:
        FileNotFoundError: it is not there.
    """
    return beir_file(folder, _FILES[side])
