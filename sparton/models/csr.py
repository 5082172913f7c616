"""The encoder of contrastive sparse representations: a dense encoder and a sparse autoencoder.

T packed tokens, N texts, D hidden width, H latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparton.arguments import ArgumentError, refuse_below
from sparton.kernels.splade_head import TopK
from sparton.models.autoencoder import SparseAutoencoder, check_sizes, residual_variance
from sparton.models.body import EncoderBody
from sparton.models.cached import CachedBackbone
from sparton.models.encoder import Encoder
from sparton.models.pooling import Pooling, PoolingMode, pooling_mode
from sparton.representations import Representations
from sparton.types import Markup, Side, TokenBatch


@dataclass(frozen=True)
class AutoencoderHead:
    """The settings of an :class:`AutoencoderEncoder` beside its backbone. Sizes that are not given
    are those of ``SparseAutoEncoder`` of sentence-transformers; a folder may leave them out.

    Attributes:
        hidden_dim: H, the number of latents.
        k, k_aux, normalize, dead_threshold: see :class:`SparseAutoencoder`.
        pooling: how a text's hidden states become its embedding, "mean" or "cls".
        normalize_pooled: bring embeddings to length 1 before the autoencoder.
        query_prompt, document_prompt: put before a text, as the backbone was trained with them.
        include_prompt: whether the tokens of a prompt, and those before it, are pooled as well.
        freeze_backbone: train the autoencoder alone; the backbone then runs without dropout.
        reconstruction_weight: of the reconstruction from k latents beside the ranking loss; that
            from 4 k weighs an eighth of it.
        auxiliary_weight: of the auxiliary loss.
        learning_rate: of the autoencoder; None for the optimizer's.

    Raises:
        ValueError: a size or a pooling that cannot be.
    """

    hidden_dim: int = 512
    k: int = 8
    k_aux: int = 512
    normalize: bool = False
    dead_threshold: int = 30
    pooling: PoolingMode = "mean"
    normalize_pooled: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    include_prompt: bool = True
    freeze_backbone: bool = True
    reconstruction_weight: float = 1.0
    auxiliary_weight: float = 0.1
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self.hidden_dim, self.k, self.k_aux, self.dead_threshold)
        weights = (self.reconstruction_weight, self.auxiliary_weight)
        refuse_below(0, reconstruction_weight=weights[0], auxiliary_weight=weights[1])
        refuse_below(0, learning_rate=self.learning_rate)
        pooling_mode(self.pooling)

    @property
    def pool(self) -> Pooling:
        return Pooling(self.pooling, self.normalize_pooled)

    @property
    def markup(self) -> Markup:
        return Markup(
            query_prompt=self.query_prompt,
            document_prompt=self.document_prompt,
            include_prompt=self.include_prompt,
        )

    @property
    def loss_weights(self) -> dict[str, float]:
        """By the names of :meth:`SparseAutoencoder.with_losses`."""
        weights = {
            "reconstruction_k": self.reconstruction_weight,
            "reconstruction_4k": self.reconstruction_weight / 8,
        }
        return weights | ({"auxiliary": self.auxiliary_weight} if self.k_aux else {})

    def autoencoder(self, input_dim: int) -> SparseAutoencoder:
        """An untrained autoencoder of these settings for embeddings of that width."""
        return SparseAutoencoder(
            input_dim,
            self.hidden_dim,
            self.k,
            k_aux=self.k_aux,
            normalize=self.normalize,
            dead_threshold=self.dead_threshold,
        )


class AutoencoderEncoder(Encoder):
    """Texts, as packed tokens, to the k largest latents of their pooled embedding.

    Args:
        backbone: packed tokens to hidden states ``[T, D]``; of a masked-language model its body
            alone is kept.
        head: everything else.

    Raises:
        ValueError: cached embeddings that were made with another pooling or other prompts, or
            adapters in a backbone that is frozen.
    """

    regularized = ()  # k latents are active, whatever a regularizer asks for

    def __init__(self, backbone: EncoderBody | CachedBackbone, head: AutoencoderHead) -> None:
        super().__init__(backbone.tokenizer, backbone.max_length)
        if head.freeze_backbone and isinstance(backbone, EncoderBody) and backbone.lora is not None:
            raise ArgumentError(
                "{freeze_backbone} would freeze adapters, too: make it False, or leave lora out",
                freeze_backbone=True,
            )
        if isinstance(backbone, CachedBackbone):
            backbone.check(head.pool, head.markup)
            self.text_rows = backbone.text_rows
        self.backbone = backbone.bare()
        self.head = head
        self.markup = head.markup
        self.loss_weights = head.loss_weights
        self.autoencoder = head.autoencoder(backbone.hidden_size)
        if head.freeze_backbone:
            self.backbone.requires_grad_(False).eval()

    def forward(self, tokens: TokenBatch) -> Tensor:
        """Latents fp32 ``[N, H]``."""
        return self.autoencoder(self.embed(tokens))

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """The latents of either side; in training mode with the autoencoder's losses, for
        :meth:`finish` and :meth:`complete` to finish."""
        if not self.training:
            return Representations(self(tokens))
        embeddings = self.embed(tokens)
        latents, losses, active = self.autoencoder.with_losses(embeddings)
        if "residual" in losses:
            losses["embeddings"] = embeddings
        return Representations(latents, losses=losses, used=active)

    def embed(self, tokens: TokenBatch) -> Tensor:
        """The dense embeddings that the autoencoder reads, fp32 ``[N, D]``."""
        return self.head.pool(self.backbone.hidden_states(tokens), tokens)

    def observe(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Count the passes of a step; bool ``[2, H]`` of either side to its dead latents."""
        return self.autoencoder.observe(queries), self.autoencoder.observe(documents)

    def finish(self, representations: Representations, seen: Tensor) -> Representations:
        """Add the auxiliary loss, in which the latents ``seen`` are dead."""
        losses = dict(representations.losses)
        if "embeddings" in losses:
            embeddings = losses.pop("embeddings")
            losses["auxiliary"] = self.autoencoder.auxiliary(embeddings, losses["residual"], seen)
        return representations._replace(losses=losses, used=None)

    def complete(self, representations: Representations) -> Representations:
        """Scale the auxiliary loss by the variance, over all texts, of what it predicts."""
        losses = dict(representations.losses)
        if "residual" in losses:
            losses["auxiliary"] = losses["auxiliary"] / residual_variance(losses.pop("residual"))
        return representations._replace(losses=losses)

    def term_names(self, columns: Sequence[int]) -> list[str]:
        """Latents have numbers, no words."""
        return [f"latent {column}" for column in columns]

    def figures(self) -> dict[str, Tensor]:
        """``dead_latents``, their share."""
        return {"dead_latents": self.autoencoder.dead.float().mean()}

    def learning_rates(self) -> dict[str, float]:
        """See :class:`AutoencoderHead`."""
        own = self.head.learning_rate
        return {} if own is None else {"autoencoder": own}

    def train(self, mode: bool = True) -> "AutoencoderEncoder":
        """As of any module; a frozen backbone stays in evaluation mode."""
        super().train(mode)
        if self.head.freeze_backbone:
            self.backbone.eval()
        return self

    @torch.no_grad()
    def topk(self, tokens: TokenBatch, side: Side, k: int) -> TopK:
        """The min(k, ``head.k``) largest latents of each text; all others are zero."""
        return self.autoencoder.topk(self.embed(tokens), k)

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """The backbone's body (its forward alone where it is frozen), and per text 2 D H for the
        latents and as much for each of three reconstructions, three times this in training."""
        learns = training and not self.head.freeze_backbone
        body = self.backbone.flops_per_token(sequence_length, training=learns)
        matrix = 2.0 * self.autoencoder.encoder.weight.numel()
        return body + (3.0 * 4.0 * matrix if training else matrix) / sequence_length

    @property
    def vocabulary_size(self) -> int:
        """H."""
        return self.autoencoder.hidden_dim
