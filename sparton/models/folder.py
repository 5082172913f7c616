"""Encoders as folders that Hugging Face and sentence-transformers load as they are.

Root: a stock masked-LM checkpoint with its tokenizer. Beside it the descriptions by which
sentence-transformers (5 and 6) composes a ``SparseEncoder``, and ``sparton.json`` with the lengths
of training. V vocabulary.
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from sparton.kernels.splade_head.variants import Activation, Pooling, check_variant
from sparton.models.backbone import Backbone
from sparton.models.checkpoint import load_mlm, load_tokenizer, optional_file
from sparton.models.encoder import SpladeEncoder
from sparton.models.heads import SpartonHead, SpladeHead

MODULES = "sentence_transformers.sparse_encoder.models"
POOLING_FOLDER = "1_SpladePooling"
LENGTH_KEYS = (
    ("sentence_bert_config.json", "max_seq_length"),
    ("tokenizer_config.json", "max_seq_length"),
    ("tokenizer_config.json", "model_max_length"),
)
UNLIMITED = 10**9  # transformers writes 1e30 for a tokenizer without a limit


class Lengths(NamedTuple):
    """Longest query and document in tokens, special tokens included."""

    query: int
    document: int


def save_encoder(
    encoder: SpladeEncoder, path: str | Path, *, query_length: int, document_length: int
) -> None:
    """Write an encoder as a folder, all of it or nothing.

    Everything is written and flushed beside ``path`` first, and renamed when complete. An existing
    folder at ``path`` is replaced; if the process dies between the two renames, its content stays
    beside ``path`` under a name that ends in ``.old``.

    Raises:
        OSError: the disk is full or not writable; names the folder and the room left. What was at
            ``path`` before is untouched.
    """
    path = Path(path)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        fresh.mkdir(parents=True)
        with encoder.backbone.decoder_in_place() as mlm:
            mlm.save_pretrained(fresh)
        encoder.tokenizer.save_pretrained(fresh)
        for name, content in _descriptions(encoder, query_length, document_length).items():
            file = fresh / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _flush(fresh)
        _replace(path, fresh)
    except Exception as error:
        # A failed write is an OSError, a SafetensorError, or a bare Exception of tokenizers.
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        raise _not_written(path, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_encoder(
    name: str | Path,
    head: SpladeHead | None = None,
    *,
    revision: str | None = None,
    compile: bool = False,
    gradient_checkpointing: bool = False,
) -> SpladeEncoder:
    """Read an encoder from a folder of :func:`save_encoder`, a sentence-transformers folder (older
    and newer layouts), a plain masked-LM checkpoint, or any of these on the Hugging Face hub.

    Args:
        name: path or hub name.
        head: how representations are computed; when None a ``SpartonHead`` with the pooling and the
            activation that the folder names (a plain checkpoint: maximum and relu).
        revision: branch, tag or commit on the hub.
        compile, gradient_checkpointing: see :class:`Backbone`.

    Raises:
        ValueError: the folder describes another kind of model, or another pooling or activation
            than that of ``head``, or its weights are damaged or incomplete.
        OSError: files are missing, among them the tokenizer.
    """
    name = str(name)
    subfolder, variant = _layout(name, revision)
    if head is None:
        head = SpartonHead(*(variant or ("max", "relu")))
    elif variant not in (None, (head.pooling, head.activation)):
        raise ValueError(
            f"{name} has pooling={variant[0]} and activation={variant[1]}, but the head has "
            f"{head.pooling} and {head.activation}; set the head's to those of the folder"
        )
    backbone = Backbone(
        load_mlm(name, revision=revision, subfolder=subfolder),
        load_tokenizer(name, revision=revision, subfolder=subfolder),
        compile=compile,
        gradient_checkpointing=gradient_checkpointing,
    )
    return SpladeEncoder(backbone, head)


def encoder_lengths(name: str | Path, revision: str | None = None) -> Lengths | None:
    """The lengths an encoder was trained with; None where the folder does not say.

    sentence-transformers knows one length for both and has kept it in several places.
    """
    own = _read_json(str(name), "sparton.json", revision)
    if own:
        return Lengths(own["query_length"], own["document_length"])
    for file, key in LENGTH_KEYS:
        length = (_read_json(str(name), file, revision) or {}).get(key)
        if length and length < UNLIMITED:
            return Lengths(length, length)
    return None


def _descriptions(
    encoder: SpladeEncoder, query_length: int, document_length: int
) -> dict[str, Any]:
    """The folder's JSON files; class paths and keys are those that versions 5 and 6 both read."""
    parts = (("", "MLMTransformer"), (POOLING_FOLDER, "SpladePooling"))
    return {
        "modules.json": [
            {"idx": row, "name": str(row), "path": folder, "type": f"{MODULES}.{kind}"}
            for row, (folder, kind) in enumerate(parts)
        ],
        "config_sentence_transformers.json": {
            "model_type": "SparseEncoder",
            "similarity_fn_name": "dot",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
        },
        "sentence_bert_config.json": {
            "max_seq_length": max(query_length, document_length),
            "do_lower_case": False,
        },
        f"{POOLING_FOLDER}/config.json": {
            "pooling_strategy": encoder.head.pooling,
            "activation_function": encoder.head.activation,
            "word_embedding_dimension": encoder.vocabulary_size,
        },
        "sparton.json": {"query_length": query_length, "document_length": document_length},
    }


def _layout(name: str, revision: str | None) -> tuple[str, tuple[Pooling, Activation] | None]:
    """Where the checkpoint lies, and pooling and activation; None if there is no ``modules.json``.

    Checks that ``modules.json`` means SPLADE.
    """
    modules = _read_json(name, "modules.json", revision)
    if modules is None:
        return "", None
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"]):
        raise ValueError(
            f"{name}/modules.json composes {' + '.join(kinds)}; a SPLADE model is a masked-LM "
            "transformer followed by SpladePooling"
        )
    transformer, pooling = (module["path"] for module in modules)
    if kinds[0] == "Transformer":
        file = f"{transformer}/sentence_bert_config.json".lstrip("/")
        task = _read_module(name, file, revision).get("transformer_task")
        if task != "fill-mask":
            raise ValueError(
                f"{name}/{file}: transformer_task is {task!r}; only 'fill-mask' is supported"
            )
    content = _read_module(name, f"{pooling}/config.json", revision)
    variant = (content.get("pooling_strategy", "max"), content.get("activation_function", "relu"))
    try:
        check_variant(*variant)
    except ValueError as error:
        raise ValueError(f"{name}/{pooling}/config.json: {error}") from None
    return transformer, variant


def _read_module(name: str, file: str, revision: str | None) -> dict[str, Any]:
    content = _read_json(name, file, revision)
    if content is None:
        raise FileNotFoundError(f"{name}/{file} is missing, though modules.json refers to it")
    if not isinstance(content, dict):
        raise ValueError(f"{name}/{file} describes no module: it must hold a JSON object")
    return content


def _read_json(name: str, file: str, revision: str | None) -> Any:
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
