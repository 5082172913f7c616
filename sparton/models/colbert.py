"""Late interaction: one vector per token (ColBERT, Khattab and Zaharia, arXiv 2004.12832).

T packed tokens, N texts, D hidden width, E width of a token's vector, V vocabulary.
"""

import copy
import string
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from sparton.arguments import ArgumentError, refuse_below, refuse_uncounted
from sparton.kernels.splade_head import HeadMemory
from sparton.models.body import EncoderBody
from sparton.models.encoder import Encoder
from sparton.representations import Representations, TokenVectors
from sparton.types import SIDES, Markup, Side, TokenBatch, TokenPooling


class ColbertHead(nn.Module):
    """What a late-interaction encoder adds to a text and computes of it; no parameters.

    Every token of a text counts in MaxSim, special ones and those of the expansion included; of a
    document all but the skiplist's.

    Args:
        width: E.
        bias: let the projection add one to every vector.
        query_marker, document_marker: tokens after [CLS] that tell the sides apart; empty for none.
            The tokenizer learns those that it does not know.
        query_expansion: fill queries up to the query length with [MASK], or the token that ends a
            text where the tokenizer has none.
        attend_to_expansion: let the text's tokens attend to those that filled it up.
        skiplist: tokens of documents that take no part in MaxSim, punctuation by default; words
            that are no tokens are ignored.
        normalize: give every vector the length 1.
        query_prompt, document_prompt: put before every text, to be tokenised with it.
        pool_factor: when documents are encoded to be searched, of so many tokens one vector is
            left, see :func:`~sparton.retrieval.pooling.pool_tokens`; training compares all.
        protected_tokens: the first tokens of a document, which keep their own.
        widths: E and smaller numbers. Training adds up the loss of the vectors' first components,
            as many as each of these says and of length 1 again, so that those work alone (Kusupati
            et al., arXiv 2205.13147).

    Raises:
        ValueError: no width, attention to an expansion that is off, ``pool_factor`` below 1, or
            ``widths`` that are not distinct, do not go up to E, or of vectors of any length.
    """

    def __init__(
        self,
        width: int = 128,
        *,
        bias: bool = False,
        query_marker: str = "[Q] ",
        document_marker: str = "[D] ",
        query_expansion: bool = True,
        attend_to_expansion: bool = False,
        skiplist: Sequence[str] = string.punctuation,
        normalize: bool = True,
        query_prompt: str = "",
        document_prompt: str = "",
        pool_factor: float = 1.0,
        protected_tokens: int = 1,
        widths: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        refuse_uncounted(1, width=width)
        refuse_below(1, pool_factor=pool_factor)
        refuse_uncounted(0, protected_tokens=protected_tokens)
        if attend_to_expansion and not query_expansion:
            raise ValueError(
                "attend_to_expansion needs query_expansion: there is nothing to attend to without"
            )
        if widths is not None:
            _check_widths(widths, width, normalize)
        self.width = width
        self.widths = sorted(widths or [width], reverse=True)
        self.bias = bias
        self.query_marker = query_marker
        self.document_marker = document_marker
        self.query_expansion = query_expansion
        self.attend_to_expansion = attend_to_expansion
        self.skiplist = list(skiplist)
        self.normalize = normalize
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt
        self.pool_factor = pool_factor
        self.protected_tokens = protected_tokens

    @property
    def token_pooling(self) -> TokenPooling:
        return TokenPooling(self.pool_factor, self.protected_tokens, self.normalize)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: TokenBatch,
        counted: Tensor | None,
    ) -> TokenVectors:
        """Vectors of hidden states ``[T, D]``.

        Args:
            hidden: last states of the body.
            weight: ``[E, D]`` of the projection.
            bias: ``[E]`` of the projection, or None.
            tokens: T of them.
            counted: bool ``[V]``, whether a token takes part in MaxSim; None if all do.

        Returns:
            Values ``[T, E]`` in the dtype of the product (autocast's, under autocast), normalised
            in fp32.
        """
        values = F.linear(hidden, weight, bias)
        if self.normalize:
            values = F.normalize(values.float(), dim=-1).to(values.dtype)
        mask = None if counted is None else counted.index_select(0, tokens.input_ids)
        return TokenVectors(values, tokens.cu_seqlens, mask, tokens.max_seqlen)

    @property
    def markers(self) -> list[str]:
        """Those in use, each once."""
        return [*dict.fromkeys(m for m in (self.query_marker, self.document_marker) if m)]

    def markup(self, tokenizer: PreTrainedTokenizerFast) -> Markup:
        """What the head adds to texts, in ids of a tokenizer that knows the markers.

        Raises:
            ValueError: the tokenizer has no token that could fill queries up.
        """
        expansion = None
        if self.query_expansion:
            expansion = tokenizer.mask_token_id
            if expansion is None:
                expansion = tokenizer.eos_token_id
            if expansion is None:
                raise ArgumentError(
                    "the tokenizer has neither a mask token nor one that ends a text to fill "
                    "queries up with: set {query_expansion}",
                    query_expansion=False,
                )
        vocabulary = tokenizer.get_vocab()
        ids = {marker: vocabulary[marker] for marker in self.markers}
        return Markup(
            query_marker=ids.get(self.query_marker),
            document_marker=ids.get(self.document_marker),
            expansion=expansion,
            attend_to_expansion=self.attend_to_expansion,
            query_prompt=self.query_prompt,
            document_prompt=self.document_prompt,
        )

    def skipped(self, tokenizer: PreTrainedTokenizerFast) -> list[str]:
        """The words of the skiplist that are tokens."""
        vocabulary = tokenizer.get_vocab()
        return [word for word in self.skiplist if word in vocabulary]

    def counted(self, tokenizer: PreTrainedTokenizerFast, rows: int) -> Tensor | None:
        """Whether a token of a document takes part in MaxSim: bool ``[rows]``; None if all do."""
        skipped = tokenizer.convert_tokens_to_ids(self.skipped(tokenizer))
        if not skipped:
            return None
        counted = torch.ones(rows, dtype=torch.bool)
        counted[skipped] = False
        return counted


def _check_widths(widths: Sequence[int], width: int, normalize: bool) -> None:
    if min(widths, default=0) < 1 or len(set(widths)) < len(widths) or max(widths) != width:
        raise ArgumentError(
            "{widths} must be different numbers from 1 up to {}, the whole width of a vector",
            width,
            widths=list(widths),
        )
    if not normalize:
        raise ArgumentError(
            "{widths:name} train the first components of vectors of length 1: set {normalize}",
            widths=list(widths),
            normalize=True,
        )


def new_projection(hidden_size: int, head: ColbertHead) -> nn.Linear:
    """What makes token vectors of hidden states, as it starts: see :class:`ColbertEncoder`."""
    projection = nn.Linear(hidden_size, head.width, head.bias)
    # Among all rotations the identity is the one that trainings with other seeds share, so that the
    # mean of their weights makes sense.
    square = head.width == hidden_size
    (nn.init.eye_ if square else nn.init.orthogonal_)(projection.weight)
    return projection


class ColbertEncoder(Encoder):
    """Texts, as packed tokens, to one vector per token.

    The projection starts as the identity where it is as wide as the body, and otherwise with
    orthonormal rows, or columns where it is wider, which keep more of what the backbone knows than
    random numbers do. These are drawn from the global generator, as are the embeddings of markers
    that the tokenizer did not know.

    Args:
        backbone: packed tokens to hidden states ``[T, D]``. Only its body is kept; the tokenizer
            learns the markers.
        head: settings.

    Raises:
        ArgumentError: texts are to attend to their expansion, and attention is causal.
    """

    kinds = ("tokens",)
    regularized = ()
    counted: Tensor | None

    def __init__(self, backbone: EncoderBody, head: ColbertHead) -> None:
        super().__init__(backbone.tokenizer, backbone.max_length)
        if head.attend_to_expansion and backbone.is_causal:
            raise ArgumentError(
                "{attend_to_expansion}: where attention is causal no token of a query sees those "
                "that fill it up behind: leave it out, or load the backbone with "
                "attention='bidirectional'",
                attend_to_expansion=True,
            )
        # Of a masked language model, what is not kept need not grow.
        body = backbone if backbone.grows else backbone.bare()
        body.add_tokens(head.markers)
        self.backbone = body.bare()
        self.head = head
        self.projection = new_projection(backbone.hidden_size, head)
        self.markup, self.token_pooling = head.markup(self.tokenizer), head.token_pooling
        counted = head.counted(self.tokenizer, backbone.num_embeddings)
        self.register_buffer("counted", counted, persistent=False)
        self.narrower_widths = tuple(head.widths[1:])

    def narrow(self, width: int) -> None:
        """See :meth:`Encoder.narrow <sparton.models.encoder.Encoder.narrow>`."""
        trained = self.head.widths
        if width not in trained and (len(trained) > 1 or not 1 <= width <= trained[0]):
            wanted = ", ".join(map(str, trained)) if len(trained) > 1 else f"1 to {trained[0]}"
            raise ArgumentError(
                "{width}: the token vectors of this model work with the widths {}",
                wanted,
                width=width,
            )
        rows = nn.Linear(self.projection.in_features, width, self.head.bias, device="meta")
        for name, whole in self.projection.named_parameters():
            setattr(rows, name, nn.Parameter(whole.detach()[:width].clone()))
        self.head = copy.copy(self.head)  # other encoders may have it, too
        self.projection, self.head.width = rows, width
        self.head.widths = [each for each in trained if each <= width] or [width]
        self.narrower_widths = tuple(self.head.widths[1:])

    def forward(self, tokens: TokenBatch, side: Side) -> TokenVectors:
        """The vectors of N queries or N documents; of a query all tokens count."""
        return self._represent(self.backbone.hidden_states(tokens), tokens, side)

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """:meth:`forward` as representations."""
        return Representations(tokens=self(tokens, side))

    def encode_both(
        self, queries: TokenBatch, documents: TokenBatch, memory: HeadMemory | None = None
    ) -> tuple[Representations, Representations]:
        """See :meth:`~sparton.models.body.EncoderBody.in_one_pass`."""
        sides = queries, documents
        hidden = self.backbone.in_one_pass(self.backbone.hidden_states, *sides)
        of_queries, of_documents = map(self._represent, hidden, sides, SIDES)
        return Representations(tokens=of_queries), Representations(tokens=of_documents)

    def _represent(self, hidden: Tensor, tokens: TokenBatch, side: Side) -> TokenVectors:
        counted = self.counted if side == "document" else None
        return self.head(hidden, self.projection.weight, self.projection.bias, tokens, counted)

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """The FLOPs of the body and of the projection. MaxSim is not counted, since it depends on
        what is compared with what."""
        projection = 2.0 * self.projection.weight.numel() * (3 if training else 1)
        body = self.backbone.flops_per_token(sequence_length, training=training)
        return body + projection
