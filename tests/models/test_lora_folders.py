"""Folders of models that learned adapters: merged, and with the adapters alone.

The other side of each comparison is a library that reads the folder: peft, transformers or
sentence-transformers.
"""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from sparton.models.assembly import build_encoder
from sparton.models.asymmetric import static_queries
from sparton.models.backbones import bare, pretrained
from sparton.models.checkpoint import load_lm
from sparton.models.colbert import ColbertHead
from sparton.models.encoder import Encoder
from sparton.models.folders import check_saving, load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.models.lora import CONFIG, WEIGHTS
from sparton.models.pooling import Pooling
from sparton.models.words import word_tokenizer
from tests.models.alone import alone, batch, close
from tests.models.test_causal_lm import TEXTS, WORDS, build, encode
from tests.models.test_lora import FP32, LENGTHS, learn

ALONE = FP32 | {"save": "adapter"}
# No tokens of its own, so that embeddings stay those of the base.
TOKENS = ColbertHead(16, query_marker="", document_marker="", query_expansion=False, skiplist=())
HEADS = {"splade": EagerHead(), "colbert": TOKENS, "dense": Pooling("mean", True)}
CLASSES = {
    "splade": "SparseEncoder",
    "colbert": "MultiVectorEncoder",
    "dense": "SentenceTransformer",
}


@pytest.fixture
def base(tmp_path, build_mlm, request) -> Path:
    """A checkpoint: BERT, a causal Llama, or one whose configuration says that it is not causal."""
    kind = getattr(request, "param", "causal")
    attention = "bidirectional" if kind == "bidirectional" else None
    model = build_mlm("bert") if kind == "bert" else build("llama", attention)
    model.save_pretrained(tmp_path / "base")
    word_tokenizer(WORDS, 96).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def is_bert(base: Path) -> bool:
    config = base / "config.json"
    return config.exists() and json.loads(config.read_text())["model_type"] == "bert"


def trained(base: Path, head: Any, lora: dict[str, Any] | None) -> Encoder:
    read = bare if isinstance(head, ColbertHead | Pooling) else pretrained
    attention = None if is_bert(base) else "bidirectional"
    return learn(build_encoder(read(str(base), lora=lora, attention=attention), head)).eval()


def save(encoder: Encoder, path: Path) -> Path:
    save_encoder(encoder, path, query_length=16, document_length=32)
    return path


def values(encoder: Encoder) -> torch.Tensor:
    found = encode(encoder)
    return found.sparse if found.tokens is None else found.tokens.values


def in_sentence_transformers(kind: str, path: Path) -> torch.Tensor:
    library = pytest.importorskip("sentence_transformers", "6.2")
    model = getattr(library, CLASSES[kind])(str(path), device="cpu")
    if kind == "splade":
        return torch.as_tensor(model.encode(TEXTS, convert_to_sparse_tensor=False))
    found = model.encode_document(TEXTS)
    return torch.as_tensor(found) if kind == "dense" else torch.cat(list(map(torch.tensor, found)))


@pytest.mark.parametrize("base", ["bert", "causal"], indirect=True)
@pytest.mark.parametrize("kind", HEADS)
def test_merged_folders_are_those_of_any_model_and_load_everywhere(kind, base, tmp_path):
    encoder = trained(base, HEADS[kind], FP32)
    given = values(encoder)
    folder = save(encoder, tmp_path / "merged")
    assert close(values(load_encoder(folder)), given)
    assert close(in_sentence_transformers(kind, folder), given)
    without = trained(base, HEADS[kind], None)
    assert not close(values(without), given)
    other = save(without, tmp_path / "plain")
    files = sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    for file in files:
        if file.suffix == ".json":
            assert (folder / file).read_text() == (other / file).read_text(), file
        if file.suffix == ".safetensors":
            shapes = [
                {name: (value.shape, value.dtype) for name, value in load_file(each / file).items()}
                for each in (folder, other)
            ]
            assert shapes[0] == shapes[1], file


def test_a_folder_merged_from_bf16_is_fp32(base, tmp_path):
    folder = save(trained(base, EagerHead(), {"rank": 4}), tmp_path / "merged")
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {
        torch.float32
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    found = values(load_encoder(folder))
    assert close(in_sentence_transformers("splade", folder), found)


@pytest.mark.parametrize("base", ["bert", "bidirectional"], indirect=True)
@pytest.mark.parametrize("kind", HEADS)
def test_folders_of_adapters_load_in_sentence_transformers(kind, base, tmp_path):
    encoder = trained(base, HEADS[kind], ALONE)
    given = values(encoder)
    folder = save(encoder, tmp_path / "alone")
    card = (folder / "README.md").read_text()
    assert f"adapters alone; loading them reads `{base}`" in card
    assert "| read by | transformers from 5.17 on" in card
    assert f"{sum(p.numel() for n, p in encoder.named_parameters() if 'lora' not in n):,}" in card
    assert not (folder / "config.json").exists() and not (folder / "model.safetensors").exists()
    assert close(values(load_encoder(folder)), given)
    assert close(in_sentence_transformers(kind, folder), given)
    learned = load_file(folder / WEIGHTS)
    save_file({name: 1.01 * value for name, value in learned.items()}, folder / WEIGHTS)
    assert not close(values(load_encoder(folder)), given)
    assert not close(in_sentence_transformers(kind, folder), given)


@pytest.mark.parametrize("base", ["bert", "causal"], indirect=True)
def test_folders_of_adapters_load_in_peft_onto_the_base(base, tmp_path):
    encoder = trained(base, EagerHead(), ALONE)
    folder, tokens = save(encoder, tmp_path / "alone"), batch(LENGTHS)
    expected = encoder.backbone.decoder(encoder.backbone(tokens))
    kind = AutoModelForMaskedLM if is_bert(base) else AutoModelForCausalLM
    stock = kind.from_pretrained(base)
    if not is_bert(base):
        stock.config.is_causal = False
    assert not close(alone(stock.eval(), tokens), expected)
    adapted = peft.PeftModel.from_pretrained(stock, str(folder)).eval()
    assert close(alone(adapted, tokens), expected)
    again = kind.from_pretrained(folder).eval()
    assert close(alone(again, tokens), expected) == is_bert(base)  # Llama's is causal there
    if not is_bert(base):
        again.config.is_causal = False
        assert close(alone(again, tokens), expected)


@pytest.mark.parametrize("base", ["bert", "causal"], indirect=True)
def test_a_body_is_read_from_the_adapters_of_a_language_model(base, tmp_path):
    """Heads that read states go on from a model that learned to predict words."""
    encoder = trained(base, EagerHead(), ALONE)
    folder, tokens = save(encoder, tmp_path / "alone"), batch(LENGTHS)
    stock = (AutoModelForMaskedLM if is_bert(base) else AutoModelForCausalLM).from_pretrained(base)
    stock.config.is_causal = False
    body = bare(str(folder)).eval()
    assert not close(states_of(stock), body.hidden_states(tokens))
    adapted = peft.PeftModel.from_pretrained(stock, str(folder))
    assert close(states_of(adapted.get_base_model()), body.hidden_states(tokens))


@torch.no_grad()
def states_of(model: PreTrainedModel) -> torch.Tensor:
    """The last states of a model's body, of every text by itself."""
    model.eval()
    pieces = batch(LENGTHS).input_ids.split(list(LENGTHS))
    return torch.cat([model.base_model(input_ids=p[None]).last_hidden_state[0] for p in pieces])


def test_an_adapter_of_a_causal_base_stays_bidirectional_or_is_refused(base, tmp_path):
    """transformers reads the base with its own attention; what cannot say otherwise must refuse."""
    encoder = trained(base, EagerHead(), ALONE)
    folder = save(encoder, tmp_path / "alone")
    assert close(values(load_encoder(folder)), values(encoder))
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        in_sentence_transformers("splade", folder)
    (folder / "sentence_bert_config.json").unlink()
    with pytest.raises(
        ValueError, match=r"holds an adapter alone.* attention='bidirectional' or c"
    ):
        load_lm(folder)
    tokens, choices = batch(LENGTHS), ("bidirectional", "causal")
    found = [alone(load_lm(folder, attention=each).eval(), tokens) for each in choices]
    expected = encoder.backbone.decoder(encoder.backbone(tokens))
    assert close(found[0], expected) and not close(found[1], expected)


def test_a_causal_model_with_adapters_alone_stays_causal(base, tmp_path):
    encoder = learn(build_encoder(pretrained(str(base), lora=ALONE), EagerHead())).eval()
    folder = save(encoder, tmp_path / "alone")
    assert close(values(load_encoder(folder)), values(encoder))
    assert close(in_sentence_transformers("splade", folder), values(encoder))
    as_backbone = build_encoder(pretrained(str(folder), attention="bidirectional"), EagerHead())
    assert not close(values(as_backbone), values(encoder))


def test_logits_of_gemma_2_are_not_capped_beside_adapters_either(tmp_path):
    build("gemma2", "bidirectional").save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"final_logit_softcapping": 0.5}))
    word_tokenizer(WORDS, 96).save_pretrained(tmp_path / "base")
    encoder = trained(tmp_path / "base", EagerHead(), ALONE)
    folder = save(encoder, tmp_path / "alone")
    assert values(encoder).max() > 0.5
    assert close(values(load_encoder(folder)), values(encoder))
    assert close(in_sentence_transformers("splade", folder), values(encoder))


@pytest.mark.parametrize("lora", [ALONE, ALONE | {"dtype": "bf16"}])
def test_adapters_of_a_base_that_has_other_weights_now_are_refused(lora, base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    folder = save(trained(base, EagerHead(), lora), tmp_path / "alone")
    model.to(torch.bfloat16).save_pretrained(base)  # what the adapters were trained on, rounded
    load_encoder(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(base)
    with pytest.raises(ValueError, match=r"trained on other weights than .*base has now"):
        load_encoder(folder)
    by_peft = load_file(folder / WEIGHTS)  # which says of no weights what they were
    save_file(by_peft, folder / WEIGHTS)
    load_encoder(folder)


def test_adapters_whose_base_is_nowhere_name_both(base, tmp_path, monkeypatch):
    folder = save(trained(base, EagerHead(), ALONE), tmp_path / "alone")
    base.rename(tmp_path / "elsewhere")
    missing = r"the adapters in .*alone belong to is not there \(.*base: no such folder"
    with pytest.raises(FileNotFoundError, match=missing):
        load_encoder(folder)
    monkeypatch.chdir(tmp_path)
    for name, why in (("base", "base: no model is in a folder"), ("elsewhere", None)):
        config = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": name}
        (folder / CONFIG).write_text(json.dumps(config))
        if why:
            with pytest.raises(FileNotFoundError, match=why):
                load_encoder(folder)
        else:
            load_encoder(folder)


@pytest.mark.parametrize("saving", ["merged", "adapter"])
def test_training_goes_on_from_either_folder(saving, base, tmp_path):
    encoder = trained(base, EagerHead(), FP32 | {"save": saving})
    folder = save(encoder, tmp_path / "first")
    again = load_encoder(folder, lora=FP32)
    assert close(values(again), values(encoder))  # fresh adapters add nothing
    assert any(p.requires_grad for p in again.parameters())
    second = load_encoder(folder, lora=ALONE)
    if saving == "merged":
        learn(second)
        assert close(values(load_encoder(save(second, tmp_path / "second"))), values(second))
    else:
        with pytest.raises(ValueError, match="saves adapters alone, and the weights"):
            save(second, tmp_path / "second")
        with pytest.raises(ValueError, match="saves adapters alone, and the weights"):
            check_saving(trained(folder, EagerHead(), ALONE))


@pytest.mark.parametrize("base", ["bert", "causal"], indirect=True)
def test_all_weights_learn_that_were_read_from_a_folder_of_adapters(base, tmp_path):
    """peft freezes a base: a training of all weights would learn a projection alone, or nothing."""
    folder = save(trained(base, EagerHead(), ALONE), tmp_path / "alone")
    for encoder in (trained(folder, EagerHead(), None), trained(folder, TOKENS, None)):
        assert all(parameter.requires_grad for parameter in encoder.backbone.parameters())
    beside_adapters = trained(folder, EagerHead(), FP32).backbone.named_parameters()
    assert all(weight.requires_grad == (".lora_" in name) for name, weight in beside_adapters)


def test_adapters_alone_are_refused_where_no_file_has_the_rest(base, tmp_path):
    changed = [
        build_encoder(bare(str(base), lora=ALONE), ColbertHead(16)),  # whose markers are new tokens
        static_queries(build_encoder(pretrained(str(base), lora=ALONE), EagerHead())),
        build_encoder(pretrained(str(base), lora=ALONE), JointHead(EagerHead(), TOKENS)),
    ]
    for encoder, message in zip(changed, ("new|added", "holds two models", "holds two models")):
        with pytest.raises(ValueError, match=message):
            check_saving(encoder)
        with pytest.raises(ValueError, match=message):
            save(encoder, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
    check_saving(build_encoder(pretrained(str(base), lora=ALONE), EagerHead()))


def test_a_rescaled_head_is_in_no_file(tmp_path, build_mlm, tokenizer):
    build_mlm("bert").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = build_encoder(pretrained(str(tmp_path), logit_scale=0.5, lora=ALONE), EagerHead())
    with pytest.raises(ValueError, match="a rescaled head"):
        check_saving(encoder)


def test_terms_that_were_left_out_are_in_no_adapter(base):
    head = EagerHead(special_terms=False)
    with pytest.raises(ValueError, match="changed after they were read"):
        check_saving(build_encoder(pretrained(str(base), lora=ALONE), head))


def test_adapters_that_do_not_fit_or_are_missing_are_refused(base, tmp_path):
    folder = save(trained(base, EagerHead(), ALONE), tmp_path / "alone")
    learned = load_file(folder / WEIGHTS)
    name = next(iter(learned))
    stranger = {"base_model.model.model.layers.7.x.lora_A.weight": torch.ones(4, 4)}
    for wrong, message in (
        ({key: value for key, value in learned.items() if key != name}, "do not both have"),
        (learned | stranger, "layers.7"),
        (learned | {name: learned[name][:, :-1].contiguous()}, "does not fit its model"),
        (learned | {name: learned[name] * float("nan")}, "are not all finite numbers"),
    ):
        save_file(wrong, folder / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            load_encoder(folder)
    (folder / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is damaged"):
        load_encoder(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=f"{CONFIG}, but no {WEIGHTS}"):
        load_encoder(folder)
    (folder / CONFIG).write_text('{"peft_type": "IA3", "base_model_name_or_path": "x"}')
    with pytest.raises(ValueError, match=r"peft_type is 'IA3', .*'LORA', the only kind of adapter"):
        load_encoder(folder)
    (folder / CONFIG).write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        load_encoder(folder)
