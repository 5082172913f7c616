"""The table of the zero-shot study: means, spreads, and which figures meet the bars."""

from tables import zero_shot
from tables.records import TABLES


def record(cranfield: float, medline: float, **more: float) -> dict:
    percent = {"cranfield": cranfield, "medline": medline}
    tasks = {
        task: {"metrics": {"ndcg@10": percent.get(task, 80) / 100}} for task in zero_shot.TASKS
    }
    environment = {"hardware": {"gpu": "A"}, "packages": {}, "git": None}
    return {"tasks": tasks, "environment": environment, **more}


def rows_of(groups: dict, monkeypatch) -> dict[str, list[str]]:
    monkeypatch.setattr(zero_shot, "by_label", lambda _: groups)
    lines = [line.strip("|\n").split(" | ") for line in TABLES["zero_shot"]().splitlines()]
    return {line[0].strip(): [cell.strip(" |") for cell in line[1:]] for line in lines}


def test_a_figure_is_bold_where_it_meets_its_bar(monkeypatch):
    groups = {
        "bm25": [record(34, 66)],
        "bm25-lucene": [record(36, 68)],
        "parent": [record(37, 78)],
        "splade-best": [record(36, 74, seconds=100), record(37, 76, seconds=120)],
        "colbert-best": [record(38, 78)],
    }
    rows = rows_of(groups, monkeypatch)
    # 36.5 exceeds BM25's 36 and 95 % of 37; the mean of 36.5 and 75, 55.75, not the parent's 57.5.
    assert rows["splade, best"][4:8] == ["**36.5 ± 0.7**", "**75.0 ± 1.4**", "55.8", "67.9"]
    assert rows["splade, best"][9] == "110"
    assert rows["colbert, best"][4:7] == ["**38.0**", "**78.0**", "**58.0**"]
    groups["splade-best"] = [record(36, 74)]
    # 36 is no more than BM25's, 74 less than 95 % of 78.
    assert rows_of(groups, monkeypatch)["splade, best"][4:7] == ["36.0", "74.0", "55.0"]


def test_without_records_the_page_says_so(monkeypatch):
    monkeypatch.setattr(zero_shot, "by_label", lambda _: {})
    assert TABLES["zero_shot"]() == zero_shot.NOT_MEASURED
