"""Where models are: folders, and names on the Hugging Face hub. Nothing heavy is imported here."""

import re
from pathlib import Path

MODEL_FILES = (
    "config.json",
    "modules.json",
    "adapter_config.json",
)  # a model has one of them at least
ENCODED = "encoding.json"  # of a folder of encoded texts
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def content_of(folder: str | Path) -> str:
    """The name of something that lies in a folder; empty where there is nothing, or no folder."""
    place = Path(folder)
    return min((each.name for each in place.iterdir()), default="") if place.is_dir() else ""


def holds_model(folder: str | Path) -> bool:
    """Whether the folder of a model is there."""
    return any((Path(folder) / file).exists() for file in MODEL_FILES)


def check_place(name: str | Path) -> None:
    """Refuse what is neither a folder nor a name on the hub; nothing is read or asked of the hub.

    Raises:
        FileNotFoundError: names what would be right.
    """
    place = Path(name)
    if not str(name):
        raise FileNotFoundError(
            "the name of the model is empty: give a folder, or a name on the hub"
        )
    if place.is_file():
        raise FileNotFoundError(f"{name} is a file: name the folder of its model, {place.parent}")
    if not holds_model(place):
        if (place / "model").is_dir():
            raise FileNotFoundError(
                f"{name} is the folder of a run: its model is {place / 'model'}"
            )
        if models := sorted(place.glob("*/model")):
            more = f", one of {len(models)}" if models[1:] else ""
            raise FileNotFoundError(f"{name} is a folder of runs: a model is {models[0]}{more}")
        if (place / ENCODED).is_file():
            raise FileNotFoundError(
                f"{name} holds encoded texts, not a model: name the model that encoded them; it "
                "takes this folder as an index, or as the documents of an evaluation"
            )
    first, *rest = place.parts or ("",)
    below_here = rest and Path(first).is_dir()  # a slip in a path is no name on the hub
    if not place.is_dir() and (below_here or not HUB_NAME.fullmatch(str(name))):
        if first == "~":
            raise FileNotFoundError(f"{name}: only a shell knows ~: name {place.expanduser()}")
        raise FileNotFoundError(
            f"{name}: no such folder; give a folder of a trained model, one of "
            "sentence-transformers, or a hub name such as naver/splade-v3"
        )
