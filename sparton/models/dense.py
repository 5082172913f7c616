"""Dense encoders: one vector per text, the baseline of all others and the base of autoencoders.

T packed tokens, N texts, D hidden width.
"""

import torch
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
    ) -> None:
        super().__init__(body.tokenizer, body.max_length)
        self.body = body.bare()
        self.pooling = pooling
        self.markup = markup
        self.cosine = cosine

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """Embeddings as one vector ``[N, D]`` of each text."""
        embeddings = self.pooling(self.body.hidden_states(tokens), tokens)
        if self.cosine and not self.pooling.normalize:
            embeddings = F.normalize(embeddings, dim=-1)
        each = torch.arange(len(embeddings) + 1, dtype=torch.int32, device=embeddings.device)
        return Representations(tokens=TokenVectors(embeddings, each, max_seqlen=1))

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """See :meth:`EncoderBody.flops_per_token`."""
        return self.body.flops_per_token(sequence_length, training=training)
