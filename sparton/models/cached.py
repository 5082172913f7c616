"""Embeddings that were made before, in the place of a backbone.

T texts, each of them one token; D width.
"""

from pathlib import Path

from torch import Tensor, nn

from sparton.embedding_files import MODEL
from sparton.embeddings import EmbeddingTable, TextRows
from sparton.models.checkpoint import load_tokenizer
from sparton.models.origin import read_origin
from sparton.models.pooling import Pooling
from sparton.types import Markup, Prompts, TokenBatch


class CachedBackbone(nn.Module):
    """A table of embeddings, looked up by the row numbers that its ``text_rows`` make of texts.

    It has no parameters. The model that made the embeddings lies beside them, for saving.

    Args:
        path: folder that ``sparton.pipelines.cache_embeddings`` has written.
        on_device: see :class:`~sparton.embeddings.EmbeddingTable`.

    Raises:
        FileNotFoundError, ValueError: no cache there, or one that is not complete.
    """

    def __init__(self, path: str | Path, *, on_device: bool = True) -> None:
        super().__init__()
        self.text_rows = TextRows(path)
        self.table = EmbeddingTable(path, on_device=on_device)
        self.tokenizer = load_tokenizer(str(self.source))
        self.max_length = None
        self.origin = read_origin(self.source)

    @property
    def source(self) -> Path:
        """Folder of the dense encoder that made the embeddings."""
        return self.text_rows.folder / MODEL

    @property
    def hidden_size(self) -> int:
        """D, the width of the embeddings."""
        return self.table.width

    def hidden_states(self, tokens: TokenBatch) -> Tensor:
        """The embeddings fp32 ``[T, D]``."""
        return self.table.take(tokens.input_ids)

    def check(self, pooling: Pooling, markup: Markup) -> None:
        """Refuse a head that would make other embeddings of the texts than these.

        Raises:
            ValueError: names the settings to change.
        """
        facts = self.text_rows.facts
        asked = {"pooling": pooling.mode, "normalize_pooled": pooling.normalize}
        cached = {"pooling": facts.pooling, "normalize_pooled": facts.normalized}
        for name in Prompts.__annotations__:
            asked[name], cached[name] = getattr(markup, name), getattr(facts, name)
        for name, ours in asked.items():
            theirs = cached[name]
            if ours != theirs:
                raise ValueError(
                    f"the embeddings in {self.text_rows.folder} were made with {name}={theirs!r}, "
                    f"but the head has {ours!r}: set head.{name}={theirs!r}"
                )

    def bare(self) -> "CachedBackbone":
        """Itself: there is no head to leave out."""
        return self

    def flops_per_token(self, sequence_length: float, *, training: bool = True) -> float:
        """None: embeddings are looked up."""
        return 0.0
