"""Late-interaction encoders as folders that sentence-transformers and PyLate load as they are.

Root: a stock checkpoint of the body with its tokenizer; beside it ``1_Dense``, the projection, and
the descriptions by which PyLate composes a ``ColBERT`` and sentence-transformers (from version 6)
a ``MultiVectorEncoder``. D hidden width, E width of a token's vector.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from safetensors.torch import save_file
from torch import Tensor, nn

from sparton.models.body import EncoderBody
from sparton.models.checkpoint import TRANSFORMER_FILE, load_body, load_tokenizer
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.folders import pooling
from sparton.models.folders.files import (
    DESCRIPTION,
    Lengths,
    describe_transformer,
    list_modules,
    write_json,
)
from sparton.models.folders.vectors import check_head, read_modules, read_vectors
from sparton.models.lora import own_base
from sparton.models.repository import Source, join
from sparton.types import BodyOptions

MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
PROJECTION_FOLDER = "1_Dense"


def save_colbert(encoder: ColbertEncoder, path: Path, lengths: Lengths) -> None:
    """Fill the folder ``path``.

    PyLate gives every vector the length 1 and knows no model that does not, and it pools tokens
    where its ``encode`` is told to: the folder of an encoder without ``normalize``, or with a
    ``pool_factor``, is sentence-transformers' alone. PyLate applies the folder's
    prompts only where ``encode`` is given their ``prompt_name``, "query" or "document".

    Adapters alone load in PyLate as well, but not with transformers 5.3, the newest that its
    version 1.6 asks for, which leaves the adapters of any folder at random numbers and goes on.
    """
    encoder.backbone.save(path)
    write_vectors(path, encoder.head, encoder.projection, encoder.backbone, lengths)


def write_vectors(
    path: Path,
    head: ColbertHead,
    projection: nn.Linear,
    body: EncoderBody,
    lengths: Lengths,
) -> None:
    """The projection and the descriptions, all but the checkpoint and its tokenizer.

    Args:
        projection: from D to E.
    """
    skipped = head.skipped(body.tokenizer)  # PyLate would take words that are no tokens for [UNK]
    files = _descriptions(head, projection, skipped, lengths)
    files[TRANSFORMER_FILE] = describe_transformer(body, *lengths)
    write_json(path, files)
    state = projection.state_dict().items()
    weights = {f"linear.{key}": value.cpu().contiguous() for key, value in state}
    save_file(weights, path / PROJECTION_FOLDER / "model.safetensors", metadata={"format": "pt"})


def load_colbert(
    source: Source, head: ColbertHead | None, **options: Unpack[BodyOptions]
) -> ColbertEncoder:
    """Read an encoder from a folder of :func:`save_colbert`, of PyLate or of sentence-transformers'
    ``MultiVectorEncoder``.

    Args:
        head: settings, which must be those of the folder; when None the folder's.

    Raises:
        ValueError: the folder describes another kind of model, or one that this project does not
            have, or other settings than those of ``head``, or its weights are damaged.
        OSError: files are missing.
    """
    modules = read_modules(source, "")
    subfolder = modules.transformer
    tokenizer = load_tokenizer(source, subfolder=subfolder)
    found, projection = read_vectors(source, modules, tokenizer)
    check_head(source, head, found, tokenizer)
    body = EncoderBody(load_body(source, subfolder=subfolder), tokenizer, **options)
    body.base = own_base(source, subfolder)
    encoder = ColbertEncoder(body, head or found)
    fill_projection(encoder.projection, projection, join(source.name, modules.projections[0]))
    return encoder


def fill_projection(projection: nn.Linear, weights: Mapping[str, Tensor], place: str) -> None:
    """Copy what :func:`~sparton.models.folders.vectors.read_vectors` found in a folder.

    Raises:
        ValueError: it is a projection of states of another width than D.
    """
    width = weights["weight"].shape[1]
    if width != projection.in_features:
        raise ValueError(
            f"{place} projects states of the width {width}, and those of the transformer beside it "
            f"have {projection.in_features}: copy or download the folder again"
        )
    projection.load_state_dict(weights)


def _descriptions(
    head: ColbertHead, projection: nn.Linear, skipped: list[str], lengths: Lengths
) -> dict[str, Any]:
    """The folder's JSON files, with the class paths and keys of PyLate, which
    sentence-transformers reads too."""
    parts = {"": "sentence_transformers.models.Transformer"}
    parts[PROJECTION_FOLDER] = "sentence_transformers.models.Dense"
    files: dict[str, Any] = {}
    pools = head.pool_factor > 1
    if pools or not head.normalize:
        parts["2_MultiVectorMask"] = MASK
        files["2_MultiVectorMask/config.json"] = {"skiplist_words": skipped}
    if pools and head.normalize:
        parts["3_Normalize"] = NORMALIZE
        names = ("module_input_name", "module_output_name")
        files["3_Normalize/config.json"] = dict.fromkeys(names, "token_embeddings")
    if pools:
        place = f"{len(parts)}_{pooling.KIND}"
        parts[place] = pooling.PATH
        files[f"{place}/config.json"] = pooling.describe_pooling(head.token_pooling)
    files["modules.json"] = list_modules(parts)
    files[DESCRIPTION] = {
        "model_type": "MultiVectorEncoder" if pools or not head.normalize else "ColBERT",
        "similarity_fn_name": "MaxSim",
        "prompts": {"query": head.query_prompt, "document": head.document_prompt},
        "default_prompt_name": None,
        "query_prefix": head.query_marker,
        "document_prefix": head.document_marker,
        **lengths.described(),
        "do_query_expansion": head.query_expansion,
        "attend_to_expansion_tokens": head.attend_to_expansion,
        "skiplist_words": skipped,
    }
    files[join(PROJECTION_FOLDER, "config.json")] = {
        "in_features": projection.in_features,
        "out_features": projection.out_features,
        "bias": projection.bias is not None,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    widths = {"widths": head.widths} if len(head.widths) > 1 else {}
    files["sparton.json"] = lengths.described() | widths
    return files
