"""Queries and documents by encoders of their own, into one space of terms.

:func:`shared_queries`, :func:`static_queries` and :func:`separate_queries` say how queries are
encoded beside a given encoder of documents; each is a ``_target_``.

T packed tokens, N texts, V vocabulary.
"""

from pathlib import Path

from torch import Tensor, nn

from sparton.arguments import ArgumentError, Instance
from sparton.kernels.splade_head import HeadMemory, TopK
from sparton.models.assembly import build_encoder
from sparton.models.body import EncoderBody
from sparton.models.encoder import Encoder
from sparton.models.folding import same_folding
from sparton.models.idf import read_idf
from sparton.models.splade import SpladeEncoder
from sparton.models.static import StaticEncoder, static_weights
from sparton.representations import Representations
from sparton.types import Markup, Side, TokenBatch


class AsymmetricEncoder(Encoder):
    """Encodes each side by an encoder of its own; training reaches both.

    Args:
        query: of the queries, static or a model of its own.
        document: of the documents.
        query_lr: learning rate of the query encoder; None for that of the rest.

    Raises:
        ValueError: the two do not have one vocabulary, row by row, or one has the prompt of the
            other's texts.
    """

    def __init__(
        self,
        query: SpladeEncoder | StaticEncoder,
        document: SpladeEncoder,
        *,
        query_lr: float | None = None,
    ) -> None:
        limits = [each.max_length for each in (query, document) if each.max_length is not None]
        super().__init__(document.tokenizer, min(limits, default=None), query.tokenizer)
        _check_space(query, document)
        self.query = query
        self.document = document
        # Of two models' terms the stricter ones hold.
        self.origin = (query if query.origin.is_non_commercial else document).origin
        self.query_lr = query_lr
        self.similarity = document.similarity
        self._query_learns = any(each.requires_grad for each in query.parameters())
        self.regularized = ("query", "document") if self._query_learns else ("document",)
        self.markup = _both_markups(query.markup, document.markup)

    def of(self, side: Side) -> SpladeEncoder | StaticEncoder:
        """The encoder of one side."""
        return self.query if side == "query" else self.document

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """What the side's encoder makes of the texts."""
        return self.of(side).encode(tokens, side)

    def encode_both(
        self, queries: TokenBatch, documents: TokenBatch, memory: HeadMemory | None = None
    ) -> tuple[Representations, Representations]:
        """Each side by its own encoder."""
        of_queries, of_documents = (
            encoder(tokens, memory) if isinstance(encoder, SpladeEncoder) else encoder(tokens)
            for encoder, tokens in ((self.query, queries), (self.document, documents))
        )
        return Representations(of_queries), Representations(of_documents)

    def topk(self, tokens: TokenBatch, side: Side, k: int) -> TopK:
        """The min(k, V) largest term weights of each text, by the side's encoder."""
        return self.of(side).topk(tokens, side, k)

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of the query encoder, where it has one of its own and can learn."""
        if self.query_lr is None or not self._query_learns:
            return {}
        return {"query": self.query_lr}

    def figures(self) -> dict[str, Tensor]:
        """The numbers of both encoders, their names preceded by the side."""
        return {
            f"{side}_{name}": figure
            for side, encoder in (("query", self.query), ("document", self.document))
            for name, figure in encoder.figures().items()
        }

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """The FLOPs of the side's encoder."""
        return self.of(side).flops_per_token(sequence_length, side, training=training)

    @property
    def vocabulary_size(self) -> int:
        """V of both sides."""
        return self.document.vocabulary_size


def shared_queries(document: Encoder) -> Encoder:
    """Let the documents' own encoder encode the queries, too: the usual, symmetric model."""
    return document


def static_queries(
    document: Encoder,
    weights: str | Path | None = None,
    *,
    missing: float = 1.0,
    frozen: bool = False,
    lr: float | None = None,
) -> AsymmetricEncoder:
    """Look the weights of queries up, see :class:`~sparton.models.static.StaticEncoder`.

    Args:
        weights: JSON of weights by token (``sparton.pipelines.compute_idf``); None for ones.
        missing: weight of tokens that the JSON does not name, see
            :func:`~sparton.models.static.static_weights`.
        frozen: keep the weights as they are.
        lr: learning rate of weights that are not frozen; None for that of the documents' encoder.

    Raises:
        FileNotFoundError, ValueError: see :func:`~sparton.models.idf.read_idf`.
        ValueError: the documents' encoder has no space of terms.
    """
    document = _splade(document, "documents")
    tokenizer = document.tokenizer
    idf = None if weights is None else read_idf(weights, tokenizer)
    rows = static_weights(tokenizer, document.vocabulary_size, idf, missing=missing)
    query = StaticEncoder(rows, tokenizer, frozen=frozen)
    return AsymmetricEncoder(query, document, query_lr=lr)


def separate_queries(
    document: Encoder, backbone: EncoderBody, head: nn.Module, *, lr: float | None = None
) -> AsymmetricEncoder:
    """Let a SPLADE model of their own, such as a smaller one, encode the queries.

    Args:
        backbone, head: of the query encoder; its vocabulary must be that of the documents.
        lr: learning rate of the query encoder; None for that of the documents' encoder.

    Raises:
        ValueError: the vocabularies differ, or one of the encoders is no SPLADE model.
    """
    document = _splade(document, "documents")
    query = _splade(build_encoder(backbone, head), "queries")
    return AsymmetricEncoder(query, document, query_lr=lr)


def _splade(encoder: Encoder, texts: str) -> SpladeEncoder:
    if not isinstance(encoder, SpladeEncoder):
        raise ArgumentError(
            "{} gives {} no weights of vocabulary terms, in which queries and documents of two "
            "encoders meet: choose a SPLADE head, such as {head}, or shared queries",
            *(type(encoder).__name__, texts),
            head=Instance("SpartonHead"),
        )
    return encoder


def _both_markups(query: Markup, document: Markup) -> Markup:
    """Each side's own, which has no prompt for the other side's texts."""
    for name, given, side in (
        ("query_prompt", document.query_prompt, "queries"),
        ("document_prompt", query.document_prompt, "documents"),
    ):
        if given:
            raise ValueError(
                f"{name}={given!r} stands in the head of an encoder that does not encode {side}: "
                f"set it in the head of the {side}, and leave it out where these are looked up"
            )
    if query.echo != document.echo:
        raise ValueError(
            f"echo is {query.echo!r} for queries and {document.echo!r} for documents: set it in "
            "both heads, or in none where queries are looked up"
        )
    if query.include_prompt != document.include_prompt and query.query_prompt:
        raise ValueError(
            f"include_prompt is {query.include_prompt} for queries and {document.include_prompt} "
            "for documents: set one of them for both"
        )
    return query._replace(
        document_marker=document.document_marker,
        document_prompt=document.document_prompt,
        include_prompt=document.include_prompt,
    )


def _check_space(query: SpladeEncoder | StaticEncoder, document: SpladeEncoder) -> None:
    if query.vocabulary_size != document.vocabulary_size:
        raise ValueError(
            f"the query encoder has {query.vocabulary_size} vocabulary rows, the document encoder "
            f"{document.vocabulary_size}: both need the vocabulary of one tokenizer"
        )
    own, other = (
        encoder.head.fold if isinstance(encoder, SpladeEncoder) else None
        for encoder in (query, document)
    )
    if not same_folding(own, other):
        raise ValueError(
            "the head of one side folds terms and that of the other does not, or others: give both "
            "one folding, and none where queries are looked up"
        )
    names, others = (
        {row: token for token, row in encoder.tokenizer.get_vocab().items()}
        for encoder in (query, document)
    )
    # Either tokenizer may have names for rows that the other leaves unused.
    differing = [row for row in sorted(names.keys() & others.keys()) if names[row] != others[row]]
    if differing:
        row = differing[0]
        raise ValueError(
            f"{len(differing)} vocabulary rows mean different tokens on the two sides; row {row} "
            f"is {names[row]!r} for queries and {others[row]!r} for documents: both need the "
            "vocabulary of one tokenizer"
        )
