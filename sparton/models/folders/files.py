"""What all kinds of model folders share: JSON beside weights, lengths."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparton.models.checkpoint import optional_file
from sparton.types import Markup

LENGTH_KEYS = (
    ("sentence_bert_config.json", "max_seq_length"),
    ("tokenizer_config.json", "max_seq_length"),
    ("tokenizer_config.json", "model_max_length"),
)
WEIGHTS = "model.safetensors"
UNLIMITED = 10**9  # transformers writes 1e30 for a tokenizer without a limit


class Lengths(NamedTuple):
    """Longest query and document in tokens, special tokens included."""

    query: int
    document: int


def write_json(folder: Path, files: Mapping[str, Any]) -> None:
    """Each content as the JSON file of its name; names may lie one folder down."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def encoder_lengths(name: str | Path, revision: str | None = None) -> Lengths | None:
    """The lengths an encoder was trained with; None where the folder does not say.

    sentence-transformers knows one length for both and has kept it in several places.
    """
    own = own_lengths(str(name), revision)
    length = None if own else length_of(str(name), "", revision)
    return own if length is None else Lengths(length, length)


def own_lengths(name: str, revision: str | None) -> Lengths | None:
    """Those that this project wrote, if it did."""
    own = read_json(name, "sparton.json", revision)
    return Lengths(own["query_length"], own["document_length"]) if own else None


def length_of(name: str, subfolder: str, revision: str | None) -> int | None:
    """The length of a module of sentence-transformers, None where there is no limit."""
    for file, key in LENGTH_KEYS:
        length = (read_json(name, join(subfolder, file), revision) or {}).get(key)
        if length and length < UNLIMITED:
            return length
    return None


def module_kinds(name: str, revision: str | None) -> list[str] | None:
    """The names of the classes that ``modules.json`` composes; None where there is none."""
    modules = read_json(name, "modules.json", revision)
    return modules and [module["type"].rsplit(".", 1)[-1] for module in modules]


def read_prompts(name: str, revision: str | None) -> Markup:
    """What ``encode_query`` and ``encode_document`` of sentence-transformers put before texts."""
    config = read_json(name, "config_sentence_transformers.json", revision) or {}
    prompts = config.get("prompts") or {}
    return Markup(
        query_prompt=prompts.get("query") or "", document_prompt=prompts.get("document") or ""
    )


def check_settings(name: str, given: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse a head whose settings are not those of the folder ``name``; both by the same keys.

    Raises:
        ValueError: lists what differs.
    """
    differing = [
        f"{key}={given[key]!r} (the folder: {found[key]!r})"
        for key in given
        if given[key] != found[key]
    ]
    if differing:
        raise ValueError(
            f"the head has other settings than {name}: {', '.join(differing)}; set the head's to "
            "those of the folder"
        )


def join(*parts: str) -> str:
    """A path within a folder or repository; empty parts are left out."""
    return "/".join(part for part in parts if part)


def read_module(name: str, file: str, revision: str | None) -> dict[str, Any]:
    """The description of one of the modules that ``modules.json`` lists."""
    content = read_json(name, file, revision)
    if content is None:
        raise FileNotFoundError(f"{name}/{file} is missing, though modules.json refers to it")
    if not isinstance(content, dict):
        raise ValueError(f"{name}/{file} describes no module: it must hold a JSON object")
    return content


def read_weights(name: str, folder: str, revision: str | None, missing: str) -> dict[str, Tensor]:
    """The tensors of one of the modules that ``modules.json`` lists.

    Raises:
        FileNotFoundError: there are none; ``missing`` ends the sentence, with the remedy.
        ValueError: the file is damaged.
    """
    path = optional_file(name, WEIGHTS, revision, folder)
    if path is None:
        raise FileNotFoundError(f"{name}/{folder} has no {WEIGHTS} {missing}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): copy or download it again") from error


def read_json(name: str, file: str, revision: str | None) -> Any:
    """A JSON file of a local folder or hub repository, None where it is not there."""
    path = optional_file(name, file, revision)
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
