"""An encoder without a model: a text is the set of its tokens, each with a weight of its own.

T packed tokens, N texts, V vocabulary.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from sparton.kernels.boundaries import sequence_ids
from sparton.kernels.splade_head import TopK
from sparton.models.encoder import Encoder
from sparton.representations import Representations
from sparton.types import Side, TokenBatch


class StaticEncoder(Encoder):
    """Inference-free representations: a row's weight where its token occurs in the text, else 0.

    A token counts once, however often it occurs. The representation has ``relu(weights)``, so that
    learned weights cannot turn a match into evidence against a document, as in OpenSearch's
    trainer (arXiv 2411.04403). A row whose weight is not positive is out and, having no gradient,
    stays out. That is how the tokens that the tokenizer adds to every text ([CLS], [SEP]) are left
    out, and rows of a padded vocabulary, which have no token.

    Args:
        weights: ``[V]``, one per row of the vocabulary of the documents' encoder.
        tokenizer: whose token ids are rows.
        frozen: keep the weights as they are.

    Raises:
        ValueError: weights of another shape, not finite, or fewer than the tokenizer's tokens.
    """

    def __init__(
        self, weights: Tensor, tokenizer: PreTrainedTokenizerFast, *, frozen: bool = False
    ) -> None:
        super().__init__(tokenizer, max_length=None)
        last = max(tokenizer.get_vocab().values())
        if weights.ndim != 1 or len(weights) <= last:
            raise ValueError(
                f"weights of shape {tuple(weights.shape)} for a tokenizer whose last token has the "
                f"id {last}: one weight per row of the documents' vocabulary is needed"
            )
        if not weights.isfinite().all():
            raise ValueError("weights of tokens must be finite numbers in fp32")
        weights = weights.detach().float().clone()
        weights[tokenizer("")["input_ids"]] = 0
        self.weights = nn.Parameter(weights, requires_grad=not frozen)

    @property
    def vocabulary_size(self) -> int:
        """V; it may exceed the tokenizer's size where a model pads its vocabulary."""
        return self.weights.shape[0]

    @property
    def frozen(self) -> bool:
        return not self.weights.requires_grad

    def forward(self, tokens: TokenBatch) -> Tensor:
        """Representations fp32 ``[N, V]``."""
        N, V = tokens.num_sequences, self.vocabulary_size
        terms, tokens = tokens.to_pool(tokens.input_ids)
        owners = sequence_ids(tokens.cu_seqlens, tokens.num_tokens)
        present = torch.zeros(N * V, dtype=torch.bool, device=self.device)
        present.index_fill_(0, owners * V + terms, True)
        return torch.where(present.view(N, V), self.weights.float().relu(), 0.0)

    def encode(self, tokens: TokenBatch, side: Side) -> Representations:
        """:meth:`forward` of either side."""
        return Representations(self(tokens))

    @torch.no_grad()
    def topk(self, tokens: TokenBatch, side: Side, k: int) -> TopK:
        """The min(k, V) largest term weights of each text, among equal ones the first rows."""
        values, indices = self(tokens).sort(dim=1, descending=True, stable=True)
        return TopK(values[:, :k], indices[:, :k])

    def figures(self) -> dict[str, Tensor]:
        """How many weights are positive; those that training takes to 0 stay there."""
        return {} if self.frozen else {"positive_weights": (self.weights > 0).sum()}

    def flops_per_token(
        self, sequence_length: float, side: Side = "document", *, training: bool = True
    ) -> float:
        """No FLOPs, since weights are looked up."""
        return 0.0


def static_weights(
    tokenizer: PreTrainedTokenizerFast,
    rows: int,
    idf: Mapping[str, float] | None = None,
    *,
    missing: float = 1.0,
) -> Tensor:
    """Weights fp32 ``[rows]`` to start a :class:`StaticEncoder` with.

    Special tokens, [UNK] among them, and rows without a token get 0.

    Args:
        rows: V of the documents' encoder; at least as many as the tokenizer has.
        idf: weights by token, see :func:`~sparton.models.idf.read_idf`; None for ones.
        missing: weight of tokens that ``idf`` does not name. OpenSearch trains with 1, which lets
            a document be found by a word that it was expanded with; sentence-transformers has 0.

    Raises:
        ValueError: the tokenizer has more tokens than there are rows.
    """
    vocabulary = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:
        raise ValueError(
            f"a tokenizer of {len(vocabulary)} tokens does not fit a vocabulary of {rows} rows: "
            "queries need the tokenizer of the documents' model"
        )
    weights = torch.zeros(rows)
    weights[list(vocabulary.values())] = 1.0 if idf is None else missing
    if idf:
        weights[[vocabulary[token] for token in idf]] = torch.tensor(list(idf.values()))
    weights[tokenizer.all_special_ids] = 0
    return weights
