"""Estimates of a body before it has been read."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.runtime.admission.estimates import (
    FIRST_BYTES_PER_TOKEN,
    FIRST_IMAGE_TOKENS,
    IMAGE_BYTES,
    Estimates,
)
from staged_pool.runtime.card import Lane

BOTH: tuple[Lane, ...] = ("text", "image")
SIZES = st.integers(0, 2**28)
READ = st.dictionaries(st.sampled_from(BOTH), st.integers(1, 10**6), min_size=1)


def test_before_anything_is_known_a_small_body_is_a_text_and_a_large_one_an_image() -> None:
    estimates = Estimates(BOTH)
    (small,) = estimates.guess(400).items()
    assert small[0] == "text"
    assert small[1].tokens == 400 / FIRST_BYTES_PER_TOKEN
    (large,) = estimates.guess(500_000).items()
    assert large[0] == "image"
    assert large[1].tokens == FIRST_IMAGE_TOKENS


def test_sizes_are_learned_apart_from_each_other() -> None:
    estimates = Estimates(BOTH)
    for _ in range(100):
        estimates.learn(300, {"text": 60})
        estimates.learn(500_000, {"image": 50})
    small, large = estimates.guess(300), estimates.guess(500_000)
    assert small["text"].tokens == pytest.approx(60)
    assert small["image"].tokens == 0
    assert not small["image"].likely
    assert large["image"].tokens == pytest.approx(50)
    assert not large["text"].likely


def test_a_small_body_may_be_a_text_whatever_was_seen() -> None:
    estimates = Estimates(BOTH)
    estimates.learn(300, {"text": 60})
    for _ in range(1000):
        estimates.learn(300, {"image": 50})
    guess = estimates.guess(300)
    assert guess["text"].likely
    assert guess["text"].given_present == pytest.approx(60)
    assert guess["image"].likely


def test_what_is_known_of_the_inputs_is_better_than_any_guess() -> None:
    estimates = Estimates(BOTH)
    for _ in range(100):
        estimates.tokenized("image", 50)
        estimates.tokenized("text", 20)
    assert estimates.known(10**6, {"image": 4}) == {"image": pytest.approx(200)}
    assert estimates.known(10**6, {"image": 4, "text": 2}) == {"image": pytest.approx(200), "text": pytest.approx(40)}
    assert estimates.known(400, {"text": 3}) == {"text": 400 / FIRST_BYTES_PER_TOKEN}


@given(st.lists(st.tuples(SIZES, READ)), SIZES)
def test_guesses_are_numbers_that_can_be_counted_and_one_lane_is_likely(
    seen: list[tuple[int, dict[Lane, int]]], body_bytes: int
) -> None:
    estimates = Estimates(BOTH)
    for size, read in seen:
        for lane, tokens in read.items():
            estimates.tokenized(lane, tokens)
        estimates.learn(size, read)
    guesses = estimates.guess(body_bytes)
    assert any(guess.likely for guess in guesses.values())
    assert all(
        0 <= guess.tokens <= guess.given_present * (1 + 1e-9) + 1e-9 or not guess.likely for guess in guesses.values()
    )
    assert all(math.isfinite(guess.tokens) and math.isfinite(guess.given_present) for guess in guesses.values())
    if body_bytes < IMAGE_BYTES:
        assert guesses["text"].likely


@given(st.integers(1, 2**24), READ)
def test_a_size_that_always_turned_out_the_same_is_guessed_right(body_bytes: int, read: dict[Lane, int]) -> None:
    estimates = Estimates(BOTH)
    for _ in range(50):
        estimates.learn(body_bytes, read)
    guesses = estimates.guess(body_bytes)
    for lane in BOTH:
        assert guesses[lane].tokens == pytest.approx(read.get(lane, 0))
        assert guesses[lane].likely or lane not in read


@given(st.lists(st.tuples(SIZES, st.integers(1, 10**6))), st.sampled_from(BOTH), SIZES)
def test_a_model_of_one_lane_is_never_thought_to_use_another(
    seen: list[tuple[int, int]], lane: Lane, body_bytes: int
) -> None:
    estimates = Estimates((lane,))
    for size, tokens in seen:
        estimates.learn(size, {lane: tokens})
    (guessed,) = estimates.guess(body_bytes)
    assert guessed == lane
