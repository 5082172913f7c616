"""Sparse, late-interaction and perhaps dense representations of a text from one pass of an encoder.

T packed tokens, N texts, D hidden width, E width of a token's vector, V vocabulary.
"""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from sparton.arguments import ArgumentError
from sparton.kernels.splade_head import HeadMemory, TopK
from sparton.models.backbone import Backbone
from sparton.models.colbert import ColbertHead, new_projection
from sparton.models.dense import check_pools
from sparton.models.encoder import Encoder
from sparton.models.heads import SpladeHead
from sparton.models.pooling import Pooling, pooling_mode
from sparton.representations import Representations, TokenVectors
from sparton.types import SIDES, Kind, Side, TokenBatch


class JointHead(nn.Module):
    """A head for each half.

    All read the same tokens: the prompts are those of ``tokens``, and ``include_prompt`` of
    ``sparse`` says whether its term weights, and the vector of ``dense``, are pooled from them,
    too.

    Args:
        sparse: of the term weights.
        tokens: of the tokens' vectors.
        dense: how the hidden states of a text become one vector beside these; None for no such
            half.
        score_weights: of each half, by the name of its argument, in the weighted sum of their
            scores; None for 1 each.

    Raises:
        ValueError: prompts of ``sparse``, several ``widths``, weights that are no such, or texts
            that attend to their expansion. Their term weights would depend on it, and no sparse
            model of other libraries expands queries.
    """

    def __init__(
        self,
        sparse: SpladeHead,
        tokens: ColbertHead,
        dense: Pooling | None = None,
        score_weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if tokens.attend_to_expansion:
            raise ValueError(
                "a joint head cannot have attend_to_expansion: the term weights of a query would "
                "depend on the tokens that fill it up; leave it out of the head of the tokens"
            )
        for name in ("query_prompt", "document_prompt"):
            if getattr(sparse.markup, name):
                raise ValueError(
                    f"a joint head reads the tokens of a text once, and {name}="
                    f"{getattr(sparse.markup, name)!r} stands in its sparse half: set {name} of "
                    "the head of the tokens instead"
                )
        if sparse.markup.echo is not None:
            raise ValueError(
                f"a joint head reads the tokens of a text once, and echo={sparse.markup.echo!r} "
                "repeats it: leave that out"
            )
        if len(tokens.widths) > 1:
            raise ValueError(
                "a joint head has one width: its sparse half would be trained once for each; leave "
                "widths out of the head of the tokens"
            )
        if dense is not None:
            pooling_mode(dense.mode)
        self.sparse = sparse
        self.tokens = tokens
        self.dense = dense
        self.score_weights: Mapping[str, float] = dict.fromkeys(self.kinds, 1.0)
        if score_weights is not None:
            self.score_weights = _checked_weights(score_weights, self.kinds)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The halves that there are."""
        return ("sparse", "tokens") if self.dense is None else ("sparse", "tokens", "dense")


def _checked_weights(weights: Mapping[str, float], kinds: Collection[str]) -> dict[str, float]:
    if set(weights) != set(kinds):
        raise ArgumentError(
            "{score_weights} must have one number for each half, {}",
            " and ".join(kinds),
            score_weights=dict(weights),
        )
    numbers = [float(weights[kind]) for kind in kinds]
    if not (all(0 <= number < math.inf for number in numbers) and any(numbers)):
        raise ArgumentError(
            "{score_weights} must be finite, not negative, and not all 0",
            score_weights=dict(weights),
        )
    return dict(zip(kinds, numbers, strict=True))


class JointEncoder(Encoder):
    """Texts, as packed tokens, to term weights over the vocabulary, one vector per token, and
    perhaps one vector of the text.

    The body runs once. The masked-LM head, and the pooling of the dense half, read the text's own
    tokens, markers included, but not those that fill a query up, nor a prompt that is not pooled;
    the projection reads all.

    Args:
        backbone: a masked-LM model; the tokenizer learns the markers.
        head: how each half is computed.

    Raises:
        ValueError: the first token is pooled of a body whose attention is causal.
    """

    counted: Tensor | None

    def __init__(self, backbone: Backbone, head: JointHead) -> None:
        super().__init__(backbone.tokenizer, backbone.max_length)
        if head.dense is not None:
            check_pools(head.dense, backbone)
        self.kinds, self.score_weights = head.kinds, head.score_weights
        backbone.add_tokens(head.tokens.markers)
        head.sparse.settle(backbone)
        self.backbone = backbone
        self.head = head
        self.projection = new_projection(backbone.hidden_size, head.tokens)
        markup = head.tokens.markup(self.tokenizer)
        self.markup = markup._replace(include_prompt=head.sparse.markup.include_prompt)
        self.token_pooling = head.tokens.token_pooling
        counted = head.tokens.counted(self.tokenizer, backbone.num_embeddings)
        self.register_buffer("counted", counted, persistent=False)

    def forward(self, tokens: TokenBatch, side: Side) -> Representations:
        """All halves of N queries or N documents."""
        return self._represent(self.backbone.hidden_states(tokens), tokens, side)

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """:meth:`forward`."""
        return self(tokens, side)

    def encode_both(
        self, queries: TokenBatch, documents: TokenBatch, memory: HeadMemory | None = None
    ) -> tuple[Representations, Representations]:
        """See :meth:`~sparton.models.body.EncoderBody.in_one_pass`."""
        sides = queries, documents
        hidden = self.backbone.in_one_pass(self.backbone.hidden_states, *sides)
        of_queries, of_documents = (
            self._represent(states, tokens, side, memory)
            for states, tokens, side in zip(hidden, sides, SIDES, strict=True)
        )
        return of_queries, of_documents

    @torch.no_grad()
    def topk(self, tokens: TokenBatch, side: Side, k: int) -> TopK:
        """The min(k, V) largest term weights of each text, see :meth:`SpladeEncoder.topk`."""
        hidden = self.backbone.hidden_states(tokens)
        inputs = self._sparse_inputs(hidden, tokens)
        return self.head.sparse.topk(*inputs, min(k, self.vocabulary_size))

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """The FLOPs of the masked-LM model and of the projection. MaxSim is not counted, since it
        depends on what is compared with what."""
        projection = 2.0 * self.projection.weight.numel() * (3 if training else 1)
        model = self.backbone.flops_per_token(sequence_length, training=training)
        return model + projection

    @property
    def vocabulary_size(self) -> int:
        """V; it may exceed the tokenizer's size where a model pads its vocabulary."""
        return self.backbone.decoder.out_features

    def _represent(
        self, hidden: Tensor, tokens: TokenBatch, side: Side, memory: HeadMemory | None = None
    ) -> Representations:
        counted = self.counted if side == "document" else None
        weight, bias = self.projection.weight, self.projection.bias
        vectors = self.head.tokens(hidden, weight, bias, tokens, counted)
        inputs = self._sparse_inputs(hidden, tokens)
        sparse, pooling = self.head.sparse, self.head.dense
        dense = None if pooling is None else TokenVectors.of_texts(pooling(hidden, tokens))
        return Representations(sparse.folded(sparse(*inputs, memory)), vectors, dense)

    def _sparse_inputs(
        self, hidden: Tensor, tokens: TokenBatch
    ) -> tuple[Tensor, Tensor, Tensor | None, TokenBatch]:
        """What the sparse head reads: of the tokens that are pooled only."""
        hidden, tokens = tokens.to_pool(hidden)
        decoder = self.backbone.decoder
        return self.backbone.transform(hidden), decoder.weight, decoder.bias, tokens
