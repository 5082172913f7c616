"""Cards of saved models, their terms, and models on the hub, which is a double here."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

import sparton
from sparton.cli.commands import card as card_command
from sparton.hub import add_results, check_license, push
from sparton.models.assembly import build_encoder
from sparton.models.asymmetric import static_queries
from sparton.models.backbones import bare, pretrained, tiny
from sparton.models.colbert import ColbertHead
from sparton.models.csr import AutoencoderHead
from sparton.models.folders import load_encoder, save_encoder
from sparton.models.heads import EagerHead
from sparton.models.joint import JointHead
from sparton.models.origin import Origin, origin_of_trained, read_origin
from sparton.models.pooling import Pooling
from sparton.models.repository import Source

TEXTS = ["paris is the capital of france .", "a cat sleeps on the sofa .", "where is the cat ?"]
LENGTHS = {"query_length": 16, "document_length": 32}
HEADS = {
    "splade": EagerHead,
    "colbert": lambda: ColbertHead(8),
    "joint": lambda: JointHead(EagerHead(), ColbertHead(8)),
    "static": EagerHead,
    "csr": lambda: AutoencoderHead(64, k=8),
    "dense": lambda: Pooling("mean", True),
}
KINDS = pytest.mark.parametrize("kind", HEADS)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def save(folder: Path, kind: str, origin: Origin = Origin()) -> Path:  # noqa: B008
    torch.manual_seed(0)
    backbone = tiny(TEXTS, hidden_size=32, layers=1, max_length=64)
    backbone.origin = origin
    encoder = build_encoder(backbone, HEADS[kind]())
    if kind == "static":
        encoder = static_queries(encoder)
    save_encoder(encoder, folder, **LENGTHS)
    return folder


def snippets(folder: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


@KINDS
def test_what_a_card_shows_runs(kind, tmp_path, monkeypatch, capsys):
    save(tmp_path / "model", kind)
    monkeypatch.chdir(tmp_path)
    own, other = snippets(tmp_path / "model")
    exec(own, {})
    shown = capsys.readouterr().out.splitlines()
    assert 1 <= len(shown) <= 2
    assert all(re.fullmatch(r"-?\d+\.\d\d .*\.", line) for line in shown)
    exec(other, {})
    assert "tensor([[" in capsys.readouterr().out


@KINDS
def test_cards_have_what_the_hub_reads(kind, tmp_path):
    origin = Origin("someone/base", "mit", ("some/pairs",))
    card = ModelCard.load(save(tmp_path / "model", kind, origin) / "README.md")
    assert card.data.license == "mit"
    assert card.data.base_model == "someone/base"
    assert card.data.datasets == ["some/pairs"]
    assert card.data.library_name == "sentence-transformers"
    assert {"sparton", "sentence-transformers"} < {*card.data.tags}
    assert read_origin(tmp_path / "model") == origin
    assert load_encoder(tmp_path / "model").origin == origin
    sparton.load(tmp_path / "model").save(tmp_path / "again")
    assert read_origin(tmp_path / "again") == origin


@pytest.mark.parametrize("begin", [pretrained, bare])
def test_terms_and_base_are_inherited_from_a_folder(begin, tmp_path):
    base = save(tmp_path / "base", "splade")
    (base / "README.md").write_text("---\nlicense: cc-by-nc-sa-4.0\nbase_model: [a/b]\n---\n# x\n")
    head = EagerHead() if begin is pretrained else ColbertHead(8)
    encoder = build_encoder(begin(str(base)), head)
    save_encoder(encoder, tmp_path / "model", **LENGTHS)
    assert read_origin(tmp_path / "model") == Origin("a/b", "cc-by-nc-sa-4.0")
    assert "Commercial use is not allowed" in (tmp_path / "model" / "README.md").read_text()


def test_a_repository_is_the_base_of_what_is_trained_from_it(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: a/b\n---\n")
    monkeypatch.setattr(Source, "file", lambda _, file: tmp_path / file)
    assert origin_of_trained("some/model") == Origin("some/model", "apache-2.0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no front matter", Origin()),
        ("---\nlicense: mit\n---\n", Origin(license="mit")),
        ("---\ndatasets: one\n---", Origin(datasets=("one",))),
        ("---\nbase_model: []\n---\n", Origin()),
        ("---\n: : :\n---\n", "no YAML"),
        ("---\n- a\n---\n", "no mapping"),
    ],
)
def test_front_matter_is_read_as_it_stands(text, expected, tmp_path):
    (tmp_path / "README.md").write_text(text)
    if isinstance(expected, Origin):
        assert read_origin(tmp_path) == expected
        return
    with pytest.raises(ValueError, match=expected):
        read_origin(tmp_path)


class Hub:
    """Stands for HfApi; keeps what is uploaded."""

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, name, private, exist_ok):
        calls.append(("create", name, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns, commit_message):
        names = sorted(path.name for path in Path(folder_path).iterdir())
        calls.append(("folder", repo_id, names, ignore_patterns))

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, commit_message):
        calls.append(("file", repo_id, path_in_repo, path_or_fileobj.decode()))
        return "https://hub/commit"


calls: list[tuple] = []


@pytest.fixture
def hub(monkeypatch):
    calls.clear()
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return calls


def test_a_pushed_card_names_the_repository(tmp_path, hub):
    model = save(tmp_path / "model", "colbert", Origin(None, "apache-2.0"))
    before = (model / "README.md").read_text()
    assert push(model, "me/colbert", private=True) == "https://hub/commit"
    created, folder, file = hub
    assert created == ("create", "me/colbert", True, True)
    assert "model.safetensors" in folder[2] and folder[3] == ["README.md"]
    assert file[2] == "README.md"
    assert 'sparton.load("me/colbert")' in file[3]
    assert 'MultiVectorEncoder("me/colbert")' in file[3]
    assert "license: apache-2.0" in file[3]
    assert (model / "README.md").read_text() == before


def test_a_retriever_pushes_itself(tmp_path, hub):
    model = sparton.load(save(tmp_path / "model", "splade"))
    model.push_to_hub("me/splade", license="mit")
    assert "license: mit" in hub[-1][3]


def test_nothing_is_pushed_under_terms_that_do_not_hold(tmp_path, hub, monkeypatch):
    model = save(tmp_path / "model", "splade")
    with pytest.raises(ValueError, match=r"README.md names no licence, .* give license"):
        push(model, "me/splade")
    bound = save(tmp_path / "bound", "splade", Origin("naver/splade", "cc-by-nc-sa-4.0"))
    terms = lambda name: Origin(license="cc-by-nc-sa-4.0")  # noqa: E731
    monkeypatch.setattr("sparton.hub.read_origin", terms)
    with pytest.raises(ValueError, match=r"naver/splade, .* license=apache-2.0 allows it"):
        push(bound, "me/splade", license="apache-2.0")
    with pytest.raises(ValueError, match="must be a user or an organisation and a name"):
        push(bound, "splade")
    with pytest.raises(FileNotFoundError, match=r"has no README.md"):
        push(tmp_path, "me/splade")
    assert not hub
    push(bound, "me/splade")
    assert "license: cc-by-nc-sa-4.0" in hub[-1][3]


def test_terms_of_free_bases_may_be_changed(monkeypatch):
    monkeypatch.setattr("sparton.hub.read_origin", lambda name: Origin(license="mit"))
    check_license("apache-2.0", base_model="a/b")
    check_license("cc-by-nc-4.0", base_model="a/b")


def tasks(value: float) -> list[dict]:
    return [{"name": "toy", "metrics": {"ndcg@10": value, "mrr@10": 0.5}}]


def test_results_are_written_into_a_card_and_replaced(tmp_path):
    model = save(tmp_path / "model", "splade", Origin("a/b", "mit"))
    add_results(model, tasks(0.25))
    add_results(model, tasks(0.75))
    card = ModelCard.load(model / "README.md")
    found = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert found == {"ndcg_at_10": 0.75, "mrr_at_10": 0.5}
    assert card.data.license == "mit"
    assert "| toy | 0.7500 | 0.5000 |" in card.text
    assert "0.2500" not in card.text and "Not measured" not in card.text
    (model / "README.md").write_text("# mine\n")
    with pytest.raises(ValueError, match="no place for results"):
        add_results(model, tasks(1.0))


def test_cards_say_what_approximate_search_loses(tmp_path):
    model = save(tmp_path / "model", "splade", Origin("a/b", "mit"))
    exact, approximate = *tasks(0.25), tasks(0.75)[0] | {"exact_recall": {"at_10": 0.987654}}
    add_results(model, [exact, approximate])
    text = (model / "README.md").read_text()
    assert "| task | ndcg@10 | mrr@10 | of exact@10 |" in text
    assert "| toy | 0.2500 | 0.5000 |  |" in text and "| toy | 0.7500 | 0.5000 | 0.9877 |" in text
    add_results(model, [exact])
    assert "of exact" not in (model / "README.md").read_text()


def test_the_command_takes_the_results_of_the_training(tmp_path, capsys):
    model = save(tmp_path / "run" / "model", "splade")
    with pytest.raises(FileNotFoundError, match=r"results.json: no such file; sparton evaluate"):
        card_command.main([str(model)])
    with pytest.raises(FileNotFoundError, match="nowhere is no folder: name that of a saved"):
        card_command.main([str(tmp_path / "nowhere")])
    (tmp_path / "run" / "results.json").write_text(json.dumps({"tasks": tasks(0.125)}))
    card_command.main([str(model)])
    assert "0.1250" in (model / "README.md").read_text()
    results = tmp_path / "measured.json"
    copy, other = tmp_path / "copy", save(tmp_path / "other", "colbert")
    shutil.copytree(model, copy)
    for measured in (model, copy, "user/model", tmp_path / "gone"):
        results.write_text(json.dumps({"model": str(measured), "tasks": tasks(0.25)}))
        card_command.main([str(model), "--results", str(results)])
        assert "results of 1 task\n" in capsys.readouterr().out
    for measured in (other, "bm25"):
        results.write_text(json.dumps({"model": str(measured), "tasks": tasks(0.75)}))
        with pytest.raises(ValueError, match=f"results of another model, {measured}: sparton"):
            card_command.main([str(model), "--results", str(results)])
    assert "0.7500" not in (model / "README.md").read_text()
    config = {"width": 32, "query_length": None, "encoder": {"pool_factor": 2, "search": None}}
    for of_evaluation, row in (
        ({"model": str(model)}, "| toy, width=32, pool_factor=2 | 0.3750 |"),
        ({}, "| toy | 0.3750 |"),  # a training's own lengths are the model's
    ):
        content = {"config": config, "tasks": tasks(0.375), **of_evaluation}
        results.write_text(json.dumps(content))
        card_command.main([str(model), "--results", str(results)])
        assert row in (model / "README.md").read_text()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json must hold a JSON object, not"):
        card_command.main([str(model), "--results", str(tmp_path / "other.json")])
