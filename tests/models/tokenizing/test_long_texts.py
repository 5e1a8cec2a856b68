"""A text that is cut is read no further than needed; its ids stay the same."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.limits import MAX_CHARACTERS
from staged_pool.runtime.models.tokenizing.long_texts import CUT_PLACE, EXPRESSIONS, can_cut, encode_beginnings
from staged_pool.runtime.models.tokenizing.shared_tokenizer import CALL_CHARACTERS, copy_tokenizer
from staged_pool.runtime.requests import Output, TextInput
from staged_pool.stages.errors import InvalidInput
from tests.models.conftest import TinyFolder
from tests.models.reading import STRANGE, WORDS, load, reader

PIECES = [
    *STRANGE,
    *WORDS[:40],
    *["a", "b", "\u0301", "\u0345", "\u037a", "\u00a8", "\u00a0", "\u3000", "\u2003", "\u2028", "\u0085", "\x1c"],
    *[
        "\x1f",
        "\x00",
        "\ufffd",
        "\u200b",
        "\u00ad",
        "ß",
        "İ",
        "Σ",
        "ﷺ",
        "ﬁ",
        "①",
        "日本語",
        "テキスト",
        "🙂🏽",
        "'",
        "'s",
    ],
    *[
        "s",
        "!!!",
        "?!\n",
        "\n\n",
        "\r\n",
        "\t",
        "1234567",
        "１２",
        "[SEP]",
        "[MASK]",
        "<mask>",
        "<|im_end|>",
        "foo",
        "bar",
    ],
    *["foo bar", "two  blanks", "  ", " ", " ", " ", " "],
]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=60).map("".join)
FEWER = settings(max_examples=settings().max_examples * 2 // 5)
"""There are as many tokenizers as a single test has examples."""
LONG_TEXT = st.builds(lambda text, other, count: text + " x y " * count + other, TEXT, TEXT, st.integers(0, 60))


def characters(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """One whose offsets and numbers of words tell where it splits; it knows single characters only."""
    tokenizer = Tokenizer(models.BPE({chr(c): c for c in range(256)}, [], unk_token="\x00"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return tokenizer


def assert_same_beginning(tokenizer: Tokenizer, text: str, wanted: int) -> None:
    """Compare ids of the cut text at the wanted and at every other possible place."""

    def call(texts: list[str]) -> list[Any]:
        return list(tokenizer.encode_batch(texts, add_special_tokens=False))

    whole = call([text])[0]
    (beginning,) = encode_beginnings(call, [text], [wanted])
    assert len(beginning.ids) >= min(wanted, len(whole.ids))
    places = [found.start() for found in CUT_PLACE.finditer(text)]
    for encoding in [beginning, *call([text[:place] for place in places])]:
        for name in ("ids", "tokens", "offsets", "word_ids"):
            assert getattr(encoding, name) == getattr(whole, name)[: len(encoding.ids)]


@pytest.fixture(scope="module", params=["real", "bert-mean", "roberta-mean", "modernbert-cls", "qwen3-last"])
def tokenizer(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Tokenizer:
    found = copy_tokenizer(load(request.param, tiny_folder)[0].backend).tokenizer
    assert can_cut(found)
    return found


@FEWER
@given(text=LONG_TEXT, wanted=st.integers(0, 30))
def test_the_beginning_of_a_long_text_has_the_ids_of_the_whole(tokenizer: Tokenizer, text: str, wanted: int) -> None:
    assert_same_beginning(tokenizer, text, wanted)


CASES = {
    "bert": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "whitespace": (
        normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents()]),
        pre_tokenizers.Whitespace(),
    ),
    "several": (
        normalizers.NFKC(),
        pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(), pre_tokenizers.Punctuation("merged_with_next")]
        ),
    ),
    "gpt2": (
        normalizers.Sequence([normalizers.Lowercase(), normalizers.Sequence([normalizers.NFC()])]),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
    ),
    **{
        f"expression {number}": (
            normalizers.NFC(),
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(expression), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
        )
        for number, expression in enumerate(sorted(EXPRESSIONS))
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("added", [False, True])
def test_every_way_of_splitting_that_is_allowed_keeps_the_beginning(case: str, added: bool) -> None:
    tokenizer = characters(*CASES[case])
    if added:
        tokenizer.add_tokens(
            [
                AddedToken("foo", single_word=True),
                AddedToken("bar", lstrip=True, normalized=False),
                AddedToken("[SEP]", special=True),
                AddedToken("<mask>", lstrip=True, special=True),
                *([AddedToken("  "), AddedToken("\n\n", normalized=False)] if "e" not in case else []),
            ]
        )
    assert can_cut(tokenizer)

    @FEWER
    @given(text=LONG_TEXT, wanted=st.integers(0, 30))
    def holds(text: str, wanted: int) -> None:
        assert_same_beginning(tokenizer, text, wanted)

    holds()


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, None),
        (None, pre_tokenizers.Metaspace()),
        (None, pre_tokenizers.Punctuation()),
        (None, pre_tokenizers.ByteLevel(use_regex=False)),
        (None, pre_tokenizers.Split(" x y ", "isolated")),
        (None, pre_tokenizers.Split(Regex(r"\s+x"), "isolated")),
        (None, pre_tokenizers.Split(Regex(min(EXPRESSIONS)), "merged_with_next")),
        (None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.WhitespaceSplit()])),
        (normalizers.Replace(" x y ", "z"), pre_tokenizers.WhitespaceSplit()),
        (normalizers.Strip(), pre_tokenizers.WhitespaceSplit()),
        (normalizers.NFKC(), pre_tokenizers.ByteLevel()),
        (normalizers.BertNormalizer(), pre_tokenizers.ByteLevel()),
    ],
)
def test_what_may_look_across_a_blank_is_read_to_its_end(normalizer: Any, pre_tokenizer: Any) -> None:
    assert not can_cut(characters(normalizer, pre_tokenizer))


@pytest.mark.parametrize("content", ["foo bar", " foo", "foo ", "foo\u00a0bar", "x\ny", " "])
def test_an_added_token_with_whitespace_has_texts_read_to_their_end(content: str) -> None:
    for pre_tokenizer in (pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()):
        tokenizer = characters(None, pre_tokenizer)
        assert can_cut(tokenizer)
        tokenizer.add_tokens([AddedToken(content)])
        assert not can_cut(tokenizer)


def test_an_added_token_that_takes_the_blank_behind_it_has_texts_read_to_their_end() -> None:
    tokenizer = characters(None, pre_tokenizers.WhitespaceSplit())
    tokenizer.add_tokens([AddedToken("foo", rstrip=True)])
    assert not can_cut(tokenizer)


def test_an_unigram_tokenizer_reads_texts_to_their_end(tiny_folder: TinyFolder) -> None:
    assert not can_cut(load("xlmr-prompt", tiny_folder)[0].backend)


def test_a_long_text_is_not_read_to_its_end(tokenizer: Tokenizer) -> None:
    seen: list[int] = []

    def call(texts: list[str]) -> list[Any]:
        seen.extend(map(len, texts))
        return list(tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    encode_beginnings(call, ["a few words " * 100_000, "short"], [256, 256])
    assert sum(seen) < 5_000
    seen.clear()
    encode_beginnings(call, ["x" * 10_000 + " and words" * 100_000], [256])
    assert sum(seen) < 60_000
    seen.clear()
    encode_beginnings(call, ["a few words " * 1_000], [None])
    assert seen == [12_000]


def test_a_text_that_cannot_be_cut_and_is_too_long_is_not_tokenized(tokenizer: Tokenizer) -> None:
    shared = copy_tokenizer(tokenizer)
    with pytest.raises(InvalidInput, match=f"A text has {MAX_CHARACTERS + 1} characters; at most {MAX_CHARACTERS} "):
        shared.encode(["," * (MAX_CHARACTERS + 1)], [64])
    with pytest.raises(InvalidInput, match="Please send its beginning"):
        shared.encode(["a few words " * MAX_CHARACTERS], None)
    (encoding,) = shared.encode(["a few words " * MAX_CHARACTERS], [64])
    assert 64 <= len(encoding.ids) < 1000


def test_a_long_text_that_is_not_to_be_cut_is_read_as_far_as_that_shows(tiny_folder: TinyFolder) -> None:
    model = reader(load("bert-mean", tiny_folder)[0])
    words = "a few words " * 50_000
    given = [ModelInput(TextInput(text), frozenset({Output.DENSE})) for text in (words, "short")]
    too_long, short = model.preprocess(given)
    assert isinstance(too_long, InvalidInput)
    assert "your input contains at least " in str(too_long)
    assert not isinstance(short, InvalidInput)


def test_many_long_texts_are_tokenized_in_portions(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = copy_tokenizer(tokenizer)
    texts = [" ".join([word] * (CALL_CHARACTERS // 10)) for word in ("a", "few", "words", "many", "more")] + [
        "short",
        "",
    ]
    expected = [encoding.ids for encoding in shared.encode(texts)]
    asked: list[int] = []
    encode = shared.encode

    def counted(portion: list[str], wanted: object = None) -> list[Any]:
        asked.append(sum(map(len, portion)))
        return encode(portion)

    monkeypatch.setattr(shared, "encode", counted)
    assert shared.encode_ids(texts) == expected
    assert len(asked) > 2
    assert max(asked) <= CALL_CHARACTERS
    assert shared.encode_ids([]) == []


def test_one_long_text_is_tokenized_at_a_time_whatever_the_number_of_threads(tokenizer: Tokenizer) -> None:
    shared = copy_tokenizer(tokenizer)
    inside: list[str] = []
    together: list[int] = []
    two_short = threading.Barrier(2, timeout=30)

    class Watching:
        """A tokenizer that notes how many texts are in it at once."""

        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            inside.append(texts[0])
            together.append(len(inside))
            if len(texts[0]) <= CALL_CHARACTERS:
                two_short.wait()  # both are in it, or the test fails
            inside.remove(texts[0])
            return []

    shared.tokenizer = cast(Any, Watching())

    def run(*texts: str) -> None:
        together.clear()
        threads = [threading.Thread(target=shared.encode, args=([text],)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run("short", "other")
    run(*(letter * (CALL_CHARACTERS + 1) for letter in "abcd"))
    assert together == [1, 1, 1, 1]
