"""Why a text is found. S tokens of a query, T of a document."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparton.retrieval.encoding import encode_texts, evaluating
from sparton.types import Side

if TYPE_CHECKING:
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.encoder import Encoder


class TokenMatch(NamedTuple):
    """A token of a query, the token of a document that answers it best, and their similarity."""

    query_token: str
    document_token: str
    similarity: float


def explain(
    encoder: "Encoder",
    tokenizer: "PackedTokenizer",
    text: str,
    *,
    side: Side = "document",
    k: int = 20,
) -> list[tuple[str, float]]:
    """The ``k`` heaviest terms of a text's sparse vector with their weights, heaviest first; of
    equal weights the first term of the vocabulary. Terms without a weight are not among them.

    Raises:
        ValueError: an encoder without sparse vectors, or k below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}, must be at least 1")
    row = encode_texts(encoder, tokenizer, [text], side, kinds={"sparse"}).sparse
    assert row is not None
    heaviest = np.argsort(-row.values, kind="stable")[:k]
    terms = encoder.term_names(row.indices[heaviest].tolist())
    return list(zip(terms, row.values[heaviest].tolist(), strict=True))


def explain_match(
    encoder: "Encoder", tokenizer: "PackedTokenizer", query: str, document: str
) -> list[TokenMatch]:
    """Which token of a document answers each token of a query, in the order of the query.

    The similarities add up to the pair's MaxSim. Of equal ones the first token answers. There is
    nothing to tell where the document has no token that takes part.

    Raises:
        ValueError: an encoder without token vectors, or whose vectors are not those of its tokens.
    """
    asked, queries = _vectors(encoder, tokenizer, query, "query")
    answers, documents = _vectors(encoder, tokenizer, document, "document")
    if not answers:
        return []
    best = (queries @ documents.T).max(dim=1)
    similarities, places = best.values.tolist(), best.indices.tolist()
    return [
        TokenMatch(token, answers[place], similarity)
        for token, place, similarity in zip(asked, places, similarities, strict=True)
    ]


def _vectors(
    encoder: "Encoder", tokenizer: "PackedTokenizer", text: str, side: Side
) -> tuple[list[str], Tensor]:
    """The tokens of a text that take part in MaxSim, and their vectors fp32 ``[S, E]``."""
    packed = tokenizer.queries([text]) if side == "query" else tokenizer.documents([text])
    with evaluating(encoder) as device:
        vectors = encoder.encode(packed.to(device), side).tokens
    name = type(encoder).__name__
    if vectors is None:
        raise ValueError(f"{name} gives no token vectors of a {side}: see explain for its terms")
    if len(vectors.values) != packed.num_tokens:
        raise ValueError(
            f"{name} makes {len(vectors.values)} vectors of the {packed.num_tokens} tokens of a "
            f"{side}: which is whose cannot be told"
        )
    kept = torch.ones(packed.num_tokens, dtype=torch.bool)
    if vectors.mask is not None:
        kept = vectors.mask.cpu()
    words = encoder.query_tokenizer if side == "query" else encoder.tokenizer
    tokens = list(words.convert_ids_to_tokens(packed.input_ids[kept].tolist()))
    return tokens, vectors.values.float().cpu()[kept]
