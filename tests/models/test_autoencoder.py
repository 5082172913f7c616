"""The sparse autoencoder against sentence-transformers' own, and what that one does not do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparton.models.autoencoder import SparseAutoencoder, relative_error, residual_variance

csr = pytest.importorskip("sentence_transformers.sparse_encoder.losses.csr")
modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")

D, H, K, K_AUX = 12, 48, 4, 6
LOSSES = ("reconstruction_k", "reconstruction_4k", "auxiliary")


def pair(
    normalize: bool = False, k_aux: int = K_AUX, dead_threshold: int = 30
) -> tuple[SparseAutoencoder, torch.nn.Module]:
    """An autoencoder with a third of its latents dead, and the other library's with its weights."""
    torch.manual_seed(0)
    settings = {"k_aux": k_aux, "normalize": normalize, "dead_threshold": dead_threshold}
    own = SparseAutoencoder(D, H, K, **settings)
    with torch.no_grad():
        own.pre_bias.normal_()
        own.latent_bias.normal_(std=0.1)
        own.passes_since_active[::3] = 31
    other = modules.SparseAutoEncoder(D, H, K, **settings)
    other.load_state_dict(
        {
            "pre_bias": own.pre_bias,
            "latent_bias": own.latent_bias,
            "encoder.weight": own.encoder.weight,
            "decoder.linear.weight": own.encoder.weight,
            "stats_last_nonzero": own.passes_since_active,
        }
    )
    return own, other.eval()  # training, it would count


def embeddings(rows: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.randn(rows, D, generator=generator) + 0.5


def own_losses(autoencoder: SparseAutoencoder, inputs: Tensor) -> dict[str, Tensor]:
    losses = autoencoder.with_losses(inputs).losses
    if "residual" in losses:
        residual = losses.pop("residual")
        errors = autoencoder.auxiliary(inputs, residual, autoencoder.dead)
        losses["auxiliary"] = errors / residual_variance(residual)
    return {name: loss.mean() for name, loss in losses.items()}


def reference_losses(other: torch.nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """The reconstructions' are mean squared errors there, of embeddings whatever their length."""
    return criterion([other({"sentence_embedding": inputs})])


def criterion(columns: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of what the other library's autoencoder makes of each column of a batch."""
    loss = csr.CSRReconstructionLoss(model=None, beta=1.0)
    k, of_4k, auxiliary = loss.compute_loss_from_embeddings(columns).values()
    return dict(zip(LOSSES, (k, 8 * of_4k, auxiliary), strict=True))


def test_untrained_latents_are_rotated_numbers_by_their_sign():
    torch.manual_seed(0)
    own = SparseAutoencoder(D, 2 * D, K, k_aux=0)
    matrix, inputs = own.encoder.weight.detach(), embeddings()
    torch.testing.assert_close(matrix[:D] @ matrix[:D].T, torch.eye(D))
    assert torch.equal(matrix[D:], -matrix[:D])
    kept = (inputs @ matrix[:D].T).square().topk(K).values.sum(1)
    losses = own.with_losses(inputs).losses
    missed = 1 - kept / inputs.square().sum(1)
    torch.testing.assert_close(losses["reconstruction_k"], missed)
    torch.testing.assert_close(losses["reconstruction_4k"], torch.zeros(9), atol=1e-6, rtol=0)
    plain = torch.nn.Linear(D, 2 * D, bias=False).weight  # the negative control
    own.encoder.weight.data.copy_(plain)
    assert (own.with_losses(inputs).losses["reconstruction_k"] > missed + 0.01).float().mean() > 0.8


@pytest.mark.parametrize("hidden_dim", [1, D - 1, 2 * D + 5, H])
def test_any_number_of_untrained_latents_has_rows_of_length_1(hidden_dim):
    matrix = SparseAutoencoder(D, hidden_dim, 1).encoder.weight
    torch.testing.assert_close(matrix.norm(dim=1), torch.ones(hidden_dim))
    assert len(matrix.unique(dim=0)) == hidden_dim


@pytest.mark.parametrize("normalize", [False, True])
def test_latents_are_those_of_sentence_transformers(normalize):
    own, other = pair(normalize)
    expected = other({"sentence_embedding": embeddings()})["sentence_embedding"]
    assert (expected > 0).sum(1).float().mean() > 3
    for actual in (own(embeddings()), own.with_losses(embeddings()).latents):
        torch.testing.assert_close(actual, expected)
    assert not torch.allclose(pair(not normalize)[0](embeddings()), expected, atol=1e-2)


@pytest.mark.parametrize("k_aux", [0, K_AUX, H])
@pytest.mark.parametrize("normalize", [False, True])
def test_losses_and_gradients_are_those_of_sentence_transformers(normalize, k_aux):
    """Gradients of the parameters, and of the embeddings where a backbone learns. Of embeddings of
    length 1, the reconstructions' are D times theirs."""
    own, other = pair(normalize, k_aux)
    inputs = [embeddings().requires_grad_() for _ in range(2)]
    units = [F.normalize(each, dim=1) for each in inputs]
    values, expected = own_losses(own, units[0]), reference_losses(other, units[1])
    expected |= {name: D * expected[name] for name in LOSSES[:2]}
    assert ("auxiliary" in values) == bool(k_aux)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name])
        assert value > 0.1
    weights = {"reconstruction_k": 1.0, "reconstruction_4k": 0.125, "auxiliary": 0.5}
    sum(weights[name] * value for name, value in values.items()).backward()
    sum(weights[name] * expected[name] for name in weights).backward()
    pairs = [
        (inputs[0].grad, inputs[1].grad),
        (own.encoder.weight.grad, other.encoder.weight.grad),
        (own.pre_bias.grad, other.pre_bias.grad),
        (own.latent_bias.grad, other.latent_bias.grad),
    ]
    for actual, target in pairs:
        torch.testing.assert_close(actual, target)
        assert not torch.allclose(actual, 1.01 * target)


@pytest.mark.parametrize("width", [D, 8 * D])
def test_reconstruction_losses_mean_the_same_at_every_length_and_width_of_embeddings(width):
    """sentence-transformers' mean squared error, the negative control, does not."""
    torch.manual_seed(0)
    sizes = (width, 4 * width, width // 3, 0, True, 30)
    own = SparseAutoencoder(*sizes[:3], k_aux=0, normalize=True)
    other = modules.SparseAutoEncoder(*sizes).eval()
    other.encoder.weight.data.copy_(own.encoder.weight)
    inputs = torch.randn(400, width)
    ours, theirs = (
        [losses(model, scale * inputs)["reconstruction_k"].item() for scale in (1.0, 10.0)]
        for losses, model in ((own_losses, own), (reference_losses, other))
    )
    assert ours[1] == pytest.approx(ours[0], rel=1e-3)
    assert theirs[1] == pytest.approx(100 * theirs[0], rel=1e-3)
    assert 0.4 < ours[0] < 0.6


def test_the_relative_error_of_zeros_is_one_and_that_of_an_embedding_of_zeros_is_finite():
    inputs = embeddings()
    zeros = torch.zeros_like(inputs)
    torch.testing.assert_close(relative_error(zeros, inputs), torch.ones(len(inputs)))
    torch.testing.assert_close(relative_error(0.9 * inputs, inputs), torch.full((9,), 0.01))
    assert not relative_error(inputs, inputs).any()
    empty = zeros.requires_grad_()
    errors = relative_error(inputs, empty)
    torch.testing.assert_close(errors, inputs.square().mean(1))
    errors.sum().backward()
    assert empty.grad.isfinite().all()


def test_the_auxiliary_loss_divides_by_the_variance_of_the_whole_batch():
    own, other = pair()
    inputs = embeddings(16)
    expected = reference_losses(other, inputs)["auxiliary"]
    halves = inputs.split(8)
    parts = [own.with_losses(half).losses["residual"] for half in halves]
    errors = torch.cat([own.auxiliary(*half, own.dead) for half in zip(halves, parts)])
    residuals = torch.cat(parts)
    torch.testing.assert_close((errors / residual_variance(residuals)).mean(), expected)
    apart = torch.stack([own_losses(own, half)["auxiliary"] for half in halves]).mean()
    assert not torch.allclose(apart, expected, rtol=1e-2)
    torch.testing.assert_close(residual_variance(torch.ones(3, D)), torch.tensor(1.0))
    assert residual_variance(torch.eye(3)) < 1


def test_dead_latents_learn_through_the_auxiliary_loss_alone():
    own, _ = pair()
    inputs = embeddings()
    with torch.no_grad():
        own.latent_bias[~own.dead] += 20.0  # so that no dead one is among the largest
    gradients = {}
    for name, value in own_losses(own, inputs).items():
        gradients[name] = torch.autograd.grad(value, own.latent_bias, retain_graph=True)[0]
    assert not gradients["reconstruction_k"][own.dead].any()
    assert gradients["reconstruction_k"][~own.dead].any()
    assert gradients["auxiliary"][own.dead].any()
    assert not gradients["auxiliary"][~own.dead].any()


def test_passes_are_counted_by_observing_alone():
    own, _ = pair()
    own.passes_since_active.zero_()
    for _ in range(3):
        own.with_losses(embeddings())
        own(embeddings())
    assert not own.passes_since_active.any()
    active = torch.zeros(2, H, dtype=torch.bool)
    active[0, 5] = active[1, 5] = active[1, 7] = True
    for _ in range(15):
        assert not own.observe(active).any()
    assert own.passes_since_active[[5, 7, 9]].tolist() == [1, 1, 30]
    assert not own.dead.any()
    dead = own.observe(active)  # of which the 31st pass has revived latent 5, the 30th latent 7
    assert (~dead).nonzero().flatten().tolist() == [5, 7] and torch.equal(own.dead, dead)
    own.observe(~active)
    assert own.passes_since_active[[5, 9]].tolist() == [3, 1] and not own.dead[9]
    again = SparseAutoencoder(D, H, K, dead_threshold=30)
    again.load_state_dict(own.state_dict())
    assert torch.equal(again.dead, own.dead)


class Steps:
    """Both autoencoders in one training, on batches of three pairs, by the other's gradients."""

    def __init__(self, normalize: bool) -> None:
        self.own, self.other = pair(normalize, dead_threshold=7)
        self.own.passes_since_active.zero_()
        self.other.stats_last_nonzero.zero_()
        self.other.train()
        self.generator = torch.Generator().manual_seed(2)
        self.optimizer = torch.optim.SGD(self.other.parameters(), lr=0.3)

    def step(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Auxiliary loss and its gradients there, here, and here with the rule that what was dead
        before the step is dead in it."""
        sides = [torch.randn(3, D, generator=self.generator) for _ in range(2)]
        before = self.own.dead
        trained = [self.own.with_losses(side) for side in sides]
        dead = [self.own.observe(each.active) for each in trained]
        values = [self._of(sides, trained, dead), self._of(sides, trained, [before, before])]
        expected = criterion([self.other({"sentence_embedding": side}) for side in sides])
        auxiliary = expected["auxiliary"]
        parameters = self.other.encoder.weight, self.other.pre_bias, self.other.latent_bias
        gradients = torch.autograd.grad(auxiliary, parameters, retain_graph=True)
        self.optimizer.zero_grad()
        sum(expected.values()).backward()
        self.optimizer.step()
        with torch.no_grad():
            self.own.encoder.weight.copy_(self.other.encoder.weight)
            self.own.pre_bias.copy_(self.other.pre_bias)
            self.own.latent_bias.copy_(self.other.latent_bias)
        return [auxiliary.detach(), *gradients], *values

    def _of(self, sides: list[Tensor], trained: list, dead: list[Tensor]) -> list[Tensor]:
        losses = []
        for side, each, those in zip(sides, trained, dead, strict=True):
            residual = each.losses["residual"]
            errors = self.own.auxiliary(side, residual, those)
            losses.append(errors.mean() / residual_variance(residual))
        value = torch.stack(losses).mean()
        own = self.own
        parameters = own.encoder.weight, own.pre_bias, own.latent_bias
        return [value.detach(), *torch.autograd.grad(value, parameters, retain_graph=True)]


@pytest.mark.parametrize("normalize", [False, True])
def test_over_several_steps_latents_die_and_revive_as_in_sentence_transformers(normalize):
    """Counters, values and gradients. The negative control is an auxiliary loss in which latents
    that the batch has revived are still dead."""
    steps = Steps(normalize)
    differing = dying = 0
    for _ in range(20):
        expected, given, unaware = steps.step()
        assert torch.equal(steps.own.passes_since_active, steps.other.stats_last_nonzero)
        for actual, target in zip(given, expected, strict=True):
            torch.testing.assert_close(actual, target, rtol=1e-4, atol=1e-6)
        dying += int(steps.own.dead.any())
        differing += int((unaware[0] - expected[0]).abs() > 1e-3)
    assert dying > 10 and differing > 5


@pytest.mark.parametrize("k", [2, K, H])
def test_topk_is_of_the_same_latents(k):
    own, _ = pair()
    values, indices = own.topk(embeddings(), k)
    assert values.shape == (9, min(k, K)) and not values.requires_grad
    torch.testing.assert_close(values, own(embeddings()).topk(min(k, K)).values)
    positive = values > 0
    torch.testing.assert_close(values[positive], own(embeddings()).gather(1, indices)[positive])


def test_a_number_above_that_of_all_latents_stands_for_all():
    """Here the other library stops with an index out of range."""
    torch.manual_seed(0)
    wide = SparseAutoencoder(D, 8, 3, k_aux=512)
    wide.passes_since_active[:] = 999
    latents, losses, active = wide.with_losses(embeddings())
    losses["auxiliary"] = wide.auxiliary(embeddings(), losses["residual"], wide.dead)
    assert (latents > 0).sum(1).max() == 3
    everything = torch.relu(wide.encoder(embeddings())) @ wide.encoder.weight
    error = (everything - embeddings()).square().mean(1)
    energy = embeddings().square().mean(1)
    torch.testing.assert_close(losses["reconstruction_4k"], error / energy)
    assert all(loss.isfinite().all() for loss in losses.values())
    assert torch.equal(active[1], (wide._latents(wide._prepare(embeddings())) > 1e-5).any(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_arithmetic_is_fp32_under_autocast_and_with_16_bit_weights(dtype):
    own, _ = pair()
    with torch.autocast("cpu", torch.bfloat16):
        latents, losses, _ = own.with_losses(embeddings().to(dtype))
        errors = own.auxiliary(embeddings().to(dtype), losses["residual"], own.dead)
    assert latents.dtype == torch.float32 and errors.dtype == torch.float32
    torch.testing.assert_close(latents, own(embeddings().to(dtype).float()))
    own.bfloat16()
    assert own(embeddings()).dtype == torch.float32
    assert own.passes_since_active.dtype == torch.long


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ((D, 8, 9), {}, "k=9 latents cannot be kept of hidden_dim=8"),
        ((D, 8, 0), {}, "k=0 must be a whole number of at least 1"),
        ((D, 8, 2), {"k_aux": -1}, "k_aux=-1 must be a whole number of at least 0"),
        ((D, 8, 2), {"dead_threshold": 0}, "dead_threshold=0 must be a whole number of at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, settings, message):
    with pytest.raises(ValueError, match=message):
        SparseAutoencoder(*sizes, **settings)
