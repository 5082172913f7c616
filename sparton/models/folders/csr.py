"""Encoders with a sparse autoencoder as folders that sentence-transformers loads as they are.

A dense encoder's folder (:mod:`sparton.models.folders.dense`) with one module more, which makes a
``SparseEncoder`` of it. D width of the embeddings, H latents.
"""

from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparton.models.autoencoder import SparseAutoencoder
from sparton.models.cached import CachedBackbone
from sparton.models.csr import AutoencoderEncoder, AutoencoderHead
from sparton.models.dense import DenseEncoder
from sparton.models.folders.dense import dense_modules, load_dense, read_dense, write_dense
from sparton.models.folders.files import (
    DESCRIPTION,
    WEIGHTS,
    Lengths,
    check_active_dims,
    check_settings,
    describe_model,
    list_modules,
    read_module,
    read_parts,
    read_similarity,
    read_weights,
    write_json,
)
from sparton.models.repository import Source
from sparton.reading import Fields
from sparton.types import BodyOptions

KIND = "SparseAutoEncoder"
# By their names there.
SIZES = {"hidden_dim": int, "k": int, "k_aux": int, "normalize": bool, "dead_threshold": int}
# Of a head; what the others say matters in training alone.
SETTINGS = (
    "hidden_dim", "k", "normalize",
    "pooling", "normalize_pooled", "query_prompt", "document_prompt", "include_prompt",
)  # fmt: skip
# Ours and theirs. The matrix has a second name there, as it is the decoder's too.
NAMES = {
    "encoder.weight": "decoder.linear.weight",
    "latent_bias": "latent_bias",
    "pre_bias": "pre_bias",
    "passes_since_active": "stats_last_nonzero",
}


def save_csr(encoder: AutoencoderEncoder, path: Path, lengths: Lengths) -> None:
    """Fill the folder ``path``; for cached embeddings with the model that made them."""
    head = encoder.head
    backbone = encoder.backbone
    body = load_dense(backbone.source).body if isinstance(backbone, CachedBackbone) else backbone
    dense = DenseEncoder(body, head.pool, encoder.markup)
    body.save(path)
    write_dense(dense, path, lengths)
    modules = dense_modules(head.pool)
    folder = f"{len(modules)}_{KIND}"
    modules[folder] = f"sentence_transformers.sparse_encoder.models.{KIND}"
    sizes = {key: getattr(head, key) for key in SIZES}
    files = {
        "modules.json": list_modules(modules),
        DESCRIPTION: describe_model("SparseEncoder", encoder.similarity, encoder.markup),
        f"{folder}/config.json": sizes | {"input_dim": encoder.autoencoder.input_dim},
    }
    write_json(path, files)
    state = encoder.autoencoder.state_dict()
    tensors = {NAMES[name]: value.contiguous() for name, value in state.items()}
    save_file(tensors, path / folder / WEIGHTS, metadata={"format": "pt"})


def load_csr(
    source: Source, head: AutoencoderHead | None, **options: Unpack[BodyOptions]
) -> AutoencoderEncoder:
    """Read an encoder from a folder of :func:`save_csr` or of sentence-transformers.

    Args:
        head: settings, which must be those of the folder but for what matters in training alone;
            when None the folder's, and nothing is frozen.

    Raises:
        ValueError: the folder composes other modules, has other settings than ``head`` or a
            similarity other than dot product and cosine, or weights are damaged or do not fit.
        OSError: files are missing.
    """
    *parts, last = read_parts(source) or []
    similarity = read_similarity(source, "dot")
    dense = read_dense(source, parts, **options)
    folder = last.path
    sizes = read_module(source, f"{folder}/config.json")
    found = _read_head(sizes, dense)
    check_active_dims(source, found.k)
    if head is not None:
        given, stored = ({key: getattr(each, key) for key in SETTINGS} for each in (head, found))
        check_settings(source, given, stored)
    missing = f"with the autoencoder's weights; copy {folder}/{WEIGHTS} from the complete model"
    weights, place = read_weights(source, folder, missing), f"{source}/{folder}/{WEIGHTS}"
    # Before anything of that size is made.
    _stored(weights, "latent_bias", torch.Size([found.hidden_dim]), place)
    encoder = AutoencoderEncoder(dense.body, head or found)
    encoder.similarity = similarity
    _fill(encoder.autoencoder, weights, place)
    return encoder


def _read_head(sizes: Fields, dense: DenseEncoder) -> AutoencoderHead:
    """The settings of an autoencoder behind a dense encoder."""
    given: dict[str, Any] = {key: sizes.get(key, kind) for key, kind in SIZES.items()}
    try:
        return AutoencoderHead(
            **{key: value for key, value in given.items() if value is not None},
            pooling=dense.pooling.mode,
            normalize_pooled=dense.pooling.normalize,
            query_prompt=dense.markup.query_prompt,
            document_prompt=dense.markup.document_prompt,
            include_prompt=dense.markup.include_prompt,
            freeze_backbone=False,
        )
    except ValueError as error:
        raise ValueError(f"{sizes.place}: {error}") from None


@torch.no_grad()
def _fill(autoencoder: SparseAutoencoder, tensors: dict[str, Tensor], place: str) -> None:
    """Copy weights of either library into an autoencoder."""
    if "encoder.weight" in tensors:
        tensors.setdefault(NAMES["encoder.weight"], tensors["encoder.weight"])
    for own, value in autoencoder.state_dict().items():
        value.copy_(_stored(tensors, NAMES[own], value.shape, place))


def _stored(tensors: dict[str, Tensor], name: str, shape: torch.Size, place: str) -> Tensor:
    """One of the weights, which must have the shape that the settings ask for."""
    stored = tensors.get(name)
    if stored is None or stored.shape != shape:
        found = "nothing" if stored is None else f"the shape {tuple(stored.shape)}"
        raise ValueError(
            f"{place} has {found} as {name}, where the settings beside it need {tuple(shape)}"
        )
    return stored
