"""Joint encoders as folders of two models that share their weights.

Root: a SPLADE folder, whose prompts are the markers, so that ``encode_query`` and
``encode_document`` of sentence-transformers' ``SparseEncoder`` see what this project sees.
``colbert``: a late-interaction folder (:mod:`sparton.models.folders.colbert`) whose checkpoint and
tokenizer are the root's files under a second name, one content on the disk.
"""

import os
import shutil
from pathlib import Path
from typing import Unpack

from sparton.models.folders.colbert import fill_projection, write_vectors
from sparton.models.folders.files import Lengths, agreed_prompts, join
from sparton.models.folders.splade import describe_splade, load_sparse, write_splade
from sparton.models.folders.vectors import check_head, read_modules, read_vectors
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.repository import Source
from sparton.models.splade import SpladeEncoder
from sparton.types import BodyOptions, Markup

VECTORS_FOLDER = "colbert"
VECTORS_KEY = "token_vectors"  # of sparton.json: the folder of the other half


def save_joint(
    encoder: JointEncoder, path: Path, *, query_length: int, document_length: int
) -> None:
    """Fill the folder ``path``."""
    head = encoder.head.tokens
    sparse = SpladeEncoder(encoder.backbone, encoder.head.sparse)
    sparse.markup = Markup(
        query_prompt=head.query_marker + head.query_prompt,
        document_prompt=head.document_marker + head.document_prompt,
        include_prompt=encoder.markup.include_prompt,
    )
    sparse.similarity = encoder.similarity
    encoder.backbone.save(path)
    (path / VECTORS_FOLDER).mkdir()
    for file in path.iterdir():
        if file.is_file():
            _link(file, path / VECTORS_FOLDER / file.name)
    files = describe_splade(sparse, query_length, document_length)
    files["sparton.json"][VECTORS_KEY] = VECTORS_FOLDER
    write_splade(sparse, path, files)
    lengths = Lengths(query_length, document_length)
    write_vectors(path / VECTORS_FOLDER, head, encoder.projection, encoder.backbone, lengths)


def is_joint(name: str | Path | Source) -> bool:
    """Whether the folder is one of :func:`save_joint`."""
    return Source.of(name).fields("sparton.json").get(VECTORS_KEY, str) is not None


def load_joint(
    name: str | Path | Source,
    head: JointHead | None = None,
    **options: Unpack[BodyOptions],
) -> JointEncoder:
    """Read an encoder from a folder of :func:`save_joint`, or from the Hugging Face hub.

    Args:
        name: path or hub name, or a source that says more.
        head: settings, which must be those of the folder; when None the folder's.
        options: see :class:`~sparton.types.BodyOptions`.

    Raises:
        ValueError: the settings of ``head`` are others, or weights are damaged.
        OSError: files are missing.
    """
    source = Source.of(name)
    sparse_head = None if head is None else head.sparse
    sparse = load_sparse(source, sparse_head, **options)
    sparse_markup = agreed_prompts(source, sparse_head, sides=())
    modules = read_modules(source, VECTORS_FOLDER)
    found, projection = read_vectors(source, modules, sparse.tokenizer)
    check_head(source, None if head is None else head.tokens, found, sparse.tokenizer)
    encoder = JointEncoder(sparse.backbone, head or JointHead(sparse.head, found))
    encoder.markup = encoder.markup._replace(include_prompt=sparse_markup.include_prompt)
    encoder.similarity = sparse.similarity
    fill_projection(encoder.projection, projection, join(source.name, modules.projections[0]))
    return encoder


def _link(file: Path, other: Path) -> None:
    """A second name for a file, or a copy on file systems without such."""
    try:
        os.link(file, other)
    except OSError:
        shutil.copyfile(file, other)
