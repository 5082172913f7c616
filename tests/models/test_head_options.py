"""Models whose heads take few terms of each token, fold terms or leave some out: their
representations, folders and trainings."""

import json
import math

import pytest
import torch

from sparton.datasets.tokenization import PackedTokenizer
from sparton.encoded.identity import encoder_digest
from sparton.evaluation.explanation import explain
from sparton.integrations.sentence_transformers import fuse
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.models.asymmetric import AsymmetricEncoder, separate_queries, static_queries
from sparton.models.backbones import pretrained, tiny
from sparton.models.colbert import ColbertHead
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EXCLUDED, EagerHead, HybridHead, SpartonHead, TiledHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.splade import SpladeEncoder
from sparton.training.distributed import World
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import TokenBatch, TrainBatch

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy cat", "foxes hunt quick hens", ""]
LENGTHS = {"query_length": 12, "document_length": 12}
CPU = torch.device("cpu")
FOLDED = {"foxes": "fox", "hens": "dog", "cat": "dog", "over": None}
HEADS = {
    "eager": EagerHead, "tiled": TiledHead, "sparton": SpartonHead, "sparton_hybrid": HybridHead
}  # fmt: skip


@pytest.fixture
def folding(tmp_path):
    path = tmp_path / "terms.json"
    path.write_text(json.dumps(FOLDED))
    return path


def make_backbone(layers=1):
    """With several positive logits for each token."""
    backbone = tiny(TEXTS, hidden_size=32, layers=layers, decoder_bias=1.0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        backbone.decoder.bias.add_(torch.rand(len(backbone.decoder.bias), generator=generator))
    return backbone


def make_encoder(head):
    return SpladeEncoder(make_backbone(), head).eval()


def batch(encoder):
    return TokenBatch.from_lists(encoder.tokenizer(TEXTS)["input_ids"])


def truth(encoder, *, token_topk=None, folded=None, special_terms=True, shift=0.0):
    """In float64 by sorting, term by term."""
    tokens, decoder = batch(encoder), encoder.backbone.decoder
    states, weight, bias = (
        x.detach().double() for x in (encoder.backbone(tokens), decoder.weight, decoder.bias)
    )
    vocabulary = encoder.tokenizer.get_vocab()
    rows = []
    for text in states.split(tokens.cu_seqlens.diff().tolist()):
        logits = text @ weight.T + bias + shift
        if not special_terms:
            logits[:, encoder.tokenizer.all_special_ids] = -math.inf
        order = logits.sort(dim=1, descending=True, stable=True).indices
        out = order[:, token_topk or logits.shape[1] :]
        row = logits.scatter(1, out, -math.inf).amax(0).relu().log1p()
        for name, target in (folded or {}).items():
            term = vocabulary[name]
            if target is not None:
                row[vocabulary[target]] = row[[vocabulary[target], term]].max()
            row[term] = 0
        rows.append(row)
    return torch.stack(rows)


def close(actual, expected):
    return torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_representations_of_every_head(name, folding):
    plain = make_encoder(EagerHead())
    options = {"folding": folding, "special_terms": False}
    k = None if name == "sparton_hybrid" else 3
    encoder = make_encoder(HEADS[name](**options, token_topk=k))
    given = {"folded": FOLDED, "special_terms": False, "token_topk": k}
    reps = encoder(batch(encoder))
    assert close(reps, truth(plain, **given))
    for each in ({"folded": None}, {"special_terms": True}, {"token_topk": 2}):
        assert not close(reps, truth(plain, **given | each))
    best = encoder.topk(batch(encoder), "document", 5)
    expected = reps.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(best.values, expected.values[:, :5])
    assert torch.equal(best.indices, expected.indices[:, :5])
    assert encoder.vocabulary_size == reps.shape[1] == plain.vocabulary_size


def test_explanations_name_the_terms_that_others_were_folded_into(folding):
    encoder = make_encoder(SpartonHead(folding=folding, special_terms=False))
    tokenizer = PackedTokenizer(encoder.tokenizer, 12, 12, markup=encoder.markup)
    for text in TEXTS[:3]:
        terms = dict(explain(encoder, tokenizer, text, k=100))
        assert terms and not terms.keys() & {*FOLDED, "[CLS]", "[SEP]", "[UNK]"}
    plain = make_encoder(SpartonHead())
    assert {"cat", "[CLS]"} <= dict(explain(plain, tokenizer, TEXTS[1], k=100)).keys()


def elsewhere(path, **options):
    model = sentence_transformers.SparseEncoder(str(path), device="cpu", **options)
    return model, model.encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_folders_load_here_and_in_sentence_transformers(pooling, folding, tmp_path):
    """Here with the same bits; there only where it may import this project's module."""
    encoder = make_encoder(EagerHead(pooling, token_topk=3, folding=folding))
    expected = encoder(batch(encoder)).detach()
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    folding.unlink()  # the folder has all of it
    again = load_encoder(tmp_path / "model").eval()
    assert (again.head.pooling, again.head.token_topk) == (pooling, 3)
    torch.testing.assert_close(again(batch(again)), expected)
    save_encoder(again, tmp_path / "again", **LENGTHS)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        elsewhere(tmp_path / "again")
    model, reps = elsewhere(tmp_path / "again", trust_remote_code=True)
    torch.testing.assert_close(reps, expected)
    with pytest.raises(ValueError, match="methods of its own"):
        fuse(model)
    model[1].token_topk, fold = None, model[1].fold
    assert not torch.allclose(model.encode(TEXTS, convert_to_sparse_tensor=False), expected)
    model[1].token_topk, model[1].fold = 3, None
    assert not torch.allclose(model.encode(TEXTS, convert_to_sparse_tensor=False), expected)
    model[1].fold = fold
    model.save(str(tmp_path / "theirs"))
    torch.testing.assert_close(elsewhere(tmp_path / "theirs", trust_remote_code=True)[1], expected)
    theirs = load_encoder(tmp_path / "theirs").eval()
    torch.testing.assert_close(theirs(batch(theirs)), expected)


def test_a_model_is_told_from_others_by_what_its_head_does(folding, tmp_path):
    """Wherever its folding lies, and whether its weights had their special terms before."""
    encoder = make_encoder(EagerHead(token_topk=3, folding=folding, special_terms=False))
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    head = EagerHead(token_topk=3, folding=folding, special_terms=False)
    own = encoder_digest(load_encoder(tmp_path / "model", head))
    file = tmp_path / "model/1_SpladePooling/folding.safetensors"
    again = load_encoder(tmp_path / "model", EagerHead(token_topk=3, folding=file))
    assert encoder_digest(again) == own
    again.head.token_topk = 4
    assert encoder_digest(again) != own
    again.head.token_topk, again.head.fold = 3, None
    assert encoder_digest(again) != own


def test_cards_say_what_it_takes(folding, tmp_path):
    for head, own in ((EagerHead(), False), (EagerHead(token_topk=3, folding=folding), True)):
        save_encoder(make_encoder(head), tmp_path / "model", **LENGTHS)
        card = (tmp_path / "model/README.md").read_text()
        said = ("trust_remote_code=True", "the 3 largest", "| terms that count as one | 2 groups")
        assert [words in card for words in said] == [own] * 3


def test_settings_that_differ_from_the_folder_are_refused(folding, tmp_path):
    save_encoder(make_encoder(EagerHead(token_topk=3)), tmp_path / "few", **LENGTHS)
    with pytest.raises(ValueError, match=r"token_topk=None \(the folder: 3\)"):
        load_encoder(tmp_path / "few", EagerHead())
    save_encoder(make_encoder(EagerHead(folding=folding)), tmp_path / "folded", **LENGTHS)
    with pytest.raises(ValueError, match=r"folding=None \(the folder: '.*folding.safetensors'\)"):
        load_encoder(tmp_path / "folded", EagerHead())
    with pytest.raises(ValueError, match=r"folding='case' \(the folder: '.*safetensors'\)"):
        load_encoder(tmp_path / "folded", EagerHead(folding="case"))
    assert load_encoder(tmp_path / "folded", EagerHead(folding=folding)).head.fold is not None
    save_encoder(make_encoder(EagerHead()), tmp_path / "plain", **LENGTHS)
    with pytest.raises(ValueError, match=r"folding='.*terms.json' \(the folder: None\)"):
        load_encoder(tmp_path / "plain", EagerHead(folding=folding))


def test_special_terms_stay_out_wherever_the_folder_is_loaded_and_trained_on(tmp_path):
    encoder = make_encoder(SpartonHead(special_terms=False))
    expected = truth(make_encoder(SpartonHead()), special_terms=False)
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    assert close(elsewhere(tmp_path / "model")[1], expected)  # a stock folder
    again = load_encoder(tmp_path / "model", SpartonHead()).train()
    reps = again(batch(again))
    assert close(reps, expected)
    reps.sum().backward()
    special = again.tokenizer.all_special_ids
    bias = again.backbone.decoder.bias
    assert (bias[special] == EXCLUDED).all() and not bias.grad[special].any()
    assert bias.grad.any()


def test_a_threshold_is_a_shift_of_the_logits(tmp_path):
    """``log(1 + relu(x - c))`` is what the weights say, wherever they are loaded."""
    save_encoder(make_encoder(SpartonHead()), tmp_path / "plain", **LENGTHS)
    backbone = pretrained(str(tmp_path / "plain"), logit_shift=-0.75)
    encoder = SpladeEncoder(backbone, SpartonHead(token_topk=5)).eval()
    expected = truth(make_encoder(SpartonHead()), shift=-0.75, token_topk=5)
    assert close(encoder(batch(encoder)), expected)
    assert not close(encoder(batch(encoder)), truth(make_encoder(SpartonHead()), token_topk=5))
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    assert close(elsewhere(tmp_path / "model", trust_remote_code=True)[1], expected)
    assert close(load_encoder(tmp_path / "model").eval()(batch(encoder)), expected)


def test_joint_models(folding, tmp_path):
    head = JointHead(EagerHead(token_topk=3, folding=folding), ColbertHead(8))
    encoder = JointEncoder(make_backbone(), head).eval()
    tokenizer = PackedTokenizer(encoder.tokenizer, 12, 12, markup=encoder.markup)
    documents = tokenizer.documents(TEXTS)
    reps = encoder.encode(documents, "document").sparse
    folded = [encoder.tokenizer.get_vocab()[name] for name in FOLDED]
    assert not reps[:, folded].any() and reps.any()
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    again = load_encoder(tmp_path / "model").eval()
    torch.testing.assert_close(again.encode(documents, "document").sparse, reps)
    model = sentence_transformers.SparseEncoder(
        str(tmp_path / "model"), device="cpu", trust_remote_code=True
    )
    theirs = model.encode_document(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True)
    torch.testing.assert_close(theirs, reps.detach())


def test_two_models_fold_alike_or_not_at_all(folding, tmp_path):
    document = make_encoder(SpartonHead(folding=folding, token_topk=3))
    with pytest.raises(ValueError, match="folds terms and that of the other does not"):
        separate_queries(document, make_backbone(), SpartonHead())
    with pytest.raises(ValueError, match="none where queries are looked up"):
        static_queries(document)
    encoder = separate_queries(document, make_backbone(2), SpartonHead(folding=folding)).eval()
    sides = ("query", "document")
    expected = [encoder.encode(batch(encoder), side).sparse for side in sides]
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    again = load_encoder(tmp_path / "model").eval()
    assert isinstance(again, AsymmetricEncoder)
    model = sentence_transformers.SparseEncoder(
        str(tmp_path / "model"), device="cpu", trust_remote_code=True
    )
    for side, reps in zip(sides, expected, strict=True):
        torch.testing.assert_close(again.encode(batch(again), side).sparse, reps)
        encode = model.encode_query if side == "query" else model.encode_document
        theirs = encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True)
        torch.testing.assert_close(theirs, reps.detach())


def gradients(micro_batch, head):
    encoder = SpladeEncoder(make_backbone(), head).train()
    rows = torch.randint(5, 18, (12, 6), generator=torch.Generator().manual_seed(0)).tolist()
    texts = TokenBatch.from_lists(rows)
    data = TrainBatch(texts.select(0, 4), texts.select(4, 12))
    penalty = {"flops": Regularizer(flops, 0.1)}
    objective = Objective(InfoNCE(), penalty, penalty)
    step = ExactStep(encoder, objective, World(0, 1, CPU), Precision("fp32", CPU), micro_batch)
    step(data, 0)
    return torch.cat(
        [each.grad.flatten() for each in encoder.parameters() if each.grad is not None]
    )


@pytest.mark.parametrize("kind", ["eager", "tiled", "sparton"])
def test_the_exact_step(kind, folding):
    """With micro-batches, the second encoding of which reuses what the fused head found."""

    def head(k):
        return HEADS[kind](token_topk=k, folding=folding, special_terms=False)

    expected = gradients(None, head(3))
    assert (gradients(1, head(3)) - expected).abs().max() < 1e-6
    assert (gradients(1, head(4)) - expected).abs().max() > 1e-5
