"""A module of sentence-transformers: the bias of logits that a checkpoint has no place for.

N texts, S tokens of the longest, V vocabulary.
"""

from typing import Any

from sentence_transformers.base.modules import Module
from torch import Tensor, nn


class LogitBias(Module):
    """Adds a bias to the logits of all tokens, between the ``Transformer`` of a causal language
    model and ``SpladePooling``. As it is no class of theirs, sentence-transformers loads a model
    with it only where ``trust_remote_code=True`` is said.

    Args:
        bias: fp32 ``[V]``.
    """

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)

    def forward(self, features: dict[str, Any], **_: object) -> dict[str, Any]:
        """``token_embeddings``, the logits ``[N, S, V]``, with the bias added."""
        logits = features["token_embeddings"]
        features["token_embeddings"] = logits + self.bias.to(logits.dtype)
        return features

    def save(self, output_path: str, *_: object, **__: object) -> None:
        """Write the bias into the module's folder."""
        self.save_torch_weights(output_path)

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
        **_: Any,
    ) -> "LogitBias":
        """Read the bias from the module's folder; the arguments are sentence-transformers'."""
        place = (model_name_or_path, subfolder, token, cache_folder, revision, local_files_only)
        return cls(cls.load_torch_weights(*place)["bias"])
