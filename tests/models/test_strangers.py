"""Folders of strangers: what is wrong in one is told in a sentence, and nothing in it is run."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sparton
from tests.models.malformed import (
    CONFIG,
    DAMAGES,
    KINDS,
    MODULES,
    TRANSFORMER,
    WEIGHTS,
    Damage,
    apply,
    edit,
    entry,
    having,
    save_kind,
)

MARK = "ran.txt"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("good")
    return {kind: save_kind(kind, folder / kind) for kind in KINDS}


@pytest.fixture
def copied(good, tmp_path) -> Callable[[str], Path]:
    return lambda kind: shutil.copytree(good[kind], tmp_path / "model")


@pytest.fixture
def yes(monkeypatch) -> None:
    """A person who answers every question with yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


def vectors(path: Path) -> torch.Tensor:
    return sparton.load(path, device="cpu").encode_documents(["the quick dog"]).sparse.dense()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_undamaged(good, kind):
    assert sparton.load(good[kind], device="cpu").encode_documents(["a fox"]).num_texts == 1


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_folder_is_told_of_in_a_sentence(copied, damage):
    path = copied(damage.kind)
    apply(damage, path)
    with pytest.raises((ValueError, OSError)) as caught:
        sparton.load(path, device="cpu")
    sentence = str(caught.value)
    assert str(path) in sentence and "\n" not in sentence
    assert 20 < len(sentence) - len(str(path)) < 600


def _write_module(path: Path, name: str) -> None:
    code = f"from pathlib import Path\nPath({str(path / MARK)!r}).write_text('ran')\n"
    (path / name).write_text(
        f"{code}from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast\n"
        "class Config(BertConfig): model_type = 'own'\n"
        "class Model(BertForMaskedLM): pass\n"
        "class Tokenizer(BertTokenizerFast): pass\n"
    )


@pytest.mark.parametrize(
    ("file", "values", "loads"),
    [
        (CONFIG, {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, False),
        (CONFIG, {"auto_map": {"AutoModelForMaskedLM": "own.Model"}}, True),  # BERT is known
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}},
            True,
        ),
        (TRANSFORMER, {"model_args": {"trust_remote_code": True}}, True),
    ],
)
@pytest.mark.usefixtures("yes")
def test_code_of_a_folder_is_not_run(copied, file, values, loads):
    path = copied("splade")
    expected = vectors(path)
    _write_module(path, "own.py")
    apply(Damage("splade", file, "", having(**values)), path)
    if loads:
        assert torch.equal(vectors(path), expected)
    else:
        with pytest.raises(
            ValueError, match="needs code that its folder brings along, which is never"
        ):
            sparton.load(path, device="cpu")
    assert not (path / MARK).exists()


@pytest.mark.parametrize("name", ["trust_remote_code", "weights_only", "use_kernels"])
def test_nor_is_it_on_request(good, name):
    with pytest.raises(ValueError, match=f"model_args=.* sets {name}, which is not to be chosen"):
        sparton.load(good["splade"], model_args={name: True})


def test_kernels_that_a_configuration_names_are_not_fetched(copied):
    path = copied("splade")
    expected = vectors(path)
    named = having(attn_implementation="someone/kernel", experts_implementation="sonicmoe")
    apply(Damage("splade", CONFIG, "", named), path)
    assert torch.equal(vectors(path), expected)


def test_classes_of_modules_are_not_imported(copied, monkeypatch):
    path = copied("splade")
    expected = vectors(path)
    _write_module(path, "strange_module.py")
    monkeypatch.syspath_prepend(path)
    apply(Damage("splade", MODULES, "", entry(1, type="strange_module.SpladePooling")), path)
    assert torch.equal(vectors(path), expected)
    assert "strange_module" not in sys.modules and not (path / MARK).exists()


class _Payload:
    """What runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.mark}",)


def test_pickled_weights_are_read_as_tensors_alone(copied):
    path = copied("splade")
    expected = vectors(path)
    weights = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    torch.save(weights, path / "pytorch_model.bin")
    assert torch.equal(vectors(path), expected)
    torch.save(weights | {"other": _Payload(path / MARK)}, path / "pytorch_model.bin")
    edit(path / TRANSFORMER, model_args={"weights_only": False})
    with pytest.raises(ValueError, match="the checkpoint cannot be read"):
        sparton.load(path, device="cpu")
    assert not (path / MARK).exists()
    torch.load(path / "pytorch_model.bin", weights_only=False)  # the command is one
    assert (path / MARK).exists()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_saved_files_have_the_permissions_of_new_files(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = save_kind("joint", tmp_path / "model")
    finally:
        os.umask(before)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert path / WEIGHTS in files
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}
