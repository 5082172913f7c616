"""What PyLate and sentence-transformers write of a late-interaction model beside its checkpoint.

Both list a Transformer and one or more Dense modules. PyLate has its settings in
``config_sentence_transformers.json``, and masks and normalises by itself; sentence-transformers
spreads them over its modules, among them a MultiVectorMask and a Normalize.
D hidden width, E width of a token's vector.
"""

import string
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sparton.models.checkpoint import TRANSFORMER_FILE
from sparton.models.colbert import ColbertHead
from sparton.models.folders import pooling
from sparton.models.folders.files import (
    Lengths,
    check_settings,
    composition,
    length_of,
    read_description,
    read_module,
    read_parts,
)
from sparton.models.folders.projection import read_projection
from sparton.models.repository import Source, join
from sparton.reading import Fields

PYLATE = "ColBERT"  # the model type
PYLATE_LENGTHS = Lengths(32, 180)
TAIL = {"MultiVectorMask", "Normalize", pooling.KIND}
SETTINGS = (
    "width", "bias", "query_marker", "document_marker", "query_expansion", "attend_to_expansion",
    "normalize", "query_prompt", "document_prompt",
)  # fmt: skip


class Modules(NamedTuple):
    """Folders of the modules, and what describes the model as a whole.

    Attributes:
        mask, pooling: None where there is no such module.
        config: content of ``config_sentence_transformers.json``.
        settings: content of the transformer's ``sentence_bert_config.json``.
    """

    transformer: str
    projections: list[str]
    mask: str | None
    pooling: str | None
    normalize: bool
    config: Fields
    settings: Fields

    @property
    def is_pylate(self) -> bool:
        """Whether the settings stand in ``config``."""
        return "query_prefix" in self.config or self.config.get("model_type", str) == PYLATE

    @property
    def expansion(self) -> Fields | None:
        """In sentence-transformers' words; None where queries are not filled up."""
        if "query_expansion" in self.settings or not self.is_pylate:
            return self.settings.object("query_expansion")
        if not self.config.get("do_query_expansion", bool, True):
            return None
        attend = self.config.get("attend_to_expansion_tokens", bool, False)
        return Fields({"attend": attend}, self.config.place)

    def length(self, side: str, default: int) -> int | None:
        """The longest text of a side; ``default`` is PyLate's."""
        key = f"{side}_length"
        own = self.settings.count(key)
        return self.config.count(key) or default if own is None and self.is_pylate else own


def is_late_interaction(kinds: list[str] | None) -> bool:
    """Whether modules of these classes may be a late-interaction model."""
    return kinds is not None and kinds[:2] == ["Transformer", "Dense"]


def read_modules(source: Source, folder: str) -> Modules:
    """The modules of the model whose ``modules.json`` lies in ``folder``.

    Raises:
        ValueError: they are no late-interaction model, or it is not scored by MaxSim.
        FileNotFoundError: there is no ``modules.json``.
    """
    place = join(folder, "modules.json")
    parts = read_parts(source, folder)
    if parts is None:
        raise FileNotFoundError(f"{source} has no {place}: it is no late-interaction model")
    kinds, places = [part.kind for part in parts], [part.path for part in parts]
    number = kinds.count("Dense")
    pools = pooling.KIND in kinds[:-1]  # what follows it would see clusters
    if not is_late_interaction(kinds) or pools or not {*kinds[1 + number :]} <= TAIL:
        raise ValueError(
            f"{source}/{place} composes {composition(parts)}; a late-interaction model is a "
            "Transformer followed by Dense, and perhaps by MultiVectorMask, Normalize and "
            f"{pooling.KIND}"
        )
    config = read_description(source, folder)
    _check_similarity(config)
    return Modules(
        transformer=places[0],
        projections=places[1 : 1 + number],
        mask=places[kinds.index("MultiVectorMask")] if "MultiVectorMask" in kinds else None,
        pooling=places[-1] if kinds[-1] == pooling.KIND else None,
        normalize="Normalize" in kinds or config.get("model_type", str) == PYLATE,
        config=config,
        settings=source.fields(TRANSFORMER_FILE, places[0]),
    )


def read_vectors(
    source: Source, modules: Modules, tokenizer: PreTrainedTokenizerFast
) -> tuple[ColbertHead, dict[str, Tensor]]:
    """Settings, and the projection as the state of a linear layer: fp32 ``weight [E, D]``, and
    ``bias [E]`` where it has one.

    Raises:
        ValueError: the model has what :class:`ColbertHead` has not, or damaged weights.
        FileNotFoundError: a file is missing.
    """
    projection = read_projection(source, modules.projections)
    query_marker, query_prompt = _opening(modules, tokenizer, "query", "[Q] ")
    document_marker, document_prompt = _opening(modules, tokenizer, "document", "[D] ")
    expansion = modules.expansion
    if expansion is not None:
        _check_expansion(source, expansion, tokenizer)
    pooled = pooling.read_pooling(source, modules.pooling, modules.normalize)
    head = ColbertHead(
        len(projection["weight"]),
        bias="bias" in projection,
        query_marker=query_marker,
        document_marker=document_marker,
        query_expansion=expansion is not None,
        attend_to_expansion=expansion is not None and expansion.get("attend", bool, False),
        skiplist=_skiplist(source, modules, tokenizer),
        normalize=modules.normalize,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
        pool_factor=pooled.factor,
        protected_tokens=pooled.protected,
        widths=_widths(source, len(projection["weight"])),
    )
    return head, projection


def read_lengths(source: Source, modules: Modules) -> Lengths | None:
    """Longest query and document, where the model says both."""
    expansion = modules.expansion
    query = expansion and expansion.count("length")
    query = query or modules.length("query", PYLATE_LENGTHS.query)
    document = modules.length("document", PYLATE_LENGTHS.document)
    if query is None or document is None:
        general = length_of(source, modules.transformer)
        query, document = query or general, document or general
    return None if query is None or document is None else Lengths(query, document)


def check_head(
    source: Source,
    given: ColbertHead | None,
    found: ColbertHead,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Refuse settings that are not those of the folder; its pooling, which nothing is trained with,
    may be another."""
    if given is None:
        return
    ours, theirs = (_settings(head, tokenizer) for head in (given, found))
    check_settings(source, ours, theirs)


def _settings(head: ColbertHead, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    skipped = " ".join(sorted({*head.skipped(tokenizer)}))
    return {key: getattr(head, key) for key in SETTINGS} | {"skiplist": skipped}


def _widths(source: Source, width: int) -> list[int] | None:
    """Those that this project trained, None for the whole one."""
    own = source.fields("sparton.json")
    if "widths" not in own:
        return None
    widths = [int(each) for each in own.numbers("widths")]
    if not widths or {*widths} - {*range(1, width + 1)} or max(widths) != width:
        own.refuse("widths", f"different numbers up to the {width} of the projection")
    return widths


def _check_similarity(config: Fields) -> None:
    """Raise ValueError for a similarity that is not MaxSim.

    Names of similarities of single vectors are let pass: they may be left over from the model that
    was begun with, and PyLate and sentence-transformers pay no attention to them.
    """
    found = config.get("similarity_fn_name", str)
    if found not in (None, "MaxSim", "maxsim", "cosine", "dot"):
        raise ValueError(
            f"{config.place}: similarity_fn_name is {found!r}, and token vectors are scored by "
            "'maxsim' alone: write this if the model may be searched by it"
        )


def _opening(
    modules: Modules, tokenizer: PreTrainedTokenizerFast, side: str, default: str
) -> tuple[str, str]:
    """Marker and prompt of a side.

    PyLate inserts its prefix as a token. sentence-transformers tokenises a prompt with the text,
    which comes to the same where the prompt begins with an added token.
    """
    prompts = modules.config.object("prompts")
    prompt = prompts.get(side, str, "") if prompts else ""
    if modules.is_pylate:
        marker = modules.config.get(f"{side}_prefix", str, default)
        return marker, prompt.removeprefix(marker)
    for marker in tokenizer.get_added_vocab():
        rest = prompt.removeprefix(marker)
        apart = [marker, *tokenizer.tokenize(f"{rest}a")]
        if rest != prompt and tokenizer.tokenize(f"{prompt}a") == apart:
            return marker, rest
    return "", prompt


def _check_expansion(source: Source, expansion: Fields, tokenizer: PreTrainedTokenizerFast) -> None:
    strategy, token = expansion.get("strategy", str, "fixed"), expansion.get("token", str)
    if strategy != "fixed" or token not in (None, tokenizer.mask_token):
        raise ValueError(
            f"{source} fills queries up by the strategy {strategy!r} with the token {token!r}; "
            f"only 'fixed' with {tokenizer.mask_token!r} is supported"
        )


def _skiplist(source: Source, modules: Modules, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Words that take no part in MaxSim. To PyLate those that are no tokens mean [UNK]."""
    if modules.mask is None:
        if not modules.is_pylate:
            return []
        words = modules.config.strings("skiplist_words")
        words = list(string.punctuation) if words is None else words
        known = tokenizer.get_vocab()
        unknown = tokenizer.unk_token
        strange = unknown is not None and any(word not in known for word in words)
        return [*words, unknown] if strange else words
    mask = read_module(source, join(modules.mask, "config.json"))
    words = mask.strings("skiplist_words") or []
    sides = mask.strings("skiplist_tasks") or ["document"]
    kept = mask.get("keep_only_token_ids", list)
    if (words and sides != ["document"]) or kept:
        raise ValueError(
            f"{mask.place} skips tokens of {' and '.join(sides)}, and keeps "
            f"only the tokens {kept}; only a skiplist of documents is "
            "supported"
        )
    return words
