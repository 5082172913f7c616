"""Packed tokens are those of the tokenizer, cut and laid end to end."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AddedToken, PreTrainedTokenizerFast

from sparton.datasets.tokenization import PackedTokenizer
from sparton.types import Markup, TextForm, TokenBatch


def assert_equal(left: TokenBatch, right: TokenBatch) -> None:
    for a, b in zip(left[:3], right[:3]):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert left.max_seqlen == right.max_seqlen


def test_equals_the_tokenizers_own_output(word_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["w1 w2 w3", "", "strange w7", "w1 " * 50]
    tokenizer = PackedTokenizer(word_tokenizer, 4, 16)
    for batch, length in ((tokenizer.queries(texts), 4), (tokenizer.documents(texts), 16)):
        expected = word_tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        assert_equal(batch, TokenBatch.from_lists(expected))


def test_no_texts_and_huge_texts(word_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = PackedTokenizer(word_tokenizer, 8, 32)
    assert tokenizer.queries([]).num_sequences == 0
    with pytest.raises(ValueError, match="texts is the single text 'w1 w2': put it into a list"):
        tokenizer.queries("w1 w2")
    batch = tokenizer.documents(["w9 " * 100_000, "w1"])
    assert batch.cu_seqlens.tolist() == [0, 32, 35]
    assert batch.input_ids[[0, 30, 31]].tolist() == [2, 13, 3]


def test_threads_may_tokenize_queries_and_documents_at_once(
    word_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Each side was cut at the length of the other now and then."""
    tokenizer = PackedTokenizer(word_tokenizer, 8, 32)
    sides = [tokenizer.queries, tokenizer.documents] * 200
    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(lambda side: side(["w1 " * 100] * 8), sides))
    assert {batch.max_seqlen for batch in batches[::2]} == {8}
    assert {batch.max_seqlen for batch in batches[1::2]} == {32}


def test_threads_may_cut_texts_of_one_side_at_different_lengths(
    word_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = PackedTokenizer(word_tokenizer, 8, 32)
    forms = [TextForm(document_length=length) for length in (8, 32)] * 200
    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(lambda x: tokenizer.documents(["w1 " * 100] * 8, x), forms))
    assert {batch.max_seqlen for batch in batches[::2]} == {8}
    assert {batch.max_seqlen for batch in batches[1::2]} == {32}


def test_a_tokenizer_without_special_tokens_gives_empty_sequences(
    word_tokenizer: PreTrainedTokenizerFast,
) -> None:
    bare = copy.deepcopy(word_tokenizer)
    bare.backend_tokenizer.post_processor = None
    batch = PackedTokenizer(bare, 1, 2).documents(["", "w1", ""])
    assert batch.cu_seqlens.tolist() == [0, 0, 1, 1] and batch.max_seqlen == 1


def test_leaves_the_tokenizer_as_it_was_and_can_be_sent_to_a_process(
    word_tokenizer: PreTrainedTokenizerFast,
) -> None:
    before = word_tokenizer.backend_tokenizer.to_str()
    tokenizer = PackedTokenizer(word_tokenizer, 4, 16)
    batch = tokenizer.queries(["w1 w2 w3 w4"])
    assert word_tokenizer.backend_tokenizer.to_str() == before
    assert_equal(pickle.loads(pickle.dumps(tokenizer)).queries(["w1 w2 w3 w4"]), batch)


@pytest.mark.parametrize(
    ("query_length", "document_length", "message"),
    [
        (2, 16, "query_length=2 leaves no room for text beside 2 special tokens"),
        (8, 513, "document_length=513 is more than the 512 positions .*set document_length to 512"),
    ],
)
def test_impossible_lengths(
    word_tokenizer: PreTrainedTokenizerFast, query_length: int, document_length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PackedTokenizer(word_tokenizer, query_length, document_length, max_length=512)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match=r"Slow is a slow tokenizer.*tokenizer\.json"):
        PackedTokenizer(Slow(), 8, 8)  # type: ignore[arg-type]


TEXTS = ["w1 w2 w3", "", "strange w7", "w1 " * 50]


@pytest.fixture
def marked(word_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Knows the markers; they end in a space, as late-interaction models save them."""
    markers = [AddedToken(m, special=True, normalized=False) for m in ("[Q] ", "[D] ")]
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.add_tokens(markers, special_tokens=True)
    return tokenizer


def markup(tokenizer: PreTrainedTokenizerFast, **others: object) -> Markup:
    query, document = tokenizer.convert_tokens_to_ids(["[Q] ", "[D] "])
    return Markup(query, document)._replace(**others)


def test_markers_stand_where_they_would_if_texts_began_with_them(marked) -> None:
    tokenizer = PackedTokenizer(marked, 5, 16, markup=markup(marked))
    sides = ((tokenizer.queries(TEXTS), "[Q] ", 5), (tokenizer.documents(TEXTS), "[D] ", 16))
    for batch, marker, length in sides:
        texts = [marker + text for text in TEXTS]
        expected = marked(texts, truncation=True, max_length=length)["input_ids"]
        assert_equal(batch, TokenBatch.from_lists(expected))
        assert batch.keys is None
    assert tokenizer.queries([]).num_sequences == 0


def test_markers_come_first_where_no_token_opens_a_text(marked) -> None:
    marked.backend_tokenizer.post_processor = None
    batch = PackedTokenizer(marked, 4, 4, markup=markup(marked)).documents(["", "w1", ""])
    document = marked.convert_tokens_to_ids("[D] ")
    assert batch.input_ids.tolist() == [document, document, 5, document]


@pytest.mark.parametrize("attend", [False, True])
def test_queries_are_filled_up_to_their_length(marked, attend) -> None:
    expansion = 9
    both = markup(marked, expansion=expansion, attend_to_expansion=attend)
    tokenizer = PackedTokenizer(marked, 7, 16, markup=both)
    plain = PackedTokenizer(marked, 7, 16, markup=markup(marked)).queries(TEXTS)
    batch = tokenizer.queries(TEXTS)
    rows = [plain.input_ids[a:b].tolist() for a, b in plain.cu_seqlens.unfold(0, 2, 1).tolist()]
    filled = [row + [expansion] * (7 - len(row)) for row in rows]
    assert_equal(batch, TokenBatch.from_lists(filled))
    assert batch.input_ids.view(4, 7)[1].tolist() == [2, 204, 3, 9, 9, 9, 9]
    if attend:
        assert batch.keys is None
    else:
        assert torch.equal(batch.input_ids[batch.keys.rows], plain.input_ids)
        assert batch.keys.cu_seqlens.dtype == torch.int32
        assert torch.equal(batch.keys.cu_seqlens, plain.cu_seqlens)
        assert batch.keys.max_seqlen == plain.max_seqlen
    part = batch.select(1, 3)
    assert_equal(part, TokenBatch.from_lists(filled[1:3]))
    documents = PackedTokenizer(marked, 7, 16, markup=markup(marked)).documents(TEXTS)
    assert_equal(tokenizer.documents(TEXTS), documents)
    assert tokenizer.queries([]).num_tokens == 0


def test_prompts_are_tokenized_with_the_text(marked) -> None:
    both = markup(marked, query_prompt="w9 w8 ", document_prompt="w7")
    tokenizer = PackedTokenizer(marked, 8, 8, markup=both)
    expected = marked(["[Q] w9 w8 w1", "[D] w7w2"])["input_ids"]
    assert tokenizer.queries(["w1"]).input_ids.tolist() == expected[0]
    assert tokenizer.documents(["w2"]).input_ids.tolist() == expected[1]


def test_queries_may_have_a_tokenizer_of_their_own(marked) -> None:
    other = copy.deepcopy(marked)
    other.backend_tokenizer.post_processor = None
    tokenizer = PackedTokenizer(marked, 1, 3, query_tokenizer=other)
    assert tokenizer.queries(["w1 w2"]).input_ids.tolist() == [5]
    assert tokenizer.documents(["w1 w2"]).input_ids.tolist() == [2, 5, 3]


def test_a_marker_needs_room(marked) -> None:
    with pytest.raises(ValueError, match="query_length=3 leaves no room for text beside 3 special"):
        PackedTokenizer(marked, 3, 16, markup=markup(marked))


def test_a_prompt_needs_room(marked) -> None:
    with pytest.raises(ValueError, match="2 special tokens and 3 of the prompt: set doc"):
        PackedTokenizer(marked, 16, 5, markup=Markup(document_prompt="w1 w2 w3 "))
    tokenizer = PackedTokenizer(marked, 16, 6, markup=Markup(document_prompt="w1 w2 w3 "))
    assert tokenizer.documents(["w4"]).input_ids.tolist() == [2, 5, 6, 7, 8, 3]


def test_sequences_are_taken_in_any_order() -> None:
    sequences = [[1, 2, 3], [], [4], [5, 6]]
    batch = TokenBatch.from_lists(sequences)
    rows = [3, 0, 1, 3]
    expected = TokenBatch.from_lists([sequences[row] for row in rows])
    assert_equal(batch.take(torch.tensor(rows)), expected)
    assert_equal(batch.take(torch.tensor([1])), TokenBatch.from_lists([[]]))


def sequences(batch: TokenBatch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.input_ids.tensor_split(batch.cu_seqlens[1:-1].long())]


FORMS = [
    TextForm(),
    TextForm(query_length=5, document_length=6),
    TextForm(query_prompt="w9 ", document_prompt="w8 w7 "),
    TextForm(12, 13, "", ""),
]


def test_a_form_of_all_texts_stands_for_the_tokenizers_own_way(marked) -> None:
    both = markup(marked, query_prompt="w20 ", document_prompt="w21 ")
    tokenizer = PackedTokenizer(marked, 8, 9, markup=both)
    for form in FORMS:
        length, prompt = form.query_length or 8, form.query_prompt
        own = both if prompt is None else both._replace(query_prompt=prompt)
        expected = PackedTokenizer(marked, length, 9, markup=own).queries(TEXTS)
        assert_equal(tokenizer.queries(TEXTS, form), expected)
        length, prompt = form.document_length or 9, form.document_prompt
        own = both if prompt is None else both._replace(document_prompt=prompt)
        expected = PackedTokenizer(marked, 8, length, markup=own).documents(TEXTS)
        assert_equal(tokenizer.documents(TEXTS, form), expected)
    texts = tokenizer.queries(TEXTS), tokenizer.queries(TEXTS, FORMS[3])
    assert sequences(texts[0]) != sequences(texts[1])


def test_every_text_may_have_a_form_and_keeps_its_place(marked, monkeypatch) -> None:
    tokenizer = PackedTokenizer(marked, 8, 9, markup=markup(marked))
    texts = [f"{text} w{row}" for row, text in enumerate(TEXTS * 3)]
    forms = [FORMS[row % 3] for row in range(len(texts))]
    for read in (tokenizer.queries, tokenizer.documents):
        alone = [sequences(read([text], form))[0] for text, form in zip(texts, forms, strict=True)]
        assert_equal(read(texts, forms), TokenBatch.from_lists(alone))
    assert tokenizer.queries([], []).num_sequences == 0

    calls = []
    encode = type(tokenizer._queries)._encode
    monkeypatch.setattr(
        type(tokenizer._queries), "_encode", lambda *args: calls.append(1) or encode(*args)
    )
    tokenizer.queries(texts, forms)
    assert len(calls) == 3  # one for each form


def test_queries_are_filled_up_to_the_length_of_their_form(marked) -> None:
    tokenizer = PackedTokenizer(marked, 7, 16, markup=markup(marked, expansion=9))
    forms = [TextForm(query_length=length) for length in (7, 5, 9, 7)]
    batch = tokenizer.queries(TEXTS, forms)
    assert batch.cu_seqlens.diff().tolist() == [7, 5, 9, 7] and batch.max_seqlen == 9
    assert sequences(batch)[1] == [2, 204, 3, 9, 9]
    alone = [sequences(tokenizer.queries([t], f))[0] for t, f in zip(TEXTS, forms, strict=True)]
    assert sequences(batch) == alone
    assert batch.keys.cu_seqlens.diff().tolist() == [6, 3, 5, 7]
    own = batch.input_ids[batch.keys.rows].tolist()
    assert own == [token for ids in alone for token in ids if token != 9]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (TextForm(query_length=513), "query_length=513 is more than the 512 positions"),
        (TextForm(query_length=2), "query_length=2 leaves no room for text beside 2 special"),
        (TextForm(query_prompt="w1 w2 w3 w4 w5 w6 "), "query_length=8 leaves no room .* and 6 of"),
    ],
)
def test_impossible_forms(
    word_tokenizer: PreTrainedTokenizerFast, form: TextForm, message: str
) -> None:
    tokenizer = PackedTokenizer(word_tokenizer, 8, 16, max_length=512)
    with pytest.raises(ValueError, match=message):
        tokenizer.queries(["w1"], form)
    with pytest.raises(ValueError, match=message):
        tokenizer.queries(["w1", "w2"], [TextForm(), form])
    assert tokenizer.documents(["w1"], form).num_sequences == 1  # whom it does not concern


def test_as_many_forms_as_texts(word_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="1 forms for 2 texts"):
        PackedTokenizer(word_tokenizer, 8, 16).queries(["w1", "w2"], [TextForm()])


def test_the_tokens_of_a_prompt_are_counted_whatever_was_cut_before(marked) -> None:
    tokenizer = PackedTokenizer(marked, 4, 16)
    prompt = "w1 w2 w3 w4 w5 w6 "
    tokenizer.queries(["w1 w2 w3 w4 w5 w6 w7 w8"])  # cut at 4 tokens
    with pytest.raises(ValueError, match=r"query_length=8 leaves no room .* and 6 of the prompt"):
        tokenizer.queries(["w7"], TextForm(query_length=8, query_prompt=prompt))


def pooled(batch: TokenBatch) -> list[list[int]]:
    return sequences(batch.to_pool(batch.input_ids)[1])


def test_prompts_and_what_stands_before_them_may_stay_out_of_the_pooling(marked) -> None:
    both = markup(marked, query_prompt="w9 w8 ", include_prompt=False)
    tokenizer = PackedTokenizer(marked, 9, 16, markup=both)
    included = PackedTokenizer(marked, 9, 16, markup=both._replace(include_prompt=True))
    batch = tokenizer.queries(TEXTS)
    assert_equal(batch, included.queries(TEXTS))
    assert included.queries(TEXTS).pooled is None and batch.keys is None
    assert pooled(batch) == [ids[4:] for ids in sequences(batch)]
    assert pooled(batch)[1] == [3]  # of an empty text what closes it
    assert batch.pooled.max_seqlen == 5 and batch.pooled.cu_seqlens.dtype == torch.int32
    assert tokenizer.documents(TEXTS).pooled is None  # without a prompt all are pooled
    forms = [TextForm(), TextForm(query_prompt=""), TextForm(query_prompt="w7 "), TextForm()]
    batch = tokenizer.queries(TEXTS, forms)
    skipped = (4, 0, 3, 4)
    assert pooled(batch) == [ids[n:] for ids, n in zip(sequences(batch), skipped, strict=True)]


@pytest.mark.parametrize("attend", [False, True])
def test_neither_prompts_nor_what_fills_queries_up_is_pooled(marked, attend) -> None:
    both = markup(marked, expansion=9, attend_to_expansion=attend)
    prompted = both._replace(query_prompt="w20 ", include_prompt=False)
    batch = PackedTokenizer(marked, 7, 16, markup=prompted).queries(TEXTS)
    own = PackedTokenizer(marked, 7, 16, markup=prompted._replace(expansion=None)).queries(TEXTS)
    assert pooled(batch) == [ids[3:] for ids in sequences(own)]
    assert (batch.keys is None) == attend
    without = PackedTokenizer(marked, 7, 16, markup=both).queries(TEXTS)
    filled = (
        sequences(without) if attend else [[i for i in s if i != 9] for s in sequences(without)]
    )
    assert pooled(without) == filled  # all that are attended to


def test_batches_are_cut_and_joined_with_the_tokens_that_stand_out(marked) -> None:
    both = markup(marked, expansion=9, query_prompt="w20 ", include_prompt=False)
    tokenizer = PackedTokenizer(marked, 7, 16, markup=both)
    plain = PackedTokenizer(marked, 7, 16).documents(TEXTS)
    batch = tokenizer.queries(TEXTS)

    def assert_is(part: TokenBatch, rows: list[int]) -> None:
        expected = tokenizer.queries([TEXTS[row] for row in rows])
        assert_equal(part, expected)
        for some, other in ((part.keys, expected.keys), (part.pooled, expected.pooled)):
            assert torch.equal(some.rows, other.rows) and some.max_seqlen >= other.max_seqlen
            assert torch.equal(some.cu_seqlens, other.cu_seqlens)
            assert some.cu_seqlens.dtype == torch.int32

    assert_is(batch.select(1, 3), [1, 2])
    assert_is(batch.take(torch.tensor([3, 0, 1, 3])), [3, 0, 1, 3])
    assert_is(TokenBatch.concatenate([batch.select(2, 4), batch.select(0, 2)]), [2, 3, 0, 1])
    mixed = TokenBatch.concatenate([plain, batch, plain])
    assert pooled(mixed) == sequences(plain) + pooled(batch) + sequences(plain)
    attended = sequences(mixed._replace(pooled=None).to_pool(mixed.input_ids)[1])
    assert attended == pooled(mixed._replace(pooled=None))
    assert attended[4:8] == pooled(batch._replace(pooled=None)) != pooled(batch)
    assert TokenBatch.concatenate([plain, plain]).pooled is None
    moved = batch.to("cpu")
    assert moved.pooled.rows.tolist() == batch.pooled.rows.tolist()
