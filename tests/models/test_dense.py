"""Dense encoders as encoders: scored, trained, saved and read back."""

import json

import pytest
import torch

from sparton.losses.objective import Objective, all_scores
from sparton.losses.ranking import InfoNCE
from sparton.models.assembly import build_encoder
from sparton.models.backbones import tiny
from sparton.models.dense import DenseEncoder
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.pooling import Pooling
from sparton.types import TokenBatch

TEXTS = ["the quick brown fox", "a lazy dog", "foxes hunt hens", "a lazy cat and a dog", ""]


def make_encoder(pooling: Pooling) -> DenseEncoder:
    encoder = build_encoder(tiny(TEXTS, hidden_size=32, layers=1), pooling)
    assert isinstance(encoder, DenseEncoder)
    return encoder.eval()


def tokens(encoder: DenseEncoder) -> TokenBatch:
    return TokenBatch.from_lists(encoder.tokenizer(TEXTS)["input_ids"])


@torch.no_grad()
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_are_the_similarities_of_sentence_transformers(tmp_path, normalize):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = make_encoder(Pooling("mean", normalize))
    save_encoder(encoder, tmp_path / "model", query_length=8, document_length=16)
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert model.similarity_fn_name == ("cosine" if normalize else "dot")
    expected = model.similarity(*[torch.from_numpy(model.encode(TEXTS))] * 2)
    for each in (encoder, load_encoder(tmp_path / "model").eval()):
        reps = each.encode(tokens(encoder), "query")
        assert reps.tokens.cu_seqlens.tolist() == list(range(len(TEXTS) + 1))
        torch.testing.assert_close(all_scores(reps, reps)["tokens"], expected, rtol=2e-6, atol=2e-6)
    assert expected.std() > 0.05


def test_dot_products_where_the_folder_says_so(tmp_path):
    encoder = make_encoder(Pooling("mean", True))
    plain = DenseEncoder(encoder.body, Pooling(), cosine=False).eval()
    save_encoder(plain, tmp_path / "model", query_length=8, document_length=16)
    again = load_encoder(tmp_path / "model").eval()
    assert not again.cosine
    with torch.no_grad():
        batch = tokens(encoder)
        cosine, given, expected = (
            all_scores(reps, reps)["tokens"]
            for reps in (each.encode(batch, "query") for each in (encoder, again, plain))
        )
    assert torch.equal(given, expected) and (given - cosine).abs().max() > 0.1


def test_a_dense_encoder_learns_pairs():
    encoder = make_encoder(Pooling("cls", True)).train()
    objective = Objective(InfoNCE(temperature=0.05))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    queries = TokenBatch.from_lists([[2, 6, 3], [2, 7, 3], [2, 8, 3]])
    documents = TokenBatch.from_lists([[2, 9, 3], [2, 10, 3], [2, 11, 3]])
    losses = []
    for step in range(30):
        sides = encoder.encode(queries, "query"), encoder.encode(documents, "document")
        loss = objective(*sides, step).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_a_head_of_another_kind_is_refused(tmp_path):
    save_encoder(make_encoder(Pooling()), tmp_path / "m", query_length=8, document_length=16)
    with pytest.raises(ValueError, match="a model with a Pooling, and a EagerHead cannot"):
        load_encoder(tmp_path / "m", EagerHead())


def test_a_pooling_that_is_none_is_refused():
    with pytest.raises(ValueError, match="pooling='max' is not one of mean, cls, last"):
        make_encoder(Pooling("max"))


def test_a_dense_model_with_a_projection_is_refused_as_one(tmp_path):
    save_encoder(make_encoder(Pooling("mean", True)), tmp_path, query_length=8, document_length=16)
    modules = json.loads((tmp_path / "modules.json").read_text())
    projection = {**modules[1], "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([*modules[:2], projection, modules[2]]))
    with pytest.raises(
        ValueError, match=r"Pooling \+ Dense \+ Normalize; a dense encoder is Transf"
    ):
        load_encoder(tmp_path)
