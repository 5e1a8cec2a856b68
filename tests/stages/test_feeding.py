"""Feeding: images that are URLs are fetched, and inputs wait for room in preprocess, in tasks of parse."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from numpy.testing import assert_array_equal

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_stages import PARSE_WORKERS
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, TextInput
from staged_pool.stages.channel import Channel
from staged_pool.stages.errors import (
    Abandoned,
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
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.supervise import RestartPolicy
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Request
from tests.runtime.images import Host, ask, at, completer, engine_on, image, waiting_to_be_fed
from tests.support.cards import BOTH_LANES
from tests.support.channels import acting_channels
from tests.support.deadlines import LATER_S, let_deadlines_pass
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.tickets import NoLoad
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


# The queue alone


class Limited(NoLoad):
    """A load that permits a number of inputs."""

    def __init__(self, most: int) -> None:
        self.left = most

    def may_feed(self, lane: Hashable, inputs: int) -> bool:
        return inputs <= self.left

    def fed(self, lane: Hashable, inputs: int) -> None:
        self.left -= inputs


def a_request(load: NoLoad | None = None, tenant: str | None = None) -> Ticket:
    return Ticket(Request, lambda result: result, load or NoLoad(), tenant=tenant)


@contextmanager
def a_queue(capacity: int) -> Iterator[tuple[FeedQueue[str], Channel[Sequence[Item[str]]]]]:
    """A queue that feeds lists of two inputs, and its channel."""
    channel = Channel[Sequence[Item[str]]]("preprocess", capacity, len)
    feed = FeedQueue("text", channel.sender, chunk_items=2, clock=lambda: 0.0)
    yield feed, channel
    feed.close()
    with suppress(anyio.ClosedResourceError):  # a test may have closed it
        channel.receiver.close()


def inputs_of(letters: str) -> list[tuple[int, str]]:
    return list(enumerate(letters))


def fed_to(channel: Channel[Sequence[Item[str]]]) -> list[str]:
    """Take the lists that are in the channel."""
    lists = iter(channel.receiver.receive_waiting, None)
    return ["".join(item.payload for item in items) for items in lists]


def test_inputs_are_fed_in_lists_while_there_is_room() -> None:
    with a_queue(capacity=5) as (feed, channel):
        assert feed.feed_nowait(a_request(), inputs_of("abcdefg")) == [(4, "e"), (5, "f"), (6, "g")]
        assert fed_to(channel) == ["ab", "cd"]


def test_inputs_are_fed_while_the_load_permits_it() -> None:
    with a_queue(capacity=100) as (feed, channel):
        assert feed.feed_nowait(a_request(Limited(3)), inputs_of("abcd")) == [(2, "c"), (3, "d")]
        assert fed_to(channel) == ["ab"]


async def test_a_single_text_goes_before_the_next_list_of_a_large_request() -> None:
    found: list[str] = []
    with a_queue(capacity=2) as (feed, channel):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.feed, a_request(tenant="large"), inputs_of("abcdefgh"))
            await until(lambda: len(feed._queue) == 1)
            tasks.start_soon(feed.feed, a_request(tenant="small"), inputs_of("x"))
            await until(lambda: len(feed._queue) == 2)
            for _ in range(9):
                found += fed_to(channel)
                await anyio.wait_all_tasks_blocked()
    assert sorted(found) == ["ab", "cd", "ef", "gh", "x"]
    assert found.index("x") <= 2


async def test_lists_that_wait_fail_when_preprocess_has_ended() -> None:
    failed: list[str] = []
    with a_queue(capacity=2) as (feed, channel):

        async def caller(name: str) -> None:
            try:
                await feed.feed(a_request(), inputs_of("abcd"))
            except anyio.BrokenResourceError:
                failed.append(name)

        async with anyio.create_task_group() as tasks:
            for name in ("first", "second"):
                tasks.start_soon(caller, name)
            await until(lambda: len(feed._queue) == 2)
            channel.receiver.close()
            feed.grant()
        assert not feed._queue
    assert sorted(failed) == ["first", "second"]


async def test_the_list_of_a_request_that_is_settled_leaves_a_lane_that_hangs() -> None:
    with a_queue(capacity=2) as (feed, channel):
        other, ticket = a_request(), a_request()
        assert not feed.feed_nowait(other, inputs_of("xy"))  # nobody takes it
        async with anyio.create_task_group() as feeders:
            feeders.start_soon(feed.feed, ticket, inputs_of("ab"))
            await until(lambda: feed.waiting_requests(ticket.priority) == 1)
            ticket.fail(Abandoned("the caller has left"))
            feeders.cancel_scope.cancel()
        assert not feed._queue
        assert feed.waiting_requests(ticket.priority) == 0
        assert fed_to(channel) == ["xy"]


async def test_a_fetch_waits_until_one_more_input_may_be_fed() -> None:
    load = Limited(0)
    with a_queue(capacity=2) as (feed, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.wait_for_room, a_request(load))
            await until(lambda: len(feed._for_room) == 1)
            feed.grant()
            assert len(feed._for_room) == 1
            load.left = 1
            feed.grant()
        assert not feed._for_room


# On an engine


def unavailable() -> Image:
    raise MediaUnavailable("The host failed.")


async def test_an_image_goes_on_as_soon_as_it_is_here() -> None:
    host = Host()
    model = LetterModel(BOTH_LANES)
    async with engine_on(model, fetch=host) as engine, anyio.create_task_group() as tasks:

        async def caller() -> None:
            result = await ask(engine, at("slow"), "text", at("quick"))
            assert_array_equal(result.embeddings, [expected("SLOW"), expected("text"), expected("QUICK")])

        tasks.start_soon(caller)
        host.answer("quick", lambda: image("QUICK"))
        await until(lambda: ["QUICK"] in model.forwarded and ["text"] in model.forwarded)
        host.answer("slow", lambda: image("SLOW"))


async def test_an_image_that_is_at_hand_does_not_wait_behind_others_that_are_fetched() -> None:
    host = Host()
    model = LetterModel(BOTH_LANES)
    async with engine_on(model, fetch=host, media_limit=2) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, at("slow 1"), at("slow 2"), at("slow 3"), image("HERE"))
        await until(lambda: model.forwarded == [["HERE"]])
        for number in range(1, 4):
            host.answer(f"slow {number}", lambda: image("SLOW"))


async def test_results_are_handed_over_while_images_of_the_same_request_are_fetched() -> None:
    host = Host()
    taken: list[int] = []
    request = EmbedRequest(inputs=(at("slow"), TextInput("text"), image("HERE"), at("quick")))

    async def give(places: Sequence[int]) -> None:
        taken.extend(places)

    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: engine.stream(lambda: request, lambda places, result: places, give))
        await until(lambda: sorted(taken) == [1, 2])
        host.answer("quick", lambda: image("QUICK"))
        await until(lambda: sorted(taken) == [1, 2, 3])
        host.answer("slow", lambda: image("SLOW"))
    assert taken[3:] == [0]


async def test_the_images_of_a_conversation_keep_their_places() -> None:
    host = Host()
    for letter in "AC":
        host.answer(letter, lambda letter=letter: image(letter))  # type: ignore[misc]
    chat = Chat(({"role": "user", "content": (at("A"), "and", image("B"), at("C"))},))
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine:
        request = EmbedRequest(inputs=(TextInput(chat),))
        result = await engine.submit(lambda: request, lambda result: result)
    assert_array_equal(result.embeddings, [expected("ABC")])


async def test_urls_are_rejected_where_nothing_fetches() -> None:
    async with engine_on(LetterModel(BOTH_LANES)) as engine:
        with pytest.raises(UrlNotAllowed, match=r"fetching is off.*--allow-media-domain") as caught:
            await ask(engine, "text", image("A"), at("B"))
    assert (caught.value.param, caught.value.index) == ("input", 2)


async def test_a_slow_host_holds_up_nobody_else() -> None:
    """Neither a worker of parse, nor images that are at hand."""
    host = Host()
    async with engine_on(LetterModel(BOTH_LANES), fetch=host, media_limit=2) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(PARSE_WORKERS + 10):
                    tasks.start_soon(ask, engine, at("slow"))
                await until(lambda: engine.statistics().stages[0].done == PARSE_WORKERS + 10)
                await until(lambda: len(host.asked) == 2)
                result = await ask(engine, "text", image("A"))
                assert_array_equal(result.embeddings, [expected("text"), expected("A")])
                assert len(host.asked) == 2
                scope.cancel()
        assert engine.statistics().cancelled == {"fetch": PARSE_WORKERS + 10}


async def test_one_request_does_not_fetch_for_ever_before_another() -> None:
    """It has no more fetches in the queue at once than there are places."""
    host = Host()
    async with (
        engine_on(LetterModel(BOTH_LANES), fetch=host, media_limit=2) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, engine, *[at(f"many {n}") for n in range(20)])
        await until(lambda: len(host.asked) == 2)
        tasks.start_soon(ask, engine, at("single"))
        await until(lambda: completer(engine)._inputs.statistics().tasks_waiting == 1)
        for n in range(20):
            host.answer(f"many {n}", lambda: image("M"))
        host.answer("single", lambda: image("S"))
    assert host.asked.index("single") <= 4


async def test_what_is_fetched_waits_for_preprocess_within_the_limit() -> None:
    gate = Gate()
    host = Host()
    host.answer("A", lambda: image("A"))
    model = LetterModel(BOTH_LANES, on_preprocess=gate)
    async with engine_on(model, fetch=host, media_limit=3, image_preprocess_limit=1, channel_capacity=1) as engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask, engine, at("A"))
            await gate.arrived()
            await until(lambda: completer(engine).fetching == 3 and waiting_to_be_fed(engine) == 3)
            assert len(host.asked) == 5  # one in a thread, one in the channel, three that wait
            gate.open()


async def test_the_failure_of_a_host_is_told_and_ends_the_other_fetches() -> None:
    host = Host()
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine, anyio.create_task_group() as tasks:

        async def caller() -> None:
            with pytest.raises(MediaUnavailable) as caught:
                await ask(engine, "text", at("slow"), at("broken"))
            assert caught.value.index == 2

        tasks.start_soon(caller)
        await until(lambda: len(host.asked) == 2)
        host.answer("broken", unavailable)
        await until(lambda: host.left == ["slow"])


async def test_what_is_wrong_with_an_image_is_the_callers_fault_and_a_bug_is_not() -> None:
    def missing() -> Image:
        raise UnusableMedia("There is nothing at this URL.", param="input")

    def bug() -> Image:
        raise ZeroDivisionError

    host = Host()
    host.answer("missing", missing)
    host.answer("bug", bug)
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine:
        with pytest.raises(UnusableMedia) as caught:
            await ask(engine, at("missing"))
        assert caught.value.index == 0
        with pytest.raises(StageFailed, match="a bug of the server"):
            await ask(engine, at("bug"))


async def test_the_failure_of_an_input_ends_the_fetches_of_its_request() -> None:
    host = Host()
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine:
        with pytest.raises(InvalidInput, match="no tokens"):
            await ask(engine, at("slow"), "")
        await until(lambda: host.left == host.asked)


async def test_a_caller_who_leaves_takes_its_fetches_along() -> None:
    host = Host()
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as callers:
                callers.start_soon(ask, engine, at("A"), at("B"), "text")
                await until(lambda: len(host.asked) == 2)
                scope.cancel()
        await until(lambda: sorted(host.left) == ["A", "B"])
        assert engine.statistics().admission.requests == 0


async def test_a_deadline_ends_a_fetch_and_names_it() -> None:
    host = Host()
    stages: list[str] = []

    async def late(engine: Engine) -> None:
        with pytest.raises(DeadlineExceeded, match="fetch") as caught:
            await ask(engine, at("slow"), timeout_s=LATER_S)
        stages.append(caught.value.stage)

    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(late, engine)
        await until(lambda: host.asked == ["slow"])
        let_deadlines_pass(engine)
        await until(lambda: host.left == ["slow"])
    assert stages == ["fetch"]


async def test_a_drain_waits_for_fetches() -> None:
    host = Host()
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine, anyio.create_task_group() as tasks:

        async def caller() -> None:
            assert_array_equal((await ask(engine, at("A"))).embeddings, [expected("A")])

        tasks.start_soon(caller)
        await until(lambda: host.asked == ["A"])
        tasks.start_soon(engine.drain, 30)
        await until(lambda: engine.phase == "draining")
        host.answer("A", lambda: image("A"))


async def test_a_drain_that_runs_out_of_time_ends_the_fetches() -> None:
    host = Host()
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine, anyio.create_task_group() as tasks:

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
        async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine:
            tasks.start_soon(caller, engine)
            await until(lambda: host.asked == ["A"])
            raise ZeroDivisionError

    async with anyio.create_task_group() as tasks:
        with pytest.raises(ZeroDivisionError):
            await stop(tasks)
        await until(lambda: outcomes == ["stopped"])
    assert host.left == ["A"]


async def test_the_time_of_a_fetch_is_not_taken_for_the_engines() -> None:
    now = 0.0  # nothing else here takes any time, so any delay comes from the fetch
    options = StageOptions(clock=lambda: now)
    host = Host()
    async with (
        engine_on(LetterModel(BOTH_LANES), fetch=host, options=options) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, engine, at("A"))
        await until(lambda: host.asked == ["A"])
        now = 100.0
        host.answer("A", lambda: image("A"))
        await until(lambda: engine.statistics().admission.requests == 0)
        assert engine.statistics().admission.lanes["image"].lag_s == 0


def conversation(*images: Image) -> EmbedRequest:
    return EmbedRequest(inputs=(TextInput(Chat(({"role": "user", "content": images},))),))


async def test_a_request_has_no_more_images_than_it_may_have_inputs() -> None:
    """In however few conversations."""
    host = Host()
    async with engine_on(LetterModel(BOTH_LANES), fetch=host, max_request_items=5) as engine:
        request = conversation(*[at(f"{n}") for n in range(6)])
        with pytest.raises(TooLarge, match="6 images; at most 5 are accepted"):
            await engine.submit(lambda: request, lambda result: result)
    assert host.asked == []


async def test_images_that_wait_for_others_of_their_input_are_bounded() -> None:
    host = Host()
    for url in ("A", "B", "C"):
        host.answer(url, lambda: image("PPPP"))
    async with engine_on(LetterModel(BOTH_LANES), fetch=host, max_bytes=11) as engine:

        async def submit(request: EmbedRequest) -> object:
            return await engine.submit(lambda: request, lambda result: result)

        with pytest.raises(TooLarge, match="more than 11 bytes together") as caught:
            await submit(conversation(at("A"), at("B"), at("C")))
        assert (caught.value.param, caught.value.index) == ("input", 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit, conversation(at("A"), at("B"), at("slow")))
            await until(lambda: completer(engine)._waiting_bytes == 8)
            with pytest.raises(Overloaded, match="limit of 11 bytes of fetched images"):
                await submit(conversation(at("A"), at("B")))
            await ask(engine, at("A"))  # waits for no other
            host.answer("slow", lambda: image("S"))
        await submit(conversation(at("A"), at("B")))
        await until(lambda: completer(engine)._waiting_bytes == 0)


async def test_what_a_caller_who_leaves_has_fetched_is_counted_no_more() -> None:
    host = Host()
    host.answer("A", lambda: image("AAAA"))
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                request = conversation(at("A"), at("slow"))
                tasks.start_soon(engine.submit, lambda: request, lambda result: result)
                await until(lambda: completer(engine)._waiting_bytes == 4)
                scope.cancel()
        await until(lambda: completer(engine)._waiting_bytes == 0)


async def test_fetched_images_count_among_the_bytes_that_requests_hold() -> None:
    host = Host()
    host.answer("A", lambda: image("AAAA"))
    async with engine_on(LetterModel(BOTH_LANES), fetch=host) as engine:
        account = engine.memory.budget.bodies
        async with anyio.create_task_group() as tasks:
            request = conversation(at("A"), at("slow"))
            tasks.start_soon(engine.submit, lambda: request, lambda result: result)
            await until(lambda: account.held_bytes == 4)
            account.limit_bytes = 6
            with pytest.raises(Overloaded, match="no memory left for another fetched image"):
                await ask(engine, at("A"))
            account.limit_bytes = 600
            host.answer("slow", lambda: image("S"))
        await ask(engine, at("A"))
        assert account.held_bytes == 0


def feeders() -> int:
    """Feeders of all engines of this event loop."""
    return sum(str(task.name).endswith("._run_feeder") for task in anyio.get_running_tasks())


@asynccontextmanager
async def feeding(gate: Gate, **settings: Any) -> AsyncIterator[tuple[Engine, LetterModel]]:
    """Open an engine whose only preprocess thread stands at a gate, behind one list."""
    model = LetterModel(on_preprocess=gate)
    settings = {"preprocess_limit": 1, "channel_capacity": 1, "chunk_items": 2} | settings
    async with engine_on(model, **settings) as engine:
        yield engine, model


async def test_a_request_that_fits_has_no_feeder_and_one_that_does_not_has_it_until_it_is_fed() -> None:
    gate = Gate()
    async with feeding(gate) as (engine, model), anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, "a", "b")
        await gate.arrived()
        tasks.start_soon(ask, engine, "c", "d")
        await until(lambda: engine.statistics().stages[0].done == 2)
        assert feeders() == 0
        tasks.start_soon(ask, engine, *"efghij")
        await until(lambda: waiting_to_be_fed(engine) == 1)
        assert (feeders(), engine.statistics().stages[0].busy) == (1, 0), "it holds no worker of parse"
        gate.open()
        await until(lambda: feeders() == 0)
    assert [text for texts in model.preprocessed for text in texts] == list("abcdefghij")


@pytest.mark.parametrize("how", ["leaves", "is too late", "has a bad input"])
async def test_the_feeder_of_a_request_that_is_settled_ends(how: str) -> None:
    gate = Gate()

    def hold(texts: Sequence[str]) -> None:
        if "" not in texts:
            gate()

    model = LetterModel(on_preprocess=hold)
    settings: dict[str, Any] = {"preprocess_limit": 2, "channel_capacity": 1, "chunk_items": 1}
    async with engine_on(model, **settings) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, "held")
        await gate.arrived()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as callers:

                async def caller() -> None:
                    texts = [f"text {number}" for number in range(20)]
                    if how == "has a bad input":
                        with pytest.raises(InvalidInput):
                            await ask(engine, "", *texts)
                    elif how == "is too late":
                        with pytest.raises(DeadlineExceeded):
                            await ask(engine, *texts, timeout_s=LATER_S)
                    else:
                        await ask(engine, *texts)

                callers.start_soon(caller)
                if how in ("leaves", "is too late"):
                    await until(lambda: feeders() == 1 and waiting_to_be_fed(engine) == 1)
                    scope.cancel() if how == "leaves" else let_deadlines_pass(engine)
        await until(lambda: feeders() == 0)
        assert engine.statistics().admission.requests == 1
        gate.open()
        await ask(engine, "next")
        await until(lambda: waiting_to_be_fed(engine) == 0)
    assert sum(map(len, model.preprocessed)) < 10, "what it had left is not begun"


async def test_a_feeder_that_crashes_fails_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    host.answer("sound", lambda: image("S"))
    options = StageOptions(restarts=RestartPolicy(max_crashes=0))
    async with (
        engine_on(LetterModel(BOTH_LANES), fetch=host, options=options) as engine,
        anyio.create_task_group() as tasks,
    ):
        sound = completer(engine).completing

        @asynccontextmanager
        async def completing(item: Any) -> AsyncIterator[Any]:
            if item.payload.images[0].source == "http://bug":
                raise ZeroDivisionError
            async with sound(item) as whole:
                yield whole

        monkeypatch.setattr(completer(engine), "completing", completing)

        async def neighbour() -> None:
            assert_array_equal((await ask(engine, at("slow"))).embeddings, [expected("N")])

        tasks.start_soon(neighbour)
        await until(lambda: host.asked == ["slow"])
        with pytest.raises(StageFailed, match="the parse stage failed on this request"):
            await ask(engine, at("bug"), at("sound"), "text")
        host.answer("slow", lambda: image("N"))
        assert_array_equal((await ask(engine, at("sound"))).embeddings, [expected("S")])
        assert engine.statistics().stages[0].crashes == 1
        assert engine.fault is None
        await until(lambda: feeders() == 0)


@pytest.mark.parametrize("end", ["drained", "cancelled", "raised"])
async def test_a_request_that_waits_to_be_fed_when_the_engine_is_closed_gets_an_outcome(end: str) -> None:
    gate = Gate()
    outcomes: list[str] = []

    async def caller(engine: Engine, *texts: str) -> None:
        try:
            await ask(engine, *texts)
        except EngineStopped:
            outcomes.append("stopped")
        else:
            outcomes.append("answered")

    async def open_late(engine: Engine, count: int) -> None:
        with anyio.CancelScope(shield=True):
            await until(lambda: len(outcomes) >= count or engine.phase == "draining")
            gate.open()

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as host:
            try:
                async with feeding(gate) as (engine, _):
                    tasks.start_soon(caller, engine, "held")
                    await gate.arrived()
                    for letters in ("abcdef", "ghijkl"):
                        tasks.start_soon(caller, engine, *letters)
                    await until(lambda: waiting_to_be_fed(engine) == 2)
                    tasks.start_soon(open_late, engine, 3)
                    if end == "drained":
                        await engine.drain(30)
                    if end == "cancelled":
                        host.cancel()
                        await anyio.sleep_forever()
                    if end == "raised":
                        raise ZeroDivisionError
            except ZeroDivisionError:
                assert end == "raised"
        await until(lambda: len(outcomes) == 3)
    assert outcomes == ["answered" if end == "drained" else "stopped"] * 3
    assert feeders() == 0


async def test_requests_that_wait_to_be_fed_hear_of_a_preprocess_stage_that_breaks() -> None:
    gate = Gate()
    breaks = False

    async def crash(point: str) -> None:
        if breaks and point == "take preprocess":
            raise RuntimeError("a bug")

    options = StageOptions(restarts=RestartPolicy(max_crashes=0), channel=acting_channels(crash))
    outcomes: list[type[Exception]] = []

    async def caller(engine: Engine, *texts: str) -> None:
        with pytest.raises((EngineStopped, StageFailed)) as caught:
            await ask(engine, *texts)
        outcomes.append(type(caught.value))

    async with feeding(gate, options=options) as (engine, _), anyio.create_task_group() as tasks:
        for letters in ("held", "abcdef", "ghijkl"):
            tasks.start_soon(caller, engine, *letters)
            await gate.arrived()
        await until(lambda: waiting_to_be_fed(engine) == 2)
        breaks = True
        gate.open()
        assert "preprocess stage crashed" in await engine.wait_broken()
        await until(lambda: len(outcomes) == 3 and feeders() == 0)
    assert EngineStopped in outcomes
