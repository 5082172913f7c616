"""Asymmetric encoders as the Router folders of sentence-transformers.

Root: the documents' checkpoint, stock as in a SPLADE folder, ``router_config.json`` with the
modules of the routes ``query`` and ``document``, and a folder for each module but the first of the
documents. This is the layout of OpenSearch's inference-free models. V vocabulary.
"""

import copy
import logging
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.checkpoint import TRANSFORMER_FILE, load_tokenizer, lowers_case
from sparton.models.folders.files import (
    DESCRIPTION,
    WEIGHTS,
    Lengths,
    Part,
    agreed_prompts,
    check_active_dims,
    class_name,
    describe_model,
    describe_own,
    length_of,
    list_modules,
    read_module,
    read_parts,
    read_similarity,
    read_weights,
    write_json,
)
from sparton.models.folders.splade import (
    MODULES,
    POOLING,
    describe_lm,
    describe_pooling,
    load_layout,
    modules_of,
    save_folding,
    splade_layout,
    transformer_type,
)
from sparton.models.heads import SpladeHead
from sparton.models.idf import read_idf
from sparton.models.repository import Source, join
from sparton.models.splade import SpladeEncoder
from sparton.models.static import StaticEncoder, static_weights
from sparton.reading import is_within
from sparton.types import SIDES, BodyOptions, Side

CONFIG = "router_config.json"
STATIC = f"{MODULES}.SparseStaticEmbedding"

logger = logging.getLogger(__name__)


class Routes(NamedTuple):
    query: list[Part]
    document: list[Part]

    @property
    def is_static(self) -> bool:
        return [part.kind for part in self.query] == [class_name(STATIC)]


def save_router(encoder: AsymmetricEncoder, path: Path, lengths: Lengths) -> None:
    """Fill the folder ``path``."""
    encoder.document.backbone.save(path)
    pooling = f"document_1_{class_name(POOLING)}"
    routes = {"document": modules_of(encoder.document, pooling)}
    files = {
        TRANSFORMER_FILE: describe_lm(encoder.document, lengths.document),
        f"{pooling}/config.json": describe_pooling(encoder.document),
    }
    if isinstance(encoder.query, StaticEncoder):
        folder = f"query_0_{class_name(STATIC)}"
        routes["query"] = {folder: STATIC}
        files[f"{folder}/config.json"] = {"frozen": encoder.query.frozen}
        _save_static(encoder.query, path / folder, lengths.query)
    else:
        folder = f"query_0_{class_name(transformer_type(encoder.query))}"
        pooling = f"query_1_{class_name(POOLING)}"
        routes["query"] = modules_of(encoder.query, pooling, folder)
        files[f"{folder}/{TRANSFORMER_FILE}"] = describe_lm(encoder.query, lengths.query)
        files[f"{pooling}/config.json"] = describe_pooling(encoder.query)
        encoder.query.backbone.save(path / folder)
    own = describe_own(lengths, encoder.markup)
    files[DESCRIPTION] = describe_model("SparseEncoder", encoder.similarity, encoder.markup)
    write_json(path, files | _describe_routes(routes) | {"sparton.json": own})
    for side, pooling in ((side, [*routes[side]][-1]) for side in SIDES):
        if isinstance(part := encoder.of(side), SpladeEncoder):
            save_folding(part, path / pooling)


def load_router(
    source: Source, head: SpladeHead | None, **options: Unpack[BodyOptions]
) -> AsymmetricEncoder | SpladeEncoder:
    """Read an encoder from a folder of :func:`save_router`, or a Router folder of
    sentence-transformers.

    Args:
        head: of the documents; see :func:`~sparton.models.folders.splade.load_splade`.

    Returns:
        A symmetric encoder where both routes have the same modules.

    Raises:
        ValueError: routes of another kind, a similarity other than dot product and cosine, or
            damaged or unfitting files.
        OSError: files are missing.
    """
    similarity = read_similarity(source, "dot")
    check_active_dims(source, None)
    routes = _read_routes(source)

    def load_route(side: str, parts: list[Part], head: SpladeHead | None) -> SpladeEncoder:
        layout = splade_layout(source, parts, described_in=f"{CONFIG}, route {side},")
        return load_layout(source, layout, head, **options)

    document = load_route("document", routes.document, head)
    encoder: AsymmetricEncoder | SpladeEncoder = document
    if routes.is_static:
        query = _load_static(source, routes.query[0].path, document.vocabulary_size)
        encoder = AsymmetricEncoder(query, document)
    elif routes.query != routes.document:
        learned = load_route("query", routes.query, None)
        learned.markup = learned.markup._replace(echo=document.markup.echo)  # agreed on below
        encoder = AsymmetricEncoder(learned, document)
    sides = SIDES if encoder is document else SIDES[1:]  # the head is that of the documents
    encoder.markup = agreed_prompts(source, head, sides)
    encoder.similarity = similarity
    return encoder


def router_lengths(source: Source) -> Lengths | None:
    """The lengths of the routes; None where the folder does not say.

    A static query route cuts texts without special tokens, and often later than the documents'
    model could; queries are then cut as documents are.
    """
    routes = _read_routes(source)
    query, document = (length_of(source, parts[0].path) for parts in routes)
    if document is None:
        return None
    if query is None:
        return Lengths(document, document)
    if routes.is_static:
        tokenizer = load_tokenizer(source, subfolder=routes.query[0].path)
        query += tokenizer.num_special_tokens_to_add(pair=False)
    return Lengths(min(query, document) if routes.is_static else query, document)


def _describe_routes(routes: dict[str, dict[str, str]]) -> dict[str, Any]:
    """JSON files at the root; class paths are those that versions 5 and 6 both read."""
    types = routes["query"] | routes["document"]
    return {
        "modules.json": list_modules({"": "sentence_transformers.models.Router"}),
        CONFIG: {
            "types": types,
            "structure": {side: list(routes[side]) for side in SIDES},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    }


def _read_routes(source: Source) -> Routes:
    (router,) = read_parts(source) or []
    folder = router.path
    config = read_module(source, join(folder, CONFIG))
    structure, types = config.object("structure"), config.object("types")
    parameters = config.object("parameters")
    mappings = parameters and parameters.object("route_mappings")
    routes = [*(structure or ())]
    if structure is None or types is None or {*routes} != {*SIDES} or mappings:
        raise ValueError(
            f"{config.place} has the routes {', '.join(routes) or 'none'}, "
            f"{'no ' if types is None else ''}types and the mappings "
            f"{mappings.as_dict() if mappings else 'none'}: only a route 'query' and a route "
            "'document' of modules with types, without mappings, can be read"
        )

    def read_route(side: Side) -> list[Part]:
        modules = structure.strings(side)
        if not modules or not all(is_within(each) for each in modules):
            structure.refuse(side, "a list of folders of modules within the folder")
        return [Part(class_name(types.need(each, str)), join(folder, each)) for each in modules]

    return Routes(read_route("query"), read_route("document"))


def _save_static(encoder: StaticEncoder, folder: Path, query_length: int) -> None:
    """sentence-transformers has no relu and no padded vocabulary: the weights are written as they
    count, and rows without a token get one that no text holds."""
    tokenizer = copy.deepcopy(encoder.tokenizer)
    rows = range(len(tokenizer), encoder.vocabulary_size)
    tokenizer.add_tokens([f"[padding row {row}]" for row in rows])
    tokenizer.model_max_length = query_length - tokenizer.num_special_tokens_to_add(pair=False)
    if lowers_case(tokenizer):
        # This module has no do_lower_case, and not all classes of tokenizers can say it; this can.
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            model_max_length=tokenizer.model_max_length,
            **tokenizer.special_tokens_map,
        )
    tokenizer.save_pretrained(folder)
    weights = encoder.weights.detach().float().relu().cpu()
    save_file({"weight": weights}, folder / "model.safetensors", metadata={"format": "pt"})


def _load_static(source: Source, folder: str, rows: int) -> StaticEncoder:
    config = read_module(source, join(folder, "config.json"))
    tokenizer = load_tokenizer(source, subfolder=folder)
    if path := config.get("path", str):
        weights = static_weights(tokenizer, rows, read_idf(path, tokenizer), missing=0.0)
    else:
        weights = _static_rows(source, folder, rows)
    return StaticEncoder(weights, tokenizer, frozen=config.get("frozen", bool, False))


def _static_rows(source: Source, folder: str, rows: int) -> Tensor:
    """Weights ``[V]`` of a folder, which may end where the tokenizer does."""
    file = join(source.name, folder, WEIGHTS)
    found = read_weights(
        source, folder,
        "with the weights of its tokens; save the model again with a current sentence-transformers",
    )  # fmt: skip
    weights = found.get("weight")
    if weights is None or weights.ndim != 1 or len(weights) > rows:
        shapes = {key: tuple(value.shape) for key, value in found.items()}
        raise ValueError(
            f"{file} must hold one weight for each of the documents' {rows} vocabulary rows, as "
            f"'weight', but holds {shapes}"
        )
    negative = int((weights < 0).sum())
    if negative:
        logger.warning(
            "%s: %d of %d weights are below zero; they count as 0 here, which "
            "sentence-transformers does not do", file, negative, len(weights),
        )  # fmt: skip
    return torch.nn.functional.pad(weights.float(), (0, rows - len(weights)))
