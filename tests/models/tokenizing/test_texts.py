"""Prompts, own limits, spans and parts of texts, against sentence-transformers and transformers."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import DENSE_ONLY, Output, TextInput
from staged_pool.runtime.spans import Span
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Prepared
from tests.models.conftest import TinyFolder
from tests.models.reading import STRANGE, WORDS, load, parts, read, reader, rejection, some_text

KINDS = [
    "real",
    "bert-mean",
    "roberta-mean",
    "xlmr-prompt",
    "qwen3-embed-left",
    "qwen3-last",
    "instructor-bpe-no-prompt",
]
PROMPTS = ["query: ", "Represent this:\n", "passage", "x [SEP]", "</s>", "<|im_end|>"]
LABELS = frozenset({Output.TOKEN_LABELS})


def test_a_prompt_goes_before_texts_only(tiny_folder: TinyFolder) -> None:
    for kind in KINDS:
        source, theirs = load(kind, tiny_folder)
        ours = reader(source)
        for prompt in PROMPTS:
            for text in ("some food", *STRANGE):
                assert read(ours, TextInput(text), prompt=prompt).ids == theirs(prompt + text)["input_ids"]
            assert read(ours, TextInput((7, 8)), prompt=prompt).ids == [7, 8]
    assert read(ours, TextInput("food"), prompt="query: ").prompt_tokens == 0


@pytest.mark.parametrize(
    "kind", ["bert-mean", "instructor-bpe-no-prompt", "xlmr-prompt", "qwen3-embed-left", "qwen3-last"]
)
def test_the_tokens_of_a_prompt_are_counted_as_sentence_transformers_counts_them(
    kind: str, tiny_folder: TinyFolder
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformer = sentence_transformers.SentenceTransformer(str(tiny_folder(kind)), device="cpu")[0]
    ours = reader(load(kind, tiny_folder)[0], pools_prompt=False)
    for prompt in PROMPTS:
        counted = transformer._get_prompt_length(prompt)
        assert read(ours, TextInput("a text"), prompt=prompt).prompt_tokens == counted
        assert read(ours, TextInput("a text", max_tokens=5), prompt=prompt).prompt_tokens == counted
    assert read(ours, TextInput("a text")).prompt_tokens == 0
    assert read(ours, TextInput((7, 8)), prompt="query: ").prompt_tokens == 0


def test_fewer_tokens_of_a_prompt_are_left_out_where_its_beginning_was_cut_off(tiny_folder: TinyFolder) -> None:
    ours = reader(load("bert-mean", tiny_folder)[0], pools_prompt=False)
    whole = read(ours, TextInput("a b c"), prompt="x y ")
    assert (len(whole.ids), whole.prompt_tokens) == (7, 3)
    for limit, left in ((7, 3), (6, 2), (5, 1), (4, 1), (3, 1)):
        cut = read(ours, TextInput("a b c", max_tokens=limit, truncate_side="left"), prompt="x y ")
        assert cut.ids == [whole.ids[0], *whole.ids[-limit + 1 :]]
        assert cut.prompt_tokens == left
    bare = read(ours, TextInput("a b c", add_special_tokens=False), prompt="x y ")
    assert (bare.ids, bare.prompt_tokens) == (whole.ids[1:-1], 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_can_be_cut_to_its_own_tokens_first(kind: str, tiny_folder: TinyFolder) -> None:
    source, theirs = load(kind, tiny_folder)
    ours = reader(source, max_tokens=30)
    text = " ".join(WORDS[:300])
    prompted = theirs("query: " + text, add_special_tokens=False)["input_ids"]
    prompt = theirs("query: ", add_special_tokens=False)["input_ids"]
    shared = len(prompt) if prompted[: len(prompt)] == prompt else len(prompt) - 1
    bare = theirs(text, add_special_tokens=False)["input_ids"]
    empty = theirs("")["input_ids"]
    for own in (1, 7, 16):
        assert set(read(ours, TextInput(text, max_own_tokens=own)).ids) == {*empty, *bare[:own]}
        sequence = read(ours, TextInput(text, max_own_tokens=own), prompt="query: ")
        assert len(sequence.ids) == len(empty) + shared + own
        assert " ".join(map(str, prompted[: shared + own])) in " ".join(map(str, sequence.ids))
        assert read(ours, TextInput(tuple(bare), max_own_tokens=own)).ids == bare[:own]
    both = read(ours, TextInput(text, max_tokens=9, max_own_tokens=12, add_special_tokens=False))
    assert both.ids == bare[:9]
    last = TextInput(text, max_tokens=9, max_own_tokens=12, add_special_tokens=False, truncate_side="left")
    assert read(ours, last).ids == bare[3:12]
    assert "at least 0" in str(rejection(ours, TextInput(text, max_own_tokens=-1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["", "query: "])
def test_spans_are_the_offsets_and_words_of_transformers(kind: str, prompt: str, tiny_folder: TinyFolder) -> None:
    source, theirs = load(kind, tiny_folder)
    ours = reader(source)
    chance = random.Random(4)
    for text in [some_text(chance, 12) for _ in range(20)] + STRANGE:
        wanted = theirs(prompt + text, return_offsets_mapping=True, return_special_tokens_mask=True)
        if not wanted["input_ids"]:
            continue
        sequence = read(ours, TextInput(text), prompt=prompt, outputs=LABELS)
        assert sequence.ids == wanted["input_ids"]
        assert sequence.spans is not None
        words = wanted.word_ids()
        offsets = wanted["offset_mapping"]
        own = [
            place
            for place, special in enumerate(wanted["special_tokens_mask"])
            if not special and offsets[place][1] > len(prompt)
        ]
        first = words[own[0]] if own else 0
        for place, span in enumerate(sequence.spans):
            if place in own:
                start, end = offsets[place]
                assert span == Span(max(start - len(prompt), 0), end - len(prompt), words[place] - first)
            else:
                assert span == Span(0, 0, None)


def test_spans_are_cut_as_the_tokens_are(tiny_folder: TinyFolder) -> None:
    ours = reader(load("real", tiny_folder)[0])
    text = " ".join(WORDS[:200])
    whole = read(ours, TextInput(text), outputs=LABELS).spans
    assert whole is not None
    none = Span(0, 0, None)
    for limit in (1, 2, 3, 20):
        right = read(ours, TextInput(text, max_tokens=limit), outputs=LABELS)
        assert right.spans == (*whole[: max(limit - 1, 1)], *[none] * (limit > 1))
        left = read(ours, TextInput(text, max_tokens=limit, truncate_side="left"), outputs=LABELS)
        assert left.spans == (none, *whole[len(whole) - limit + 1 :])
        assert len(left.ids) == len(right.ids) == limit


def test_only_texts_that_want_labels_of_tokens_have_spans(tiny_folder: TinyFolder) -> None:
    ours = reader(load("bert-mean", tiny_folder)[0])
    prepared = ours.preprocess(
        [
            ModelInput(TextInput("a text"), DENSE_ONLY),
            ModelInput(TextInput("a text"), LABELS),
            ModelInput(TextInput((7, 8)), LABELS),
        ]
    )
    spans = [outcome.payload.spans for outcome in prepared if isinstance(outcome, Prepared)]
    assert [found is not None for found in spans] == [False, True, False]


def bare_of(theirs: Any, text: str) -> list[int]:
    ids: list[int] = theirs(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["", "query: "])
def test_a_text_that_is_too_long_is_split(kind: str, prompt: str, tiny_folder: TinyFolder) -> None:
    source, theirs = load(kind, tiny_folder)
    ours = reader(source, max_tokens=20)
    text = " ".join(WORDS[:100])
    bare = bare_of(theirs, prompt + text)
    alone = bare_of(theirs, prompt) if prompt else []
    before = alone if bare[: len(alone)] == alone else alone[:-1]
    room = 20 - len(theirs("")["input_ids"]) - len(before)
    chunks = [bare[start : start + room] for start in range(len(before), len(bare), room)]
    found = parts(ours, TextInput(text), prompt=prompt)
    special = reader(source).tokenize("", add_special_tokens=True).ids
    assert [len(part.ids) for part in found] == [len(special) + len(before) + len(chunk) for chunk in chunks]
    for part, chunk in zip(found, chunks, strict=True):
        own = [*before, *chunk]
        at = next(n for n in range(len(part.ids)) if part.ids[n : n + len(own)] == own)
        assert part.ids[:at] + part.ids[at + len(own) :] == special


def test_token_ids_that_are_too_many_are_split(tiny_folder: TinyFolder) -> None:
    ours = reader(load("bert-mean", tiny_folder)[0], max_tokens=20)
    ids = tuple(range(5, 60))
    assert [part.ids for part in parts(ours, TextInput(ids), prompt="query: ")] == [
        list(ids[:20]),
        list(ids[20:40]),
        list(ids[40:]),
    ]


def test_the_prompt_of_each_part_is_left_out(tiny_folder: TinyFolder) -> None:
    ours = reader(load("instructor-bpe-no-prompt", tiny_folder)[0], max_tokens=20, pools_prompt=False)
    found = parts(ours, TextInput(" ".join(WORDS[:100])), prompt="query: ")
    # Alone, the blank at the end is a token; it is not one of those that each part begins with.
    first, *others = [part.prompt_tokens for part in found]
    assert set(others) == {first - 1}


def test_what_fits_or_is_cut_is_not_split(tiny_folder: TinyFolder) -> None:
    ours = reader(load("bert-mean", tiny_folder)[0], max_tokens=20)
    assert len(read(ours, TextInput("a short text"), may_split=True).ids) < 20
    assert len(read(ours, TextInput("x " * 90, max_tokens=9), may_split=True).ids) == 9
    assert len(read(ours, TextInput("x " * 90, max_own_tokens=9), may_split=True).ids) == 11


def test_a_text_is_split_into_at_most_1024_parts(tiny_folder: TinyFolder) -> None:
    ours = reader(load("bert-mean", tiny_folder)[0], max_tokens=5)
    assert len(parts(ours, TextInput("x " * 3 * 1024))) == 1024
    rejected = rejection(ours, TextInput("x " * (3 * 1024 + 1)), may_split=True)
    assert "more than 1024 parts" in str(rejected)
    rejected = rejection(ours, TextInput("x " * 9), may_split=True, prompt="a b c ")
    assert "leaves no room" in str(rejected)
    assert isinstance(rejected, InvalidInput)
