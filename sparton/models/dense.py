"""Dense encoders: one vector per text, the baseline of all others and the base of autoencoders.

T packed tokens, N texts, D hidden width.
"""

import torch.nn.functional as F

from sparton.models.body import EncoderBody
from sparton.models.encoder import Encoder
from sparton.models.pooling import Pooling
from sparton.representations import Representations, TokenVectors
from sparton.types import Markup, Side, TokenBatch


class DenseEncoder(Encoder):
    """Packed tokens to one embedding per text: late interaction with a single vector a side, of
    which MaxSim is the dot product.

    Args:
        body: packed tokens to hidden states.
        pooling: of these to an embedding.
        markup: prompts of the texts.
        cosine: compare embeddings by their cosine; else by their dot product.
        truncate_dim: keep the first numbers of each embedding, that many, after it was pooled and
            perhaps normalised; None for all. Training compares what is left, as search does.

    Raises:
        ValueError: see :func:`check_truncate_dim`; or the first token is pooled of a body whose
            attention is causal.
    """

    kinds = ("tokens",)
    regularized = ()

    def __init__(
        self,
        body: EncoderBody,
        pooling: Pooling,
        markup: Markup = Markup(),  # noqa: B008 (a tuple)
        *,
        cosine: bool = True,
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__(body.tokenizer, body.max_length)
        check_pools(pooling, body)
        self.body = body.bare()
        self.pooling = pooling
        self.markup = markup
        check_truncate_dim(truncate_dim)
        self.cosine = cosine
        self.truncate_dim = truncate_dim

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """Embeddings as one vector ``[N, D]`` of each text, or ``[N, truncate_dim]``."""
        embeddings = self.pooling(self.body.hidden_states(tokens), tokens)
        whole = self.truncate_dim is None
        embeddings = embeddings[:, : self.truncate_dim]
        if self.cosine and not (self.pooling.normalize and whole):
            embeddings = F.normalize(embeddings, dim=-1)
        return Representations(tokens=TokenVectors.of_texts(embeddings))

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """See :meth:`EncoderBody.flops_per_token`."""
        return self.body.flops_per_token(sequence_length, training=training)


def check_pools(pooling: Pooling, body: EncoderBody) -> None:
    """Refuse to pool what has seen nothing of a text.

    Raises:
        ValueError: names the mode and the remedy.
    """
    if pooling.mode == "cls" and body.is_causal:
        raise ValueError(
            "cls pools the first token of a text, which attends to no other where attention is "
            "causal: pool the last one, or load the model with attention='bidirectional'"
        )


def check_truncate_dim(size: object) -> None:
    """Refuse what is no number of dimensions to keep.

    Raises:
        ValueError: names it and what it must be.
    """
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(
            f"truncate_dim={size!r} must be a whole number of at least 1, the first numbers of an "
            "embedding that stay, or nothing for all"
        )
