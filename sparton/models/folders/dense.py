"""Dense encoders as sentence-transformers folders: Transformer, Pooling and perhaps Normalize.

D hidden width.
"""

from pathlib import Path
from typing import Any, Unpack

from sparton.models.body import EncoderBody
from sparton.models.checkpoint import TRANSFORMER_FILE, load_body, load_tokenizer
from sparton.models.dense import DenseEncoder, check_truncate_dim
from sparton.models.folders.files import (
    DESCRIPTION,
    Lengths,
    Part,
    check_settings,
    composition,
    describe_model,
    describe_transformer,
    list_modules,
    read_description,
    read_module,
    read_parts,
    read_prompts,
    read_similarity,
    write_json,
)
from sparton.models.lora import own_base
from sparton.models.pooling import Pooling, pooling_mode
from sparton.models.repository import Source, join
from sparton.reading import Fields
from sparton.types import BodyOptions, Markup

MODULES = "sentence_transformers.models"
KINDS = ["Transformer", "Pooling", "Normalize"]
# By the keys of version 5; version 6 has one key instead, pooling_mode.
POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
THEIR_LAST = POOLING_KEYS["pooling_mode_lasttoken"]  # our "last"


def save_dense(encoder: DenseEncoder, path: Path, lengths: Lengths) -> None:
    """Fill the folder ``path`` with what ``SentenceTransformer(path)`` loads."""
    encoder.body.save(path)
    describe_dense(encoder, path, lengths)


def describe_dense(encoder: DenseEncoder, path: Path, lengths: Lengths) -> None:
    """All that ``SentenceTransformer(path)`` reads beside the checkpoint and its tokenizer."""
    write_dense(encoder, path, lengths)
    similarity = "cosine" if encoder.cosine else "dot"
    description = describe_model("SentenceTransformer", similarity, encoder.markup)
    if encoder.truncate_dim is not None:
        description["truncate_dim"] = encoder.truncate_dim
    modules = list_modules(dense_modules(encoder.pooling))
    write_json(path, {"modules.json": modules, DESCRIPTION: description})


def load_dense(
    name: str | Path | Source,
    pooling: Pooling | None = None,
    **options: Unpack[BodyOptions],
) -> DenseEncoder:
    """Read a dense encoder of sentence-transformers, or of :func:`save_dense`.

    Args:
        name: path or hub name, or a source that says more.
        pooling: which must be that of the folder; None for whatever that is.
        options: see :class:`~sparton.types.BodyOptions`.

    Raises:
        ValueError: the folder composes other modules, another pooling than mean, cls and last
            or than the given one, a similarity other than cosine and dot product, or a
            ``truncate_dim`` that is none, or its weights are damaged or incomplete.
        OSError: files are missing.
    """
    source = Source.of(name)
    parts = read_parts(source)
    if parts is None:
        raise FileNotFoundError(
            f"{source} has no modules.json: it is no sentence-transformers model, and nothing says "
            "how its hidden states become an embedding"
        )
    cosine = read_similarity(source, "cosine") == "cosine"
    truncate_dim = _truncate_dim(source)
    encoder = read_dense(source, parts, **options)
    encoder.cosine, encoder.truncate_dim = cosine, truncate_dim
    if pooling is not None:
        check_settings(source, pooling._asdict(), encoder.pooling._asdict())
    return encoder


def write_dense(encoder: DenseEncoder, path: Path, lengths: Lengths) -> None:
    """The descriptions of the modules, all but ``modules.json``."""
    files: dict[str, Any] = {
        TRANSFORMER_FILE: describe_transformer(encoder.body, *lengths),
        "sparton.json": lengths.described(),
    }
    for folder in filter(None, dense_modules(encoder.pooling)):
        files[f"{folder}/config.json"] = {}
    files["1_Pooling/config.json"] = {
        "word_embedding_dimension": encoder.body.hidden_size,
        "pooling_mode_cls_token": encoder.pooling.mode == "cls",
        "pooling_mode_mean_tokens": encoder.pooling.mode == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_lasttoken": encoder.pooling.mode == "last",
        "include_prompt": encoder.markup.include_prompt,
    }
    write_json(path, files)


def dense_modules(pooling: Pooling) -> dict[str, str]:
    """The classes of sentence-transformers that make up a dense encoder, by their folders."""
    modules = {"": f"{MODULES}.Transformer", "1_Pooling": f"{MODULES}.Pooling"}
    return modules | ({"2_Normalize": f"{MODULES}.Normalize"} if pooling.normalize else {})


def read_dense(source: Source, parts: list[Part], **options: Unpack[BodyOptions]) -> DenseEncoder:
    """The dense encoder that these parts of a folder make up, its embeddings whole: what the folder
    says of comparing them is the caller's to read."""
    pooling, include_prompt = read_pooling(source, parts)
    transformer = parts[0].path
    _check_transformer(source, transformer)
    body = EncoderBody(
        load_body(source, subfolder=transformer),
        load_tokenizer(source, subfolder=transformer),
        **options,
    )
    body.base = own_base(source, transformer)
    markup = (read_prompts(source) or Markup())._replace(include_prompt=include_prompt)
    return DenseEncoder(body, pooling, markup)


def read_pooling(source: Source, parts: list[Part]) -> tuple[Pooling, bool]:
    """How the dense encoder that parts of a folder make up pools, and whether it pools prompts.

    Raises:
        ValueError: they make up something else, or it pools otherwise than is known here.
    """
    if [part.kind for part in parts] not in (KINDS[:2], KINDS):
        raise ValueError(
            f"{join(source.name, parts[0].path)}/modules.json composes {composition(parts)}; a "
            "dense encoder is Transformer + Pooling, with or without Normalize"
        )
    content = read_module(source, f"{parts[1].path}/config.json")
    return _pooling(content, len(parts) == 3), content.get("include_prompt", bool, True)


def _truncate_dim(source: Source) -> int | None:
    found = read_description(source).get("truncate_dim", int)
    try:
        check_truncate_dim(found)
    except ValueError as error:
        raise ValueError(f"{source}/{DESCRIPTION}: {error}") from None
    return found


def _check_transformer(source: Source, path: str) -> None:
    file = join(path, TRANSFORMER_FILE)
    task = source.fields(file).get("transformer_task", str, "feature-extraction")
    if task != "feature-extraction":
        raise ValueError(
            f"{source}/{file}: transformer_task is {task!r}; an embedding needs "
            "'feature-extraction'"
        )


def _pooling(content: Fields, normalize: bool) -> Pooling:
    if content.is_list("pooling_mode"):
        modes = content.strings("pooling_mode")
    elif one := content.get("pooling_mode", str):
        modes = [one]
    else:
        modes = [mode for key, mode in POOLING_KEYS.items() if content.get(key, bool)]
    try:
        name = "+".join(modes or ["mean"])
        return Pooling("last" if name == THEIR_LAST else pooling_mode(name), normalize)
    except ValueError as error:
        raise ValueError(f"{content.place}: {error}") from None
