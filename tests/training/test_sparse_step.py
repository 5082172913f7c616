"""The step holds active entries alone: the same gradients, in less memory, and when it does not."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparton.kernels.sparse_products import spans
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.kernels.splade_head import function
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import DFFlops, L0Flops, Regularizer, anti_zero, flops, l1
from sparton.models.backbones import tiny
from sparton.models.heads import SpartonHead
from sparton.models.splade import SpladeEncoder
from sparton.training import diagnostics
from sparton.training.diagnostics import describe_representations
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import TrainBatch
from tests.training.bag_encoder import BagEncoder, gradients, random_batch

CPU = torch.device("cpu")
BATCH, NEGATIVES = 8, 1


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    """Batches count as large, whose representations are held without zeros."""
    monkeypatch.setattr("sparton.training.step.DENSE_ENTRIES", 0)


def objective() -> Objective:
    penalties = {"flops": flops, "l0": L0Flops(20), "df": DFFlops(0.4), "l1": l1, "zero": anti_zero}
    weighted = {name: Regularizer(penalty, 0.1) for name, penalty in penalties.items()}
    return Objective(InfoNCE(), weighted, weighted)


def make_step(encoder: BagEncoder, micro_batch: int | None) -> ExactStep:
    return ExactStep(encoder, objective(), World(0, 1, CPU), Precision("fp32", CPU), micro_batch)


def batch() -> TrainBatch:
    return random_batch(BATCH, NEGATIVES, seed=1)


def shifted(bias: float) -> BagEncoder:
    """With that much more of every term before the ReLU."""
    encoder = BagEncoder()
    with torch.no_grad():
        encoder.decoder.bias += bias
    return encoder


def truth(encoder: BagEncoder) -> Tensor:
    given = batch()
    sides = encoder.encode(given.queries, "query"), encoder.encode(given.documents, "document")
    objective()(*sides, 0).loss.backward()
    return gradients(encoder)


def stepped(encoder: BagEncoder, micro_batch: int | None) -> Tensor:
    output = make_step(encoder, micro_batch)(batch(), 0)
    assert output.sides["query"].num_texts == BATCH
    return gradients(encoder)


@pytest.mark.parametrize(("bias", "share"), [(-9.0, 0.0), (-0.6, 0.1), (0.0, 0.5), (9.0, 1.0)])
def test_gradients_are_exact_however_many_entries_are_active(bias, share):
    with torch.no_grad():
        active = (shifted(bias)(batch().documents) > 0).float().mean().item()
    assert active == pytest.approx(share, abs=0 if share in (0, 1) else 0.1)
    expected = truth(shifted(bias))
    for micro_batch in (1, 3):
        assert (stepped(shifted(bias), micro_batch) - expected).abs().max() < 1e-6
    assert share == 0 or (1.01 * expected - expected).abs().max() > 1e-5


def test_an_encoder_may_refuse():
    """A zero that passes a gradient on cannot be left out: seen on an encoder without a ReLU."""

    class Leaking(BagEncoder):
        def forward(self, tokens):
            hidden = super().forward(tokens)
            return torch.where(hidden > 0.1, hidden, 0 * hidden + hidden - hidden.detach())

    def leaking(final: bool) -> Leaking:
        encoder = Leaking()
        encoder.zeros_are_final = final
        return encoder

    expected = truth(leaking(True))
    assert (stepped(leaking(False), 3) - expected).abs().max() < 1e-6
    assert (stepped(leaking(True), 3) - expected).abs().max() > 1e-4


def test_one_micro_batch_stays_dense_and_bit_for_bit(monkeypatch):
    expected = truth(BagEncoder())
    monkeypatch.setattr(SparseVectors, "from_dense", None)
    assert torch.equal(stepped(BagEncoder(), None), expected)
    with pytest.raises(TypeError):
        stepped(BagEncoder(), 3)


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation gave."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.entries = max(self.entries, each.numel())
        return result


@pytest.mark.parametrize("final", [True, False])
def test_no_tensor_has_all_entries_of_the_batch(final, monkeypatch):
    """Of one side of it; with the dense form, the negative control, there are several."""
    monkeypatch.setattr(spans, "ENTRIES", 1)
    monkeypatch.setattr(spans, "COLUMNS", 16)
    monkeypatch.setattr(diagnostics, "_MOST_ROWS", 4)
    encoder = shifted(-0.6)
    encoder.zeros_are_final = final
    with Largest() as largest:
        output = make_step(encoder, 2)(random_batch(20, 1, seed=1), 0)
        for reps in output.sides.values():
            diagnostics.describe_representations(reps)
    documents = output.sides["document"]
    assert (largest.entries >= documents.num_texts * documents.width) != final


def test_the_log_describes_either_form_alike():
    described = []
    for micro_batch in (None, 3):
        output = make_step(BagEncoder(), micro_batch)(batch(), 0)
        described.append([describe_representations(side) for side in output.sides.values()])
    for dense, sparse in zip(*described, strict=True):
        assert dense == pytest.approx(sparse, rel=1e-6)
    output = make_step(shifted(-9.0), 3)(batch(), 0)
    assert describe_representations(output.sides["query"])["max_weight"] == 0


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_heads_look_for_their_maxima_once(micro_batch, monkeypatch):
    backbone = tiny([" ".join(f"w{n}" for n in range(500))], hidden_size=64, layers=1)
    encoder = SpladeEncoder(backbone, SpartonHead()).train()
    forward, made = function._head._function.run, []

    def spy(*arguments: object) -> tuple[Tensor, Tensor]:
        made.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(function._head._function, "run", spy)
    step = ExactStep(encoder, objective(), World(0, 1, CPU), Precision("fp32", CPU), micro_batch)
    step(batch(), 0)
    assert len(made) == (2 if micro_batch is None else 6)  # two sides of each part
    found = gradients(encoder)
    encoder.zero_grad()
    expected = truth(encoder)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (1.01 * found - expected).norm() > 1e-3 * expected.norm()
