"""Encoders as folders that Hugging Face and sentence-transformers load as they are."""

from pathlib import Path

from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.csr import AutoencoderEncoder
from sparton.models.folders import csr, files
from sparton.models.folders.csr import load_csr, save_csr
from sparton.models.folders.files import Lengths, module_kinds, writing_folder
from sparton.models.folders.router import load_router, router_lengths, save_router
from sparton.models.folders.splade import load_splade, save_splade
from sparton.models.heads import SpladeHead
from sparton.models.splade import SpladeEncoder

__all__ = ["Lengths", "encoder_lengths", "load_encoder", "save_encoder"]

ROUTER = ["Router"]


def save_encoder(
    encoder: SpladeEncoder | AsymmetricEncoder | AutoencoderEncoder,
    path: str | Path,
    *,
    query_length: int,
    document_length: int,
) -> None:
    """Write an encoder as a folder, all of it or nothing; see
    :func:`~sparton.models.folders.files.writing_folder`.

    Raises:
        OSError: the disk is full or not writable.
    """
    lengths = {"query_length": query_length, "document_length": document_length}
    with writing_folder(Path(path)) as fresh:
        if isinstance(encoder, AsymmetricEncoder):
            save_router(encoder, fresh, **lengths)
        elif isinstance(encoder, AutoencoderEncoder):
            save_csr(encoder, fresh, **lengths)
        else:
            save_splade(encoder, fresh, **lengths)


def load_encoder(
    name: str | Path,
    head: SpladeHead | None = None,
    *,
    revision: str | None = None,
    compile: bool = False,
    gradient_checkpointing: bool = False,
) -> SpladeEncoder | AsymmetricEncoder | AutoencoderEncoder:
    """Read an encoder of any kind, as its folder says; see
    :func:`~sparton.models.folders.splade.load_splade` and
    :func:`~sparton.models.folders.csr.load_csr`, which takes no head."""
    kinds = module_kinds(str(name), revision) or [""]
    if kinds[-1] == csr.KIND:
        return load_csr(
            name,
            revision=revision,
            compile=compile,
            gradient_checkpointing=gradient_checkpointing,
        )
    load = load_router if kinds == ROUTER else load_splade
    return load(
        name,
        head,
        revision=revision,
        compile=compile,
        gradient_checkpointing=gradient_checkpointing,
    )


def encoder_lengths(name: str | Path, revision: str | None = None) -> Lengths | None:
    """The lengths an encoder was trained with; None where the folder does not say."""
    if module_kinds(str(name), revision) == ROUTER:
        return router_lengths(name, revision)
    return files.encoder_lengths(name, revision)
