"""Files that an engine reads, written shard by shard: what is there is complete.

FOLDER has ``push.json``, what makes the index, and ``documents/00042/0007.ndjson.gz``: the body of
a request, with texts of shard 42.
"""

import json
from pathlib import Path
from typing import NamedTuple

from sparton.arguments import ArgumentError
from sparton.encoded.collection import EncodedTexts
from sparton.engines.engine import Engine
from sparton.engines.lines import batches, check_ids, count_with_vectors, shards_with_ids
from sparton.reading import Fields, read_json
from sparton.retrieval.progress import progress_bar
from sparton.writing import replacing, replacing_folder, sweep_leftovers, writing

FACTS, DOCUMENTS = "push.json", "documents"


class Pushed(NamedTuple):
    """How many documents an engine got, and how many texts had no vectors and were left out."""

    documents: int
    empty: int


def write_files(
    engine: Engine, texts: EncodedTexts, output: str | Path, *, progress: bool = True
) -> Pushed:
    """Write what makes and fills an index; called again, it goes on where it was, and where texts
    were added since it writes files for these alone.

    Args:
        engine: from :func:`~sparton.engines.engine_for`.
        texts: documents.
        output: folder, which is made, or has the files of the same texts, or of the first of them.
        progress: show a bar on standard error.

    Raises:
        ArgumentError: the folder holds something else.
        ValueError: an id or a weight that the engine does not take.
        OSError: the disk is full or not writable.
    """
    output = Path(output)
    check_ids(engine, texts)
    _begin(output, engine.described(), texts)
    for name, content in engine.setup().items():
        with replacing(output / name) as fresh:
            fresh.write_text(content, encoding="utf-8")
    documents = 0
    with progress_bar("documents" if progress else None, len(texts)) as advance:
        for number, (ids, shard) in enumerate(shards_with_ids(texts)):
            folder = output / DOCUMENTS / f"{number:05d}"
            if not folder.is_dir():
                with replacing_folder(folder) as fresh:
                    for each, batch in enumerate(batches(engine, ids, shard)):
                        file = fresh / f"{each:04d}{engine.suffix}{'.gz' * engine.compressed}"
                        with writing(file, compress=engine.compressed) as sink:
                            sink.write(engine.body(batch.lines))
            documents += count_with_vectors(engine, shard)
            advance(len(ids))
    return Pushed(documents, len(texts) - documents)


def _begin(output: Path, described: dict, texts: EncodedTexts) -> None:
    """Make the folder, or see that the one that is there is of the same texts, or of the first."""
    path, shards = output / FACTS, [shard.content for shard in texts.facts.shards()]
    facts = described | {"deleted": texts.deleted.tolist(), "shards": shards}
    if path.is_file():
        found = Fields.of(read_json(path), str(path)).as_dict()
        first = found.get("shards") or []
        if found | {"shards": shards} != facts or first != shards[: len(first)]:
            raise ArgumentError(
                "{} holds files of other texts or of some that are deleted now, or for another "
                "index: choose another {output:name}, or delete it",
                output,
                output=output,
            )
        sweep_leftovers(output / DOCUMENTS)
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(
            "{} is there and was not written by a push: choose another {output:name}",
            output,
            output=output,
        )
    with replacing(path) as fresh:
        fresh.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
