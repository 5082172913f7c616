"""What the hub does not give is said in one sentence."""

from pathlib import Path

import pytest
from transformers.utils import hub

from sparton.models import repository
from sparton.models.folders import find_model
from sparton.models.repository import Source

ANSWERS = {
    hub.RepositoryNotFoundError: "nobody/none: no such folder, and no such model on the hub",
    hub.GatedRepoError: "nobody/none: the hub shows this model to those only who accept its terms",
    hub.RevisionNotFoundError: "nobody/none has no revision=v9 on the hub: name a branch, tag or",
    hub.HfHubHTTPError: "nobody/none: There was a specific connection error when trying to load",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_hubs_refusals_are_one_sentence(monkeypatch, kind):
    def refuse(*_: object, **__: object) -> None:
        error = kind.__new__(kind)  # without the response that its constructor asks for
        error.args = ("401 Client Error.\nRepository Not Found for url: ...",)
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    with pytest.raises(OSError, match=ANSWERS[kind]) as caught:
        Source("nobody/none", "v9").file("config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "modules.json"])
def test_a_model_is_a_folder_or_on_the_hub(tmp_path, monkeypatch, file):
    there = {"nobody/some": file}
    monkeypatch.setattr(
        repository,
        "cached_file",
        lambda name, asked, **_: asked if there.get(name) == asked else None,
    )
    find_model(tmp_path)
    find_model("nobody/some")
    with pytest.raises(
        FileNotFoundError, match=r"nobody/none: .* the hub cannot be reached .*offline"
    ):
        find_model("nobody/none")
    monkeypatch.setattr(repository, "model_info", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError, match="nobody/none: no such folder, and no such model"):
        find_model("nobody/none")
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder; give a folder of a"):
        find_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"only a shell knows ~: name {Path.home()}/mine"):
        find_model("~/mine")
