"""What tells whether an interrupted pipeline goes on with the same model and the same texts."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from sparton.digests import texts_digest
from sparton.models.identity import weights_digest


def model_identity(model: str | Path | nn.Module) -> str:
    """What a model is: its weights where it is in memory, its name where it is on the hub; of a
    folder the state of its files, too."""
    if isinstance(model, nn.Module):
        return f"weights {weights_digest(model.state_dict())}"
    if not Path(model).is_dir():
        return str(model)
    files = (file for file in sorted(Path(model).rglob("*")) if file.is_file())
    states = (
        f"{file.relative_to(model)} {(stat := file.stat()).st_size} {stat.st_mtime_ns}"
        for file in files
    )
    return f"{model}, files {texts_digest(states)}"


def settings_identity(settings: Any) -> dict[str, object]:
    """The kind and the fields of a dataclass; of its model, if it has one, what that is."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    if "model" in values:
        values["model"] = model_identity(values["model"])
    return {"kind": type(settings).__name__, **values}
