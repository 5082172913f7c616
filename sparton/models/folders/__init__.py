"""Encoders as folders that Hugging Face and sentence-transformers load as they are."""

from pathlib import Path

from sparton.models.folders.files import Lengths, encoder_lengths, writing_folder
from sparton.models.folders.splade import load_splade
from sparton.models.folders.splade import save_splade as _save_splade
from sparton.models.splade import SpladeEncoder

__all__ = ["Lengths", "encoder_lengths", "load_encoder", "save_encoder"]


def save_encoder(
    encoder: SpladeEncoder, path: str | Path, *, query_length: int, document_length: int
) -> None:
    """Write an encoder as a folder, all of it or nothing; see
    :func:`~sparton.models.folders.files.writing_folder`.

    Raises:
        OSError: the disk is full or not writable.
    """
    with writing_folder(Path(path)) as fresh:
        _save_splade(encoder, fresh, query_length=query_length, document_length=document_length)


load_encoder = load_splade
