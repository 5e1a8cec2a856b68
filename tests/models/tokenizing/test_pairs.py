"""Pairs against the tokenizers of transformers: ids, token types, and the longer text cut first."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import processors

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.models.tokenizing.pairs import longest_first
from staged_pool.runtime.models.tokenizing.shared_tokenizer import SharedTokenizer
from staged_pool.runtime.requests import DENSE_ONLY, PairInput, TextInput
from staged_pool.stages.errors import ConfigError
from tests.models.conftest import TinyFolder
from tests.models.reading import STRANGE, load, read, reader, rejection, some_text

KINDS = ["real", "ce-bert-1label", "ce-xlmr-reranker", "ce-modernbert", "ce-qwen3-seqcls", "seqcls-distilbert"]
"""WordPiece, Unigram, byte-BPE with two tokens between and with none, and WordPiece with unread types."""

NO_TYPES = ["ce-xlmr-reranker", "ce-modernbert", "seqcls-distilbert"]


def tokens_of(theirs: Any, first: str, second: str, **settings: Any) -> dict[str, list[int]]:
    """Ids and types of one pair, by transformers: as a batch of one, because a single pair with an empty second text
    is taken for a single text there."""
    batch = theirs([first], [second], return_token_type_ids=True, **settings)
    return {name: column[0] for name, column in batch.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_those_of_transformers_at_every_length(kind: str, tiny_folder: TinyFolder) -> None:
    source, theirs = load(kind, tiny_folder)
    ours = reader(source)
    chance = random.Random(5)
    pairs = [(some_text(chance, chance.choice([3, 20])), some_text(chance, chance.choice([5, 40]))) for _ in range(200)]
    added = theirs.num_special_tokens_to_add(pair=True)
    for limit in (None, added + 1, added + 2, 9, 16, 17, 64):
        cut = {"truncation": "longest_first", "max_length": limit} if limit else {}
        wanted = theirs(*map(list, zip(*pairs, strict=True)), return_token_type_ids=True, **cut)
        for (first, second), ids, types in zip(pairs, wanted["input_ids"], wanted["token_type_ids"], strict=True):
            if not ids:
                continue
            sequence = read(ours, PairInput(first=first, second=second, max_tokens=limit))
            assert sequence.ids == ids
            if sequence.first_tokens is not None:
                assert [int(place >= sequence.first_tokens) for place in range(len(types))] == types
            elif source.gives_types:
                assert not any(types)


def test_first_tokens_are_told_only_where_the_model_is_given_types(tiny_folder: TinyFolder) -> None:
    pair = PairInput(first="a text", second="and another")
    for kind in KINDS:
        source, _ = load(kind, tiny_folder)
        told = read(reader(source), pair).first_tokens is not None
        assert told is (source.gives_types and kind not in NO_TYPES)


def test_a_long_second_text_is_read_no_further_than_it_matters(tiny_folder: TinyFolder) -> None:
    source, theirs = load("real", tiny_folder)
    ours = reader(source)
    chance = random.Random(6)
    texts = [" ".join(some_text(chance, 9) for _ in range(count)) for count in (1, 20, 150)]
    for first in texts:
        for second in texts:
            for limit in (16, 17, 65):
                wanted = tokens_of(theirs, first, second, truncation="longest_first", max_length=limit)["input_ids"]
                assert read(ours, PairInput(first=first, second=second, max_tokens=limit)).ids == wanted


@pytest.mark.parametrize(("words", "whole"), [((2000, 3), False), ((3, 2000), False), ((2000, 2000), True)])
def test_a_long_text_is_tokenized_whole_only_beside_another_one(
    words: tuple[int, int], whole: bool, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = reader(load("ce-bert-1label", tiny_folder)[0])
    seen: list[int] = []
    encode = SharedTokenizer.encode

    def watched(self: SharedTokenizer, *given: Any, **settings: Any) -> Any:
        encodings = encode(self, *given, **settings)
        seen.extend(len(encoding.ids) for encoding in encodings)
        return encodings

    monkeypatch.setattr(SharedTokenizer, "encode", watched)
    first, second = ("a " * count for count in words)
    assert len(read(ours, PairInput(first=first, second=second, max_tokens=16)).ids) == 16
    assert (max(seen) >= 2000) is whole


def test_each_text_can_be_cut_before_they_are_joined(tiny_folder: TinyFolder) -> None:
    source, theirs = load("ce-bert-1label", tiny_folder)
    ours = reader(source, max_tokens=40)
    first, second = some_text(random.Random(2), 90), some_text(random.Random(3), 90)
    a = theirs(first, add_special_tokens=False)["input_ids"]
    b = theirs(second, add_special_tokens=False)["input_ids"]
    cut = read(ours, PairInput(first=first, second=second, max_first_tokens=5, max_second_tokens=7))
    assert cut.ids == [2, *a[:5], 3, *b[:7], 3]
    assert cut.first_tokens == 7
    both = PairInput(first=first, second=second, max_first_tokens=5, max_second_tokens=30, max_tokens=20)
    assert read(ours, both).ids == [2, *a[:5], 3, *b[:12], 3]
    without = PairInput(first=first, second=second, max_first_tokens=0, max_second_tokens=1)
    assert read(ours, without).ids == [2, 3, b[0], 3]


def test_a_limit_below_the_special_tokens_of_a_pair_is_kept(tiny_folder: TinyFolder) -> None:
    ours = reader(load("ce-bert-1label", tiny_folder)[0])
    sequence = read(ours, PairInput(first="a", second="b", max_tokens=2))
    assert (sequence.ids, sequence.first_tokens) == ([2, 3], 2)
    sequence = read(ours, PairInput(first="a", second="b", max_tokens=1))
    assert (sequence.ids, sequence.first_tokens) == ([2], 1)


def test_a_prompt_goes_before_the_first_text_of_a_pair(tiny_folder: TinyFolder) -> None:
    ours = reader(load("ce-bert-1label", tiny_folder)[0])
    pair = PairInput(first="what is this", second="a test")
    assert (
        read(ours, pair, prompt="query: ").ids
        == read(ours, PairInput(first="query: what is this", second="a test")).ids
    )
    cut = PairInput(first="a b c", second="a test", max_first_tokens=1)
    assert read(ours, cut, prompt="query: ").ids == read(ours, PairInput(first="query: a", second="a test")).ids


def test_texts_and_pairs_of_one_call_keep_their_order(tiny_folder: TinyFolder) -> None:
    ours = reader(load("ce-bert-1label", tiny_folder)[0])
    sources: list[TextInput | PairInput] = [
        PairInput(first="one", second="two"),
        TextInput("three"),
        PairInput(first="one", second="four"),
        TextInput("\ud800"),
        PairInput(first="\ud800", second="two"),
        TextInput((7, 8)),
    ]
    together = ours.preprocess([ModelInput(source, DENSE_ONLY) for source in sources])
    alone = [ours.preprocess([ModelInput(source, DENSE_ONLY)])[0] for source in sources]
    assert [str(outcome) for outcome in together] == [str(outcome) for outcome in alone]


@pytest.mark.parametrize(
    ("pair", "param", "message"),
    [
        (
            PairInput(first="a " * 9, second="b " * 9),
            "input",
            "maximum context length is 12 tokens.*contains 21 tokens",
        ),
        (PairInput(first="a", second="b", max_tokens=13), "max_tokens", "greater than max_model_len"),
        (PairInput(first="a", second="\ud800"), "input", "half of a surrogate pair"),
        (PairInput(first="\ud800", second="b"), "input", "half of a surrogate pair"),
        (PairInput(first="a", second="b", max_tokens=0), "input", "no tokens"),
        (PairInput(first="a", second="b", max_first_tokens=-1), "max_tokens", "at least 0"),
        (PairInput(first="a", second="b", instruction="be kind"), "instruction", "takes no instruction"),
    ],
)
def test_a_pair_that_cannot_be_used_is_rejected_in_words(
    pair: PairInput, param: str, message: str, tiny_folder: TinyFolder
) -> None:
    rejected = rejection(reader(load("ce-bert-1label", tiny_folder)[0], max_tokens=12), pair)
    assert rejected.param == param
    with pytest.raises(type(rejected), match=message):
        raise rejected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("[CLS] $B [SEP] $A", "the same special tokens around and between"),
        ("[CLS]:1 $A [SEP] $B:1", "types"),
        ("$A $B:1 [SEP]", "types"),
    ],
)
def test_a_pair_template_that_is_not_understood_rejects_pairs_only(
    template: str, message: str, tiny_folder: TinyFolder
) -> None:
    source, _ = load("ce-bert-1label", tiny_folder)
    source.backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    ours = reader(source)
    assert read(ours, TextInput("a")).ids[0] == 2
    assert message in str(rejection(ours, PairInput(first="a", second="b")))
    with pytest.raises(ConfigError, match=message):
        reader(source, needs_pairs=True)


def test_the_longer_text_is_cut_first_and_no_more_than_needed() -> None:
    for first in range(12):
        for second in range(12):
            for room in range(14):
                a, b = longest_first(first, second, room)
                assert 0 <= a <= first
                assert 0 <= b <= second
                assert a + b == min(first + second, room)
                assert a == first or a >= b - 1
                assert b == second or b >= a - 1


def test_strange_pairs_are_those_of_transformers(tiny_folder: TinyFolder) -> None:
    for kind in KINDS:
        source, theirs = load(kind, tiny_folder)
        ours = reader(source)
        for first in STRANGE:
            for second in STRANGE:
                if wanted := tokens_of(theirs, first, second)["input_ids"]:
                    assert read(ours, PairInput(first=first, second=second)).ids == wanted
