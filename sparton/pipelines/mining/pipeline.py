"""Mining from the examples to the file of them with negatives."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import numpy as np

from sparton.arguments import ArgumentError, refuse_ignored, refuse_other
from sparton.datasets.lengths import sample_rows
from sparton.datasets.lookup import Records
from sparton.datasets.texts import TextsByRow, TextTable
from sparton.digests import texts_digest
from sparton.evaluation import choose_device
from sparton.pipelines.identity import settings_identity
from sparton.pipelines.mining import parts
from sparton.pipelines.mining.examples import (
    Hashes,
    PositiveDocuments,
    Positives,
    distinct,
    hash_documents,
    read_items,
)
from sparton.pipelines.mining.miners import SLAB, BM25Miner, Miner, Setup, TrainedModel
from sparton.pipelines.mining.mining import Mining, Output, Short
from sparton.pipelines.mining.selection import Rule
from sparton.pipelines.mining.teachers import Teacher
from sparton.training.status import only_writer
from sparton.types import Side


def mine_hard_negatives(
    examples: Records,
    output: str | Path,
    *,
    collection: TextsByRow | None = None,
    miners: Sequence[Miner] = (BM25Miner(),),
    rule: Rule = Rule(),  # noqa: B008 (frozen)
    teachers: Sequence[Teacher] = (),
    short: Short = "keep",
    ids: bool = False,
    exclude_self: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> Mapping[str, int]:
    """Rank a collection for the query of each example, and keep what is wrong: a file of examples
    that training reads, with negatives and, of teachers, scores.

    Never a negative: a positive of the query anywhere in the examples, the query itself, and texts
    that differ from these in white space or case only. Negatives that the examples have are
    replaced.

    A model that is read from its folder warns where it cuts many of the queries.

    An interrupted run goes on when called again with the same arguments, from what it left in the
    folder ``<output>.parts``, which is gone where there is nothing to go on from; the output
    appears when it is complete, with ``<name>.mined.json`` beside it.

    Args:
        examples: as :func:`~sparton.datasets.sources.text_records` and its neighbours give them.
        output: ``.jsonl`` or ``.jsonl.gz``.
        collection: in which to mine, for examples that are written out as texts, a ``TextTable`` or
            ``TextList``; None for all their positives. Examples of ids bring their own.
        miners: each ranks the collection. Of several, each makes an example of its own, with its
            own negatives, out of every example.
        rule: which ranks become negatives.
        teachers: score positives and negatives, for distillation. The first of them counts for
            margins in the place of the miners. A record has a number for each document, or of
            several teachers a list, in which they have this order.
        short: what becomes of examples with too few negatives: "keep" what there is; "pad" repeats
            it, as training does, and drops examples without any; "drop"; "former" is as "keep", but
            those without any keep the negatives that they have, which no teacher scores.
        ids: write ids; otherwise texts.
        exclude_self: a document with the query's own id is no negative (ArguAna, Quora).
        device: where models run and vectors are compared, to which models that were loaded are
            moved; None for a GPU if there is one.
        progress: show bars on standard error.

    Returns:
        Counts: ``examples`` that were read; of those made of them, how many were ``written``, are
        ``short`` of negatives, of these with ``none``, and were ``dropped``; ``negatives``;
        ``candidates`` in the windows, those ``refused`` by the margin; ``teacher_pairs`` scored.

    Raises:
        ValueError: an argument that cannot be, an unfinished run with other settings, or no example
            with enough negatives.
        OSError: there is no such model, the disk is full or not writable, or another process writes
            the same.
    """
    output = Path(output)
    parts.check_output(output)
    refuse_other(get_args(Short), short=short)
    written = Output(short, ids, exclude_self)
    if not miners:
        raise ArgumentError("{miners}: name one", miners=[])
    if short == "former" and teachers:
        raise ArgumentError(
            "{short} keeps negatives that no teacher has scored: take another with teachers",
            short=short,
        )
    collection = _collection(examples, collection, written)
    on = choose_device(device)
    folder = parts.working_folder(output)
    with only_writer(folder), parts.kept_if_begun(folder):
        settings = _settings(examples, collection, miners, rule, teachers, written)
        parts.agree(output, settings)
        positives = Positives(examples)
        documents, hashes = _documents(
            examples, collection, positives, with_outside=rule.has_margin and not teachers
        )
        pairs = len(examples) * (1 + rule.negatives)  # the least there are
        sample = _sample(examples, documents[0])
        setup = Setup(documents, sample, pairs, folder, on, progress, encodings={})
        for model in (*miners, *teachers):
            if isinstance(model, TrainedModel):  # refused before another has encoded anything
                model.encoding(setup)
        loaded = [teacher.load(setup, f"teacher-{n}") for n, teacher in enumerate(teachers, 1)]
        rankers = [miner.build(setup, f"miner-{n}") for n, miner in enumerate(miners, 1)]
        mining = Mining(examples, positives, documents, hashes, rankers, loaded, rule, written)
        counts = parts.mine_parts(output, len(examples), mining.part, progress)
        parts.assemble(output, len(examples), settings, counts)
    return counts


def _collection(
    examples: Records, collection: TextsByRow | None, written: Output
) -> TextsByRow | None:
    """Where to mine; None for the positives of the examples."""
    if examples.texts is not None:
        refuse_ignored("mining for examples of ids", collection=collection)
        return examples.texts[1]
    for name in ("ids", "exclude_self"):
        if getattr(written, name):
            raise ArgumentError(f"{{{name}:name}} needs examples with ids", **{name: True})
    if collection is not None and not len(collection):
        raise ArgumentError("{collection:name} has no texts to mine in: give some", collection=None)
    return collection


def _sample(examples: Records, collection: TextsByRow) -> dict[Side, Sequence[str]]:
    """Some of the queries and of the collection, evenly among all."""
    rows = sample_rows(len(examples))
    queries = [item.query for row in rows for item in read_items(examples, row, row + 1)]
    documents = collection.take(sample_rows(len(collection))).texts
    return {"query": queries, "document": documents}


def _settings(
    examples: Records,
    collection: TextsByRow | None,
    miners: Sequence[Miner],
    rule: Rule,
    teachers: Sequence[Teacher],
    written: Output,
) -> dict[str, object]:
    """All that decides what is written, and nothing else."""
    content = [examples.table.folder.name]
    if isinstance(collection, TextTable):
        content.append(collection.table.folder.name)
    elif collection is not None:
        content.append(texts_digest(collection.take(range(len(collection))).texts))
    roles = {f"miner_{n}": settings_identity(miner) for n, miner in enumerate(miners, 1)}
    for number, teacher in enumerate(teachers, 1):
        roles[f"teacher_{number}"] = settings_identity(teacher)
        roles[f"teacher_{number}"].pop("batch", None)  # may differ when a run goes on
    return {
        **{f"{role}_{name}": value for role, of in roles.items() for name, value in of.items()},
        **asdict(rule),
        **written._asdict(),
        "examples": examples.name,
        "content of the files": content,
        "rows of a part and a slab": [parts.PART, SLAB],
    }


def _documents(
    examples: Records, collection: TextsByRow | None, positives: Positives, *, with_outside: bool
) -> tuple[list[TextsByRow], Hashes]:
    """The collection, and the hashes of all. Positives outside of it join it, to be scored and
    never to be mined, if a margin to the miner's score needs them."""
    if collection is None:
        own = PositiveDocuments(examples, positives.places[distinct(positives)])
        return [own], hash_documents(own)
    hashes = hash_documents(collection)
    if not with_outside:
        return [collection], hashes
    outside = PositiveDocuments(examples, positives.places[distinct(positives, hashes)])
    return [collection, outside], np.concatenate([hashes, hash_documents(outside)])
