"""Encoders as folders that Hugging Face and sentence-transformers load as they are."""

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders import csr, files
from sparton.models.folders.colbert import colbert_lengths, load_colbert, save_colbert
from sparton.models.folders.csr import load_csr, save_csr
from sparton.models.folders.dense import load_dense, save_dense
from sparton.models.folders.files import Lengths, check_settings, module_kinds, writing_folder
from sparton.models.folders.joint import is_joint, load_joint, save_joint
from sparton.models.folders.router import load_router, router_lengths, save_router
from sparton.models.folders.splade import load_splade, save_splade
from sparton.models.folders.vectors import is_late_interaction
from sparton.models.heads import SpladeHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.pooling import Pooling
from sparton.models.splade import SpladeEncoder

__all__ = ["Lengths", "encoder_lengths", "load_encoder", "save_encoder"]

Head = TypeVar("Head")

ROUTER = ["Router"]
DENSE = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def save_encoder(
    encoder: Encoder, path: str | Path, *, query_length: int, document_length: int
) -> None:
    """Write an encoder as a folder, all of it or nothing; see
    :func:`~sparton.models.folders.files.writing_folder`.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: an encoder of a kind that has no folder.
    """
    lengths = {"query_length": query_length, "document_length": document_length}
    with writing_folder(Path(path)) as fresh:
        match encoder:
            case SpladeEncoder():
                save_splade(encoder, fresh, **lengths)
            case ColbertEncoder():
                save_colbert(encoder, fresh, **lengths)
            case JointEncoder():
                save_joint(encoder, fresh, **lengths)
            case AsymmetricEncoder():
                save_router(encoder, fresh, **lengths)
            case AutoencoderEncoder():
                save_csr(encoder, fresh, **lengths)
            case DenseEncoder():
                save_dense(encoder, fresh, **lengths)
            case _:
                raise ValueError(f"a {type(encoder).__name__} cannot be saved as a folder")


def load_encoder(
    name: str | Path,
    head: object = None,
    *,
    revision: str | None = None,
    compile: bool = False,
    gradient_checkpointing: bool = False,
) -> Encoder:
    """Read an encoder of any kind, as its folder says.

    Args:
        name: path or hub name.
        head: how representations are computed, for what the folder leaves open; None for the usual
            way. The folders of autoencoders and dense encoders leave nothing open: theirs count.
        revision: branch, tag or commit on the hub.
        compile, gradient_checkpointing: see :class:`~sparton.models.body.EncoderBody`.

    Raises:
        ValueError: the folder is damaged or of a kind that is not known, or ``head`` belongs to
            another kind of encoder or has other settings.
        OSError: files are missing.
    """
    kinds = module_kinds(str(name), revision) or [""]
    options = {"compile": compile, "gradient_checkpointing": gradient_checkpointing}
    if kinds[-1] == csr.KIND:
        given = _fitting(AutoencoderHead, head, name)
        autoencoder = load_csr(name, revision=revision, **options)
        _check_settings(name, given, autoencoder.head, csr.SETTINGS)
        return autoencoder
    if kinds in DENSE:
        pooling = _fitting(Pooling, head, name)
        dense = load_dense(name, revision=revision, **options)
        _check_settings(name, pooling, dense.pooling, Pooling._fields)
        return dense
    if is_late_interaction(kinds):
        return load_colbert(name, _fitting(ColbertHead, head, name), revision=revision, **options)
    if is_joint(name, revision):
        return load_joint(name, _fitting(JointHead, head, name), revision=revision, **options)
    load = load_router if kinds == ROUTER else load_splade
    return load(name, _fitting(SpladeHead, head, name), revision=revision, **options)


def encoder_lengths(name: str | Path, revision: str | None = None) -> Lengths | None:
    """The lengths an encoder was trained with; None where the folder does not say."""
    kinds = module_kinds(str(name), revision)
    if kinds == ROUTER:
        return router_lengths(name, revision)
    if is_late_interaction(kinds):
        return colbert_lengths(name, revision)
    return files.encoder_lengths(name, revision)


def _fitting(kind: type[Head], head: object, name: str | Path) -> Head | None:
    if head is None or isinstance(head, kind):
        return head
    raise ValueError(
        f"{name} holds an encoder with a {kind.__name__}, which a {type(head).__name__} cannot "
        "stand in for; give no head, or one of that kind"
    )


def _check_settings(name: str | Path, given: object, found: object, keys: Collection[str]) -> None:
    if given is not None:
        ours, theirs = ({key: getattr(each, key) for key in keys} for each in (given, found))
        check_settings(str(name), ours, theirs)
