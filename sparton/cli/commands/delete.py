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
    named.add_argument("--ids", nargs="+", metavar="ID")
    named.add_argument("--file", type=Path, help="of ids, one per line")
    parsed = parser.parse_args(arguments)

    from rich.console import Console

    from sparton.encoded import delete_texts

    lines = parsed.ids or parsed.file.read_text(encoding="utf-8").splitlines()
    ids = {line for line in lines if line}
    left = delete_texts(parsed.folder, ids)
    Console(soft_wrap=True, highlight=False).print(
        f"{len(ids):,} texts deleted, {len(left):,} are left in {parsed.folder}", markup=False
    )
