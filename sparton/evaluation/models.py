"""Trained models as users name them: a folder or a hub name, and a device."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch

from sparton.arguments import ArgumentError, refuse_below

if TYPE_CHECKING:
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.models.encoder import Encoder
    from sparton.models.repository import ReadingOptions
    from sparton.types import RetrievalTask, Tokenizer


def choose_device(name: str | None) -> torch.device:
    """The device of that name; for None a GPU if there is one.

    Raises:
        ValueError: no such device, or PyTorch cannot use it.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name} cannot be used ({error}): try device=cpu") from error
    return device


def check_model(model: Path | str) -> None:
    """Refuse what is neither a folder of a model nor a name on the hub, before anything is read.

    Raises:
        FileNotFoundError: names what would be right.
    """
    from sparton.models.places import check_place

    check_place(model)


def load_retriever(
    model: "Path | str | Encoder",
    query_length: int | None = None,
    document_length: int | None = None,
    *,
    device: torch.device | str = "cpu",
    width: int | None = None,
    **reading: "Unpack[ReadingOptions]",
) -> "tuple[Encoder, PackedTokenizer]":
    """An encoder on its device and its tokenizer, ready for
    :func:`~sparton.evaluation.tasks.evaluate_encoder`.

    Args:
        model: a folder of ``train.py``, a sentence-transformers or masked-LM folder, a name on the
            Hugging Face hub, or an encoder that was loaded before.
        query_length, document_length: tokens at which texts are cut; None takes what the model's
            folder says, or 64 and 256 if it is silent or there is none, and at most the model's
            positions.
        device: where to put the encoder.
        width: how many of the first components of token vectors to take; None for all.
        reading: see :class:`~sparton.models.repository.Source`.

    Raises:
        OSError, ValueError: from :func:`sparton.models.folders.load_encoder`.
        ValueError: a length or a ``width`` that the model cannot have.
    """
    from sparton.models.encoder import Encoder
    from sparton.models.folders import encoder_lengths, load_encoder, usual_lengths
    from sparton.models.repository import Source

    lengths_given = {"query_length": query_length, "document_length": document_length}
    for name, length in lengths_given.items():
        if length is not None and type(length) is not int:
            raise ArgumentError(f"{{{name}}} must be a whole number", **{name: length})
    refuse_below(1, **lengths_given)
    if isinstance(model, Encoder):
        encoder, own = model, None
    else:
        source = Source(str(model), **reading)
        encoder, own = load_encoder(source), encoder_lengths(source)
    if width is not None:
        encoder.narrow(width)
    encoder.to(device)
    lengths = usual_lengths(own, encoder.max_length)
    tokenizer = packed_tokenizer(
        encoder, query_length or lengths.query, document_length or lengths.document
    )
    return encoder, tokenizer


def packed_tokenizer(
    encoder: "Encoder", query_length: int, document_length: int
) -> "PackedTokenizer":
    """What makes token batches of the texts of an encoder, cut at these lengths.

    Raises:
        ValueError: from :class:`~sparton.datasets.tokenization.PackedTokenizer`.
    """
    from sparton.datasets.tokenization import PackedTokenizer

    return PackedTokenizer(
        encoder.tokenizer,
        query_length,
        document_length,
        max_length=encoder.max_length,
        markup=encoder.markup,
        query_tokenizer=encoder.query_tokenizer,
    )


def training_tokenizer(
    encoder: "Encoder", dev_tasks: "Sequence[RetrievalTask]", **lengths: int
) -> "Tokenizer":
    """Texts to token batches, or to the rows of embeddings that were made before.

    Raises:
        ValueError: embeddings made at other lengths, or that lack a text of a dev task.
    """
    rows = encoder.text_rows
    if rows is None:
        return packed_tokenizer(encoder, **lengths)
    rows.check_lengths(**lengths)
    for task in dev_tasks:  # what the cache lacks shows before the training
        rows.queries(task.queries.texts, task.form)
        rows.documents(task.documents.texts, task.form)
    return rows
