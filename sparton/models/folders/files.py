"""What all kinds of model folders share: atomic writing, JSON beside weights, lengths."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparton.models.repository import optional_file
from sparton.types import Markup, Similarity

LENGTH_KEYS = (
    ("sentence_bert_config.json", "max_seq_length"),
    ("tokenizer_config.json", "max_seq_length"),
    ("tokenizer_config.json", "model_max_length"),
)
DESCRIPTION = "config_sentence_transformers.json"
WEIGHTS = "model.safetensors"
UNLIMITED = 10**9  # transformers writes 1e30 for a tokenizer without a limit


class Lengths(NamedTuple):
    """Longest query and document in tokens, special tokens included."""

    query: int
    document: int


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``path`` when the block ends without an error.

    Everything is flushed before the renaming. An existing folder at ``path`` is replaced; if the
    process dies between the two renames, its content stays beside ``path`` under a name that ends
    in ``.old``.

    Raises:
        OSError: the disk is full or not writable; names the folder and the room left. What was at
            ``path`` before is untouched.
    """
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _flush(fresh)
        _replace(path, fresh)
    except Exception as error:
        # A failed write is an OSError, a SafetensorError, or a bare Exception of tokenizers.
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        raise _not_written(path, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


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


def describe_model(kind: str, similarity: str, markup: Markup) -> dict[str, Any]:
    """The ``config_sentence_transformers.json`` of a model of that class."""
    return {
        "model_type": kind,
        "similarity_fn_name": similarity,
        "prompts": {"query": markup.query_prompt, "document": markup.document_prompt},
        "default_prompt_name": None,
    }


def read_description(name: str, revision: str | None, folder: str = "") -> dict[str, Any]:
    """What sentence-transformers says of the model as a whole; empty where it says nothing."""
    return read_json(name, join(folder, DESCRIPTION), revision) or {}


def read_similarity(name: str, default: Similarity, revision: str | None) -> Similarity:
    """How representations are compared; the default of sentence-transformers' class where the
    folder does not say.

    Raises:
        ValueError: in another way than by dot product or cosine.
    """
    found = read_description(name, revision).get("similarity_fn_name")
    for known in get_args(Similarity):
        if found in (known, None):
            return default if found is None else known
    raise ValueError(
        f"{name}/{DESCRIPTION}: similarity_fn_name is {found!r}, and vectors are compared by 'dot' "
        "or 'cosine' here alone: write the one that this model may be searched by"
    )


def check_active_dims(name: str, own: int | None, revision: str | None) -> None:
    """Refuse a sparse model of which sentence-transformers keeps another number of weights of a
    text than the model's ``own``.

    Raises:
        ValueError: names the number and the remedy.
    """
    found = read_description(name, revision).get("max_active_dims")
    if found not in (None, own):
        raise ValueError(
            f"{name}/{DESCRIPTION}: max_active_dims={found} keeps that many weights of a text, and "
            f"this model keeps {'all' if own is None else own}: take it out, and bound them where "
            "texts are encoded (max_terms)"
        )


def read_prompts(name: str, revision: str | None) -> Markup:
    """What ``encode_query`` and ``encode_document`` of sentence-transformers put before texts."""
    prompts = read_description(name, revision).get("prompts") or {}
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


def _not_written(path: Path, error: Exception) -> OSError:
    existing = next(each for each in path.absolute().parents if each.is_dir())
    free = shutil.disk_usage(existing).free / 2**20
    return OSError(
        f"the model folder {path} could not be written; {free:,.1f} MiB are free in {existing}. "
        "Make room and run the same command again; what was at the path before is untouched. "
        f"({error})"
    )


def _flush(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(path: Path, fresh: Path) -> None:
    old = fresh.with_suffix(".old")
    existed = path.exists()
    if existed:
        path.rename(old)
    try:
        fresh.rename(path)
    except OSError:
        if existed:
            old.rename(path)
        raise
    if existed:
        shutil.rmtree(old)
