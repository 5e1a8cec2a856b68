"""The verdict: a bottleneck that the test has planted is named, in each place where one can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import click
import pytest
from blockbuster import BlockBuster

from staged_pool.api.asgi import Message
from staged_pool.api.commands.cli import main
from staged_pool.api.live.verdict import Verdict, bottleneck, judge
from staged_pool.api.live.view import ModelView, Moment, view_model, view_readers
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import Overloaded
from staged_pool.stages.stage import StageOptions
from tests.runtime.images import Host, at
from tests.servers.engines import engine_on
from tests.servers.in_memory import serving_in_memory
from tests.support.cards import BOTH_LANES, CARD
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def moment(engine: Engine, clock: Clock) -> Moment:
    return Moment(clock.now, {"letters": engine.statistics()}, None)


async def watch(engine: Engine, clock: Clock) -> ModelView:
    """Return the view of the next two seconds, in which nothing moves."""
    before = moment(engine, clock)
    clock.now += 2.0
    return view_model(moment(engine, clock), before, "letters")


def waiting(engine: Engine, stage: str) -> int:
    return next(each.waiting for each in engine.statistics().stages if each.name == stage)


async def test_the_device_is_named_while_items_wait_for_it() -> None:
    clock, gate = Clock(), Gate()
    async with engine_on(LetterModel(on_forward=gate), options=StageOptions(clock=clock)) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "first")
            await gate.arrived()
            for place in range(3):
                tasks.start_soon(engine.embed, f"text {place}")
            await until(lambda: waiting(engine, "batch") == 3)
            view = await watch(engine, clock)
            gate.open()
    stages = {stage.name: stage for stage in view.stages}
    assert (stages["batch"].busy, stages["preprocess"].busy, stages["preprocess"].blocked) == (1.0, 0.0, 0.0)
    assert stages["batch"].oldest_s == 2.0
    verdict = judge(view, None)
    assert (verdict.kind, verdict.at, verdict.sentence) == ("busy", "batch", "The device is the bottleneck.")
    assert verdict.why == "It was busy 100 % of the last 2 s, and items waited 2 s."


async def test_preprocess_is_named_while_items_wait_for_it() -> None:
    clock, gate = Clock(), Gate()
    config = EngineConfig(preprocess_limit=2, chunk_items=1)
    async with engine_on(LetterModel(on_preprocess=gate), config, options=StageOptions(clock=clock)) as engine:
        async with anyio.create_task_group() as tasks:
            for place in range(6):
                tasks.start_soon(engine.embed, f"text {place}")
            await gate.arrived()
            await until(lambda: waiting(engine, "preprocess") > 0 and engine.statistics().stages[1].busy == 2)
            view = await watch(engine, clock)
            gate.open()
    stages = {stage.name: stage for stage in view.stages}
    assert (stages["preprocess"].busy, stages["batch"].busy) == (1.0, 0.0)
    assert judge(view, None).sentence == "Preprocess is the bottleneck."


async def test_a_stage_that_only_waits_for_the_next_one_is_not_named() -> None:
    """Preprocess is blocked by a device whose channel is full, and not busy."""
    clock, gate = Clock(), Gate()
    async with engine_on(LetterModel(on_forward=gate), options=StageOptions(clock=clock)) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "a")
            await gate.arrived()
            with engine._stages.preprocess["text"].meter.blocked():
                tasks.start_soon(engine.embed, "b")
                await until(lambda: waiting(engine, "batch") > 0)
                view = await watch(engine, clock)
            gate.open()
    stages = {stage.name: stage for stage in view.stages}
    assert stages["preprocess"].blocked > 0
    hot = bottleneck(view)
    assert hot is not None
    assert hot.name == "batch"


async def test_fetches_are_named_while_inputs_wait_for_them() -> None:
    clock, host = Clock(), Host()
    model = LetterModel(card=replace(BOTH_LANES))
    async with engine_on(model, EngineConfig(media_limit=2), options=StageOptions(clock=clock), fetch=host) as engine:
        async with anyio.create_task_group() as tasks:
            for place in range(4):
                tasks.start_soon(engine.embed, at(f"host/{place}"))
            await until(lambda: engine.statistics().limiters["fetch"].used == 2)
            view = await watch(engine, clock)
            for place in range(4):
                host.answer(f"host/{place}", lambda: Image(b"letters"))
    verdict = judge(view, None)
    assert verdict.sentence == "Fetching images is the bottleneck."
    assert verdict.why.startswith("2 of 2 fetches run")
    assert engine.statistics().fetches["fetched"].count == 4


async def test_slow_readers_are_named_while_answers_wait_for_them() -> None:
    body = b'{"input": "a"}'
    async with serving_in_memory() as served, anyio.create_task_group() as tasks:
        read = anyio.Event()

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await read.wait()

        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/embeddings", "query_string": b"",
            "raw_path": b"/v1/embeddings", "root_path": "", "scheme": "http", "headers": [], "client": None,
        }  # fmt: skip
        for _ in range(6):
            tasks.start_soon(served.application, {**scope, "state": {}}, receive, send)
        http = served.application.http_statistics
        await until(lambda: http().unread == 6)
        before = Moment(0.0, served.registry.statistics(), http())
        now = Moment(2.0, served.registry.statistics(), replace(http(), reader_s=before.http.reader_s + 12.0))  # type: ignore[union-attr]
        readers = view_readers(now, before)
        verdict = judge(view_model(now, before, "letters"), readers)
        read.set()
    assert readers is not None
    assert readers.unread == 6.0
    assert verdict.sentence == "Slow readers are the bottleneck."
    assert verdict.why == "6 answers waited for their clients to read them, on average of the last 2 s."


async def test_rejections_are_told_with_the_stage_that_causes_them() -> None:
    clock, gate = Clock(), Gate()
    config = EngineConfig(max_requests=2)
    async with engine_on(LetterModel(on_forward=gate), config, options=StageOptions(clock=clock)) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "first")
            await gate.arrived()
            tasks.start_soon(engine.embed, "second")
            await until(lambda: waiting(engine, "batch") > 0)
            before = moment(engine, clock)
            for place in range(3):
                with pytest.raises(Overloaded):
                    await engine.embed(f"more {place}")
            clock.now += 2.0
            view = view_model(moment(engine, clock), before, "letters")
            gate.open()
    verdict = judge(view, None)
    assert (verdict.kind, verdict.at, verdict.sentence) == (
        "lost", "batch", "Overloaded: 100 % of requests were rejected.",
    )  # fmt: skip
    assert view.door.reasons == {"requests": 3}
    assert view.door.lately == {"requests": 3}
    by = "requests were rejected by the limit on requests in flight"
    assert verdict.why == f"The device was busy 100 % of the last 2 s; {by}."


async def test_an_idle_model_and_a_calm_one() -> None:
    clock = Clock()
    async with engine_on(LetterModel(), options=StageOptions(clock=clock)) as engine:
        assert judge(await watch(engine, clock), None).sentence == "Idle. Ready for requests."
        before = moment(engine, clock)
        await engine.embed("a")
        clock.now += 2.0
        calm = judge(view_model(moment(engine, clock), before, "letters"), None)
    assert calm.kind == "calm"
    assert calm.lead == "Calm"
    assert "was the busiest stage" in calm.sentence


async def test_a_model_that_drains_or_is_broken_says_so() -> None:
    clock = Clock()
    async with engine_on(LetterModel(), options=StageOptions(clock=clock)) as engine:
        await engine.drain(0)
        view = await watch(engine, clock)
    assert judge(view, None).sentence == "Draining: 0 requests left."
    assert judge(replace(view, fault="the device is gone"), None).sentence == "At fault: the device is gone."
    assert judge(replace(view, phase="starting"), None).sentence == "Loading."
    stalled = judge(replace(view, phase="ready", stall="a forward has run for 9.0 s"), None)
    assert (stalled.kind, stalled.sentence, stalled.why) == (
        "lost", "The device seems to hang.", "A forward has run for 9.0 s.",
    )  # fmt: skip


async def each_bottleneck() -> Mapping[str, Verdict]:
    """Return a verdict for each stage that may be the bottleneck."""
    async with engine_on(LetterModel(card=CARD)) as engine:
        view = await watch(engine, Clock())
    found = {}
    for stage in (*view.stages, replace(view.stages[1], name="preprocess_images")):
        saturated = replace(stage, busy=1.0, wait_s=5.0, waiting=9)
        found[stage.name] = judge(replace(view, stages=[saturated]), None)
    return found


async def test_each_stage_has_a_sentence_and_a_setting_that_exists(
    nothing_blocks_the_event_loop: BlockBuster,
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # Click looks at files
    serve = main.commands["serve"]
    for name, verdict in (await each_bottleneck()).items():
        assert verdict.kind == "busy", name
        assert verdict.help is not None
        flag, value = verdict.help.setting.split()
        context = click.Context(serve)
        parsed, _, _ = serve.make_parser(context).parse_args([flag, value])
        assert parsed, flag
