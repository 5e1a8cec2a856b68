"""Pictures that are given as URLs: fetched in the tasks of their callers."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from anyio.abc import TaskGroup
from numpy.testing import assert_array_equal

from staged_pool.runtime.engine import Engine
from staged_pool.runtime.pipeline import PARSE_WORKERS
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, TextInput
from staged_pool.stages.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidInput,
    MediaUnavailable,
    Overloaded,
    StageFailed,
    TooLarge,
    UnusableMedia,
    UrlNotAllowed,
)
from staged_pool.stages.stage import StageOptions
from tests.doubles import Gate, expected, until
from tests.runtime.seeing import Host, SeeingModel, ask, at, engine_on, picture, waiting_pictures

pytestmark = pytest.mark.anyio


def unavailable() -> Image:
    raise MediaUnavailable("The host failed.")


async def test_a_picture_goes_on_as_soon_as_it_is_here() -> None:
    host = Host()
    model = SeeingModel()
    async with engine_on(model, fetch=host) as engine, anyio.create_task_group() as tasks:

        async def caller() -> None:
            result = await ask(engine, at("slow"), "text", at("quick"))
            assert_array_equal(result.embeddings, [expected("SLOW"), expected("text"), expected("QUICK")])

        tasks.start_soon(caller)
        host.answer("quick", lambda: picture("QUICK"))
        await until(lambda: ["QUICK"] in model.forwarded and ["text"] in model.forwarded)
        host.answer("slow", lambda: picture("SLOW"))


async def test_a_picture_that_is_at_hand_does_not_wait_behind_others_that_are_fetched() -> None:
    host = Host()
    model = SeeingModel()
    async with engine_on(model, fetch=host, media_limit=2) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, at("slow 1"), at("slow 2"), at("slow 3"), picture("HERE"))
        await until(lambda: model.forwarded == [["HERE"]])
        for number in range(1, 4):
            host.answer(f"slow {number}", lambda: picture("SLOW"))


async def test_results_are_handed_over_while_pictures_of_the_same_request_are_fetched() -> None:
    host = Host()
    taken: list[int] = []
    request = EmbedRequest(inputs=(at("slow"), TextInput("text"), picture("HERE"), at("quick")))

    async def give(places: Sequence[int]) -> None:
        taken.extend(places)

    async with engine_on(SeeingModel(), fetch=host) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: engine.stream(lambda: request, lambda places, result: places, give))
        await until(lambda: sorted(taken) == [1, 2])
        host.answer("quick", lambda: picture("QUICK"))
        await until(lambda: sorted(taken) == [1, 2, 3])
        host.answer("slow", lambda: picture("SLOW"))
    assert taken[3:] == [0]


async def test_the_pictures_of_a_conversation_keep_their_places() -> None:
    host = Host()
    for letter in "AC":
        host.answer(letter, lambda letter=letter: picture(letter))  # type: ignore[misc]
    chat = Chat(({"role": "user", "content": (at("A"), "and", picture("B"), at("C"))},))
    async with engine_on(SeeingModel(), fetch=host) as engine:
        request = EmbedRequest(inputs=(TextInput(chat),))
        result = await engine.submit(lambda: request, lambda result: result)
    assert_array_equal(result.embeddings, [expected("ABC")])


async def test_urls_are_refused_where_nothing_fetches() -> None:
    async with engine_on(SeeingModel()) as engine:
        with pytest.raises(UrlNotAllowed, match=r"fetching is off.*--allow-media-domain") as caught:
            await ask(engine, "text", picture("A"), at("B"))
    assert (caught.value.param, caught.value.index) == ("input", 2)


async def test_a_slow_host_holds_up_nobody_else() -> None:
    """Neither a worker of parse, nor pictures that are at hand."""
    host = Host()
    async with engine_on(SeeingModel(), fetch=host, media_limit=2) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(PARSE_WORKERS + 10):
                    tasks.start_soon(ask, engine, at("slow"))
                await until(lambda: engine.statistics().stages[0].done == PARSE_WORKERS + 10)
                await until(lambda: len(host.asked) == 2)
                result = await ask(engine, "text", picture("A"))
                assert_array_equal(result.embeddings, [expected("text"), expected("A")])
                assert len(host.asked) == 2
                scope.cancel()
        assert engine.statistics().cancelled == {"parse": PARSE_WORKERS + 8, "fetch": 2}


async def test_one_request_does_not_fetch_for_ever_before_another() -> None:
    """It has no more fetches in the queue at once than there are places."""
    host = Host()
    async with engine_on(SeeingModel(), fetch=host, media_limit=2) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, *[at(f"many {n}") for n in range(20)])
        await until(lambda: len(host.asked) == 2)
        tasks.start_soon(ask, engine, at("single"))
        await until(lambda: engine._pipeline.errands._in_hand.statistics().tasks_waiting == 1)
        for n in range(20):
            host.answer(f"many {n}", lambda: picture("M"))
        host.answer("single", lambda: picture("S"))
    assert host.asked.index("single") <= 4


async def test_what_is_fetched_waits_for_preprocess_within_the_limit() -> None:
    gate = Gate()
    host = Host()
    host.answer("A", lambda: picture("A"))
    model = SeeingModel(on_preprocess=gate)
    async with engine_on(model, fetch=host, media_limit=3, image_preprocess_limit=1, channel_capacity=1) as engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask, engine, at("A"))
            await gate.arrived()
            await until(lambda: engine._pipeline.errands.fetching == 3 and waiting_pictures(engine) == 4)
            assert len(host.asked) == 5  # one in a thread, one in the channel, three that wait
            gate.open()


async def test_the_failure_of_a_host_is_told_and_ends_the_other_fetches() -> None:
    host = Host()
    async with engine_on(SeeingModel(), fetch=host) as engine, anyio.create_task_group() as tasks:

        async def caller() -> None:
            with pytest.raises(MediaUnavailable) as caught:
                await ask(engine, "text", at("slow"), at("broken"))
            assert caught.value.index == 2

        tasks.start_soon(caller)
        await until(lambda: len(host.asked) == 2)
        host.answer("broken", unavailable)
        await until(lambda: host.left == ["slow"])


async def test_what_is_wrong_with_a_picture_is_the_callers_fault_and_a_bug_is_not() -> None:
    def missing() -> Image:
        raise UnusableMedia("There is nothing at this URL.", param="input")

    def bug() -> Image:
        raise ZeroDivisionError

    host = Host()
    host.answer("missing", missing)
    host.answer("bug", bug)
    async with engine_on(SeeingModel(), fetch=host) as engine:
        with pytest.raises(UnusableMedia) as caught:
            await ask(engine, at("missing"))
        assert caught.value.index == 0
        with pytest.raises(StageFailed, match="a bug of the server"):
            await ask(engine, at("bug"))


async def test_the_failure_of_an_input_ends_the_fetches_of_its_request() -> None:
    host = Host()
    async with engine_on(SeeingModel(), fetch=host) as engine:
        with pytest.raises(InvalidInput, match="no tokens"):
            await ask(engine, at("slow"), "")
        assert host.left == host.asked


async def test_a_caller_who_leaves_takes_its_fetches_along() -> None:
    host = Host()
    async with engine_on(SeeingModel(), fetch=host) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as callers:
                callers.start_soon(ask, engine, at("A"), at("B"), "text")
                await until(lambda: len(host.asked) == 2)
                scope.cancel()
        assert sorted(host.left) == ["A", "B"]
        assert engine.statistics().admission.requests == 0


async def test_a_deadline_ends_a_fetch_and_names_it() -> None:
    host = Host()
    async with engine_on(SeeingModel(), fetch=host) as engine:
        with pytest.raises(DeadlineExceeded, match="fetch") as caught:
            await ask(engine, at("slow"), timeout_s=0.5)
        assert host.left == ["slow"]
    assert caught.value.stage == "fetch"


async def test_a_drain_waits_for_fetches() -> None:
    host = Host()
    async with engine_on(SeeingModel(), fetch=host) as engine, anyio.create_task_group() as tasks:

        async def caller() -> None:
            assert_array_equal((await ask(engine, at("A"))).embeddings, [expected("A")])

        tasks.start_soon(caller)
        await until(lambda: host.asked == ["A"])
        tasks.start_soon(engine.drain, 30)
        await until(lambda: engine.phase == "draining")
        host.answer("A", lambda: picture("A"))


async def test_a_drain_that_runs_out_of_time_ends_the_fetches() -> None:
    host = Host()
    async with engine_on(SeeingModel(), fetch=host) as engine, anyio.create_task_group() as tasks:

        async def caller() -> None:
            with pytest.raises(EngineStopped):
                await ask(engine, at("A"), "text")

        tasks.start_soon(caller)
        await until(lambda: host.asked == ["A"])
        await engine.drain(0.01)
        await until(lambda: host.left == ["A"])


async def test_a_stop_ends_the_fetches() -> None:
    host = Host()
    outcomes: list[str] = []

    async def caller(engine: Engine) -> None:
        with pytest.raises(EngineStopped):
            await ask(engine, at("A"))
        outcomes.append("stopped")

    async def stop(tasks: TaskGroup) -> None:
        async with engine_on(SeeingModel(), fetch=host) as engine:
            tasks.start_soon(caller, engine)
            await until(lambda: host.asked == ["A"])
            raise ZeroDivisionError

    async with anyio.create_task_group() as tasks:
        with pytest.raises(ZeroDivisionError):
            await stop(tasks)
        await until(lambda: outcomes == ["stopped"])
    assert host.left == ["A"]


async def test_the_time_of_a_fetch_is_not_taken_for_the_engines() -> None:
    now = 0.0  # as nothing else here takes any time, what is late is late by the fetch
    options = StageOptions(clock=lambda: now)
    host = Host()
    async with (
        engine_on(SeeingModel(), fetch=host, options=options) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, engine, at("A"))
        await until(lambda: host.asked == ["A"])
        now = 100.0
        host.answer("A", lambda: picture("A"))
        await until(lambda: engine.statistics().admission.requests == 0)
        assert engine.statistics().admission.lanes["image"].lag_s == 0


def conversation(*images: Image) -> EmbedRequest:
    return EmbedRequest(inputs=(TextInput(Chat(({"role": "user", "content": images},))),))


async def test_a_request_has_no_more_pictures_than_it_may_have_inputs() -> None:
    """In however few conversations."""
    host = Host()
    async with engine_on(SeeingModel(), fetch=host, max_request_items=5) as engine:
        request = conversation(*[at(f"{n}") for n in range(6)])
        with pytest.raises(TooLarge, match="6 pictures; at most 5 are accepted"):
            await engine.submit(lambda: request, lambda result: result)
    assert host.asked == []


async def test_pictures_that_wait_for_others_of_their_input_are_bounded() -> None:
    host = Host()
    for url in ("A", "B", "C"):
        host.answer(url, lambda: picture("PPPP"))
    async with engine_on(SeeingModel(), fetch=host, max_bytes=11) as engine:

        async def submit(request: EmbedRequest) -> object:
            return await engine.submit(lambda: request, lambda result: result)

        with pytest.raises(TooLarge, match="more than 11 bytes together") as caught:
            await submit(conversation(at("A"), at("B"), at("C")))
        assert (caught.value.param, caught.value.index) == ("input", 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit, conversation(at("A"), at("B"), at("slow")))
            await until(lambda: engine._pipeline.errands._gathered_bytes == 8)
            with pytest.raises(Overloaded, match="limit of 11 bytes of pictures"):
                await submit(conversation(at("A"), at("B")))
            await ask(engine, at("A"))  # waits for no other
            host.answer("slow", lambda: picture("S"))
        await submit(conversation(at("A"), at("B")))
        assert engine._pipeline.errands._gathered_bytes == 0


async def test_what_a_caller_who_leaves_has_fetched_is_counted_no_more() -> None:
    host = Host()
    host.answer("A", lambda: picture("AAAA"))
    async with engine_on(SeeingModel(), fetch=host) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                request = conversation(at("A"), at("slow"))
                tasks.start_soon(engine.submit, lambda: request, lambda result: result)
                await until(lambda: engine._pipeline.errands._gathered_bytes == 4)
                scope.cancel()
        assert engine._pipeline.errands._gathered_bytes == 0
