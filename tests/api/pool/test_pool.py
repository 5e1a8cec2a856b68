"""A pool: the engine's methods, which block, for inputs of any number."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from staged_pool.pool import Pool
from staged_pool.pool.calls import WINDOW
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.input_ranges import REQUEST_ITEMS
from staged_pool.runtime.progress import UNKNOWN_TOTAL
from staged_pool.stages.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelFailed,
    NoInputs,
    StageFailed,
    Unsupported,
)
from tests.api.pool.conftest import Open
from tests.support.cards import CLASSIFIER, CROSS_ENCODER, EMBEDDER, TAGGER
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected, label_logits, letter_counts
from tests.support.user_code import BAD_ENDS, BadEnd

MANY = [f"{'a' * (number % 7 + 1)}{number}" for number in range(3 * REQUEST_ITEMS + 5)]
"""Inputs of four requests."""


def in_flight(pool: Pool) -> int:
    return pool.statistics().admission.requests


def wait_until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


@pytest.mark.parametrize("form", [list, tuple, iter, np.array], ids=["list", "tuple", "iterator", "array"])
def test_many_inputs_come_back_in_their_order(letters: Open, form: Callable[[list[str]], Iterable[str]]) -> None:
    pool = letters()
    result = pool.embed(form(MANY))
    assert_array_equal(result.embeddings, np.stack([expected(text) for text in MANY]))
    assert result.usage.prompt_tokens == sum(map(len, MANY))
    assert_array_equal(pool.embed("alone").embeddings, [expected("alone")])


def test_each_method_gives_what_the_engine_gives(letters: Open) -> None:
    embedder = letters(LetterModel(EMBEDDER))
    both = embedder.embed(MANY, outputs=["dense", "sparse"], dimensions=2, prompt_name="query")
    assert both.embeddings.shape == (len(MANY), 2)
    assert both.sparse is not None
    assert_array_equal(both.sparse[-1].indices, letter_counts(f"q:{MANY[-1]}").indices)
    assert embedder.tokenize("ab").ids == [97, 98]
    assert embedder.detokenize([97, 98]) == "ab"
    assert embedder.card is EMBEDDER

    labels = letters(LetterModel(CLASSIFIER)).classify(MANY, activate=False)
    assert_array_equal(labels.scores, [label_logits(text) for text in MANY])

    tagged = letters(LetterModel(TAGGER)).classify_tokens(["aB"] * (REQUEST_ITEMS + 1))
    assert len(tagged.entities) == REQUEST_ITEMS + 1
    assert tagged.entities[-1][0].text == "B"

    ranker = letters(LetterModel(CROSS_ENCODER))
    scored = ranker.score("abc", MANY)
    pairs = ranker.score(["abc"] * len(MANY), MANY)
    assert_array_equal(scored.scores, pairs.scores)
    assert scored.scores.shape == (len(MANY),)
    best = ranker.rerank("xyz", [*MANY, "zyx"], top_n=1).ranking
    assert [ranked.index for ranked in best] == [len(MANY)]


def test_a_call_without_inputs_is_rejected_but_an_empty_stream_is_none(letters: Open) -> None:
    pool = letters()
    with pytest.raises(NoInputs):
        pool.embed([])
    with pytest.raises(NoInputs):
        pool.embed(iter([]))
    with pytest.raises(InvalidInput, match="no documents"):
        letters(LetterModel(CROSS_ENCODER)).score("a", [])
    with pytest.raises(InvalidInput, match="2 queries and 3 documents"):
        letters(LetterModel(CROSS_ENCODER)).score(["a", "b"], ["a", "b", "c"])
    with pool.embed_stream([]) as stream:
        assert list(stream) == []
    assert stream.usage is not None
    assert stream.usage.prompt_tokens == 0


def test_progress_is_told_to_a_function(letters: Open) -> None:
    told: list[tuple[int, int]] = []
    pool = letters()
    pool.embed(MANY, progress=lambda done, total: told.append((done, total)))
    steps = [*range(REQUEST_ITEMS, len(MANY), REQUEST_ITEMS), len(MANY)]
    assert told == [(done, len(MANY)) for done in steps]
    told.clear()
    pool.embed(iter(MANY), progress=lambda done, total: told.append((done, total)))
    assert told == [(done, UNKNOWN_TOTAL) for done in steps]


def test_without_a_terminal_the_bar_is_one_line_on_standard_error(
    letters: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    letters().embed(MANY, progress=True)
    shown = capsys.readouterr()
    assert f"{len(MANY)}/{len(MANY)}" in shown.err
    assert "/s" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_gives_each_result_with_the_index_of_its_input(letters: Open, ordered: bool) -> None:
    pool = letters()
    stream = pool.embed_stream(iter(MANY), ordered=ordered)
    found = list(stream)
    assert [index for index, _ in found] == list(range(len(MANY))) or not ordered
    for index, vector in found:
        assert_array_equal(vector, expected(MANY[index]))
    assert sorted(index for index, _ in found) == list(range(len(MANY)))
    assert stream.usage is not None
    assert stream.usage.prompt_tokens == sum(map(len, MANY))


def test_labels_and_scores_are_streamed_too(letters: Open) -> None:
    labels = letters(LetterModel(CLASSIFIER)).classify_stream(iter(MANY), activate=False)
    assert_array_equal([scores for _, scores in labels], [label_logits(text) for text in MANY])
    ranker = letters(LetterModel(CROSS_ENCODER))
    scores = [score for _, score in ranker.score_stream(("abc", text) for text in MANY)]
    assert_array_equal(np.array(scores, np.float32), ranker.score("abc", MANY).scores)


def test_unordered_results_do_not_wait_for_the_first_request(letters: Open) -> None:
    gate = Gate()
    model = LetterModel(on_preprocess=lambda texts: gate() if "slow" in texts else None)
    pool = letters(model, preprocess_limit=2)
    texts = ["slow", *MANY[: 2 * REQUEST_ITEMS]]
    stream = pool.embed_stream(texts, ordered=False)
    first = [index for index, _ in itertools.islice(stream, REQUEST_ITEMS)]
    assert min(first) >= 1
    gate.open()
    assert sorted([*first, *(index for index, _ in stream)]) == list(range(len(texts)))


def test_a_stream_takes_no_more_inputs_than_its_window_has_room_for(letters: Open) -> None:
    taken = 0

    def inputs() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"text {taken}"

    pool = letters()
    stream = pool.embed_stream(inputs())
    for _ in range(3 * REQUEST_ITEMS):
        next(stream)
    assert taken <= (3 + WINDOW) * REQUEST_ITEMS + 1
    stream.close()
    assert list(stream) == []


def test_leaving_a_loop_over_a_stream_cancels_what_is_in_flight(letters: Open) -> None:
    gate = Gate()
    model = LetterModel(on_preprocess=lambda texts: gate() if "held" in texts else None)
    pool = letters(model, preprocess_limit=2)
    for index, _ in pool.embed_stream(itertools.chain(["held"], map(str, itertools.count())), ordered=False):
        assert index >= 1
        assert in_flight(pool) >= 1
        break
    wait_until(lambda: in_flight(pool) == 0)
    gate.open()
    assert pool.embed("usable").embeddings.shape == (1, 4)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_gives_its_first_result_before_it_asks_for_more_inputs_than_it_needs(
    letters: Open, ordered: bool
) -> None:
    pool, taken = letters(), 0

    def inputs() -> Iterator[str]:
        nonlocal taken
        for text in MANY:
            taken += 1
            yield text  # a result is there before the next input is
            wait_until(lambda: pool.statistics().device.items > 0 and in_flight(pool) == 0)

    stream = pool.embed_stream(inputs(), ordered=ordered)
    for place in range(5):
        index, vector = next(stream)
        assert index == place
        assert_array_equal(vector, expected(MANY[place]))
        assert taken <= 20, "the source was slow, and nothing was in flight"
    stream.close()


@pytest.mark.parametrize("end", [*BAD_ENDS, None])
@pytest.mark.parametrize("ordered", [True, False])
def test_the_error_of_an_iterator_comes_behind_the_results_of_the_inputs_before_it(
    letters: Open, ordered: bool, end: BadEnd | None
) -> None:
    pool, seen = letters(), list[int]()

    def inputs() -> Iterator[str]:
        yield from MANY[: REQUEST_ITEMS + 5]
        if end is not None:
            end.called()
        raise LookupError("the caller's own")

    message = "the caller's own" if end is None else f"iterator of the inputs failed: {end.kind}"
    stream = pool.embed_stream(inputs(), ordered=ordered)
    with pytest.raises(LookupError if end is None else StageFailed, match=message):
        seen.extend(index for index, _ in stream)
    assert sorted(seen) == list(range(REQUEST_ITEMS + 5))
    with pytest.raises(LookupError if end is None else StageFailed, match=message):
        pool.embed(inputs())
    wait_until(lambda: in_flight(pool) == 0)
    assert pool.embed("usable").embeddings.shape == (1, 4)


@pytest.mark.parametrize("end", BAD_ENDS)
def test_whatever_other_functions_of_a_caller_let_out_fails_their_call_alone(letters: Open, end: BadEnd) -> None:
    pool = letters()

    async def use(_: Engine) -> None:
        await end.awaited()

    with pytest.raises(StageFailed, match=f"The function of the call failed: {end.kind}"):
        pool.call(use)
    with pytest.raises(StageFailed, match=f"The function of the progress failed: {end.kind}"):
        pool.embed(MANY, progress=lambda done, total: end.called())
    wait_until(lambda: in_flight(pool) == 0)
    assert pool.embed("usable").embeddings.shape == (1, 4)


def test_a_wrong_input_is_named_by_its_index_in_the_call(letters: Open) -> None:
    pool = letters()
    with pytest.raises(InvalidInput) as raised:
        pool.embed([*MANY, None])  # type: ignore[arg-type]
    assert raised.value.index == len(MANY)
    assert str(raised.value).startswith(f"Inputs {3 * REQUEST_ITEMS} to {len(MANY)} of {len(MANY) + 1}: ")
    with pytest.raises(ModelFailed) as failed:
        list(pool.embed_stream(itertools.chain(MANY, ["NaN"])))
    assert failed.value.index == len(MANY)
    assert re.match(rf"Inputs \d+ to {len(MANY)}: ", str(failed.value))
    wait_until(lambda: in_flight(pool) == 0)


def test_a_task_that_the_model_cannot_do_is_unsupported(letters: Open) -> None:
    with pytest.raises(Unsupported):
        letters().classify(MANY)


def test_calls_wait_for_room_instead_of_being_rejected(letters: Open) -> None:
    pool = letters(max_requests=1)
    assert pool.embed(MANY).embeddings.shape == (len(MANY), 4)
    assert pool.statistics().admission.refused["requests"]


def test_a_time_limit_holds_for_the_whole_call(letters: Open) -> None:
    gate = Gate()
    pool = letters(LetterModel(on_forward=gate), max_requests=1)
    with pytest.raises(DeadlineExceeded):
        pool.embed(MANY, timeout_s=0.2)
    gate.open()
    with pytest.raises(InvalidInput, match="timeout_s"):
        pool.embed(MANY, timeout_s="3")  # type: ignore[arg-type]
    assert pool.embed(MANY, timeout_s=60).embeddings.shape == (len(MANY), 4)


def test_several_threads_use_one_pool(letters: Open) -> None:
    pool = letters()

    def use(number: int) -> bool:
        texts = [f"{number} {text}" for text in MANY]
        return np.array_equal(pool.embed(texts).embeddings, np.stack([expected(text) for text in texts]))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(16)))


def test_a_future_is_started_and_cancelled(letters: Open) -> None:
    gate = Gate()
    pool = letters(LetterModel(on_forward=gate))
    future = pool.submit(lambda engine: engine.embed("a"))
    wait_until(lambda: in_flight(pool) == 1)
    assert future.cancel()
    wait_until(lambda: in_flight(pool) == 0)
    gate.open()
    assert pool.call(lambda engine: engine.embed("b")).embeddings.shape == (1, 4)


def test_settings_are_arguments_by_name_or_an_engine_config() -> None:
    assert Pool("model", device="cpu", preprocess_limit=3).config.preprocess_limit == 3
    config = EngineConfig(model="model", target_delay_s=3)
    assert Pool(config).config == config
    assert Pool(config, chunk_items=2).config.chunk_items == 2
    with pytest.raises(ConfigError, match="preproces_limit: is no setting of an engine, but preprocess_limit is"):
        Pool("model", preproces_limit=3)
    with pytest.raises(ConfigError, match="preprocess_limit=0"):
        Pool("model", preprocess_limit=0)
    with pytest.raises(ConfigError, match="backend='curio': must be 'asyncio' or 'trio'"):
        Pool("model", backend="curio")  # type: ignore[arg-type]
