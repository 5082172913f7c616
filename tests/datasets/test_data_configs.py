"""Every data configuration reads a small folder of the files that it names."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

from sparton.cli.errors import explain
from sparton.cli.schema import identity
from sparton.cli.targets import parameters
from sparton.datasets.demands import check
from sparton.datasets.loader import BatchStream, train_loader
from sparton.datasets.mixture import Mixture
from sparton.datasets.tokenization import PackedTokenizer
from tests.composing import composed
from tests.datasets.numbered import Numbers

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "data"
PAIR = ["query", "positive"]
SHAPES: dict[str, Any] = {
    "msmarco": {"query": "q", "pos": ["p"], "neg": ["n", "m"]},
    "wikianswers": {"set": ["a", "b", "c"]},
    "searchqa": {"query": "q", "pos": ["p", "r"]},
}
SCORED = {"query": "q", "pos": ["p"], "pos_scores": [2], "neg": ["n"], "neg_scores": [1]}


def build(name: str, data_dir: Path, **changes: Any) -> Mixture:
    config = OmegaConf.create({"data_dir": str(data_dir)})
    config.data = OmegaConf.merge(OmegaConf.load(CONFIGS / f"{name}.yaml"), changes)
    config.data.pop("defaults", None)  # which are for Hydra
    return instantiate(config.data)


def write_mistral_splade(folder: Path, record_of: Callable[[str, int], Any]) -> dict[str, str]:
    """Five records for each source, in the files that the configuration names."""
    files = OmegaConf.to_container(OmegaConf.load(CONFIGS / "mistral_splade.yaml").files)
    files = {
        name: entry["files"] if isinstance(entry, dict) else entry for name, entry in files.items()
    }
    for source, file in files.items():
        lines = "".join(json.dumps(record_of(source, row)) + "\n" for row in range(5))
        (folder / file).write_bytes(gzip.compress(lines.encode()))
    return files


def test_mistral_splade_from_a_local_folder(tmp_path: Path) -> None:
    files = write_mistral_splade(tmp_path, lambda source, _: SHAPES.get(source, PAIR))
    (tmp_path / files["squad"]).write_bytes(
        gzip.compress(b'["query", ""]\n["query", "positive"]\n')
    )
    mixture = build("mistral_splade", tmp_path, root=str(tmp_path))
    sizes = {share.source: share.examples for share in mixture.describe()}
    assert sizes == dict.fromkeys(files, 5) | {"squad": 1}
    examples = mixture.examples(range(len(mixture)), seed=0)
    assert all(example.query and example.positive for example in examples)


def test_the_part_that_is_drawn_makes_a_run_the_run_it_is() -> None:
    """A checkpoint of another part is refused."""
    whole, other = (
        identity(composed("data=mistral_splade", *overrides))
        for overrides in ((), ("data.files.s2orc.limit=5", "data.limit=7"))
    )
    changed = {key for key in whole if whole[key] != other[key]}
    assert changed == {"data.files.s2orc.limit", "data.limit"}


def numbered(source: str, row: int) -> Any:
    """A record of the shape of a source's file, with texts of its own."""
    query, positive = f"{source} {row}", f"w{row} of {source}"
    if source == "msmarco":
        return {"query": query, "pos": [positive], "neg": [f"w{n} no {row}" for n in range(50)]}
    if source == "wikianswers":
        return {"set": [query, positive, f"w{row} also"]}
    return {"query": query, "pos": [positive]} if source == "searchqa" else [query, positive]


@pytest.mark.parametrize("homogeneous", [False, True])
def test_mistral_splade_trains_with_seven_of_fifty_negatives(
    tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast, homogeneous: bool
) -> None:
    write_mistral_splade(tmp_path, numbered)
    mixture = build("mistral_splade", tmp_path, root=str(tmp_path), homogeneous=homogeneous)
    tokenizer = PackedTokenizer(word_tokenizer, 8, 16)
    settings = {"num_negatives": 7, "unique_positives": not homogeneous}
    names, seen = list(mixture.sources), set()
    for batch in train_loader(BatchStream(mixture, tokenizer, 4, **settings), 0, 60):
        for number, count in zip(batch.sources.tolist(), batch.counts.each.tolist()):
            seen.add(names[number])
            assert count == (8 if names[number] == "msmarco" else 1)
        assert batch.documents.num_sequences == batch.counts.each.sum()
        assert len(set(batch.sources.tolist())) == 1 or not homogeneous
    assert seen == set(names)
    drawn = {
        text for draw in range(200) for text in mixture.sources["msmarco"].example(0, draw, 7)[2]
    }
    assert len(drawn) == 50


def test_no_source_of_mistral_splade_is_more_than_a_quarter() -> None:
    """With the sizes of the table in the documentation, which has the shares as well."""
    text = (CONFIGS.parents[1] / "docs/data_sets.md").read_text()
    row = r"^\| `(\w+)` \|.*\| ([\d.]+) M \| ([\d,]+) \| ([\d.]+) % \|$"
    rows = re.findall(row, text, re.MULTILINE)
    config = OmegaConf.load(CONFIGS / "mistral_splade.yaml")
    assert [name for name, *_ in rows] == list(config.files)
    sources = {name: Numbers(name, int(taken.replace(",", ""))) for name, _, taken, _ in rows}
    whole = {name: Numbers(name, round(1e6 * float(records))) for name, records, *_ in rows}
    for entry, source in zip(config.files.values(), sources.values()):
        limit = entry.limit if "limit" in entry else whole[source.name].size
        assert source.size == min(limit, whole[source.name].size)
    shares = Mixture(sources, config.weights, alpha=config.alpha).describe()
    assert max(share.weight for share in shares) <= 0.25
    for other in (Mixture(whole), Mixture(whole, alpha=config.alpha)):
        assert max(share.weight for share in other.describe()) > 0.25
    by_size = {share.source: share.weight for share in Mixture(whole).describe()}
    largest = round(100 * (by_size["wikianswers"] + by_size["s2orc"]))
    assert f"WikiAnswers and S2ORC would be {largest} %" in text
    assert [f"{100 * share.weight:.1f}" for share in shares] == [said for *_, said in rows]


def test_text_files_with_renamed_columns(write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    write_jsonl([{"n": "x", "frage": "q", "positive": "p"}], "mine.jsonl")
    changes = {
        "files": {"mine": "mine.jsonl"},
        "columns": {"frage": "query"},
        "root": str(tmp_path),
    }
    (example,) = build("text_files", tmp_path, **changes).examples([0], seed=0)
    assert example[:2] == ("q", "p")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_columns_are_a_setting_wherever_they_can_be_renamed(path: Path) -> None:
    config = OmegaConf.load(path)
    places = [config, *config.get("sources", {}).values()]
    for place in places:
        takes = "columns" in parameters(place._target_, "data")
        assert ("columns" in place) == takes, place._target_


def test_the_shelf_has_a_row_for_every_configuration() -> None:
    text = (CONFIGS.parents[1] / "docs/guides/data.md").read_text()
    rows = dict(re.findall(r"^\| `data=(\w+)` \|.*\| (.+) \| .+ \|$", text, re.MULTILINE))
    assert set(rows) == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert rows["quickstart"] == "random"
    check(build("quickstart", Path()), 2, needs_negatives=True)


def test_triples(write_lines: Callable[..., str], tmp_path: Path) -> None:
    write_lines(["q\tp\tn"], "triples/triples.tsv")
    mixture = build("triples", tmp_path)
    check(mixture, 1, needs_negatives=True)
    assert mixture.examples([0], seed=0, num_negatives=1)[0][:3] == ("q", "p", ("n",))


def test_msmarco_ids_from_gzipped_files(tmp_path: Path) -> None:
    (tmp_path / "msmarco").mkdir()
    files = {"qidpidtriples.train.full.2": "1\t10\t11", "queries.train": "1\tq"}
    for name, line in {**files, "collection": "10\tp\n11\tn"}.items():
        (tmp_path / "msmarco" / f"{name}.tsv.gz").write_bytes(gzip.compress(line.encode() + b"\n"))
    mixture = build("msmarco_ids", tmp_path)
    assert mixture.examples([0], seed=0, num_negatives=1)[0][:3] == ("q", "p", ("n",))


def test_msmarco_ids(write_lines: Callable[..., str], tmp_path: Path) -> None:
    write_lines(["1\t10\t11"], "msmarco/qidpidtriples.train.full.2.tsv")
    write_lines(["1\tq"], "msmarco/queries.train.tsv")
    write_lines(["10\tp", "11\tn"], "msmarco/collection.tsv")
    mixture = build("msmarco_ids", tmp_path)
    assert mixture.examples([0], seed=0, num_negatives=1)[0][:3] == ("q", "p", ("n",))


def test_distillation(write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    write_jsonl([SCORED], "distillation/part.jsonl.gz")
    (example,) = build("distillation", tmp_path).examples([0], seed=0, num_negatives=1)
    assert example.teacher_scores == (2.0, 1.0)


def test_distillation_by_id(tmp_path: Path) -> None:
    tables = {
        "train": {"query_id": [7], "document_ids": [[3, 5]], "scores": [[1.0, 2.0]]},
        "queries": {"query_id": [7], "text": ["seven"]},
        "documents": {"document_id": [5, 3], "text": ["five", "three"]},
    }
    for name, columns in tables.items():
        folder = tmp_path / "ms-marco-en-bge" / name
        folder.mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / "0000.parquet")
    (example,) = build("distillation_ids", tmp_path).examples([0], seed=0, num_negatives=1)
    assert example == ("seven", "five", ("three",), (2.0, 1.0))


@pytest.mark.parametrize(
    ("name", "folders"),
    [("beir_folder", ["scifact"]), ("squad_acl", ["squad", "acl_title_abstract"])],
)
def test_beir_folders(
    write_beir: Callable[..., str], tmp_path: Path, name: str, folders: list[str]
):
    record = [{"_id": "1", "text": "words"}]
    made = Path(write_beir(record, record, ["1\t1\t1"], split="train"))
    for folder in folders:
        (tmp_path / folder).symlink_to(made)
    assert len(build(name, tmp_path)) == len(folders)


def test_the_remedy_of_a_malformed_record_works_for_every_kind_of_source(
    write_beir: Callable[..., str], write_lines: Callable[..., str], tmp_path: Path
) -> None:
    record = [{"_id": "1", "text": "words"}]
    made = Path(write_beir(record, record, ["1\t1\t1", "1\t9\t1"], split="train"))
    (tmp_path / "scifact").symlink_to(made)
    write_lines(["1\t10\t11", "1\t10\t12"], "msmarco/qidpidtriples.train.full.2.tsv")
    write_lines(["1\tq"], "msmarco/queries.train.tsv")
    write_lines(["10\tp", "11\tn"], "msmarco/collection.tsv")
    write_lines(["q\tp\tn", "q"], "triples/triples.tsv")
    for name in ("beir_folder", "msmarco_ids", "triples"):
        with pytest.raises(
            InstantiationException, match=r"line \d.* set on_error='skip'"
        ) as caught:
            build(name, tmp_path)
        assert "set data.on_error=skip to leave" in explain(caught.value)
        assert len(build(name, tmp_path, on_error="skip")) == 1


def test_every_configuration_of_files_has_the_keys_that_messages_name() -> None:
    for path in CONFIGS.glob("*.yaml"):
        config = OmegaConf.load(path)
        assert ("on_error" in config) == (path.stem != "quickstart"), path.stem
        if config._target_.endswith("text_mixture"):
            assert "negatives" in config, path.stem


@pytest.mark.parametrize("name", ["text_files", "msmarco_ids"])
def test_records_without_negatives_can_be_left_out(
    write_lines: Callable[..., str], tmp_path: Path, name: str
) -> None:
    write_lines(["1\t10\t11", "1\t10"], "msmarco/qidpidtriples.train.full.2.tsv")
    write_lines(["1\tq"], "msmarco/queries.train.tsv")
    write_lines(["10\tp", "11\tn"], "msmarco/collection.tsv")
    write_lines(["q\tp\tn", "q\tp"], "mine.tsv")
    mine = {"files": "mine.tsv", "root": str(tmp_path)}
    changes: dict[str, Any] = mine if name == "text_files" else {}
    if name == "msmarco_ids":
        changes = {"sources": {"msmarco": {"columns": None}}}
    mixture = build(name, tmp_path, **changes)
    check(mixture, 1)
    with pytest.raises(
        ValueError, match=r"1 of the 2 .* line 2: .* negatives='required' of .* on_error='skip'"
    ):
        check(mixture, 1, needs_negatives=True)
    strict = {"sources": {"msmarco": {"columns": None, "negatives": "required"}}}
    changes = changes | ({"negatives": "required"} if name == "text_files" else strict)
    mixture = build(name, tmp_path, on_error="skip", **changes)
    check(mixture, 1, needs_negatives=True)
    assert len(mixture) == 1
