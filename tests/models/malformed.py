"""Folders of every kind of model, and the ways in which a stranger's files are wrong.

A damage is the file, and what becomes of it: text or bytes in its place, or a function of its
content, parsed where it is JSON and as tensors where it is safetensors.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparton.models.asymmetric import separate_queries, static_queries
from sparton.models.backbones import tiny
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders import save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.pooling import Pooling
from sparton.models.splade import SpladeEncoder

KINDS = ("splade", "colbert", "joint", "csr", "dense", "static", "router")
CONFIG, MODULES, OWN = "config.json", "modules.json", "sparton.json"
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
DESCRIPTION, TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"
POOLING = {"splade": "1_SpladePooling", "joint": "1_SpladePooling", "csr": "1_Pooling"}
STATIC = "query_0_SparseStaticEmbedding"


# Whose text would have 2^30 parts.
_ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{row}: &a{row} [*a{row - 1}, *a{row - 1}]\n" for row in range(1, 31)
)


def edit(file: Path, **changes: object) -> None:
    """Other entries in a file of JSON."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class Damage(NamedTuple):
    kind: str
    file: str
    what: str
    change: str | bytes | Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.kind}-{self.file.replace('/', '.')}-{self.what}"


def save_kind(kind: str, path: Path) -> Path:
    """A small model of a kind."""
    torch.manual_seed(0)
    backbone = tiny(["the quick fox", "a lazy dog ! ,"], hidden_size=16, layers=1)
    sparse = SpladeEncoder(backbone, EagerHead())
    encoders: dict[str, Callable[[], Encoder]] = {
        "splade": lambda: sparse,
        "colbert": lambda: ColbertEncoder(backbone, ColbertHead(8)),
        "joint": lambda: JointEncoder(backbone, JointHead(EagerHead(), ColbertHead(8))),
        "csr": lambda: AutoencoderEncoder(backbone, AutoencoderHead(hidden_dim=32, k=4)),
        "dense": lambda: DenseEncoder(backbone, Pooling("mean", normalize=True)),
        "static": lambda: static_queries(sparse),
        "router": lambda: separate_queries(
            sparse, tiny(["the quick fox", "a lazy dog ! ,"], hidden_size=8, layers=1), EagerHead()
        ),
    }
    save_encoder(encoders[kind](), path, query_length=8, document_length=16)
    return path


def apply(damage: Damage, folder: Path) -> Path:
    """Damage a file of a folder, and return its path."""
    file = folder / damage.file
    content = damage.change
    if callable(content):
        if file.suffix == ".safetensors":
            save_file(content(load_file(file)), file, metadata={"format": "pt"})
            return file
        content = json.dumps(content(json.loads(file.read_text())))
    file.unlink(missing_ok=True)  # it may be a second name of another file
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def having(**values: Any) -> Callable[[Any], Any]:
    """Some values changed."""
    return lambda content: content | values


def lacking(key: str) -> Callable[[Any], Any]:
    return lambda content: {each: value for each, value in content.items() if each != key}


def entry(row: int, **values: Any) -> Callable[[Any], Any]:
    """An entry of a list changed."""
    return lambda content: [
        each | values if number == row else each for number, each in enumerate(content)
    ]


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def _with_value(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


def _json_damages() -> list[Damage]:
    """What no JSON file of a model may be."""
    files = {
        "splade": [CONFIG, TOKENIZER, "tokenizer_config.json", MODULES, DESCRIPTION, TRANSFORMER,
                   OWN, "1_SpladePooling/config.json"],
        "colbert": [MODULES, DESCRIPTION, TRANSFORMER, OWN, "1_Dense/config.json"],
        "joint": ["colbert/modules.json", f"colbert/{DESCRIPTION}", f"colbert/{TRANSFORMER}"],
        "csr": [MODULES, TRANSFORMER, "1_Pooling/config.json", "2_SparseAutoEncoder/config.json"],
        "dense": [MODULES, TRANSFORMER, "1_Pooling/config.json"],
        "static": [MODULES, "router_config.json", f"{STATIC}/config.json", f"{STATIC}/{TOKENIZER}"],
        "router": ["router_config.json", "query_0_MLMTransformer/config.json"],
    }  # fmt: skip
    contents: dict[str, str | bytes] = {
        "empty": "",
        "cut": '{"a": [1, ',
        "a string": '"text"',
        "a list of one": '["a"]',
        "no utf-8": b'{"a": "\xff\xfe"}',
        "nested": "[" * 100_000,
    }
    return [
        Damage(kind, file, what, content)
        for kind, places in files.items()
        for file in places
        for what, content in contents.items()
    ]


def _values() -> list[Damage]:
    """Values of another type, of another size, or missing."""
    dense, auto, static = "1_Dense/config.json", "2_SparseAutoEncoder", f"{STATIC}/config.json"
    lone = "\ud800"  # which no tokenizer can encode
    parts: list[tuple[str, str, str, str | bytes | Callable[[Any], Any]]] = [
        ("splade", MODULES, "null", "null"),
        ("splade", MODULES, "no entries", "[]"),
        ("splade", MODULES, "no type", lambda parts: [lacking("type")(each) for each in parts]),
        ("splade", MODULES, "no path", lambda parts: [lacking("path")(each) for each in parts]),
        ("splade", MODULES, "a number as type", entry(0, type=3)),
        ("splade", MODULES, "a number as path", entry(1, path=3)),
        ("splade", MODULES, "a path above", entry(1, path="../elsewhere")),
        ("splade", MODULES, "an absolute path", entry(1, path="/etc")),
        ("splade", MODULES, "a stranger's class", entry(1, type="os.system")),
        ("splade", DESCRIPTION, "prompts as list", having(prompts=["a"])),
        ("splade", DESCRIPTION, "a number as prompt", having(prompts={"query": 3})),
        ("splade", DESCRIPTION, "a lone surrogate", having(prompts={"query": lone})),
        ("splade", DESCRIPTION, "similarity as list", having(similarity_fn_name=["dot"])),
        ("splade", DESCRIPTION, "NaN", '{"max_active_dims": NaN}'),
        ("splade", DESCRIPTION, "a key twice", '{"prompts": {}, "prompts": {"query": "a"}}'),
        ("splade", TRANSFORMER, "model_args as list", having(config_args=["a"])),
        ("splade", TRANSFORMER, "strange configuration", having(config_args={"num_labels": "x"})),
        ("splade", TRANSFORMER, "strange tokenizer", having(tokenizer_args={"mask_token": 3})),
        ("splade", TRANSFORMER, "lower case as text", having(do_lower_case="no")),
        ("splade", OWN, "no query_length", lacking("query_length")),
        ("splade", OWN, "a text as length", having(query_length="long")),
        ("splade", OWN, "a length of 0", having(document_length=0)),
        ("splade", OWN, "a length below 0", having(document_length=-1)),
        ("splade", OWN, "a fraction as length", having(document_length=8.5)),
        ("splade", OWN, "true as length", having(document_length=True)),
        ("splade", OWN, "a huge length", '{"query_length": 1%s}' % ("0" * 5000)),
        ("splade", OWN, "a long length", having(query_length=10**400)),
        ("splade", OWN, "prompt pooled as text", having(include_prompt="no")),
        ("splade", "1_SpladePooling/config.json", "list", having(pooling_strategy=["max"])),
        ("splade", "1_SpladePooling/config.json", "other", having(activation_function="tanh")),
        ("splade", CONFIG, "no model_type", lacking("model_type")),
        ("splade", CONFIG, "strange model_type", having(model_type="none-such")),
        ("splade", CONFIG, "a number as model_type", having(model_type=3)),
        ("splade", CONFIG, "a text as size", having(hidden_size="big")),
        ("splade", CONFIG, "a size of 0", having(hidden_size=0)),
        ("splade", CONFIG, "a size below 0", having(num_hidden_layers=-1)),
        ("splade", CONFIG, "another size", having(hidden_size=32)),
        ("splade", CONFIG, "a huge size", having(vocab_size=10**15)),
        ("splade", CONFIG, "heads that do not divide", having(num_attention_heads=3)),
        ("splade", CONFIG, "no heads", having(num_attention_heads=0)),
        ("splade", CONFIG, "strange activation", having(hidden_act="no-such")),
        ("splade", CONFIG, "a text as dropout", having(hidden_dropout_prob="much")),
        ("splade", CONFIG, "more layers", having(num_hidden_layers=3)),
        ("splade", CONFIG, "own code", having(
            model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"})),
        ("splade", CONFIG, "a million layers", having(num_hidden_layers=10**6)),
        ("splade", CONFIG, "a wide layer", having(intermediate_size=10**12)),
        ("splade", CONFIG, "padding outside", having(pad_token_id=10**9)),
        ("splade", CONFIG, "strange dtype", having(dtype="no")),
        ("splade", "special_tokens_map.json", "list", '["a"]'),
        ("splade", "added_tokens.json", "list", "[1]"),
        ("splade", "tokenizer_config.json", "a text as length", having(model_max_length="x")),
        ("splade", "tokenizer_config.json", "strange tokens", having(extra_special_tokens=3)),
        ("splade", TOKENIZER, "strange pattern", having(pre_tokenizer={
            "type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False})),
        ("splade", TOKENIZER, "no model", lacking("model")),
        ("splade", TOKENIZER, "strange model", having(model={"type": "none-such"})),
        ("splade", TOKENIZER, "no vocabulary", lambda held: held | {
            "model": held["model"] | {"vocab": {}}, "added_tokens": []}),
        ("splade", TOKENIZER, "a list as vocabulary", lambda held: held | {
            "model": held["model"] | {"vocab": ["a"]}}),
        ("splade", TOKENIZER, "a larger vocabulary", lambda held: held | {"model": held["model"] | {
            "vocab": held["model"]["vocab"] | {f"new{row}": 500 + row for row in range(9)}}}),
        ("splade", TOKENIZER, "strange normaliser", having(normalizer={"type": "none-such"})),
        ("splade", "tokenizer_config.json", "a list as token", having(mask_token=["a"])),
        ("splade", WEIGHTS, "empty", b""),
        ("splade", WEIGHTS, "no header", b"\xff" * 64),
        ("splade", WEIGHTS, "a pickle", b"\x80\x04cos\nsystem\n(S'true'\ntR."),
        ("splade", WEIGHTS, "NaN", _tensor("cls.predictions.bias", _with_value(float("nan")))),
        ("splade", WEIGHTS, "inf", _tensor(
            "bert.embeddings.word_embeddings.weight", _with_value(float("-inf")))),
        ("splade", WEIGHTS, "a wide number", _tensor(
            "cls.predictions.bias", lambda bias: _with_value(1e300)(bias.double()))),
        ("splade", WEIGHTS, "another shape", _tensor(
            "cls.predictions.bias", lambda bias: bias[1:])),
        ("splade", WEIGHTS, "one missing", lacking("cls.predictions.transform.dense.weight")),
        ("splade", WEIGHTS, "other names", lambda held: {f"x.{k}": v for k, v in held.items()}),
        ("splade", "README.md", "no mapping", "---\n- a\n---\n"),
        ("splade", "README.md", "no YAML", "---\na: [\n---\n"),
        ("splade", "README.md", "no utf-8", b"---\nlicense: \xff\xfe\n---\n"),
        ("splade", "README.md", "a number as dataset", "---\ndatasets: 3\n---\n"),
        ("splade", "README.md", "a mapping as base", "---\nbase_model: {a: b}\n---\n"),
        ("splade", "README.md", "a mapping as licence", "---\nlicense: {a: b}\n---\n"),
        ("splade", "README.md", "aliases", f"---\n{_ALIASES}datasets: *a30\n---\n"),
        ("splade", "README.md", "nested", "---\na: " + "[" * 20_000 + "\n---\n"),
        ("colbert", DESCRIPTION, "a number as marker", having(query_prefix=3)),
        ("colbert", DESCRIPTION, "a number as skiplist", having(skiplist_words=3)),
        ("colbert", DESCRIPTION, "numbers as skiplist", having(skiplist_words=[1, 2])),
        ("colbert", DESCRIPTION, "prompts as text", having(prompts="a")),
        ("colbert", DESCRIPTION, "expansion as text", having(do_query_expansion="no")),
        ("colbert", TRANSFORMER, "expansion as list", having(query_expansion=["a"])),
        ("colbert", OWN, "a list as length", having(query_length=[8])),
        ("colbert", dense, "bias as text", having(bias="no")),
        ("colbert", dense, "a number as activation", having(activation_function=3)),
        ("colbert", f"1_Dense/{WEIGHTS}", "cut", b"\x10\x00\x00\x00\x00\x00\x00\x00{"),
        ("colbert", f"1_Dense/{WEIGHTS}", "NaN", _tensor(
            "linear.weight", _with_value(float("nan")))),
        ("colbert", f"1_Dense/{WEIGHTS}", "three dimensions", _tensor(
            "linear.weight", lambda weight: weight[None])),
        ("colbert", f"1_Dense/{WEIGHTS}", "another width", _tensor(
            "linear.weight", lambda weight: weight[:, 1:])),
        ("colbert", f"1_Dense/{WEIGHTS}", "no rows", _tensor(
            "linear.weight", lambda weight: weight[:0])),
        ("colbert", f"1_Dense/{WEIGHTS}", "other names", lambda held: {"x": held["linear.weight"]}),
        ("joint", OWN, "another folder", having(token_vectors=3)),
        ("joint", "colbert/modules.json", "other modules", entry(1, type="a.Pooling")),
        ("joint", f"colbert/1_Dense/{WEIGHTS}", "inf", _tensor(
            "linear.weight", _with_value(float("inf")))),
        ("csr", f"{auto}/config.json", "a text as size", having(hidden_dim="x")),
        ("csr", f"{auto}/config.json", "more kept than there are", having(k=1000)),
        ("csr", f"{auto}/config.json", "k of 0", having(k=0)),
        ("csr", f"{auto}/config.json", "normalize as text", having(normalize="x")),
        ("csr", f"{auto}/config.json", "another size", having(hidden_dim=64)),
        ("csr", f"{auto}/config.json", "a huge size", having(hidden_dim=10**15)),
        ("csr", f"{auto}/{WEIGHTS}", "NaN", _tensor("latent_bias", _with_value(float("nan")))),
        ("csr", f"{auto}/{WEIGHTS}", "another shape", _tensor("pre_bias", lambda bias: bias[1:])),
        ("csr", "1_Pooling/config.json", "modes as number", having(pooling_mode=3)),
        ("csr", "1_Pooling/config.json", "modes of numbers", having(pooling_mode=[3])),
        ("dense", "1_Pooling/config.json", "prompt as text", having(include_prompt="x")),
        ("dense", "1_Pooling/config.json", "strange mode", having(pooling_mode="none-such")),
        ("dense", DESCRIPTION, "a text to cut to", having(truncate_dim="x")),
        ("dense", DESCRIPTION, "cut to 0", having(truncate_dim=0)),
        ("dense", MODULES, "Pooling alone", lambda parts: parts[1:]),
        ("dense", WEIGHTS, "NaN", lambda held: {
            key: value * float("nan") for key, value in held.items()}),
        ("static", MODULES, "two routers", lambda parts: parts * 2),
        ("static", "router_config.json", "no structure", lacking("structure")),
        ("static", "router_config.json", "no types", lacking("types")),
        ("static", "router_config.json", "structure as list", having(structure=["query"])),
        ("static", "router_config.json", "a text as route", having(
            structure={"query": "a", "document": "b"})),
        ("static", "router_config.json", "routes of numbers", having(
            structure={"query": [1], "document": [2]})),
        ("static", "router_config.json", "empty routes", having(
            structure={"query": [], "document": []})),
        ("static", "router_config.json", "unknown parts", having(
            structure={"query": ["a"], "document": ["b"]})),
        ("static", "router_config.json", "parameters as list", having(parameters=["a"])),
        ("static", static, "frozen as text", having(frozen="no")),
        ("static", static, "a number as path", having(path=3)),
        ("static", f"{STATIC}/{WEIGHTS}", "NaN", _tensor("weight", _with_value(float("nan")))),
        ("static", f"{STATIC}/{WEIGHTS}", "a table", _tensor("weight", lambda held: held[None])),
        ("static", f"{STATIC}/{WEIGHTS}", "texts", b"weights"),
        ("router", f"query_0_MLMTransformer/{WEIGHTS}", "NaN", _tensor(
            "cls.predictions.bias", _with_value(float("nan")))),
        ("router", "query_0_MLMTransformer/config.json", "no heads", having(
            num_attention_heads=0)),
    ]  # fmt: skip
    return [Damage(*part) for part in parts]


DAMAGES = _json_damages() + _values()
