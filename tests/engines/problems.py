"""A small folder of encoded texts with known vectors, and what every engine makes of it.

``python -m tests.engines.problems`` writes the golden files anew.
"""

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import cast

import torch

from sparton.datasets.texts import TextList
from sparton.encoded import EncodedTexts, begin_folder, open_encoded
from sparton.encoded.facts import Settings
from sparton.encoded.shards import write_shard
from sparton.engines import ENGINES, Engine, engine_for, write_files
from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations, TokenVectors
from sparton.retrieval.storing import VectorDtype
from sparton.types import Kind

GOLDEN = Path(__file__).parent / "golden"
IDS = ['d/1 "a"', "zwei", "трия", "empty"]
SPARSE = torch.tensor(
    [[0, 1.8454583, 0, 0.1], [2.0**-100, 0, 3, 0], [0.35, 0, 0, 1000.123], [0, 0, 0, 0]]
)
TOKENS = [
    torch.tensor([[0.1, -0.2], [1, 0]]),
    torch.tensor([[2.0**-14, 0.33]]),
    torch.tensor([[-0.6, 0.8], [0.6, 0.8], [0, -1]]),
    torch.zeros(0, 2),
]
QUERY = Representations(
    SparseVectors.from_dense(torch.tensor([[0.5, 0.25, 0, 2.5]])),
    TokenVectors(torch.tensor([[0.6, 0.8], [1, 0]]), torch.tensor([0, 2])),
)
NAMES = ["cat", "##s", ".", "трия"]


def representations(kinds: tuple[Kind, ...] = ("sparse", "tokens")) -> Representations:
    """Of the four texts."""
    cu_seqlens = cu_seqlens_of(torch.tensor([len(each) for each in TOKENS]))
    vectors = TokenVectors(torch.cat(TOKENS).half(), cu_seqlens)
    sparse = SparseVectors.from_dense(SPARSE)
    return Representations(
        sparse if "sparse" in kinds else None, vectors if "tokens" in kinds else None
    )


def write_encoded(
    folder: Path, encoded: Representations, ids: list[str], rows_per_shard: int = 2
) -> EncodedTexts:
    """A complete folder of these representations."""
    kinds: tuple[Kind, ...] = tuple(k for k in ("sparse", "tokens") if k in encoded.kinds)
    settings = Settings(
        side="document",
        kinds=kinds,
        sparse_width=encoded.width,
        token_width=encoded.tokens.width if encoded.tokens else 0,
        dense_width=0,
        max_terms=None,
        vector_dtype=_dtype(encoded),
        pool_factor=1.0,
        length=8,
        prompt="",
        precision="fp32",
        model="digest",
        rows_per_shard=rows_per_shard,
    )
    facts = begin_folder(folder, settings, TextList(list(ids), list(ids)), "a model")
    for shard in facts.shards():
        write_shard(folder, shard, encoded.slice(shard.rows.start, shard.rows.stop))
    return open_encoded(folder)


def _dtype(encoded: Representations) -> VectorDtype:
    stored = torch.float16 if encoded.tokens is None else encoded.tokens.values.dtype
    return cast(VectorDtype, str(stored).removeprefix("torch."))


def engine_of(name: str, texts: EncodedTexts, **more: object) -> Engine:
    """An engine for all that it takes of texts with both halves."""
    kind = "sparse" if name == "milvus" else None
    return engine_for(name, texts.facts.settings, **({"kind": kind} | more))  # type: ignore[arg-type]


def made_files(name: str, folder: Path) -> dict[str, bytes]:
    """All files that a push writes, unpacked, and a query; without what has digests of files."""
    texts = write_encoded(folder / "docs", representations(), IDS)
    engine = engine_of(name, texts)
    write_files(engine, texts, folder / name, progress=False)
    files = {
        str(path.relative_to(folder / name)).removesuffix(".gz"): _unpacked(path)
        for path in sorted((folder / name).rglob("*"))
        if path.is_file() and path.name != "push.json"
    }
    (query,) = engine.query(QUERY, 3)
    return files | {"query.json": f"{json.dumps(query, indent=1)}\n".encode()}


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for each in ENGINES:
        with tempfile.TemporaryDirectory() as temporary:
            for path, content in made_files(each, Path(temporary)).items():
                (GOLDEN / each / path).parent.mkdir(parents=True, exist_ok=True)
                (GOLDEN / each / path).write_bytes(content)
