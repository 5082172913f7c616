"""Files that come with the package and are no code."""

from pathlib import Path


def shipped(name: str) -> Path:
    """A file or folder that a clone has at its root, and an installed package inside of it.

    Raises:
        FileNotFoundError: this installation lacks it.
    """
    package = Path(__file__).resolve().parents[1]
    for root in (package, package.parent):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(f"{name} is neither in {package} nor beside it: install sparton again")
