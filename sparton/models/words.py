"""A tokenizer whose tokens are whole words."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def word_tokenizer(words: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """Lower-casing word-level tokenizer, [CLS] and [SEP] around every text."""
    vocabulary = {word: row for row, word in enumerate((*SPECIAL_TOKENS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = _word_splitting()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, vocabulary[t]) for t in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _word_splitting() -> tuple:
    return normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()


def frequent_words(texts: Iterable[str], limit: int) -> list[str]:
    """The most frequent words of texts, as :func:`word_tokenizer` splits them; among equally
    frequent ones in the order of the alphabet."""
    normalizer, splitter = _word_splitting()
    counts: Counter[str] = Counter()
    for text in texts:
        pieces = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        counts.update(word for word, _ in pieces)
    for token in SPECIAL_TOKENS:
        counts.pop(token, None)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ranked[:limit]]
