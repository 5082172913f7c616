"""A sparse autoencoder over dense embeddings: the contrastive sparse representations (CSR) of Wen
et al., arXiv 2503.01776, after the autoencoders of Gao et al., arXiv 2406.04093.

N texts, D width of the embeddings, H latents.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparton.arguments import refuse_uncounted
from sparton.kernels.splade_head import TopK

ACTIVE = 1e-5  # a smaller latent does not count as active
EPSILON = 1e-5  # of the layer normalisation


class Prepared(NamedTuple):
    """Embeddings fp32 ``[N, D]`` as the encoder reads them, and how to undo that: ``[N, 1]``."""

    values: Tensor
    mean: Tensor
    deviation: Tensor


class Trained(NamedTuple):
    """What an autoencoder makes of N embeddings in training.

    Attributes:
        latents: fp32 ``[N, H]``, the k largest of each text, where positive, among zeros.
        losses: by name, see :meth:`SparseAutoencoder.with_losses`.
        active: bool ``[2, H]``, the latents that are active in some text: among its k largest, and
            among its 4 k largest.
    """

    latents: Tensor
    losses: dict[str, Tensor]
    active: Tensor


class SparseAutoencoder(nn.Module):
    """Embeddings to a few positive latents, and back with the encoder's own matrix.

    ``z = relu(top_k(W (x - b) + c))`` and ``x' = W^T z + b``, in fp32 whatever the precision
    around. Where fewer latents exist than a number asks for, it stands for all of them.

    Untrained, W stacks random rotations and their negatives. With H = 2 D that is one rotation:
    the latents are the rotated numbers of an embedding by their sign, and dot products miss those
    that are left out and those whose signs differ.

    A latent is dead if it was active in none of the last ``dead_threshold`` passes. A training step
    has four, in this order: over all queries of the global batch the k largest latents of each,
    then the 4 k largest, and both again over all documents. The dead latents of a side's auxiliary
    loss are those after the first of its two passes, so that what its own texts have just revived
    is alive. ``SparseAutoEncoder`` of sentence-transformers counts in this way when it is trained
    on pairs. It makes a column of every negative besides, with two passes of its own.

    Args:
        input_dim: D.
        hidden_dim: H.
        k: latents kept of a text.
        k_aux: dead latents that the auxiliary loss revives at a time; 0 for no such loss.
        normalize: give each embedding mean 0 and standard deviation 1 over its D numbers first,
            and undo this after the reconstruction.
        dead_threshold: passes without activity after which a latent is dead; 120 are 30 steps of
            training.

    Raises:
        ValueError: a size below 1, or ``k`` above ``hidden_dim``.
    """

    passes_since_active: Tensor

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int = 512,
        k: int = 8,
        *,
        k_aux: int = 512,
        normalize: bool = False,
        dead_threshold: int = 30,
    ) -> None:
        super().__init__()
        check_sizes(hidden_dim, k, k_aux, dead_threshold)
        self.k = k
        self.k_aux = k_aux
        self.normalize = normalize
        self.dead_threshold = dead_threshold
        self.encoder = nn.Linear(input_dim, hidden_dim, bias=False)
        with torch.no_grad():
            self.encoder.weight.copy_(_signed_rotations(hidden_dim, input_dim))
        self.latent_bias = nn.Parameter(torch.zeros(hidden_dim))
        self.pre_bias = nn.Parameter(torch.zeros(input_dim))
        # 1 for the latents of the last pass, as sentence-transformers counts.
        self.register_buffer("passes_since_active", torch.zeros(hidden_dim, dtype=torch.long))

    @property
    def input_dim(self) -> int:
        return self.encoder.in_features

    @property
    def hidden_dim(self) -> int:
        return self.encoder.out_features

    def forward(self, embeddings: Tensor) -> Tensor:
        """The k largest latents of each text, where positive, among zeros; ``[N, D]`` to fp32
        ``[N, H]``."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return _positive_topk(self._latents(self._prepare(embeddings)), self.k)

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int) -> TopK:
        """The min(k, ``k``) largest latents of each text and their places; others are zero."""
        with torch.autocast(embeddings.device.type, enabled=False):
            values, indices = self._latents(self._prepare(embeddings)).topk(min(k, self.k))
            return TopK(values.relu(), indices)

    def with_losses(self, embeddings: Tensor) -> Trained:
        """:meth:`forward`, and what the autoencoder wants to minimise.

        Returns:
            The latents, which of them are active, and the losses by name:

            - ``reconstruction_k``, ``reconstruction_4k`` fp32 ``[N]``: the relative error of
              reconstructions from the k and from the 4 k largest latents;
            - with ``k_aux``: ``residual`` fp32 ``[N, D]``, what the k largest latents left over,
              for :meth:`auxiliary` to predict.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            inputs, prepared = embeddings.float(), self._prepare(embeddings)
            latents = self._latents(prepared)
            kept, more = _positive_topk(latents, self.k), _positive_topk(latents, 4 * self.k)
            # Without the bias, so that the auxiliary loss can take what the latents alone explain.
            explained = self._decode(kept)
            bias = self.pre_bias.float()
            losses = {
                "reconstruction_k": relative_error(
                    self._restore(explained + bias, prepared), inputs
                ),
                "reconstruction_4k": relative_error(
                    self._restore(self._decode(more) + bias, prepared), inputs
                ),
            }
            if self.k_aux:
                losses["residual"] = inputs - self._restore(explained, prepared).detach()
            active = torch.stack([(each > ACTIVE).any(0) for each in (kept, more)])
            return Trained(kept, losses, active)

    def auxiliary(self, embeddings: Tensor, residual: Tensor, dead: Tensor) -> Tensor:
        """The mean squared error, fp32 ``[N]``, with which the ``k_aux`` largest dead latents of
        each text predict its ``residual [N, D]``, whose variance over the batch scales the loss:
        see :func:`residual_variance`.

        Args:
            dead: bool ``[H]`` that :meth:`observe` returned for these texts' side of the batch.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            prepared = self._prepare(embeddings)
            revived = _positive_topk(self._latents(prepared) * dead, self.k_aux)
            prediction = self._decode(revived) + self.pre_bias.float()
            return _error(prediction * prepared.deviation, residual)

    @property
    def dead(self) -> Tensor:
        """Which latents were active in none of the last passes; bool ``[H]``."""
        return self.passes_since_active > self.dead_threshold

    @torch.no_grad()
    def observe(self, active: Tensor) -> Tensor:
        """Count the two passes of one side of the global batch.

        Args:
            active: bool ``[2, H]`` of all its texts, see :class:`Trained`.

        Returns:
            The latents that are dead between the two, bool ``[H]``.
        """
        first, second = active
        self._count(first)
        dead = self.dead
        self._count(second)
        return dead

    def _count(self, active: Tensor) -> None:
        self.passes_since_active.add_(1).masked_fill_(active, 1)

    def _prepare(self, embeddings: Tensor) -> Prepared:
        inputs = embeddings.float()
        if not self.normalize:
            return Prepared(inputs, inputs.new_zeros(()), inputs.new_ones(()))
        mean = inputs.mean(-1, keepdim=True)
        deviation = inputs.std(-1, keepdim=True)
        return Prepared((inputs - mean) / (deviation + EPSILON), mean, deviation)

    def _restore(self, reconstruction: Tensor, prepared: Prepared) -> Tensor:
        return reconstruction * prepared.deviation + prepared.mean

    def _latents(self, prepared: Prepared) -> Tensor:
        """Before top-k and relu; fp32 ``[N, H]``."""
        centred = prepared.values - self.pre_bias.float()
        return F.linear(centred, self.encoder.weight.float(), self.latent_bias.float())

    def _decode(self, latents: Tensor) -> Tensor:
        return latents @ self.encoder.weight.float()


def relative_error(reconstruction: Tensor, embeddings: Tensor) -> Tensor:
    """``|x' - x|^2 / |x|^2`` of each row, fp32 ``[N]``: the share of an embedding that its
    reconstruction misses, 1 for one of zeros. The normalised mean squared error of Gao et al.,
    arXiv 2406.04093, so that a weight means the same at every width and length of embeddings: the
    mean squared error of the numbers of a vector of length 1 is at most 1 / D, nothing beside a
    ranking loss. Of an embedding of zeros it is the mean squared error."""
    energy = embeddings.square().mean(-1)
    return _error(reconstruction, embeddings) / torch.where(energy > 0, energy, 1.0)


def residual_variance(residual: Tensor) -> Tensor:
    """What the auxiliary loss is divided by: the mean squared distance of ``residual [N, D]`` from
    its mean over the batch; 1 where all rows are equal."""
    variance = _error(residual.mean(0), residual).mean()
    alike = (variance == 0) | (residual == residual[:1]).all()
    return torch.where(alike, torch.ones_like(variance), variance)


def check_sizes(hidden_dim: int, k: int, k_aux: int, dead_threshold: int) -> None:
    """Refuse sizes that no autoencoder can have.

    Raises:
        ValueError: names the size, its value and the remedy.
    """
    refuse_uncounted(1, hidden_dim=hidden_dim, k=k, dead_threshold=dead_threshold)
    refuse_uncounted(0, k_aux=k_aux)
    if k > hidden_dim:
        raise ValueError(
            f"k={k} latents cannot be kept of hidden_dim={hidden_dim}: set k from 1 to hidden_dim"
        )


def _signed_rotations(rows: int, columns: int) -> Tensor:
    pairs = -(-rows // (2 * columns))
    rotations = [nn.init.orthogonal_(torch.empty(columns, columns)) for _ in range(pairs)]
    return torch.cat([sign * each for each in rotations for sign in (1, -1)])[:rows]


def _positive_topk(latents: Tensor, k: int) -> Tensor:
    values, indices = latents.topk(min(k, latents.shape[-1]), sorted=False)
    return torch.zeros_like(latents).scatter(-1, indices, values.relu())


def _error(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each row; ``[N]``."""
    return (predicted - target).square().mean(-1)
