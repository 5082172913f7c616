"""What all kinds of model folders share: JSON beside weights, lengths."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from torch import Tensor

from sparton.models.body import EncoderBody
from sparton.models.causal_lm import is_causal_lm
from sparton.models.checkpoint import TRANSFORMER_FILE, lowers_case
from sparton.models.damage import read_tensors
from sparton.models.repository import Source, join
from sparton.reading import Fields
from sparton.types import SIDES, Markup, Side, Similarity

if TYPE_CHECKING:
    from sparton.models.heads import SpladeHead

LENGTH_KEYS = (
    (TRANSFORMER_FILE, "max_seq_length"),
    ("tokenizer_config.json", "max_seq_length"),
    ("tokenizer_config.json", "model_max_length"),
)
DESCRIPTION = "config_sentence_transformers.json"
WEIGHTS = "model.safetensors"
UNLIMITED = 10**9  # transformers writes 1e30 for a tokenizer without a limit


class Part(NamedTuple):
    """A module of sentence-transformers.

    Attributes:
        kind: its class, without the modules that it lies in; no class is imported by it.
        path: its folder, within that of the model.
    """

    kind: str
    path: str


class Lengths(NamedTuple):
    """Longest query and document in tokens, special tokens included."""

    query: int
    document: int

    def described(self) -> dict[str, int]:
        """As ``sparton.json`` has them."""
        return {"query_length": self.query, "document_length": self.document}


def class_name(path: str) -> str:
    """A class without the modules that it lies in."""
    return path.rsplit(".", 1)[-1]


def write_json(folder: Path, files: Mapping[str, Any]) -> None:
    """Each content as the JSON file of its name; names may lie one folder down."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def own_lengths(source: Source) -> Lengths | None:
    """Those that this project wrote, if it did."""
    own = source.fields("sparton.json")
    if not own:
        return None
    query, document = own.count("query_length"), own.count("document_length")
    if query is None or document is None:
        own.refuse("document_length" if query else "query_length", "a whole number from 1 on")
    return Lengths(query, document)


def usual_lengths(said: Lengths | None, most: int | None) -> Lengths:
    """What a folder says, or 64 and 256 tokens, and at most the positions of its model, None for
    any number: many a tokenizer says more than its model has."""
    query, document = said or (64, 256)
    return (
        Lengths(query, document) if most is None else Lengths(min(query, most), min(document, most))
    )


def length_of(source: Source, subfolder: str) -> int | None:
    """The length of a module of sentence-transformers, which knows one for both sides and has kept
    it in several places; None where there is no limit."""
    for file, key in LENGTH_KEYS:
        fields = source.fields(file, subfolder)
        length = fields.get(key, float)
        if length and length < UNLIMITED:
            return fields.count(key)
    return None


def module_kinds(source: Source) -> list[str] | None:
    """The names of the classes that ``modules.json`` composes; None where there is none."""
    parts = read_parts(source)
    return None if parts is None else [part.kind for part in parts]


def read_parts(source: Source, folder: str = "") -> list[Part] | None:
    """What the ``modules.json`` in a folder composes; None where there is none.

    Raises:
        ValueError: it lists no modules.
    """
    file = join(folder, "modules.json")
    listed = source.json(file)
    if listed is None:
        return None
    place = join(source.name, file)
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"{place} must hold a JSON list of modules, each with its type and path: copy or "
            "download it again"
        )
    modules = [Fields.of(each, f"{place}, module {row}") for row, each in enumerate(listed)]
    return [
        Part(class_name(module.need("type", str)), join(folder, module.path("path")))
        for module in modules
    ]


def composition(parts: Sequence[Part]) -> str:
    """Parts in a sentence."""
    return " + ".join(part.kind for part in parts)


def list_modules(classes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The ``modules.json`` of classes of sentence-transformers, by their folders and in order, as
    versions 5 and 6 read it."""
    return [
        {"idx": row, "name": str(row), "path": folder, "type": kind}
        for row, (folder, kind) in enumerate(classes.items())
    ]


def describe_model(kind: str, similarity: str, markup: Markup) -> dict[str, Any]:
    """The ``config_sentence_transformers.json`` of a model of that class."""
    return {
        "model_type": kind,
        "similarity_fn_name": similarity,
        "prompts": {"query": markup.query_prompt, "document": markup.document_prompt},
        "default_prompt_name": None,
    }


def read_description(source: Source, folder: str = "") -> Fields:
    """What sentence-transformers says of the model as a whole; empty where it says nothing."""
    return source.fields(DESCRIPTION, folder)


def read_similarity(source: Source, default: Similarity) -> Similarity:
    """How representations are compared; the default of sentence-transformers' class where the
    folder does not say.

    Raises:
        ValueError: in another way than by dot product or cosine.
    """
    found = read_description(source).get("similarity_fn_name", str)
    for known in get_args(Similarity):
        if found in (known, None):
            return default if found is None else known
    raise ValueError(
        f"{source}/{DESCRIPTION}: similarity_fn_name is {found!r}, and vectors are compared by "
        "'dot' or 'cosine' here alone: write the one that this model may be searched by"
    )


def check_active_dims(source: Source, own: int | None) -> None:
    """Refuse a sparse model of which sentence-transformers keeps another number of weights of a
    text than the model's ``own``.

    Raises:
        ValueError: names the number and the remedy.
    """
    found = read_description(source).count("max_active_dims")
    if found not in (None, own):
        raise ValueError(
            f"{source}/{DESCRIPTION}: max_active_dims={found} keeps that many weights of a text, "
            f"and this model keeps {'all' if own is None else own}: take it out, and bound them "
            "where texts are encoded (max_terms)"
        )


def describe_transformer(body: EncoderBody, *lengths: int) -> dict[str, Any]:
    """The ``sentence_bert_config.json`` of a Transformer of texts of these lengths, of which
    sentence-transformers knows one; beside adapters alone also how the model that they belong to is
    read."""
    content = {"max_seq_length": max(lengths), "do_lower_case": lowers_case(body.tokenizer)}
    return content | (_describe_base(body) if body.saves_adapters_alone else {})


def _describe_base(body: EncoderBody) -> dict[str, Any]:
    """How the configuration of a body differs from that of the folder in which its weights are."""
    base, config = body.need_base(), body.model.config
    model_args: dict[str, Any] = {"torch_dtype": "float32"}
    config_args = dict(base.config_args or {})
    if is_causal_lm(config):
        config_args["is_causal"] = is_causal = getattr(config, "is_causal", True)
        if is_causal != base.fields("config.json").get("is_causal", bool, True):
            # transformers leaves out, without a word, what is new to a configuration, and attention
            # would be another. No model takes this as an argument: such a folder is refused.
            model_args["is_causal"] = is_causal
        if hasattr(config, "final_logit_softcapping"):
            config_args["final_logit_softcapping"] = None
    return {"model_args": model_args, "config_args": config_args}


def describe_own(lengths: Lengths, markup: Markup) -> dict[str, Any]:
    """The ``sparton.json`` of a SPLADE model: what sentence-transformers has no words for. Its
    SpladePooling knows no ``include_prompt`` and pools prompts in any case, and no text is read
    twice there."""
    own: dict[str, Any] = lengths.described() | {"include_prompt": markup.include_prompt}
    return own if markup.echo is None else own | {"echo": markup.echo}


def read_prompts(source: Source) -> Markup | None:
    """What ``encode_query`` and ``encode_document`` of sentence-transformers put before texts, and
    whether this project pools it or repeats the text; None where the folder does not say."""
    prompts = read_description(source).object("prompts")
    if prompts is None:
        return None
    own = source.fields("sparton.json")
    return Markup(
        query_prompt=prompts.get("query", str, ""),
        document_prompt=prompts.get("document", str, ""),
        include_prompt=own.get("include_prompt", bool, True),
        echo=own.get("echo", str),
    )


def agreed_prompts(
    source: Source, head: "SpladeHead | None", sides: Collection[Side] = SIDES
) -> Markup:
    """The prompts of the folder; where it does not say, those of a head that is given.

    Raises:
        ValueError: the head has others for one of these sides.
    """
    found, given = read_prompts(source), None if head is None else head.markup
    if found is not None and given is not None:
        keys = [*(f"{side}_prompt" for side in sides), "include_prompt", "echo"]
        check_settings(
            source, *({key: getattr(each, key) for key in keys} for each in (given, found))
        )
    return found or given or Markup()


def check_settings(source: Source, given: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse a head whose settings are not those of a folder; both by the same keys.

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
            f"the head has other settings than {source}: {', '.join(differing)}; set the head's to "
            "those of the folder"
        )


def read_module(source: Source, file: str) -> Fields:
    """The description of one of the modules that ``modules.json`` lists."""
    if source.file(file) is None:
        raise FileNotFoundError(f"{source}/{file} is missing, though modules.json refers to it")
    return source.fields(file)


def read_weights(source: Source, folder: str, missing: str) -> dict[str, Tensor]:
    """The tensors of one of the modules that ``modules.json`` lists.

    Raises:
        FileNotFoundError: there are none; ``missing`` ends the sentence, with the remedy.
        ValueError: the file is damaged, or a value is not finite in fp32.
    """
    path = source.file(WEIGHTS, folder)
    if path is None:
        raise FileNotFoundError(f"{source}/{folder} has no {WEIGHTS} {missing}")
    return read_tensors(path)
