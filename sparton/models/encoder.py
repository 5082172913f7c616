"""What training and evaluation ask of an encoder, whatever its representations are."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparton.arguments import ArgumentError
from sparton.embeddings import TextRows
from sparton.kernels.splade_head import HeadMemory
from sparton.models.origin import Origin
from sparton.representations import Representations
from sparton.types import Kind, Markup, Side, Similarity, TokenBatch, TokenPooling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Encoder(nn.Module):
    """Packed tokens to representations.

    Attributes:
        tokenizer: of the documents, and of the queries unless ``query_tokenizer`` is another.
        query_tokenizer: of the queries.
        max_length: positions that its model supports; None where there is no limit.
        markup: what its texts are given beside their own tokens.
        kinds: the fields of its representations: "sparse", "tokens" or "dense", or several.
        similarity: by which search compares sparse representations: their dot product, or their
            cosine. Training compares them by dot product in any case, as sentence-transformers does
            unless its losses are told otherwise.
        zeros_are_final: no gradient with respect to a zero of its sparse representations ever
            reaches a parameter, as behind a ReLU; training may then hold the active entries alone.
        regularized: the sides whose sparse representations training can make sparser.
        token_pooling: how many vectors of a document are stored; training compares all.
        narrower_widths: how many of the first components of its token vectors work alone;
            training adds up the losses of all.
        score_weights: of the halves of its representations, where their scores are added up.
        loss_weights: of the losses that its representations bring along, by name.
        origin: what its card says of where its weights come from.
        text_rows: what reads its texts in place of the tokenizers, where it trains on embeddings
            that were made before; None for encoders that read tokens.
    """

    markup = Markup()
    kinds: tuple[Kind, ...] = ("sparse",)
    similarity: Similarity = "dot"
    zeros_are_final = True
    regularized: tuple[Side, ...] = ("query", "document")
    token_pooling = TokenPooling()
    narrower_widths: tuple[int, ...] = ()
    score_weights: Mapping[str, float] = {}
    loss_weights: Mapping[str, float] = {}
    origin = Origin()
    text_rows: TextRows | None = None

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        max_length: int | None,
        query_tokenizer: "PreTrainedTokenizerFast | None" = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.query_tokenizer = query_tokenizer or tokenizer

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """The representations of N queries or N documents."""
        raise NotImplementedError

    def encode_both(
        self, queries: TokenBatch, documents: TokenBatch, memory: HeadMemory | None = None
    ) -> tuple[Representations, Representations]:
        """:meth:`encode` of either side; encoders of which both run through one body may make one
        pass of them.

        Args:
            queries, documents: N texts each, in general of other numbers.
            memory: where SPLADE heads keep what they find for a second pass over the same texts.
        """
        return self.encode(queries, "query"), self.encode(documents, "document")

    def complete(self, representations: Representations) -> Representations:
        """Called in every training step with one side of the global batch, before the objective
        and within its graph: fills in what no part of a batch can know."""
        return representations

    def observe(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Called once in every training step, on every rank, with the flags ``used`` of the queries
        and of the documents of the global batch; for encoders whose representations have such.
        Returns what :meth:`finish` must know of either side."""
        raise NotImplementedError

    def finish(self, representations: Representations, seen: Tensor) -> Representations:
        """Called after :meth:`observe` with one side of every micro-batch, within its graph: fills
        in the losses that depend on what the global batch used, and takes ``used`` out.

        Args:
            seen: what :meth:`observe` returned for this side.
        """
        raise NotImplementedError

    def narrow(self, width: int) -> None:
        """Give, from now on, the first components of token vectors alone, and of length 1 again
        where the whole ones are. Of a model that does not say that it was trained with several
        widths any are given.

        Raises:
            ValueError: another width than those, or there are no token vectors.
        """
        raise ArgumentError(
            "{width} narrows the token vectors of a ColbertEncoder, and this is a {}: leave it out",
            type(self).__name__,
            width=width,
        )

    def multiplying_in_fp8(self) -> AbstractContextManager[None]:
        """Within, its layers multiply in FP8 in evaluation mode, see
        :func:`~sparton.models.fp8.encoding_in_fp8`.

        Raises:
            ValueError: a device or layers that FP8 does not serve.
        """
        # It knows layers, which know encoders.
        from sparton.models.fp8 import check_fp8, encoding_in_fp8

        check_fp8(self.device)
        return encoding_in_fp8(self)

    def learning_rates(self) -> dict[str, float]:
        """Learning rates of parameters that have their own, by the prefix of their names."""
        return {}

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """Model FLOPs per real token of a side's sequences of that mean length."""
        raise NotImplementedError

    def term_names(self, columns: Sequence[int]) -> list[str]:
        """What columns of the sparse representations stand for: tokens, unless it is said."""
        return list(self.tokenizer.convert_ids_to_tokens(list(columns)))

    def figures(self) -> dict[str, Tensor]:
        """Numbers about the encoder itself for the log, on its device."""
        return {}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
