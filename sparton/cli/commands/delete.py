"""Delete documents of a collection that sparton encode has written.

    sparton delete DOCS --ids d17 d18
    sparton delete DOCS --file gone.txt                # an id per line

Their vectors stay on the disk, and nobody finds them any more. Others are added by
sparton encode ... output=DOCS append=true; a document that is replaced is deleted first.
"""

from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.flags import command_parser


def main(arguments: Sequence[str]) -> None:
    """``sparton delete``."""
    parser = command_parser("delete", __doc__)
    parser.add_argument("folder", metavar="DOCS", type=Path, help="folder of sparton encode")
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument("--ids", nargs="+", metavar="ID", help="of the documents")
    named.add_argument("--file", type=Path, help="of ids, one per line")
    parsed = parser.parse_args(arguments)

    from sparton.encoded import delete_texts, open_encoded

    ids = set(parsed.ids or _read_ids(parsed.file))
    before = open_encoded(parsed.folder)
    left = delete_texts(parsed.folder, ids)
    deleted = len(before) - len(left)
    said = f"{deleted:,} {'text' if deleted == 1 else 'texts'} deleted"
    if already := len(ids) - deleted:
        said += f", {already:,} {'was' if already == 1 else 'were'} already"
    said += f", {len(left):,} {'is' if len(left) == 1 else 'are'} left in {parsed.folder}"
    print(said)


def _read_ids(file: Path) -> list[str]:
    """Lines of a file that are not empty.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not text, or has no such lines.
    """
    if not file.is_file():
        raise FileNotFoundError(f"--file {file}: no such file")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file {file} is not UTF-8 text: write an id per line") from error
    if ids := [line for line in lines if line]:
        return ids
    raise ValueError(f"--file {file} holds no ids: write an id per line")
