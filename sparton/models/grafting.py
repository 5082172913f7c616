"""The masked-LM head of one model on the body of another.

D hidden width, V vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# How heads of transformers call the functions between their matrices.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "classifier_activation")


def graft(body: PreTrainedModel, mlm: Any, source: str, head_source: str) -> PreTrainedModel:
    """The masked-language model ``mlm`` with another body in the place of its own.

    Its decoder keeps its weights, and is parted from the embeddings: those of the new body are
    others, and both learn by themselves from then on. Tokens that the body alone knows, as markers
    of late interaction, get their embeddings for weights, and the mean of the biases.

    Args:
        body: of the architecture of that of ``mlm``.
        mlm: gives its head; it is changed.
        source, head_source: what the two are called in messages.

    Raises:
        ValueError: another architecture, width, vocabulary or activation, or a decoder that cannot
            be parted from the embeddings.
    """
    own = mlm.base_model
    if type(own) is not type(body):
        _refuse(source, type(body).__name__, head_source, type(own).__name__)
    rows, own_rows = body.config.vocab_size, mlm.config.vocab_size
    if rows > own_rows:  # markers of its own
        mlm.resize_token_embeddings(rows, mean_resizing=False)
    for name in ("hidden_size", "vocab_size", *_ACTIVATIONS):
        ours, theirs = getattr(body.config, name, None), getattr(mlm.config, name, None)
        if ours != theirs:
            _refuse(source, f"{name}={ours}", head_source, f"{name}={theirs}")
    decoder = mlm.get_output_embeddings()
    if not isinstance(decoder, nn.Linear) or decoder.weight.shape[1] != body.config.hidden_size:
        raise ValueError(
            f"the decoder of {type(mlm).__name__} in {head_source} cannot be parted from its "
            "embeddings: graft the head of another architecture"
        )
    weight = decoder.weight.detach().clone()
    weight[own_rows:] = _rows_of(body)[own_rows:]
    decoder.weight = nn.Parameter(weight)
    if decoder.bias is not None:
        with torch.no_grad():
            decoder.bias[own_rows:] = decoder.bias[:own_rows].mean()
    setattr(mlm, mlm.base_model_prefix, body)
    mlm.config = body.config
    mlm.config.tie_word_embeddings = False
    mlm.all_tied_weights_keys = {}  # transformers has noted them when it made the model
    return mlm


def _rows_of(body: PreTrainedModel) -> torch.Tensor:
    table = body.get_input_embeddings()
    assert isinstance(table, nn.Embedding)
    return table.weight.detach()


def check_vocabulary(
    tokenizer: PreTrainedTokenizerFast,
    head_tokenizer: PreTrainedTokenizerFast,
    source: str,
    head_source: str,
) -> None:
    """Refuse a body whose tokens are not those of the head; it may know some more, such as the
    markers of a late-interaction model.

    Raises:
        ValueError: names a token that has another number.
    """
    known = tokenizer.get_vocab()
    for token, row in sorted(head_tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != row:
            _refuse(source, f"token {token!r} as {known.get(token)}", head_source, f"it as {row}")


def _refuse(source: str, body: str, head_source: str, head: str) -> None:
    raise ValueError(
        f"{source} has {body}, and {head_source} has {head}: a head fits on a body of its own "
        "architecture, width and vocabulary; name the pretrained model that the body was trained "
        "from"
    )
