"""What is no place of a model is refused, with what would be right."""

from pathlib import Path

import pytest

from sparton.models.places import check_place


@pytest.mark.parametrize("name", ["pairs.csv", "mine/model.safetensors"])
def test_a_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    check_place("pairs.csv")  # the hub may have one of this name
    Path("mine").mkdir()
    Path(name).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=rf"^{name} is a file: name the folder of its mod"):
        check_place(name)


def test_an_empty_name_is_said_to_be_empty() -> None:
    with pytest.raises(FileNotFoundError, match=r"^the name of the model is empty: give a"):
        check_place("")
