"""Joint encoders as folders of two or three models that share their weights.

Root: a SPLADE folder, whose prompts are the markers, so that ``encode_query`` and
``encode_document`` of sentence-transformers' ``SparseEncoder`` see what this project sees.
``colbert``: a late-interaction folder (:mod:`sparton.models.folders.colbert`), and ``dense``, where
there is such a half, a dense one (:mod:`sparton.models.folders.dense`) with the prompts of the
root. Their checkpoints and tokenizers are the root's files under other names, one content on the
disk.
"""

import os
import shutil
from pathlib import Path
from typing import Unpack

from sparton.models.dense import DenseEncoder
from sparton.models.folders.colbert import fill_projection, write_vectors
from sparton.models.folders.dense import describe_dense, read_pooling
from sparton.models.folders.files import (
    Lengths,
    agreed_prompts,
    check_settings,
    join,
    read_parts,
)
from sparton.models.folders.splade import describe_splade, load_sparse, write_splade
from sparton.models.folders.vectors import check_head, read_modules, read_vectors
from sparton.models.joint import JointEncoder, JointHead
from sparton.models.pooling import Pooling
from sparton.models.repository import Source
from sparton.models.splade import SpladeEncoder
from sparton.types import BodyOptions, Markup

VECTORS_FOLDER = "colbert"
DENSE_FOLDER = "dense"
VECTORS_KEY = "token_vectors"  # of sparton.json: the folder of that half
DENSE_KEY = "dense_vectors"  # likewise
WEIGHTS_KEY = "score_weights"


def save_joint(encoder: JointEncoder, path: Path, lengths: Lengths) -> None:
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
    halves = {VECTORS_KEY: VECTORS_FOLDER}
    _link_files(path, path / VECTORS_FOLDER)
    write_vectors(path / VECTORS_FOLDER, head, encoder.projection, encoder.backbone, lengths)
    if (pooling := encoder.head.dense) is not None:
        halves[DENSE_KEY] = DENSE_FOLDER
        dense = DenseEncoder(encoder.backbone, pooling, sparse.markup, cosine=pooling.normalize)
        _link_files(path, path / DENSE_FOLDER)
        describe_dense(dense, path / DENSE_FOLDER, lengths)
    files = describe_splade(sparse, lengths)
    files["sparton.json"] |= {**halves, WEIGHTS_KEY: encoder.score_weights}
    write_splade(sparse, path, files)


def is_joint(source: Source) -> bool:
    """Whether the folder is one of :func:`save_joint`."""
    return source.fields("sparton.json").get(VECTORS_KEY, str) is not None


def load_joint(
    source: Source, head: JointHead | None, **options: Unpack[BodyOptions]
) -> JointEncoder:
    """Read an encoder from a folder of :func:`save_joint`.

    Args:
        head: settings, which must be those of the folder, but for ``score_weights``; when None the
            folder's.

    Raises:
        ValueError: the settings of ``head`` are others, or weights are damaged.
        OSError: files are missing.
    """
    sparse_head = None if head is None else head.sparse
    sparse = load_sparse(source, sparse_head, **options)
    sparse_markup = agreed_prompts(source, sparse_head, sides=())
    modules = read_modules(source, VECTORS_FOLDER)
    found, projection = read_vectors(source, modules, sparse.tokenizer)
    check_head(source, None if head is None else head.tokens, found, sparse.tokenizer)
    dense = _read_dense(source)
    if head is None:
        head = JointHead(sparse.head, found, dense, _read_weights(source))
    check_settings(source, {"dense": head.dense}, {"dense": dense})
    encoder = JointEncoder(sparse.backbone, head)
    encoder.markup = encoder.markup._replace(include_prompt=sparse_markup.include_prompt)
    encoder.similarity = sparse.similarity
    fill_projection(encoder.projection, projection, join(source.name, modules.projections[0]))
    return encoder


def _read_dense(source: Source) -> Pooling | None:
    """How the dense half pools, where there is one."""
    own = source.fields("sparton.json")
    if DENSE_KEY not in own:
        return None
    folder = own.path(DENSE_KEY)
    parts = read_parts(source, folder)
    if parts is None:
        raise FileNotFoundError(f"{source}/{folder} has no modules.json: copy or download it again")
    return read_pooling(source, parts)[0]


def _read_weights(source: Source) -> dict[str, float] | None:
    weights = source.fields("sparton.json").object(WEIGHTS_KEY)
    return None if weights is None else {half: weights.need(half, float) for half in weights}


def _link_files(folder: Path, other: Path) -> None:
    """Give the files of a folder a second name in another, which is made; or copies, on file
    systems without second names."""
    other.mkdir()
    for file in filter(Path.is_file, folder.iterdir()):
        try:
            os.link(file, other / file.name)
        except OSError:
            shutil.copyfile(file, other / file.name)
