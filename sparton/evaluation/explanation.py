"""Why a text is found. S tokens of a query, T of a document."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sparton.arguments import refuse_uncounted
from sparton.kernels.sparse_vectors import SparseVectors
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


class TermMatch(NamedTuple):
    """A term of a query and of a document, and what it adds to their dot product."""

    term: str
    product: float


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
        ValueError: an encoder without sparse vectors, or k that is no whole number from 1 on.
    """
    refuse_uncounted(1, k=k)
    vector = encode_texts(encoder, tokenizer, [text], side, kinds={"sparse"}).sparse
    assert isinstance(vector, SparseVectors)
    heaviest = vector.values.argsort(descending=True, stable=True)[:k]
    terms = encoder.term_names(vector.terms[heaviest].tolist())
    return list(zip(terms, vector.values[heaviest].tolist(), strict=True))


def explain_match(
    encoder: "Encoder", tokenizer: "PackedTokenizer", query: str, document: str, *, k: int = 20
) -> list[TermMatch] | list[TokenMatch]:
    """What adds up to the score of a query and a document.

    By MaxSim the token of the document that answers each token of the query, in the order of the
    query; of equal ones the first token answers. There is nothing to tell where the document has no
    token that takes part. By sparse vectors the ``k`` terms with the largest products of weights.

    Raises:
        ValueError: an encoder whose token vectors are not those of its tokens, or k that is no
            whole number from 1 on.
    """
    refuse_uncounted(1, k=k)
    if "tokens" in encoder.kinds:
        return _token_matches(encoder, tokenizer, query, document)
    asked = encode_texts(encoder, tokenizer, [query], "query").sparse
    answer = encode_texts(encoder, tokenizer, [document], "document").sparse
    assert isinstance(asked, SparseVectors) and isinstance(answer, SparseVectors)
    products = (asked.dense() * answer.dense())[0]
    best = products.topk(min(k, int((products > 0).sum())))
    names = encoder.term_names(best.indices.tolist())
    return [TermMatch(*match) for match in zip(names, best.values.tolist(), strict=True)]


def _token_matches(
    encoder: "Encoder", tokenizer: "PackedTokenizer", query: str, document: str
) -> list[TokenMatch]:
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
    assert vectors is not None, "an encoder of token vectors"
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
