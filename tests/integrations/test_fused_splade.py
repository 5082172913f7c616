"""A fused SparseEncoder against the same model as sentence-transformers runs it."""

import copy
import io
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

peer = pytest.importorskip("sentence_transformers", minversion="6.0")

from sentence_transformers import SentenceTransformer, SparseEncoder  # noqa: E402
from sentence_transformers.base.modules import Router, Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402
from sentence_transformers.sparse_encoder import losses  # noqa: E402
from sentence_transformers.sparse_encoder.evaluation import (  # noqa: E402
    SparseInformationRetrievalEvaluator,
)
from sentence_transformers.sparse_encoder.modules import (  # noqa: E402
    SparseStaticEmbedding,
    SpladePooling,
)

from sparton.integrations.sentence_transformers import fuse, unfuse  # noqa: E402
from sparton.integrations.sentence_transformers.forwards import PackedTransformer  # noqa: E402
from tests.devices import nothing_waits  # noqa: E402
from tests.integrations.theirs import TEXTS, examples, files, gradients, splade, train  # noqa: E402

TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def encode(model: nn.Module, texts: list[str] = TEXTS) -> torch.Tensor:
    return model.encode(texts, convert_to_sparse_tensor=False)


def parts(model: nn.Module) -> PackedTransformer:
    return vars(model[0])["forward"]


@pytest.mark.parametrize("unpadded", [None, False])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_outputs_and_gradients_are_the_same(checkpoint, family, pooling, activation, unpadded):
    model = splade(checkpoint(family), pooling, activation).train()
    batches = [TEXTS, TEXTS[:2]]
    stock = [model.preprocess(texts) for texts in batches]
    expected = gradients(model, stock, "sentence_embedding")
    outputs = [model(dict(each))["sentence_embedding"] for each in stock]
    model[0].unpad_inputs = unpadded
    fuse(model)
    fused = [model.preprocess(texts) for texts in batches]
    assert ("cu_seq_lens_q" in fused[0]) == (unpadded is None)
    found = [model(dict(each))["sentence_embedding"] for each in fused]
    torch.testing.assert_close(found, outputs, **TIGHT)
    assert found[0].dtype == outputs[0].dtype
    actual = gradients(model, fused, "sentence_embedding")
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-5 * max(scale, 1))
    other = gradients(model, fused[:1], "sentence_embedding")
    assert not all(torch.allclose(other[n], expected[n], atol=1e-3) for n in expected)


def ranking(model: SparseEncoder, **cached: int) -> nn.Module:
    """In-batch negatives and both regularizers."""
    kind = losses.CachedSpladeLoss if cached else losses.SpladeLoss
    inner = losses.SparseMultipleNegativesRankingLoss(model)
    return kind(model, inner, 1e-2, query_regularizer_weight=1e-2, **cached)


# Columns, scores of a teacher, and the loss.
LOSSES = {
    "in-batch negatives": (2, 0, ranking),
    "hard negatives": (4, 0, ranking),
    "cached": (3, 0, lambda m: ranking(m, mini_batch_size=4)),
    "cached by tokens": (2, 0, lambda m: ranking(m, mini_batch_num_tokens=40)),
    "margins": (3, 2, lambda m: losses.SpladeLoss(m, losses.SparseMarginMSELoss(m), 1e-2)),
    "teacher": (4, 3, lambda m: losses.SpladeLoss(m, losses.SparseDistillKLDivLoss(m), 1e-2)),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LOSSES)
def test_their_trainer_gives_the_same_losses_with_all_of_their_losses(checkpoint, tmp_path, name):
    columns, labels, build = LOSSES[name]
    data, folder = examples(columns, labels), checkpoint()
    stock, fused = splade(folder), fuse(splade(folder))
    expected = train(stock, build(stock), data, tmp_path / "stock")
    found = train(fused, build(fused), data, tmp_path / "fused")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(encode(fused), encode(stock), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(encode(splade(folder)), encode(stock), atol=1e-1)
    changed = splade(folder)
    other = train(changed, build(changed), examples(columns, labels, seed=1), tmp_path / "other")
    assert not torch.allclose(other, expected, rtol=1e-2)


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, {"bf16": True, "learning_rate": 1e-3}]
)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_their_settings_work(checkpoint, tmp_path, settings, family):
    data, folder = examples(3), checkpoint(family)
    stock, fused = splade(folder), fuse(splade(folder))
    expected = train(stock, ranking(stock), data, tmp_path / "stock", **settings)
    found = train(fused, ranking(fused), data, tmp_path / "fused", **settings)
    tolerance = 5e-2 if "bf16" in settings else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert parts(fused)._twin.body.model.is_gradient_checkpointing == (
        "gradient_checkpointing" in settings
    )


def test_saved_folders_are_the_same_bytes(checkpoint, tmp_path):
    data, folder = examples(), checkpoint()
    saved = {}
    for name, model in (("stock", splade(folder)), ("fused", fuse(splade(folder)))):
        model.save_pretrained(str(tmp_path / name / "before"))
        train(model, ranking(model), data, tmp_path / "run", learning_rate=0.0)
        model.save_pretrained(str(tmp_path / name / "after"))
        saved[name] = files(tmp_path / name)
        card = saved[name]["after/README.md"]
        saved[name]["after/README.md"] = re.sub(rb"Training\*\*: .* seconds", b"", card)
    assert "before/model.safetensors" in saved["stock"]
    assert saved["fused"] == saved["stock"]
    again = SparseEncoder(str(tmp_path / "fused/after"), device="cpu")
    torch.testing.assert_close(encode(again), encode(splade(folder)))


def test_a_fused_model_is_copied_and_pickled(checkpoint):
    model = fuse(splade(checkpoint()))
    expected = encode(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    with torch.no_grad():
        model[0].model.bert.embeddings.word_embeddings.weight.zero_()
    for other in copies:
        assert parts(other).module is other[0]
        assert torch.equal(encode(other), expected)
    assert not torch.allclose(encode(model), expected, atol=1e-2)


def test_state_and_parameters_are_those_of_the_model(checkpoint):
    model = splade(checkpoint())
    names, parameters = list(model.state_dict()), list(model.parameters())
    fuse(model)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_unfusing_takes_all_of_it_back(checkpoint):
    model = splade(checkpoint())
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    implementation = model[0].model.config._attn_implementation
    unfuse(fuse(fuse(model)))
    assert model[0].model.config._attn_implementation == implementation == "sdpa"
    for name, module in model.named_modules():
        changed = {key for key in vars(module) if vars(module)[key] is not before[name].get(key)}
        assert not changed, name
    assert "cu_seq_lens_q" not in model.preprocess(TEXTS)


def test_what_happens_to_the_model_happens_to_its_twin(checkpoint):
    model = fuse(splade(checkpoint()))
    first = encode(model)
    transformer = model[0].model
    state = {name: 2 * value for name, value in transformer.state_dict().items()}
    transformer.load_state_dict(state, assign=True)
    transformer.tie_weights()
    torch.testing.assert_close(encode(model), encode(unfuse(copy.deepcopy(model))), **TIGHT)
    assert not torch.allclose(encode(model), first, atol=1e-2)
    layer = transformer.bert.encoder.layer[0].attention.self
    layer.query = nn.Sequential(layer.query, nn.Linear(32, 32))
    torch.testing.assert_close(encode(model), encode(unfuse(copy.deepcopy(model))), **TIGHT)
    model.to(torch.float64)
    assert encode(model).dtype == torch.float64


def test_adapters_that_are_switched_are_followed(checkpoint):
    peft = pytest.importorskip("peft")
    model = splade(checkpoint())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name in ("first", "second"):
            model.add_adapter(peft.LoraConfig(init_lora_weights=False), name)
    fuse(model)
    outputs = []
    for switch in (
        lambda: model.set_adapter("first"),
        lambda: model.set_adapter("second"),
        model.disable_adapters,
        model.enable_adapters,
    ):
        switch()
        outputs.append(encode(model))
        torch.testing.assert_close(outputs[-1], encode(unfuse(copy.deepcopy(model))), **TIGHT)
    first, second, none, again = outputs
    assert torch.equal(second, again)
    for one, other in ((first, second), (second, none), (none, first)):
        assert not torch.allclose(one, other, atol=1e-2)


def test_half_precision_weights(checkpoint):
    model = splade(checkpoint()).to(torch.bfloat16)
    expected = encode(model)
    found = encode(fuse(model))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@torch.no_grad()
def test_numbers_that_change_afterwards_are_followed(checkpoint):
    model = splade(checkpoint(hidden_dropout_prob=0.5))
    fuse(model).train()
    batch = model.preprocess(TEXTS)

    def twice() -> list[torch.Tensor]:
        return [model(dict(batch))["sentence_embedding"] for _ in range(2)]

    assert not torch.equal(*twice())
    for rate, is_equal in ((0, True), (0.5, False), (0.0, True)):  # a whole number is one, too
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = rate
        first, second = twice()
        assert torch.equal(first, second) == is_equal
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 1.0
    fused = twice()[0]
    assert not torch.allclose(fused, first, atol=1e-2)
    plain = unfuse(model)
    stock = plain(dict(plain.preprocess(TEXTS)))["sentence_embedding"]
    torch.testing.assert_close(fused, stock, **TIGHT)


def test_dropout_follows_the_mode_of_every_part(checkpoint):
    model = fuse(splade(checkpoint(hidden_dropout_prob=0.5))).train()
    features = model.preprocess(TEXTS)

    def varies() -> bool:
        outputs = [model(dict(features))["sentence_embedding"] for _ in range(2)]
        return not torch.equal(*outputs)

    assert varies()
    model[0].model.eval()
    assert not varies()
    model[0].model.bert.encoder.layer[1].output.dropout.train()
    assert varies()


def test_attention_dropout_is_left_out_and_said(checkpoint, caplog):
    model = splade(checkpoint(attention_probs_dropout_prob=0.25)).train()
    with caplog.at_level("WARNING"):
        fuse(model)
    assert "trains without its attention_probs_dropout_prob of 0.25" in caplog.text
    features = model.preprocess(TEXTS)
    outputs = [model(dict(features))["sentence_embedding"] for _ in range(2)]
    assert torch.equal(*outputs)
    assert model[0].model.config.attention_probs_dropout_prob == 0.25


def test_attention_dropout_of_families_without_fused_layers(checkpoint):
    model = fuse(splade(checkpoint("distilbert", attention_dropout=0.25))).train()
    features = model.preprocess(TEXTS)
    outputs = [model(dict(features))["sentence_embedding"] for _ in range(2)]
    assert torch.equal(*outputs)


def test_evaluators_give_the_same_numbers(checkpoint):
    queries = {f"q{i}": text for i, text in enumerate(TEXTS)}
    corpus = {f"d{i}": f"{text} w7 w{20 + i}" for i, text in enumerate(TEXTS)}
    relevant = {f"q{i}": {f"d{i}"} for i in range(len(TEXTS))}
    evaluator = SparseInformationRetrievalEvaluator(queries, corpus, relevant, batch_size=2)
    model = splade(checkpoint())
    expected = evaluator(model)
    assert evaluator(fuse(model)) == pytest.approx(expected, rel=1e-6)


def router(folder: str) -> SparseEncoder:
    document = Transformer(folder, transformer_task="fill-mask")
    query = SparseStaticEmbedding(tokenizer=document.tokenizer)
    modules = Router.for_query_document([query], [document, SpladePooling("max")])
    return SparseEncoder(modules=[modules], device="cpu")


def test_of_a_router_the_routes_with_a_transformer_are_fused(checkpoint, tmp_path):
    folder = checkpoint()
    stock, fused = router(folder), fuse(router(folder))
    for side in ("encode_query", "encode_document"):
        expected, found = (
            getattr(model, side)(TEXTS, convert_to_sparse_tensor=False) for model in (stock, fused)
        )
        torch.testing.assert_close(found, expected, **TIGHT)
    mapping = {"router_mapping": {"query": "query", "positive": "document"}}
    expected, found = (
        train(model, ranking(model), examples(), tmp_path / "run", **mapping)
        for model in (stock, fused)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    stock.save_pretrained(str(tmp_path / "stock"))
    fused.save_pretrained(str(tmp_path / "fused"))
    names = files(tmp_path / "stock").keys()
    assert files(tmp_path / "fused").keys() == names
    assert len([name for name in names if name.endswith(".safetensors")]) == 2


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_dense_models_run_without_padding_too(checkpoint, mode):
    transformer = Transformer(checkpoint())
    model = SentenceTransformer(modules=[transformer, Pooling(32, mode)], device="cpu")
    expected = model.encode(TEXTS, convert_to_tensor=True)
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)
    torch.testing.assert_close(fuse(model).encode(TEXTS, convert_to_tensor=True), expected, **TIGHT)


def test_dense_models_give_out_the_states_of_each_text(checkpoint):
    model = SentenceTransformer(modules=[Transformer(checkpoint()), Pooling(32)], device="cpu")
    expected = model.encode(TEXTS, output_value="token_embeddings")
    whole = model.encode(TEXTS, output_value=None)
    fuse(model)
    assert len({len(each) for each in expected}) > 1
    for found, each in zip(model.encode(TEXTS, output_value="token_embeddings"), expected):
        torch.testing.assert_close(found, each, **TIGHT)
    for found, each in zip(model.encode(TEXTS, output_value=None), whole):
        for name in ("input_ids", "attention_mask", "sentence_embedding"):
            torch.testing.assert_close(found[name], each[name], **TIGHT)
        seen = each["attention_mask"].bool()
        states = [features["token_embeddings"][seen] for features in (found, each)]
        torch.testing.assert_close(*states, **TIGHT)
    with torch.enable_grad():  # in training they stay packed
        features = model(model.preprocess(TEXTS))
    assert features["token_embeddings"].shape[:2] == features["input_ids"].shape
    assert features["token_embeddings"].shape[0] == 1


class OwnForward(Transformer):
    def forward(self, features, **kwargs):
        return super().forward(features, **kwargs)


def test_what_cannot_be_fused_is_refused_by_name(checkpoint):
    folder = checkpoint()
    model = SparseEncoder(modules=[Transformer(folder, transformer_task="fill-mask")], device="cpu")
    with pytest.raises(ValueError, match="logits of BertForMaskedLM go to nothing; SpladePooling"):
        fuse(model)
    model = SparseEncoder(modules=[SparseStaticEmbedding(tokenizer=model.tokenizer)], device="cpu")
    with pytest.raises(ValueError, match="SparseEncoder of SparseStaticEmbedding has no transf"):
        fuse(model)
    modules = [OwnForward(folder, transformer_task="fill-mask"), SpladePooling()]
    with pytest.raises(ValueError, match=r"OwnForward has methods of its own in place of .*Transf"):
        fuse(SparseEncoder(modules=modules, device="cpu"))
    model = splade(folder)
    model[0].model.bert.forward = model[0].model.bert.forward
    with pytest.raises(ValueError, match="parts of BertForMaskedLM have a forward of their own"):
        fuse(model)
    model = splade(folder)
    model[1].forward = model[1].forward
    theirs = r"sentence_transformers\.\S+SpladePooling"
    with pytest.raises(
        ValueError, match=f"{theirs} has methods of its own in place of those of {theirs}"
    ):
        fuse(model)
    model = splade(folder)
    model[0].model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states and output_attentions to False"):
        fuse(model)
    assert "forward" not in vars(model[0]) and "forward" not in vars(model[1])


def test_replicas_are_refused(checkpoint):
    model = fuse(splade(checkpoint()))
    features = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in model.preprocess(TEXTS).items()
    }
    with pytest.raises(ValueError, match=r"on meta and the model on cpu.*nn.DataParallel"):
        model(features)


def test_distributed_data_parallel_gathers_the_same_gradients(checkpoint, tmp_path):
    model = fuse(splade(checkpoint())).train()
    features = model.preprocess(TEXTS)
    expected = gradients(model, [features], "sentence_embedding")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )

    def learn() -> None:
        parallel = nn.parallel.DistributedDataParallel(model)
        torch.manual_seed(1)
        output = parallel(dict(features))["sentence_embedding"]
        (output * torch.randn_like(output)).sum().backward()
        # A group that dies while its threads are at work waits for them for ever, now and then.
        torch.distributed.barrier()

    try:
        learn()
    finally:
        torch.distributed.destroy_process_group()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **TIGHT)


@pytest.mark.slow
def test_compiled_models_have_one_graph(checkpoint):
    model = fuse(splade(checkpoint()))
    expected = model(model.preprocess(TEXTS))["sentence_embedding"]
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    found = compiled(model.preprocess(TEXTS))["sentence_embedding"]
    torch.testing.assert_close(found, expected, **TIGHT)


@pytest.mark.gpu
def test_unpadded_texts_wait_for_nothing(checkpoint):
    model = fuse(splade(checkpoint())).to("cuda").train()
    features = {
        name: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for name, value in model.preprocess(TEXTS).items()
    }
    for each in (nullcontext(), nothing_waits()):  # the first time kernels are compiled
        with each:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(dict(features))["sentence_embedding"].sum()
            loss.backward()
