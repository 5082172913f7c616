"""What a training leaves and says at its end."""

import json

from sparton.cli.ending import draw, say_the_end


def end(folder, capsys, kinds=("sparse",), **options) -> str:
    say_the_end(folder, kinds, **{"public": False, **options})
    return capsys.readouterr().out


def make_run(folder) -> None:
    (folder / "model").mkdir(parents=True)
    (folder / "results.json").write_text("{}")
    line = {"step": 1, "loss": 2.0, "examples_per_second": 3.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_it_names_the_files_and_what_to_do_with_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "[odd] name"
    make_run(run)
    said = end(run, capsys)
    for name in ("model", "results.json", "run.png"):
        assert f" runs/[odd] name/{name}\n" in said
    assert "sparton evaluate model=runs/[odd] name/model evaluation=" in said
    assert "sparton push runs/[odd] name/model USER/NAME" in said
    assert "sparton compare runs/[odd] name OTHER_RUN" in said
    assert 'sparton.load("runs/[odd] name/model")' in said
    assert 'model.explain("a text")' in said
    assert 'model.explain("a question", "a text")' in end(run, capsys, kinds=("tokens",))


def test_what_is_evaluated_next_is_of_the_users_own_unless_the_data_were_public(tmp_path, capsys):
    make_run(tmp_path)
    folder = (
        f"sparton evaluate model={tmp_path}/model evaluation=beir_folder evaluation.path=FOLDER "
    )
    suite = f"sparton evaluate model={tmp_path}/model evaluation=small_beir "
    for public in (False, True):
        said = end(tmp_path, capsys, public=public)
        assert (folder in said, suite in said) == (not public, public)


def test_a_run_without_results_or_model_says_less(tmp_path, capsys):
    make_run(tmp_path)
    (tmp_path / "results.json").unlink()
    said = end(tmp_path, capsys)
    assert "results.json" not in said and "sparton compare" not in said
    (tmp_path / "model").rmdir()
    said = end(tmp_path, capsys)
    assert "next" not in said and said.startswith("picture ")


def test_a_cell_of_a_sweep_names_its_files_alone(tmp_path, capsys):
    make_run(tmp_path)
    assert "What to do next" in end(tmp_path, capsys)
    (tmp_path / "cell.json").write_text("{}")
    said = end(tmp_path, capsys)
    assert f"{tmp_path}/model\n" in said and "next" not in said and "sparton" not in said


def test_a_model_with_a_head_of_ones_own_is_loaded_with_it(tmp_path, capsys):
    make_run(tmp_path)
    said = end(tmp_path, capsys, own_head="my_heads.Halved")
    assert "  import my_heads\n" in said
    assert f'load_encoder("{tmp_path}/model", head=my_heads.Halved())' in said
    assert f"sparton compare {tmp_path} OTHER_RUN" in said
    for refused in ("sparton evaluate", "sparton encode", "sparton push", "sparton.load"):
        assert refused not in said and refused in end(tmp_path, capsys)


def test_a_picture_that_cannot_be_drawn_spoils_nothing(tmp_path, caplog, capsys, monkeypatch):
    make_run(tmp_path)

    def fail(_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("sparton.cli.ending.draw_run", fail)
    assert draw(tmp_path) is None
    assert "no picture of this run: no fonts" in caplog.text
    said = end(tmp_path, capsys)
    assert "run.png" not in said and "sparton evaluate" in said
