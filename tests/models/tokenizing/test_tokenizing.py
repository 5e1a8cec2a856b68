"""Token ids against the tokenizers of transformers, in one thread and in many."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.limits import token_limit
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.models.tokenizing.text_settings import TextSettings
from staged_pool.runtime.models.tokenizing.tokenizer import TextTokenizer
from staged_pool.runtime.requests import DENSE_ONLY, MODEL_MAX, TextInput
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.work import Prepared
from tests.models.conftest import TinyFolder
from tests.models.reading import STRANGE, TokenizerOf, load, read, reader, rejection
from tests.models.vectors.test_oracle import MIXED, TEXTS

Side = Literal["left", "right"]

KINDS = ["real", "bert-mean", "roberta-mean", "xlmr-prompt", "qwen3-last"]
"""WordPiece twice, byte-BPE, Unigram, and one with a token at the end only."""


@pytest.fixture(scope="module")
def tokenizer_of(tiny_folder: TinyFolder) -> TokenizerOf:
    """Our tokenizer of a kind of model, and that of transformers."""

    def both(kind: str) -> tuple[TextTokenizer, Any]:
        source, theirs = load(kind, tiny_folder)
        return reader(source), theirs

    return both


def ids(tokenizer: TextTokenizer, given: TextInput) -> list[int]:
    return read(tokenizer, given).ids


@pytest.fixture
def small(tiny_folder: TinyFolder) -> TextTokenizer:
    """A tokenizer with [CLS] = 2 and [SEP] = 3; its model takes 12 tokens and knows 1500."""
    return reader(load("bert-mean", tiny_folder)[0], max_tokens=12, vocabulary=1500)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_ids_are_those_of_transformers_at_every_length(kind: str, side: Side, tokenizer_of: TokenizerOf) -> None:
    ours, theirs = tokenizer_of(kind)
    theirs.truncation_side = side
    for text in TEXTS + MIXED[:8]:
        if not (whole := theirs(text)["input_ids"]):
            continue
        assert ids(ours, TextInput(text)) == whole
        for length in (2, 3, 4, 7, 19, 64, len(whole) - 1, len(whole), len(whole) + 1):
            if length >= 2:
                wanted = theirs(text, truncation=True, max_length=length)["input_ids"]
                assert ids(ours, TextInput(text, max_tokens=length, truncate_side=side)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_special_tokens_are_those_of_transformers(kind: str, tokenizer_of: TokenizerOf) -> None:
    ours, theirs = tokenizer_of(kind)
    for text in MIXED:
        wanted = theirs(text, add_special_tokens=False, truncation=True, max_length=9)["input_ids"]
        assert ids(ours, TextInput(text, max_tokens=9, add_special_tokens=False)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_cut_differently_do_not_disturb_each_other(kind: str, tokenizer_of: TokenizerOf) -> None:
    ours, theirs = tokenizer_of(kind)
    texts = [" ".join(text.split()[:12]) for text in MIXED[:40]]
    wanted = {
        (text, limit): theirs(text, truncation=True, max_length=limit)["input_ids"]
        for text in texts
        for limit in range(3, 20)
    }
    calls = random.Random(1).choices(list(wanted), k=20_000)

    def wrong(some: list[tuple[str, int]]) -> int:
        return sum(ids(ours, TextInput(text, max_tokens=limit)) != wanted[text, limit] for text, limit in some)

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(wrong, [calls[n::16] for n in range(16)])) == 0


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_tokens_are_those_of_transformers(add_special_tokens: bool, tokenizer_of: TokenizerOf) -> None:
    ours, theirs = tokenizer_of("real")
    tokens = ours.tokenize("Someone has a meal.", add_special_tokens=add_special_tokens)
    assert tokens.ids == theirs("Someone has a meal.", add_special_tokens=add_special_tokens)["input_ids"]
    assert tokens.strings == theirs.convert_ids_to_tokens(tokens.ids)


def test_token_ids_are_taken_as_they_are(small: TextTokenizer) -> None:
    assert ids(small, TextInput((7, 8, 9))) == [7, 8, 9]
    assert ids(small, TextInput((7, 8, 9), max_tokens=2)) == [7, 8]
    assert ids(small, TextInput((7, 8, 9), max_tokens=2, truncate_side="left")) == [8, 9]
    assert ids(small, TextInput(tuple(range(30)), max_tokens=MODEL_MAX)) == list(range(12))


def test_a_limit_below_the_special_tokens_is_kept(small: TextTokenizer) -> None:
    assert ids(small, TextInput("food", max_tokens=2)) == [2, 3]
    assert ids(small, TextInput("food", max_tokens=1)) == [2]


def test_one_bad_input_does_not_spoil_the_others(small: TextTokenizer) -> None:
    bad = TextInput("half \ud800 pair")
    good = TextInput("food")
    first, second, third = small.preprocess([ModelInput(given, DENSE_ONLY) for given in (good, bad, good)])
    assert isinstance(second, InvalidInput)
    whole = read(small, good)
    assert first == third == Prepared(whole, tokens=len(whole.ids), batch_key=DENSE_ONLY)
    assert "half" not in str(second).removeprefix("The input is not valid Unicode: it has half of")


def test_no_inputs_give_no_outputs(small: TextTokenizer) -> None:
    assert small.preprocess([]) == []


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        (
            TextInput((7,) * 13),
            "input",
            "This model's maximum context length is 12 tokens. However, your input contains 13 tokens. "
            "Please reduce the length of the input prompt, or set max_tokens.",
        ),
        (
            TextInput("food", max_tokens=13),
            "max_tokens",
            "max_tokens value is greater than max_model_len. Please request a smaller truncation size.",
        ),
        (TextInput("food", max_tokens=-2), "max_tokens", "max_tokens must be at least -1."),
        (TextInput((7, 1500)), "input", "Token id 1500 is out of vocabulary"),
        (TextInput((-1, 7)), "input", "Token id -1 is out of vocabulary"),
        (TextInput(()), "input", "The input has no tokens; it must have at least one."),
        (TextInput("food", max_tokens=0), "input", "The input has no tokens; it must have at least one."),
        (TextInput("", add_special_tokens=False), "input", "The input has no tokens; it must have at least one."),
        (TextInput("\udfff"), "input", "The input is not valid Unicode: it has half of a surrogate pair."),
    ],
)
def test_an_input_that_cannot_be_used_is_rejected_in_words(
    given: TextInput, param: str, message: str, small: TextTokenizer
) -> None:
    rejected = rejection(small, given)
    assert str(rejected) == message
    assert rejected.param == param


def test_half_a_surrogate_pair_cannot_be_tokenized(small: TextTokenizer) -> None:
    with pytest.raises(InvalidInput, match="not valid Unicode"):
        small.tokenize("\ud800", add_special_tokens=True)


def test_a_text_with_a_token_that_the_weights_lack_is_rejected(tiny_folder: TinyFolder) -> None:
    source, _ = load("bert-mean", tiny_folder)
    source.backend.add_tokens(["unheardof"])
    tokenizer = reader(source, max_tokens=12, vocabulary=1500)
    assert str(rejection(tokenizer, TextInput("an unheardof word"))) == "Token id 1500 is out of vocabulary"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_tokens_spell_the_text_of_transformers(kind: str, skip_special_tokens: bool, tokenizer_of: TokenizerOf) -> None:
    ours, theirs = tokenizer_of(kind)
    for text in STRANGE:
        tokens = ours.tokenize(text, add_special_tokens=True)
        wanted = theirs.backend_tokenizer.decode(tokens.ids, skip_special_tokens=skip_special_tokens)
        assert ours.detokenize(tokens.ids, skip_special_tokens=skip_special_tokens) == wanted
    assert ours.detokenize([], skip_special_tokens=skip_special_tokens) == ""


@pytest.mark.parametrize("wrong", [-1, 1500, 2**70])
def test_an_id_out_of_vocabulary_spells_nothing(wrong: int, small: TextTokenizer) -> None:
    with pytest.raises(InvalidInput, match=f"Token id {wrong} is out of vocabulary"):
        small.detokenize([7, wrong], skip_special_tokens=False)


def test_a_limit_is_checked_against_the_model() -> None:
    assert token_limit(None, 12) is None
    assert token_limit(MODEL_MAX, 12) == 12
    assert token_limit(0, 12) == 0
    with pytest.raises(InvalidInput, match="greater than max_model_len"):
        token_limit(13, 12)


def test_special_tokens_in_the_middle_are_not_imitated() -> None:
    source = Tokenizer(models.WordLevel({"[UNK]": 0, "[S]": 1, "x": 2}, unk_token="[UNK]"))
    source.pre_tokenizer = pre_tokenizers.Whitespace()
    source.post_processor = processors.TemplateProcessing(single="$A [S] $A", special_tokens=[("[S]", 1)])
    with pytest.raises(ConfigError, match="the same special tokens before and after every text"):
        TextTokenizer(SharedTokenizer(source), TextSettings(max_tokens=12, vocabulary=3))


def test_special_tokens_must_leave_room_for_a_text(tiny_folder: TinyFolder) -> None:
    source, _ = load("bert-mean", tiny_folder)
    with pytest.raises(ConfigError, match="special tokens fill already"):
        reader(source, max_tokens=2)
