"""``sparton pairs``, from the command line to a file that a training reads."""

import json

import pytest

from sparton.cli.commands.pairs import main
from sparton.datasets.mixture import text_mixture

TEXTS = ["one two three four five six seven eight nine ten", "alpha beta gamma delta", "word"]


@pytest.fixture
def folder(tmp_path):
    for name, texts in (("one", TEXTS[:1]), ("two", TEXTS[1:])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"_id": str(i), "text": text}) for i, text in enumerate(texts)]
        (tmp_path / name / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_a_training_reads_what_is_written(folder, capsys):
    output = folder / "pairs.jsonl"
    main([str(folder / "one"), str(folder / "two/corpus.jsonl"), "--output", str(output)])
    said = capsys.readouterr().out
    assert "1 by spans, 2 by keywords; 1 texts are too short" in said
    data = text_mixture(str(output))
    examples = data.examples(range(len(data)), seed=0, num_negatives=0)
    assert len(examples) == 3
    assert [example.positive for example in examples].count(TEXTS[1]) == 1


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["nowhere"], FileNotFoundError, r"nowhere/corpus\.jsonl\[\.gz\] does not exist"),
        (["one", "--by", "words"], ValueError, r"--by \['words'\]: choose from spans, keywords"),
        (["one", "--per-text", "0"], ValueError, "--per-text 0"),
    ],
)
def test_what_is_wrong_is_named_by_its_flag(folder, words, error, message):
    output = folder / "pairs.jsonl"
    with pytest.raises(error, match=message):
        main([str(folder / words[0]), *words[1:], "--output", str(output)])
    assert not output.exists()


def test_a_file_that_is_there_is_kept(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("precious")
    with pytest.raises(FileExistsError, match="kept exists: remove it, or name another"):
        main([str(tmp_path), "--output", str(kept)])
    assert kept.read_text() == "precious"
