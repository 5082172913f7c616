"""SpladePooling with settings that sentence-transformers' own lacks, for folders of such models.

``SparseEncoder(folder, trust_remote_code=True)`` imports it. N texts, S tokens, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from sentence_transformers.sparse_encoder.modules import SpladePooling as StockPooling
from torch import Tensor

from sparton.kernels.splade_head.token_topk import largest_of_rows
from sparton.kernels.splade_head.variants import check_token_topk
from sparton.models.folding import FILE, Folding, read_columns, write_folding


class SpladePooling(StockPooling):
    """The stock module, of logits of which each token keeps the largest; then terms are folded.

    Args:
        token_topk: see :class:`~sparton.models.heads.SpladeHead`.
        folding: integers ``[V]``, see :class:`~sparton.models.folding.Folding`, or None.
        stock: the arguments of sentence-transformers' SpladePooling.

    Raises:
        ValueError: a number of terms, or a folding, that cannot be.
    """

    config_keys: list[str] = [*StockPooling.config_keys, "token_topk"]  # noqa: RUF012

    def __init__(
        self,
        *,
        token_topk: int | None = None,
        folding: Tensor | None = None,
        **stock: Any,
    ) -> None:
        super().__init__(**stock)
        check_token_topk(token_topk)
        self.token_topk = token_topk
        self.fold = None if folding is None else Folding(folding)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Representations ``[N, V]`` in ``sentence_embedding``."""
        if self.token_topk is not None:
            logits = features["token_embeddings"].relu()
            features["token_embeddings"] = _kept(logits, self.token_topk)
        features = super().forward(features)
        if self.fold is not None:
            features["sentence_embedding"] = self.fold(features["sentence_embedding"])
        return features

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write what :meth:`load` reads."""
        super().save(output_path, *args, **kwargs)
        if self.fold is not None:
            write_folding(self.fold, Path(output_path))

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> "SpladePooling":
        """Read a folder or a model of the hub; the arguments are those of the stock module."""
        place: Any = {
            "model_name_or_path": model_name_or_path,
            "subfolder": subfolder,
            "token": token,
            "cache_folder": cache_folder,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        file = cls.load_file_path(filename=FILE, **place)
        folding = None if file is None else read_columns(Path(file))
        return cls(**(init_defaults or {}) | cls.load_config(**place), folding=folding)


def _kept(values: Tensor, k: int) -> Tensor:
    """``values [..., V]`` with zeros in the place of all but the k largest of each token."""
    rows = values.flatten(0, -2)
    _, terms = largest_of_rows(rows.detach().float(), min(k, rows.shape[1]))
    return torch.zeros_like(rows).scatter(1, terms, rows.gather(1, terms)).view_as(values)
