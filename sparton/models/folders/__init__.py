"""Encoders as folders that Hugging Face and sentence-transformers load as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from sparton.arguments import ArgumentError, Instance
from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.body import EncoderBody
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders import csr
from sparton.models.folders.card import write_card
from sparton.models.folders.colbert import load_colbert, save_colbert
from sparton.models.folders.csr import load_csr, save_csr
from sparton.models.folders.dense import load_dense, save_dense
from sparton.models.folders.files import (
    Lengths,
    length_of,
    module_kinds,
    own_lengths,
    usual_lengths,
)
from sparton.models.folders.joint import is_joint, load_joint, save_joint
from sparton.models.folders.router import load_router, router_lengths, save_router
from sparton.models.folders.splade import load_splade, save_splade
from sparton.models.folders.vectors import is_late_interaction, read_lengths, read_modules
from sparton.models.heads import SpladeHead
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.origin import origin_of_trained
from sparton.models.places import MODEL_FILES, check_place
from sparton.models.pooling import Pooling
from sparton.models.repository import Source
from sparton.models.splade import SpladeEncoder
from sparton.types import BodyOptions
from sparton.writing import replacing_folder

__all__ = [
    "Lengths",
    "check_saving",
    "encoder_lengths",
    "find_model",
    "load_encoder",
    "save_encoder",
    "usual_lengths",
]

ROUTER = ["Router"]
DENSE = ["Transformer", "Pooling"]  # with which a dense model begins


def save_encoder(
    encoder: Encoder, path: str | Path, *, query_length: int, document_length: int
) -> None:
    """Write an encoder as a folder, all of it or nothing; see
    ``sparton.writing.replacing_folder``.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: an encoder of a kind that has no folder, or see :func:`check_saving`.
    """
    check_saving(encoder)
    folder, lengths = Path(path), Lengths(query_length, document_length)
    with replacing_folder(folder) as fresh:
        match encoder:
            case SpladeEncoder():
                save_splade(encoder, fresh, lengths)
            case ColbertEncoder():
                save_colbert(encoder, fresh, lengths)
            case JointEncoder():
                save_joint(encoder, fresh, lengths)
            case AsymmetricEncoder():
                save_router(encoder, fresh, lengths)
            case AutoencoderEncoder():
                save_csr(encoder, fresh, lengths)
            case DenseEncoder():
                save_dense(encoder, fresh, lengths)
            case _:
                raise ValueError(f"a {type(encoder).__name__} cannot be saved as a folder")
        write_card(encoder, fresh, folder.name, lengths)


def check_saving(encoder: Encoder) -> None:
    """Refuse an encoder whose adapters are to be saved alone, where that cannot be.

    Raises:
        ValueError: names the reason and the remedy.
    """
    for body in encoder.modules():
        if isinstance(body, EncoderBody) and body.saves_adapters_alone:
            if isinstance(encoder, JointEncoder | AsymmetricEncoder):
                raise ArgumentError(
                    "{lora}: the folder of a {} holds two models, and adapters alone are saved of "
                    "one: save them merged",
                    type(encoder).__name__,
                    lora=body.lora and body.lora._asdict(),
                )
            body.need_base()


def load_encoder(
    name: str | Path | Source,
    head: object = None,
    **options: Unpack[BodyOptions],
) -> Encoder:
    """Read an encoder of any kind, as its folder says.

    Args:
        name: path or hub name, or a source that says more.
        head: how representations are computed, for what the folder leaves open; None for the usual
            way. Settings that a folder does not leave open must be the folder's.
        options: see :class:`~sparton.types.BodyOptions`.

    Raises:
        ValueError: the folder is damaged or of a kind that is not known, or ``head`` belongs to
            another kind of encoder or has other settings.
        OSError: there is no such folder, or files are missing.
    """
    source = Source.of(name)
    find_model(source)
    load, kind, usual = _loader(source)
    if head is not None and not isinstance(head, kind):
        raise ArgumentError(
            "{} holds a model with a {}, and a {} cannot stand in for that: {head} goes on from "
            "it. A model of another kind begins at its encoder alone, as a backbone; a bare one "
            "where it has no masked-LM head, as in ColBERT, CSR and dense models",
            source,
            kind.__name__,
            type(head).__name__,
            head=Instance(usual),
        )
    try:
        encoder = load(source, head, **options)
    except ArgumentError:
        raise
    except ValueError as error:
        if source.name in str(error):
            raise
        raise ValueError(f"{source}: {error}") from error
    encoder.origin = origin_of_trained(source)
    return encoder


def find_model(name: str | Path | Source) -> None:
    """Refuse what is neither a folder nor a model on the hub; no weights are read.

    Raises:
        OSError: says what would be right.
    """
    source = Source.of(name)
    check_place(source.name)
    if Path(source.name).is_dir() or any(source.file(x, cached=True) for x in MODEL_FILES):
        return
    source.check_reachable()
    if not any(source.file(file) for file in MODEL_FILES):
        raise FileNotFoundError(f"{source}: no such folder, and no such model on the hub")


def _loader(source: Source) -> tuple[Callable[..., Encoder], type, str]:
    """What reads a folder of this kind, the kind of head it has, and the usual one of that kind."""
    kinds = module_kinds(source) or [""]
    if kinds[-1] == csr.KIND:
        return load_csr, AutoencoderHead, "AutoencoderHead"
    if kinds[:2] == DENSE:
        return load_dense, Pooling, "Pooling"
    if is_late_interaction(kinds):
        return load_colbert, ColbertHead, "ColbertHead"
    if is_joint(source):
        return load_joint, JointHead, "JointHead"
    return load_router if kinds == ROUTER else load_splade, SpladeHead, "SpartonHead"


def encoder_lengths(name: str | Path | Source) -> Lengths | None:
    """The lengths an encoder was trained with; None where the folder does not say."""
    source = Source.of(name)
    if own := own_lengths(source):
        return own
    kinds = module_kinds(source)
    if kinds == ROUTER:
        return router_lengths(source)
    if is_late_interaction(kinds):
        return read_lengths(source, read_modules(source, ""))
    length = length_of(source, "")
    return None if length is None else Lengths(length, length)
