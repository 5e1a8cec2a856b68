"""Pipelines of functions and of model doubles: items, windows, priorities, deadlines, cancellation and errors."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import pytest

from staged_pool import (
    ConfigError,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    EngineStopped,
    InvalidInput,
    ItemError,
    ModelFailed,
    Overloaded,
    Pipeline,
    PipelineItem,
    PipelineStage,
    StageFailed,
    TooLarge,
)
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.tasks.score import max_sim
from staged_pool.runtime.threads.device import DeviceThreads
from tests.runtime.test_zero_shot import NLI
from tests.support.cards import CLASSIFIER, EMBEDDER
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

T = TypeVar("T")


@asynccontextmanager
async def engines_on(*models: LetterModel, **settings: Any) -> AsyncIterator[Sequence[Engine]]:
    async with AsyncExitStack() as stack:
        engines = []
        for model in models:
            device = await stack.enter_async_context(DeviceThreads("test device", watchdog_s=60).running())
            config = EngineConfig(drain_timeout_s=10, **settings)
            engines.append(await stack.enter_async_context(run_engine(config, model, device=device)))
        yield engines


class Valve(Generic[T]):
    """An async stage that holds items until the test lets them pass. It records them."""

    def __init__(self) -> None:
        self.came: list[T] = []
        self.cancelled: list[T] = []
        self._open = anyio.Event()

    async def __call__(self, value: T) -> T:
        self.came.append(value)
        try:
            await self._open.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(value)
            raise
        return value

    def open(self) -> None:
        self._open.set()


def is_idle(pipeline: Pipeline) -> bool:
    """True if nothing is in flight, and nothing waits."""
    s = pipeline.statistics()
    return not (s.requests or s.in_flight or s.waiting or any(stage.in_flight or stage.waiting for stage in s.stages))


async def test_the_outcome_of_each_stage_feeds_the_next_and_items_keep_their_order() -> None:
    async def shout(text: str) -> str:
        for _ in range(ord(text[0]) % 3):  # items overtake each other
            await anyio.lowlevel.checkpoint()
        return text.upper()

    async with engines_on(LetterModel()) as (engine,):
        pipeline = Pipeline([shout, PipelineStage("vectors", engine=engine)])
        result = await pipeline.submit(["abc", "bcd", "cde"])
    assert [item.index for item in result.items] == [0, 1, 2]
    assert [item.value.dense.tolist() for item in result.items] == [
        expected(text).tolist() for text in ("ABC", "BCD", "CDE")
    ]
    assert result.usage.prompt_tokens == 9
    assert is_idle(pipeline)


async def test_items_multiply_vanish_and_are_found_by_index_and_part() -> None:
    split = PipelineStage("split", function=str.split, expand=True)
    drop = PipelineStage("drop", function=lambda word: None if word == "b" else word)
    result = await Pipeline([split, drop]).submit(["a b c", "b", "", "d b"])
    assert [(item.index, item.parts, item.value) for item in result.items] == [
        (0, (0,), "a"),
        (0, (2,), "c"),
        (3, (0,), "d"),
    ]


async def test_a_stage_expands_the_list_in_a_field_and_no_more_than_max_items() -> None:
    def find(text: str) -> dict[str, list[str]]:
        return {"words": text.split()}

    pipeline = Pipeline([PipelineStage("find", function=find, expand="words", max_items=2)])
    assert (await pipeline.submit("a b")).values == ["a", "b"]
    with pytest.raises(TooLarge, match=r"Item 1, stage find: The stage made more than 2 items of one"):
        await pipeline.submit(["a", "a b c"])
    wrong = Pipeline([PipelineStage("find", function=len, expand=True)])
    with pytest.raises(StageFailed, match=r"must be a list, not of type int"):
        await wrong.submit("a")


async def test_references_find_the_request_the_item_and_fields_of_earlier_stages() -> None:
    def measure(text: str) -> dict[str, int]:
        return {"length": len(text)}

    def join(query: str, text: str, length: int) -> str:
        return f"{query} {text} {length}"

    pipeline = Pipeline(
        [measure, PipelineStage("join", function=join, source=["request.query", "item", "measure.length"])],
        output={"text": "join", "length": "measure.length"},
    )
    result = await pipeline.submit({"query": "q", "data": ["one", "three"]})
    assert result.values == [{"text": "q one 3", "length": 3}, {"text": "q three 5", "length": 5}]
    with pytest.raises(InvalidInput, match="needs the field `query`") as failure:
        await pipeline.submit(["one"])
    assert failure.value.param == "query"
    assert is_idle(pipeline)


async def test_a_stage_chooses_among_its_labels_or_those_of_the_request() -> None:
    labels, texts = ["c", "acca", "e"], ["cc", "d", "ac"]
    how: dict[str, Any] = {"hypothesis_template": "={}", "multi_label": True}
    async with engines_on(LetterModel(card=NLI)) as (engine,):
        nli: dict[str, Any] = {"engine": engine, "task": "classify"}
        plain = PipelineStage("plain", **nli, source="item")
        own = PipelineStage("own", **nli, source="item", candidate_labels=labels)
        asked = PipelineStage("asked", **nli, source=["item", "request.labels"], **how)
        pipeline = Pipeline([plain, own, asked], output={name: name for name in ("plain", "own", "asked")})
        result = await pipeline.submit({"data": texts, "labels": ", ".join(labels[:2])})
        wanted = {
            "plain": await engine.classify(texts),
            "own": await engine.classify(texts, candidate_labels=labels),
            "asked": await engine.classify(texts, candidate_labels=labels[:2], **how),
        }
        assert pipeline.fields == ["labels"]
        for name, found in wanted.items():
            for item, scores, best in zip(result.items, found.scores, found.best, strict=True):
                value = item.value[name]
                assert tuple(value.scores) == found.labels
                assert [*value.scores.values()] == pytest.approx(scores.tolist())
                assert (value.label, value.score) == (found.labels[best], pytest.approx(scores[best]))
        assert result.usage.prompt_tokens == sum(found.usage.prompt_tokens for found in wanted.values())
        for wrong, message in (
            (None, "The labels are null"),
            (3, "candidate_labels must be texts"),
            ({"a": 1}, "candidate_labels must be texts"),
            (["a", ""], "Label 1 of candidate_labels is empty"),
        ):
            with pytest.raises(InvalidInput, match=f"^Stage asked: {message}") as failure:
                await pipeline.submit({"data": texts, "labels": wrong})
            assert (failure.value.param, failure.value.index) == ("candidate_labels", None)
        with pytest.raises(InvalidInput, match="needs the field `labels`"):
            await pipeline.submit(texts)
        with pytest.raises(ConfigError, match=r"stage asked: from = .* takes one input, and candidate labels"):
            Pipeline([PipelineStage("asked", **nli, source=["item", "request.labels", "item"])])
    assert is_idle(pipeline)


async def test_wrong_labels_of_an_item_fail_alone_and_those_of_the_request_fail_it() -> None:
    async with engines_on(LetterModel(card=NLI)) as (engine,):
        nli: dict[str, Any] = {"engine": engine, "task": "classify", "on_error": "skip"}
        own = Pipeline([PipelineStage("own", **nli, source=["item.text", "item.labels"])])
        items = [{"text": "cc", "labels": labels} for labels in (["c", "d"], None, ["d", "d"], "d, c")]
        result = await own.submit(items)
        assert [item.value.label for item in result.items] == ["c", "c"]
        assert {error.index: str(error.error) for error in result.errors} == {
            1: "Item 1, stage own: The labels are null; expected texts, or one text with commas between the labels.",
            2: "Item 2, stage own: Label 1 of candidate_labels stands there twice: each must be given once.",
        }
        asked = Pipeline([PipelineStage("asked", **nli, source=["item", "request.labels"])])
        with pytest.raises(InvalidInput, match=r"^Stage asked: candidate_labels has no label"):
            await asked.submit({"data": ["a", "b"], "labels": []})
        result = await asked.submit({"data": ["cc", "d"], "labels": iter(["c", "d"])})
        assert [item.value.label for item in result.items] == ["c", "c"]
    assert is_idle(own)
    assert is_idle(asked)


async def test_labels_and_limits_must_fit_the_model() -> None:
    few = replace(EMBEDDER, max_active_dims=2)
    async with engines_on(LetterModel(card=CLASSIFIER), LetterModel(card=few)) as (classifier, embedder):
        labelled: dict[str, Any] = {"engine": classifier, "task": "classify"}
        with pytest.raises(ConfigError, match="stage a: candidate_labels: the model `letters` cannot choose among"):
            Pipeline([PipelineStage("a", **labelled, candidate_labels=["b"])])
        with pytest.raises(ConfigError, match="stage a: from: the model `letters` cannot choose among"):
            Pipeline([PipelineStage("a", **labelled, source=["item", "request.labels"])])
        sparse: dict[str, Any] = {"engine": embedder, "outputs": ["sparse"]}
        with pytest.raises(ConfigError, match="max_active_dims = 3: the folder of the model `letters` keeps 2 weights"):
            Pipeline([PipelineStage("a", **sparse, max_active_dims=3)])
        result = await Pipeline([PipelineStage("a", **sparse, max_active_dims=1)]).submit("aab")
        (whole,) = (await embedder.embed("aab", outputs="sparse")).sparse or ()
    assert len(whole.values) > 1
    assert result.values[0].sparse.values.tolist() == [whole.values.max()]


async def test_the_best_items_go_on_and_the_others_vanish_even_if_a_request_is_larger_than_the_window() -> None:
    async with engines_on(LetterModel(card=EMBEDDER)) as (engine,):
        vectors = PipelineStage("vectors", engine=engine, outputs=["multi_vector"])
        best = PipelineStage("best", task="maxsim", top_k=3)
        pipeline = Pipeline([vectors, best], window=2, output={"text": "item", "score": "best"})
        texts = ["abc", "xyz", "a", "abd", "q", "abcabc", "zz", "abz"]
        result = await pipeline.submit({"query": "abc", "data": texts})
        query = await engine.embed("abc", outputs="multi_vector", prompt_name="query")
        documents = await engine.embed(texts, outputs="multi_vector", prompt_name="document")
    assert query.multi_vector is not None
    assert documents.multi_vector is not None
    scores = {
        text: max_sim(query.multi_vector[0], document)
        for text, document in zip(texts, documents.multi_vector, strict=True)
    }
    best_texts = sorted(texts, key=lambda text: -scores[text])[:3]
    assert [item.value["text"] for item in result.items] == best_texts
    assert [item.value["score"] for item in result.items] == pytest.approx([scores[text] for text in best_texts])
    assert is_idle(pipeline)


async def test_at_most_as_many_items_are_in_flight_as_the_windows_allow() -> None:
    first, second = Valve[Any](), Valve[Any]()
    pipeline = Pipeline(
        [PipelineStage("first", function=first, window=3), PipelineStage("second", function=second)], window=5
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.submit, list(range(20)))

        def counts() -> tuple[int, ...]:
            s = pipeline.statistics()
            return len(first.came), s.in_flight, s.waiting, s.stages[0].in_flight, s.stages[0].waiting

        await until(lambda: counts() == (3, 5, 1, 3, 2))  # the feed waits with the next item
        first.open()
        await until(lambda: len(second.came) == 5)
        assert len(first.came) == 5
        second.open()
    assert sorted(map(str, first.came)) == sorted(map(str, second.came)) == sorted(map(str, range(20)))
    assert is_idle(pipeline)


async def test_parts_of_items_go_before_new_items() -> None:
    valve: Valve[tuple[int, int]] = Valve()
    split = PipelineStage("split", function=lambda number: [(number, part) for part in range(3)], expand=True)
    pipeline = Pipeline([split, PipelineStage("valve", function=valve, window=1)], window=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.submit, list(range(4)))
        await until(lambda: len(valve.came) == 1 and pipeline.statistics().waiting == 3)  # two spreads and the feed
        valve.open()
    assert {number for number, _ in valve.came[:6]} == {0, 1}, "those were in memory already"
    assert len(valve.came) == 12


async def test_a_slow_pipeline_does_not_stop_another_one_on_the_same_engine() -> None:
    valve = Valve[Any]()
    async with engines_on(LetterModel()) as (engine,):
        slow = Pipeline([PipelineStage("vectors", engine=engine), PipelineStage("valve", function=valve)], window=2)
        quick = Pipeline([PipelineStage("vectors", engine=engine)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow.submit, ["a"] * 10)
            await until(lambda: len(valve.came) == 2)
            assert len((await quick.submit(["b"] * 10)).items) == 10
            valve.open()
    assert is_idle(slow)


async def test_inner_engines_reject_nothing_however_small_their_limits() -> None:
    async with engines_on(LetterModel(), LetterModel(), max_requests=1, target_delay_s=0.001) as (one, other):
        pipeline = Pipeline(
            [PipelineStage("one", engine=one), PipelineStage("other", engine=other, source="item")], window=16
        )
        async with anyio.create_task_group() as tasks:
            for priority in ("interactive", "bulk"):
                tasks.start_soon(partial(pipeline.submit, ["text"] * 20, priority=priority, tenant=priority))
        rejected = {**one.statistics().admission.refused, **other.statistics().admission.refused}
    assert not rejected
    assert pipeline.statistics().outcomes["answered"] == 2


async def test_the_same_engine_twice_cannot_block_itself() -> None:
    async with engines_on(LetterModel(), max_requests=1) as (engine,):
        first = PipelineStage("first", engine=engine, window=1)
        again = PipelineStage("again", engine=engine, source="item", window=1)
        result = await Pipeline([first, again], window=4).submit([f"text {n}" for n in range(30)])
    assert len(result.items) == 30


async def test_interactive_requests_overtake_bulk_ones_at_every_window() -> None:
    valve = Valve[Any]()
    pipeline = Pipeline([PipelineStage("valve", function=valve)], window=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(pipeline.submit, [f"bulk {n}" for n in range(5)], priority="bulk"))
        await until(lambda: pipeline.statistics().waiting == 1)
        tasks.start_soon(pipeline.submit, ["interactive"])
        await until(lambda: pipeline.statistics().waiting == 2)
        valve.open()
    assert valve.came[1] == "interactive"


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_who_leaves_is_cancelled_in_any_stage_and_frees_all_places(stage: int) -> None:
    valves = [Valve[Any]() for _ in range(3)]
    for place, valve in enumerate(valves):
        if place != stage:
            valve.open()
    pipeline = Pipeline([PipelineStage(f"s{place}", function=valve) for place, valve in enumerate(valves)], window=2)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.submit, ["a", "b", "c"])
            await until(lambda: len(valves[stage].came) == 2)
            scope.cancel()
    assert sorted(map(str, valves[stage].cancelled)) == ["a", "b"]
    assert is_idle(pipeline)
    assert pipeline.statistics().outcomes["cancelled"] == 1


async def test_who_leaves_while_a_model_works_frees_all_places_at_once() -> None:
    gate = Gate()
    async with engines_on(LetterModel(on_forward=gate), max_requests=2) as (engine,):
        pipeline = Pipeline([PipelineStage("vectors", engine=engine)])
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipeline.submit, ["a", "b", "c", "d"])
                await gate.arrived()
                await until(lambda: engine._entrance.waiting == 2)
                scope.cancel()
        assert is_idle(pipeline)
        assert (engine.statistics().admission.requests, engine._entrance.waiting) == (0, 0)
        gate.open()


async def test_a_deadline_is_that_of_the_whole_request_and_its_error_names_the_stage() -> None:
    valve, passing = Valve[Any](), Valve[Any]()
    passing.open()
    pipeline = Pipeline([PipelineStage("first", function=passing), PipelineStage("second", function=valve)])
    with pytest.raises(DeadlineExceeded) as failure:
        await pipeline.submit(["a", "b"], timeout_s=2)
    assert failure.value.stage == "second"
    assert sorted(valve.cancelled) == ["a", "b"]
    assert is_idle(pipeline)
    assert pipeline.statistics().outcomes["expired"] == 1


async def test_engines_learn_what_is_left_of_the_deadline_the_priority_and_the_tenant() -> None:
    async with engines_on(LetterModel()) as (engine,):
        asked: list[dict[str, Any]] = []
        submit = engine.submit

        async def watched(*args: Any, **how: Any) -> Any:
            asked.append(how)
            return await submit(*args, **how)

        engine.submit = watched  # type: ignore[method-assign]
        pipeline = Pipeline([PipelineStage("vectors", engine=engine)])
        await pipeline.submit("a", timeout_s=60, priority="bulk", tenant="me")
    (how,) = asked
    assert 50 < how["timeout_s"] <= 60
    assert (how["priority"], how["tenant"], how["waits"]) == ("bulk", "me", True)


async def test_a_failing_item_fails_its_request_with_its_index_and_ends_the_others() -> None:
    async with engines_on(LetterModel()) as (engine,):
        pipeline = Pipeline([PipelineStage("vectors", engine=engine)], window=1)
        with pytest.raises(ModelFailed, match="Item 2, stage vectors: ") as failure:
            await pipeline.submit(["a", "b", "NaN", "c"])
    assert failure.value.index == 2
    statistics = pipeline.statistics()
    assert (statistics.stages[0].done, statistics.stages[0].failed, statistics.outcomes["failed"]) == (2, 1, 1)
    assert is_idle(pipeline)


async def test_items_that_fail_are_skipped_with_their_errors_where_the_stage_says_so() -> None:
    async with engines_on(LetterModel()) as (engine,):
        pipeline = Pipeline([PipelineStage("vectors", engine=engine, on_error="skip")])
        result = await pipeline.submit(["a", "NaN", 3, "c"])
    assert [item.index for item in result.items] == [0, 3]
    assert [(error.index, error.stage, type(error.error)) for error in result.errors] == [
        (1, "vectors", ModelFailed),
        (2, "vectors", InvalidInput),
    ]
    assert pipeline.statistics().stages[0].skipped == 2


async def test_the_end_of_an_engine_is_no_error_of_an_item() -> None:
    async with engines_on(LetterModel()) as (engine,):
        pipeline = Pipeline([PipelineStage("vectors", engine=engine, on_error="skip")])
        await engine.drain(0)
        with pytest.raises(EngineStopped):
            await pipeline.submit(["a", "b"])


async def test_an_error_of_a_function_is_the_cause_of_that_of_the_request(logged: list[Any]) -> None:
    def fail(text: str) -> str:
        raise LookupError(text)

    with pytest.raises(
        StageFailed, match=r"Item 0, stage fail: The function of the stage failed: LookupError"
    ) as failure:
        await Pipeline([fail]).submit("secret")
    assert failure.value.stage == "fail"
    assert "secret" not in str(failure.value)
    assert [event["event"] for event in logged] == ["pipeline.function_failed"]


async def test_a_query_is_embedded_once_for_all_items_and_its_error_fails_the_request() -> None:
    model = LetterModel(card=EMBEDDER)
    async with engines_on(model) as (engine,):
        vectors = PipelineStage("vectors", engine=engine, outputs=["multi_vector"])
        pipeline = Pipeline([vectors, PipelineStage("best", task="maxsim", on_error="skip")])
        await pipeline.submit({"query": "query", "data": [f"text {n}" for n in range(10)]})
        texts = [text for call in model.forwarded for text in call]
        assert sum("query" in text for text in texts) == 1
        with pytest.raises(ModelFailed):
            await pipeline.submit({"query": "NaN", "data": ["a", "b"]})
    assert is_idle(pipeline)


async def test_too_many_requests_are_rejected_at_the_door_and_some_room_is_left_for_others() -> None:
    valve = Valve[Any]()
    pipeline = Pipeline([valve_stage(valve)], max_requests=4)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(partial(pipeline.submit, "a", tenant="greedy", priority="bulk"))
        await until(lambda: pipeline.statistics().requests == 3)
        with pytest.raises(Overloaded, match="has reached its share") as failure:
            await pipeline.submit("b", tenant="greedy", priority="bulk")
        assert failure.value.retry_after_s > 0
        tasks.start_soon(partial(pipeline.submit, "c", tenant="modest"))
        await until(lambda: pipeline.statistics().requests == 4)
        with pytest.raises(Overloaded, match="at its limit of 4 requests in flight"):
            await pipeline.submit("d", tenant="another")
        valve.open()
    assert pipeline.statistics().outcomes == {"answered": 4, "rejected": 2, "expired": 0, "cancelled": 0, "failed": 0}


def valve_stage(valve: Valve[Any]) -> PipelineStage:
    return PipelineStage("valve", function=valve)


async def test_a_drain_finishes_requests_in_flight_rejects_new_ones_and_fails_those_that_take_too_long() -> None:
    valve, stuck = Valve[Any](), Valve[Any]()
    pipeline, other = Pipeline([valve_stage(valve)]), Pipeline([valve_stage(stuck)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.submit, ["a"])
        await until(lambda: len(valve.came) == 1)
        tasks.start_soon(pipeline.drain, math.inf)
        for _ in range(2):  # trio runs the tasks of one turn in any order, so drain may come after the first
            await anyio.lowlevel.checkpoint()
        with pytest.raises(EngineStopped, match="drains"):
            await pipeline.submit(["b"])
        valve.open()
    assert pipeline.statistics().outcomes["answered"] == 1
    async with anyio.create_task_group() as tasks:
        failed: list[EngineStopped] = []

        async def ask() -> None:
            try:
                await other.submit(["a"])
            except EngineStopped as error:
                failed.append(error)

        tasks.start_soon(ask)
        await until(lambda: len(stuck.came) == 1)
        await other.drain(0.01)
    assert len(failed) == 1
    assert is_idle(other)


async def test_outcomes_come_as_they_are_done_and_an_endless_feed_is_read_no_faster_than_they_are_taken() -> None:
    fed = 0

    async def feed() -> AsyncGenerator[int, None]:
        nonlocal fed
        while True:
            await anyio.lowlevel.checkpoint()
            fed += 1
            yield fed

    async def pass_on(number: int) -> int:
        return number

    pipeline = Pipeline([pass_on], window=4)
    async with aclosing(feed()) as numbers, pipeline.stream(numbers) as outcomes:
        taken = [await anext(outcomes) for _ in range(10)]
        for _ in range(200):
            await anyio.lowlevel.checkpoint()
        assert fed <= 10 + 4 + 1, "the window, and the one that waits for a place"
        assert (await pipeline.submit([7])).values == [7], "who reads slowly holds up only its own request"
    assert sorted(outcome.index for outcome in taken if isinstance(outcome, PipelineItem)) == list(range(10))
    assert is_idle(pipeline)


async def test_a_stream_ends_with_the_error_of_its_request_and_gives_those_of_skipped_items() -> None:
    async with engines_on(LetterModel()) as (engine,):
        skips = Pipeline([PipelineStage("vectors", engine=engine, on_error="skip")])
        async with skips.stream(["a", "NaN"]) as outcomes:
            assert {type(outcome) async for outcome in outcomes} == {PipelineItem, ItemError}
        fails = Pipeline([PipelineStage("vectors", engine=engine)], window=1)
        with pytest.raises(ModelFailed):
            async with fails.stream(["a", "NaN"]) as outcomes:
                assert [outcome.index async for outcome in outcomes] == [0]
    assert is_idle(skips)
    assert is_idle(fails)
