"""SPLADE encoders as folders that Hugging Face and sentence-transformers load as they are.

Root: a stock checkpoint of the language model with its tokenizer. Beside it the descriptions by
which sentence-transformers (5 and 6) composes a ``SparseEncoder``, and ``sparton.json`` with the
lengths of training. V vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack, cast

from sparton.kernels.splade_head.variants import Activation, Pooling, check_variant
from sparton.models.backbone import Backbone
from sparton.models.causal_lm import is_causal_lm
from sparton.models.checkpoint import (
    LOGIT_BIAS,
    TRANSFORMER_FILE,
    load_lm,
    load_logit_bias,
    load_tokenizer,
)
from sparton.models.folders.files import (
    DESCRIPTION,
    Lengths,
    Part,
    agreed_prompts,
    check_active_dims,
    check_settings,
    class_name,
    composition,
    describe_model,
    describe_own,
    describe_transformer,
    list_modules,
    read_module,
    read_parts,
    read_similarity,
    write_json,
)
from sparton.models.folding import FILE as FOLDING
from sparton.models.folding import read_folding, same_folding, write_folding
from sparton.models.heads import SpartonHead, SpladeHead, TiledHead
from sparton.models.lora import own_base
from sparton.models.repository import Source, join
from sparton.models.splade import SpladeEncoder
from sparton.types import BodyOptions

MODULES = "sentence_transformers.sparse_encoder.models"
POOLING_FOLDER = "1_SpladePooling"
# The module before the pooling: of a masked language model, which versions 5 and 6 both read, and
# of a causal one, which 6.2 reads. Between them a bias that the checkpoint has no place for; as no
# library but this has such a module, none gives logits without it.
MASKED, POOLING = f"{MODULES}.MLMTransformer", f"{MODULES}.SpladePooling"
OWN_POOLING = "sparton.integrations.sentence_transformers.pooling.SpladePooling"
CAUSAL = "sentence_transformers.base.modules.transformer.Transformer"
BIAS = "sparton.integrations.sentence_transformers.LogitBias"
KINDS = (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])
TASKS = ("fill-mask", "text-generation")
OWN = "head"  # of the pooling's config.json: the class of a head of a user's own


class HeadSettings(TypedDict):
    """The settings of a SPLADE head that a folder has; ``folding`` is the path of its file."""

    pooling: Pooling
    activation: Activation
    token_topk: int | None
    folding: Path | None


class Layout(NamedTuple):
    """Where a masked-LM checkpoint lies in a folder, and the head after it, of which a plain
    checkpoint says nothing; and its class, where that is a user's own."""

    subfolder: str
    head: HeadSettings | None
    own: str | None = None


def save_splade(encoder: SpladeEncoder, path: Path, lengths: Lengths) -> None:
    """Fill the folder ``path``."""
    encoder.backbone.save(path)
    write_splade(encoder, path, describe_splade(encoder, lengths))


def write_splade(encoder: SpladeEncoder, path: Path, files: Mapping[str, Any]) -> None:
    """The files of :func:`describe_splade`, and the folding beside them."""
    write_json(path, files)
    save_folding(encoder, path / POOLING_FOLDER)


def save_folding(encoder: SpladeEncoder, folder: Path) -> None:
    """Write into the pooling's folder which terms count as one, if any do."""
    if encoder.head.fold is not None:
        write_folding(encoder.head.fold, folder)


def transformer_type(encoder: SpladeEncoder) -> str:
    """The class of sentence-transformers that gives the logits of this model."""
    return CAUSAL if is_causal_lm(encoder.backbone.model.config) else MASKED


def modules_of(encoder: SpladeEncoder, pooling: str, folder: str = "") -> dict[str, str]:
    """The classes of sentence-transformers that make up an encoder, by their folders.

    Args:
        pooling: folder of the last of them.
        folder: of the checkpoint.
    """
    modules = {folder: transformer_type(encoder)}
    if encoder.backbone.logit_bias is not None:
        modules[join(folder, LOGIT_BIAS)] = BIAS
    return modules | {pooling: pooling_type(encoder.head)}


def pooling_type(head: SpladeHead) -> str:
    """The class that pools logits so in sentence-transformers: its own, unless that lacks a
    setting of the head. Ours is imported only where ``trust_remote_code`` is true, so that nobody
    computes other representations unawares."""
    return POOLING if head.token_topk is None and head.fold is None else OWN_POOLING


def describe_lm(encoder: SpladeEncoder, *lengths: int) -> dict[str, Any]:
    """The settings of :func:`transformer_type`, for texts of these lengths at most."""
    content = describe_transformer(encoder.backbone, *lengths)
    if transformer_type(encoder) == MASKED:
        return content
    return content | {
        "transformer_task": "text-generation",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"text": {"logits_to_keep": 0}},  # 0: those of all tokens
    }


def describe_pooling(encoder: SpladeEncoder) -> dict[str, Any]:
    """The ``config.json`` of that class."""
    content: dict[str, Any] = {
        "pooling_strategy": encoder.head.pooling,
        "activation_function": encoder.head.activation,
        "word_embedding_dimension": encoder.vocabulary_size,
    }
    if encoder.head.token_topk is not None:
        content["token_topk"] = encoder.head.token_topk
    if encoder.head.own is not None:  # which sentence-transformers refuses to build
        content[OWN] = encoder.head.own
    return content


def load_splade(
    source: Source, head: SpladeHead | None, **options: Unpack[BodyOptions]
) -> SpladeEncoder:
    """Read an encoder from a folder of :func:`save_splade`, a sentence-transformers folder (older
    and newer layouts), or a plain masked-LM checkpoint.

    Args:
        head: how representations are computed; when None a ``SpartonHead`` with the settings that
            the folder names (a plain checkpoint: maximum and relu), or a ``TiledHead`` for a sum
            of the largest terms of each token. Its prompts must be those of the folder, if it
            names any.

    Raises:
        ValueError: the folder describes another kind of model, or another pooling, activation,
            token_topk, folding, prompt or class of a user's own than those of ``head``, or a
            similarity other than dot product and cosine, or its weights are damaged or incomplete.
        OSError: files are missing, among them the tokenizer.
    """
    encoder = load_sparse(source, head, **options)
    encoder.markup = agreed_prompts(source, head)
    return encoder


def load_sparse(
    source: Source, head: SpladeHead | None, **options: Unpack[BodyOptions]
) -> SpladeEncoder:
    """:func:`load_splade` without the prompts of texts."""
    similarity = read_similarity(source, "dot")
    check_active_dims(source, None)
    parts = read_parts(source)
    layout = Layout("", None)
    if parts is not None:
        layout = splade_layout(source, parts, described_in="modules.json")
    encoder = load_layout(source, layout, head, **options)
    encoder.similarity = similarity
    return encoder


def load_layout(
    source: Source,
    layout: Layout,
    head: SpladeHead | None,
    **options: Unpack[BodyOptions],
) -> SpladeEncoder:
    """:func:`load_splade` of a model whose layout is known."""
    subfolder, settings, own = layout
    if own is not None and (head is None or head.own != own):
        given = "none" if head is None else head.own or type(head).__name__
        raise ValueError(
            f"{source} was trained with the head {own}, and its files do not say what that "
            f"computes; given is {given}: read it in Python by sparton.models.folders.load_encoder("
            "folder, head=...), or go on from it with init_from and this head"
        )
    if head is None:
        head = _usual_head(settings)
    elif settings is not None:
        found = {key: value for key, value in settings.items() if key != "folding"}
        check_settings(source, {key: getattr(head, key) for key in found}, found)
    backbone = Backbone(
        load_lm(source, subfolder=subfolder),
        load_tokenizer(source, subfolder=subfolder),
        logit_bias=load_logit_bias(source, subfolder=subfolder),
        **options,
    )
    backbone.base = own_base(source, subfolder)
    encoder = SpladeEncoder(backbone, head)
    if settings is not None:
        _check_folding(source, encoder, settings["folding"])
    return encoder


def _check_folding(source: Source, encoder: SpladeEncoder, path: Path | None) -> None:
    """Refuse a head that folds other terms than the file of the folder, if it has one."""
    folding = None
    if path is not None:
        folding = read_folding(path, encoder.tokenizer, encoder.vocabulary_size)
    if not same_folding(encoder.head.fold, folding):
        given = encoder.head.folding
        check_settings(
            source,
            {"folding": None if given is None else str(given)},
            {"folding": None if path is None else str(path)},
        )


def _usual_head(settings: HeadSettings | None) -> SpladeHead:
    if settings is None:
        return SpartonHead()
    if settings["pooling"] == "sum" and settings["token_topk"] is not None:
        return TiledHead(**settings)
    return SpartonHead(**settings)


def describe_splade(encoder: SpladeEncoder, lengths: Lengths) -> dict[str, Any]:
    """The folder's JSON files; class paths and keys are those that versions 5 and 6 both read."""
    return {
        "modules.json": list_modules(modules_of(encoder, POOLING_FOLDER)),
        DESCRIPTION: describe_model("SparseEncoder", encoder.similarity, encoder.markup),
        TRANSFORMER_FILE: describe_lm(encoder, *lengths),
        f"{POOLING_FOLDER}/config.json": describe_pooling(encoder),
        "sparton.json": describe_own(lengths, encoder.markup),
    }


def splade_layout(source: Source, parts: Sequence[Part], *, described_in: str) -> Layout:
    """The layout of modules in a row.

    Raises:
        ValueError: they are no SPLADE model.
        FileNotFoundError: a module's description is missing.
    """
    kinds = [part.kind for part in parts]
    has_bias = len(parts) == 3 and parts[1] == (class_name(BIAS), join(parts[0].path, LOGIT_BIAS))
    if (kinds[::2] if has_bias else kinds) not in KINDS:
        raise ValueError(
            f"{source}/{described_in} composes {composition(parts)}; a SPLADE model is a language "
            "model's transformer followed by SpladePooling"
        )
    transformer, pooling = parts[0].path, parts[-1].path
    if kinds[0] == "Transformer":
        file = join(transformer, TRANSFORMER_FILE)
        task = read_module(source, file).get("transformer_task", str)
        if task not in TASKS:
            raise ValueError(
                f"{source}/{file}: transformer_task is {task!r}; only {' and '.join(TASKS)} give "
                "every token its logits"
            )
    content = read_module(source, f"{pooling}/config.json")
    strategy = content.get("pooling_strategy", str, "max")
    activation = content.get("activation_function", str, "relu")
    try:
        check_variant(strategy, activation)
    except ValueError as error:
        raise ValueError(f"{content.place}: {error}") from None
    settings: HeadSettings = {
        "pooling": cast(Pooling, strategy),
        "activation": cast(Activation, activation),
        "token_topk": content.count("token_topk"),
        "folding": source.file(FOLDING, pooling),
    }
    return Layout(transformer, settings, content.get(OWN, str))
