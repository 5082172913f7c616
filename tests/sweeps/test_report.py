"""The report of a sweep is made from what its cells left in their folders."""

import json
from pathlib import Path

import pytest

from sparton.sweeps import report
from sparton.sweeps.report import Published, read_records, write_report

PUBLISHED = Published(
    "a paper, on a card",
    [
        {"name": "Eager", "heads": ["eager"], "batch": 16, "steps": 2250, "hours": 0.02}
        | {"memory_gb": 5.25, "ndcg@10": 0.421},
        {"name": "Fused", "heads": ["sparton", "sparton_hybrid"], "batch": 32, "hours": 25},
        {"name": "Fused", "heads": ["sparton", "sparton_hybrid"], "batch": 512, "hours": 2},
        {"name": "Another model", "heads": [], "ndcg@10": 0.422},
    ],
)


def leave_cell(
    folder: Path,
    head: str,
    batch: int,
    state: str = "ok",
    rate: float = 1000.0,
    seed: int = 0,
    more: tuple[str, ...] = (),
    quality: float = 0.5,
    split: str = "test",
    tasks: tuple[str, ...] = ("scifact",),
) -> None:
    cell = folder / f"{head}-{batch}{''.join(more)}" / f"seed-{seed}"
    cell.mkdir(parents=True)
    overrides = sorted(["experiment=x", f"head={head}", f"batch={batch}", f"seed={seed}", *more])
    settings = {"head": head, "batch": batch, "gpus": 1, "seed": seed, "overrides": overrides}
    (cell / "cell.json").write_text(json.dumps(settings))
    status = {"run": cell.name, "state": state, "message": f"{state}, why"}
    (cell / "status.json").write_text(json.dumps(status))
    lines = [
        {"step": step, "examples_per_second": seen, "step_ms": 1e3 * batch / seen, "loss": 1.0}
        | {"memory_allocated_mib": memory}
        for step, seen, memory in ((50, 10, 4096), (100, rate, 2048), (150, rate + 2, 1024))
    ]
    (cell / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = {"ndcg@10": quality}
    each = [{"name": name, "metrics": metrics} for name in tasks]
    results = {"split": split, "mean": metrics, "tasks": each}
    (cell / "results.json").write_text(json.dumps(results))


@pytest.fixture
def sweep(tmp_path) -> Path:
    for batch in (16, 32, 64):
        leave_cell(tmp_path, "sparton", batch, rate=2000.0)
        leave_cell(tmp_path, "eager", batch, "ok" if batch < 32 else "oom")
    leave_cell(tmp_path, "tiled", 16, "killed")
    return tmp_path


def rows(folder: Path) -> list[list[str]]:
    lines = [line for line in (folder / "sweep.md").read_text().splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_speed_is_the_median_after_the_warm_up_and_memory_the_peak(sweep):
    [record] = [r for r in read_records(sweep) if r["head"] == "sparton" and r["batch"] == 16]
    assert record["examples_per_second"] == 2001
    assert record["peak_memory_mib"] == 4096
    assert record["tasks"] == {"scifact": {"ndcg@10": 0.5}}
    seconds = 50 * 16 * (1 / 10 + 1 / 2000 + 1 / 2002)
    assert record["hours"] == pytest.approx(seconds / 3600)


def test_every_cell_is_a_row_and_those_without_a_result_are_counted_and_explained(sweep, capsys):
    assert write_report(sweep) == 1
    header, _, *body = rows(sweep)
    assert header[:3] == ["head", "batch", "status"] and "seed" not in header
    assert [row[:3] for row in body] == [
        ["eager", "16", "ok"],
        ["eager", "32", "oom"],
        ["eager", "64", "oom"],
        ["sparton", "16", "ok"],
        ["sparton", "32", "ok"],
        ["sparton", "64", "ok"],
        ["tiled", "16", "killed"],
    ]
    assert body[1][3:-1] == [""] * (len(header) - 4)
    folders = [row[-1].strip("`") for row in body]
    assert header[-1] == "folder" and folders[1] == "eager-32/seed-0"
    for row, cell in zip(body, folders, strict=True):
        settings = json.loads((sweep / cell / "cell.json").read_text())
        assert [settings["head"], str(settings["batch"])] == row[:2]
    shown = capsys.readouterr().out
    assert "tiled, batch 16: killed: killed, why" in shown
    assert "folder" not in shown, "which few terminals are wide enough for"
    assert "Largest batch that fit: eager 16, sparton 64, tiled none." in shown
    lines = (sweep / "sweep.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == [row[2] for row in body]


def test_cells_without_a_result_are_told_apart_by_their_seed(sweep, capsys):
    write_report(sweep)
    assert "The same command goes on with the cells that have no result." in capsys.readouterr().out
    for seed in (1, 2):
        leave_cell(sweep, "tiled", 32, "failed", seed=seed)
    write_report(sweep)
    shown = capsys.readouterr().out
    assert all(f"tiled, batch 32, seed {seed}: failed: failed, why" in shown for seed in (1, 2))


def test_the_time_of_a_whole_training_and_published_figures_in_brackets(sweep):
    write_report(sweep, examples=1_000_000, published=PUBLISHED)
    header, _, *body = rows(sweep)
    table = {(row[0], row[1]): dict(zip(header, row)) for row in body}
    time = "time for 1,000,000 examples"
    assert table["eager", "16"]["examples/s"] == "1,001 (500)"
    assert table["eager", "16"][time] == f"~{1e6 / 1001 / 60:.3g} min (1.2 min)"
    assert table["eager", "16"]["peak GiB"] == "4.0 (5.2)"
    assert table["eager", "16"]["test NDCG@10"] == "0.500 (0.421)"
    assert table["sparton", "32"][time].endswith("(25 h)")
    assert table["sparton", "64"][time] == f"~{1e6 / 2001 / 60:.3g} min"
    text = (sweep / "sweep.md").read_text()
    assert "a paper, on a card. Memory is in GB there" in text
    assert f"sparton 64 ({1e6 / 2001 / 60:.3g} min), tiled none." in text


def test_published_rows_that_no_cell_stands_beside_are_rows_too(sweep):
    write_report(sweep, examples=1_000_000, published=PUBLISHED)
    header, _, *body = rows(sweep)
    assert len(body) == 9
    fused, other = (dict(zip(header, row)) for row in body[-2:])
    assert (fused["head"], fused["batch"], fused["status"]) == ("Fused", "512", "published")
    assert fused["time for 1,000,000 examples"] == "(2 h)" and fused["test NDCG@10"] == ""
    assert (other["head"], other["batch"], other["test NDCG@10"]) == (
        "Another model",
        "",
        "(0.422)",
    )
    assert "Another model" not in (sweep / "sweep.svg").read_text()


def test_the_time_of_a_whole_training_is_what_it_took(tmp_path):
    leave_cell(tmp_path, "sparton", 16)
    write_report(tmp_path, examples=150 * 16)
    header, _, [*row] = rows(tmp_path)
    time = dict(zip(header, row))["time for 2,400 examples"]
    assert time == f"{50 * 16 * (1 / 10 + 1 / 1000 + 1 / 1002) / 60:.3g} min"


def test_the_time_of_short_and_long_cells_is_in_units_of_which_there_is_one_at_least(tmp_path):
    """150 steps, of which 50 at ten examples a second."""
    for batch in (1, 16, 2048):
        leave_cell(tmp_path, "sparton", batch, rate=1e9)
    write_report(tmp_path)
    header, _, *body = rows(tmp_path)
    assert [row[header.index("time")] for row in body] == ["5 s", "1.33 min", "2.84 h"]


def test_settings_that_vary_set_rows_apart_and_those_of_a_row_file_do_not(tmp_path):
    for rate in ("1e-4", "1e-5"):
        leave_cell(tmp_path, "sparton", 16, more=(f"optimizer.lr={rate}", "+experiment/t=a"))
    leave_cell(tmp_path, "eager", 16, seed=1, more=("+experiment/t=b",))
    write_report(tmp_path)
    header, _, *body = rows(tmp_path)
    assert header[:4] == ["head", "batch", "seed", "settings"]
    assert [row[3] for row in body] == ["", "optimizer.lr=1e-4", "optimizer.lr=1e-5"]


def test_cells_that_differ_in_their_seed_alone_are_one_row(tmp_path):
    for seed, quality in ((2, 0.40), (0, 0.50), (1, 0.60)):
        leave_cell(tmp_path, "sparton", 16, rate=1000.0 + seed, seed=seed, quality=quality)
    leave_cell(tmp_path, "sparton", 32, seed=0)
    for seed, state in ((0, "ok"), (1, "ok"), (2, "oom"), (3, "failed")):
        leave_cell(tmp_path, "eager", 16, state, seed=seed, more=("optimizer.lr=1e-4",))
    assert write_report(tmp_path) == 1
    header, _, *body = rows(tmp_path)
    table = [dict(zip(header, row)) for row in body]
    assert [(row["head"], row["batch"], row["seed"], row["status"]) for row in table] == [
        ("eager", "16", "0, 1", "ok"),
        ("eager", "16", "2", "oom"),
        ("eager", "16", "3", "failed"),
        ("sparton", "16", "0, 1, 2", "ok"),
        ("sparton", "32", "0", "ok"),
    ]
    seeds = (f"`sparton-16/seed-{seed}`" for seed in range(3))
    assert table[3]["folder"] == ", ".join(seeds)
    assert table[3]["test NDCG@10"] == "0.500 ± 0.100" and table[3]["examples/s"] == "1,002 ± 1"
    assert (table[3]["steps"], table[3]["peak GiB"]) == ("150", "4.0")
    assert table[0]["test NDCG@10"] == "0.500" and table[4]["test NDCG@10"] == "0.500"
    text = (tmp_path / "sweep.md").read_text()
    assert "±: mean and standard deviation over the seeds." in text
    lines = (tmp_path / "sweep.jsonl").read_text().splitlines()
    assert len(lines) == 8, "every cell has its own record"


def test_cells_that_look_alike_and_were_asked_for_otherwise_are_rows_of_their_own(tmp_path):
    for row in ("a", "b"):
        leave_cell(tmp_path, "sparton", 16, more=(f"+experiment/t={row}",))
    write_report(tmp_path)
    assert [row[0] for row in rows(tmp_path)[2:]] == ["sparton", "sparton"]


def test_quality_is_said_to_be_of_dev_or_test_tasks_and_of_which(tmp_path):
    held_out = {"quality": 0.25, "split": "dev", "tasks": ("holdout",)}
    leave_cell(tmp_path, "eager", 16, tasks=("scifact", "fiqa"))
    leave_cell(tmp_path, "sparton", 16, tasks=("scifact", "fiqa"))
    leave_cell(tmp_path, "tiled", 16)
    leave_cell(tmp_path, "tiled", 32, **held_out)
    write_report(tmp_path)
    header, _, *body = rows(tmp_path)
    places = header.index("test NDCG@10"), header.index("dev NDCG@10")
    assert [[row[place] for place in places] for row in body] == [
        *[["0.500", ""]] * 3,
        ["", "0.250"],
    ]
    text = (tmp_path / "sweep.md").read_text()
    assert "\ntest NDCG@10: mean over scifact, fiqa or, of other cells, scifact.\n" in text
    assert "\ndev NDCG@10: mean over holdout.\n" in text
    leave_cell(tmp_path / "alone", "tiled", 32, **held_out)
    write_report(tmp_path / "alone")
    assert "test" not in (tmp_path / "alone/sweep.md").read_text().replace(str(tmp_path), "")


def test_one_seed_of_each_has_no_deviation(sweep):
    write_report(sweep)
    assert "±" not in (sweep / "sweep.md").read_text()


def test_the_figure_has_a_line_for_each_head_and_a_cross_where_memory_ran_out(sweep):
    write_report(sweep)
    figure = (sweep / "sweep.svg").read_text()
    assert figure.count("<!-- sparton -->") == 1
    for title in ("examples per second", "peak memory, GiB", "test NDCG@10", "eager", "tiled"):
        assert f"<!-- {title} -->" in figure


def test_a_folder_without_cells_has_no_report(tmp_path):
    with pytest.raises(ValueError, match="no cell has left anything there"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_damaged_files_of_a_cell_are_left_out_and_told(tmp_path, caplog):
    cell = tmp_path / "cell"
    cell.mkdir()
    assert report._read(cell / "results.json") == {}
    (cell / "results.json").write_text('{"split": "te')
    assert report._quality(cell / "results.json") == {}
    assert "results.json is left out of the report" in caplog.text
