"""Small files of every format, a tokenizer built on the spot, and a cache of each test's own."""

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(200))]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """``write_jsonl(records, name)`` writes a file, gzipped if the name says so."""

    def write(records: Iterable[Any], name: str = "data.jsonl") -> str:
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
        return str(path)

    return write


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., str]:
    """``write_lines(lines, name)`` writes raw bytes or texts, one per line."""

    def write(lines: Sequence[str | bytes], name: str = "data.tsv") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines)
        )
        return str(path)

    return write


@pytest.fixture
def write_beir(
    write_jsonl: Callable[..., str], write_lines: Callable[..., str], tmp_path: Path
) -> Callable[..., str]:
    """``write_beir(documents, queries, qrels)`` writes a BEIR folder and gives its path."""

    def write(
        documents: Iterable[Any],
        queries: Iterable[Any],
        qrels: Sequence[str],
        split: str = "test",
        ending: str = "",
    ) -> str:
        write_jsonl(documents, f"beir/corpus.jsonl{ending}")
        write_jsonl(queries, f"beir/queries.jsonl{ending}")
        write_lines(["query-id\tcorpus-id\tscore", *qrels], f"beir/qrels/{split}.tsv")
        return str(tmp_path / "beir")

    return write


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w199 are tokens 4 to 203; the rest is [UNK]; [CLS] and [SEP] around."""
    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
