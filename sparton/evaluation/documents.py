"""Whether documents that were encoded before are those that a task would encode."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from sparton.digests import records_digest
from sparton.encoded import EncodedTexts
from sparton.retrieval.encoding import usual_pooling, usual_precision
from sparton.retrieval.storing import VectorDtype
from sparton.types import Kind, RetrievalTask, Tokenizer

if TYPE_CHECKING:
    from sparton.models.encoder import Encoder


def check_documents(
    documents: EncodedTexts,
    encoder: "Encoder",
    tokenizer: Tokenizer,
    task: RetrievalTask,
    *,
    kinds: Collection[Kind],
    max_terms: int | None,
    precision: str | None,
    vector_dtype: VectorDtype,
    pool_factor: float | None,
) -> None:
    """Refuse documents with which an evaluation would have other results than with its own.

    Args:
        documents: encoded before.
        encoder, tokenizer: that are evaluated.
        task: with the documents, and the form in which they are read.
        kinds: what is compared.
        max_terms, precision, vector_dtype, pool_factor: of the evaluation.

    Raises:
        ValueError: names the folder and what differs.
    """
    documents.check_model(encoder)
    made, form = documents.facts.settings, task.form
    length, prompt = form.of("document")
    wanted = {
        "side": "document",
        "length": getattr(tokenizer, "document_length", None) if length is None else length,
        "prompt": encoder.markup.document_prompt if prompt is None else prompt,
        "precision": precision or usual_precision(encoder),
    }
    if "sparse" in kinds:
        wanted["max_terms"] = max_terms
    if {"tokens", "dense"}.intersection(kinds):
        wanted["vector_dtype"] = vector_dtype
    if "tokens" in kinds:
        pooling = usual_pooling(encoder, "document", pool_factor)
        wanted["pool_factor"] = 1.0 if pooling is None else pooling.factor
    unlike = [
        f"{name}={getattr(made, name)} and not {value}"
        for name, value in wanted.items()
        if getattr(made, name) != value
    ]
    if missing := {*kinds} - {*made.kinds}:
        unlike.append(f"kinds={list(made.kinds)} without {', '.join(sorted(missing))}")
    if unlike:
        raise ValueError(
            f"{documents.folder} was encoded with {', '.join(unlike)}: evaluate as it was encoded, "
            "or encode again"
        )
    _check_texts(documents, task)


def _check_texts(documents: EncodedTexts, task: RetrievalTask) -> None:
    """Texts that were added one part after the other, or of which some were deleted, are known by
    their identifiers alone."""
    ids, texts = task.documents
    whole = len(documents.facts.parts) == 1 and len(documents) == documents.facts.rows
    if whole and records_digest(ids, texts) == documents.facts.parts[0].source:
        return
    if len(documents) != len(ids):
        raise ValueError(
            f"{documents.folder} holds {len(documents):,} documents, and the task {task.name} has "
            f"{len(ids):,}: encode those of the task"
        )
    for row, (stored, wanted) in enumerate(zip(documents.ids, ids, strict=True)):
        if stored != wanted:
            raise ValueError(
                f"{documents.folder} holds other documents than the task {task.name}: document "
                f"{row} is {stored!r} and not {wanted!r}; encode those of the task"
            )
    if whole:
        raise ValueError(
            f"{documents.folder} holds other texts than the task {task.name} has under the same "
            "ids: encode those of the task"
        )
