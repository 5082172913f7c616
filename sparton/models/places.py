"""Where models are: folders, and names on the Hugging Face hub. Nothing heavy is imported here."""

import re
from pathlib import Path

MODEL_FILES = (
    "config.json",
    "modules.json",
    "adapter_config.json",
)  # a model has one of them at least
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def check_place(name: str | Path) -> None:
    """Refuse what is neither a folder nor a name on the hub; nothing is read or asked of the hub.

    Raises:
        FileNotFoundError: names what would be right.
    """
    if _is_run(Path(name)):
        raise FileNotFoundError(
            f"{name} is the folder of a run: its model is {Path(name) / 'model'}"
        )
    if runs := sorted(each.parent for each in Path(name).glob("*/model") if _is_run(each.parent)):
        raise FileNotFoundError(
            f"{name} is a folder of runs: a model is {runs[0] / 'model'}"
            + (f", one of {len(runs)}" if runs[1:] else "")
        )
    first, *rest = Path(name).parts or ("",)
    below_here = rest and Path(first).is_dir()  # a slip in a path is no name on the hub
    if not Path(name).is_dir() and (below_here or not HUB_NAME.fullmatch(str(name))):
        raise FileNotFoundError(
            f"{name}: no such folder; give a folder of a trained model, one of "
            "sentence-transformers, or a hub name such as naver/splade-v3"
        )


def _is_run(folder: Path) -> bool:
    """Whether a model is not this folder, but below it."""
    return (folder / "model").is_dir() and not any((folder / file).exists() for file in MODEL_FILES)
