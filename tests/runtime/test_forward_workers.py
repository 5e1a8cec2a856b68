"""An engine whose device runs several forwards at once."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from numpy.testing import assert_array_equal

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import model_loading
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.requests import EmbedRequest, TextInput
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import ConfigError, DeviceLost, EngineStopped, ModelFailed, OutOfMemory
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.timeline import Timeline
from tests.support.cards import CARD
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.stages import batch_stages
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def engine_on(
    model: LetterModel,
    workers: int = 2,
    options: StageOptions | None = None,
    **settings: Any,
) -> AsyncIterator[Engine]:
    config = EngineConfig(**settings)
    model.card = replace(CARD, forward_workers=workers)
    async with DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device:
        device.grow(workers)
        async with run_engine(config, model, device=device, options=options) as engine:
            yield engine
            assert engine.statistics().admission.requests == 0
            assert batch_stages(engine)["text"].running == 0


def busy(engine: Engine) -> tuple[int, int]:
    stage = engine.statistics().stages[2]
    return stage.busy, stage.workers


async def test_a_second_batch_begins_while_the_first_runs_and_a_third_waits() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "first")
        await until(lambda: len(model.forwarded) == 1)
        tasks.start_soon(engine.embed, "second")
        await until(lambda: len(model.forwarded) == 2)
        tasks.start_soon(engine.embed, "third")
        await until(lambda: len(model.forwarded) == 2 and batch_stages(engine)["text"].waiting == 1)
        assert batch_stages(engine)["text"].running == 2
        assert busy(engine) == (2, 2)
        gate.open()
    assert sorted(model.forwarded) == [["first"], ["second"], ["third"]]


async def test_where_much_waits_one_batch_more_is_handed_to_the_device() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model, max_batch_tokens=4) as engine, anyio.create_task_group() as tasks:
        stage = batch_stages(engine)["text"]
        for number in range(2):
            tasks.start_soon(engine.embed, f"run{number}")
            await until(lambda count=number + 1: len(model.forwarded) == count)  # type: ignore[misc]
        tasks.start_soon(engine.embed, "wai0")
        await until(lambda: stage.waiting == 1)
        assert not stage._slots.ahead  # an item that came now would be in the next batch, too
        tasks.start_soon(engine.embed, "wai1")
        await until(lambda: stage._slots.ahead == 1)
        assert stage.waiting == 1
        assert (len(model.forwarded), busy(engine), stage.running) == (2, (2, 2), 2)
        gate.open()
    assert sorted(model.forwarded) == [["run0"], ["run1"], ["wai0"], ["wai1"]]


async def test_what_is_ahead_of_a_gpu_begins_before_the_forward_that_runs_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate, card=replace(CARD, launched_ahead=1))
    monkeypatch.setattr(model_loading, "_load", lambda *given: [model])
    async with open_engine(EngineConfig(max_batch_tokens=4)) as engine, anyio.create_task_group() as tasks:
        stage = batch_stages(engine)["text"]
        tasks.start_soon(engine.embed, "runs")
        await gate.arrived()
        for text in ("wai0", "wai1", "wai2"):
            tasks.start_soon(engine.embed, text)
        await until(lambda: len(model.forwarded) == 2)
        assert (busy(engine), stage.running) == ((1, 1), 1)
        await until(lambda: stage.waiting == 2)
        assert len(model.forwarded) == 2
        gate.open()
    assert sorted(model.forwarded) == [["runs"], ["wai0"], ["wai1"], ["wai2"]]


async def test_each_of_several_gpus_has_a_batch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate, card=replace(CARD, forward_workers=2, launched_ahead=1))
    monkeypatch.setattr(model_loading, "_load", lambda *given: [model])
    async with open_engine(EngineConfig(max_batch_tokens=4)) as engine, anyio.create_task_group() as tasks:
        stage = batch_stages(engine)["text"]
        for number in range(8):
            tasks.start_soon(engine.embed, f"tex{number}")
        await until(lambda: len(model.forwarded) == 4 and stage.waiting == 4)
        assert (busy(engine), stage.running, stage._slots.ahead) == ((2, 2), 2, 2)
        gate.open()
    assert len(model.forwarded) == 8
    assert busy(engine) == (0, 2)
    assert (stage.running, stage._slots.ahead) == (0, 0)


async def test_every_thread_is_warmed_up_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LetterModel(card=replace(CARD, forward_workers=2, launched_ahead=1))
    monkeypatch.setattr(model_loading, "_load", lambda *given: [model])
    async with open_engine(EngineConfig()):
        assert sorted(model.warmed_up) == [("text", f"staged-pool device {number}") for number in range(4)]


async def test_what_is_ahead_is_cancelled_with_the_engine() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            async with engine_on(model, workers=1, max_batch_tokens=4) as engine, anyio.create_task_group() as clients:
                for text in ("abcd", "bcde", "cdef", "defg"):
                    clients.start_soon(engine.embed, text)
                await gate.arrived()
                await until(lambda: batch_stages(engine)["text"]._slots.ahead == 1)
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await until(lambda: not batch_stages(engine)["text"]._slots.ahead)
                gate.open()
                await anyio.lowlevel.checkpoint()

        tasks.start_soon(serve)
    assert len(model.forwarded) == 1


async def test_a_forward_is_told_whether_it_has_the_device_to_itself() -> None:
    gate = Gate()
    model = LetterModel()
    async with engine_on(model, workers=3) as engine:
        await engine.embed("alone")
        await engine.embed("alone again")
        assert model.at_once == [1, 1]
        model.on_forward = gate
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "first")
            await gate.arrived()
            tasks.start_soon(engine.embed, "beside it")
            await until(lambda: len(model.at_once) == 4)
            gate.open()
    assert model.at_once[2:] == [1, 3]


async def test_many_requests_at_once_are_never_mixed_up() -> None:
    results: dict[int, Any] = {}

    async def ask(engine: Engine, i: int) -> None:
        results[i] = await engine.embed([f"{i}." * (j + 1) for j in range(i % 5 + 1)])

    async with engine_on(LetterModel(), workers=3, max_batch_tokens=64) as engine:
        async with anyio.create_task_group() as tasks:
            for i in range(60):
                tasks.start_soon(ask, engine, i)
    for i in range(60):
        assert_array_equal(results[i].embeddings, [expected(f"{i}." * (j + 1)) for j in range(i % 5 + 1)])


async def test_a_bad_item_fails_alone_while_another_batch_runs() -> None:
    gate = Gate()

    def deed(texts: Sequence[str]) -> None:
        if "held" in texts:
            gate()
        if "poison" in texts:
            raise ValueError("poison")

    async with engine_on(LetterModel(on_forward=deed)) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "held")
        await gate.arrived()
        with pytest.raises(ModelFailed):
            await engine.embed(["fine", "poison", "fine too"])
        await engine.embed("next")
        gate.open()


async def test_out_of_memory_lowers_what_all_workers_plan() -> None:
    def deed(texts: Sequence[str]) -> None:
        if len(texts) > 4:
            raise OutOfMemory("no room")

    model = LetterModel(on_forward=deed)
    async with engine_on(model, max_batch_tokens=32) as engine:
        for most in (16, 8):
            model.forwarded.clear()
            result = await engine.embed(list("abcdefghijklmnop"))
            assert_array_equal(result.embeddings, [expected(text) for text in "abcdefghijklmnop"])
            assert max(map(len, model.forwarded)) == most


async def test_a_drain_waits_for_both_forwards() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    answered: list[str] = []

    async with anyio.create_task_group() as tasks, engine_on(model) as engine:

        async def ask(text: str) -> None:
            await engine.embed(text)
            answered.append(text)

        tasks.start_soon(ask, "a")
        await gate.arrived()
        tasks.start_soon(ask, "b")
        await until(lambda: len(model.forwarded) == 2)
        tasks.start_soon(engine.drain, 30)
        await anyio.lowlevel.checkpoint()
        gate.open()
        await until(lambda: len(answered) == 2)


async def test_a_stop_fails_the_requests_at_once_and_waits_for_both_forwards() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    failed: list[str] = []

    async def ask(engine: Engine, text: str) -> None:
        with pytest.raises(EngineStopped):
            await engine.embed(text)
        failed.append(text)
        if len(failed) == 2:
            gate.open()

    async def stop(tasks: TaskGroup) -> None:
        async with engine_on(model) as engine:
            tasks.start_soon(ask, engine, "a")
            await gate.arrived()
            tasks.start_soon(ask, engine, "b")
            await until(lambda: len(model.forwarded) == 2)
            raise ZeroDivisionError

    async with anyio.create_task_group() as tasks:
        with pytest.raises(ZeroDivisionError):
            await stop(tasks)
        assert sorted(failed) == ["a", "b"]


async def test_a_caller_who_leaves_a_running_forward_is_not_waited_for() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with engine_on(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "stays")
        await gate.arrived()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(engine.embed, "leaves")
                await until(lambda: len(model.forwarded) == 2)
                scope.cancel()
        assert engine.statistics().admission.requests == 1
        gate.open()
        await until(lambda: engine.statistics().device.wasted_tokens == len("leaves"))


async def test_a_device_that_is_lost_in_one_forward_breaks_the_engine_for_both() -> None:
    gate = Gate()

    def deed(texts: Sequence[str]) -> None:
        if "lose" in texts:
            raise DeviceLost("the device is lost")
        gate()

    async with engine_on(LetterModel(on_forward=deed)) as engine, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises((EngineStopped, DeviceLost)):
                await engine.embed("runs")

        tasks.start_soon(ask)
        await gate.arrived()
        with pytest.raises((EngineStopped, DeviceLost)):
            await engine.embed("lose")
        assert "lost" in await engine.wait_broken()
        gate.open()
        await until(lambda: batch_stages(engine)["text"].running == 0)


def test_the_number_of_forward_workers_has_a_range() -> None:
    with pytest.raises(ConfigError, match="forward_workers"):
        EngineConfig(forward_workers=0)


def _same(request: EmbedRequest) -> EmbedRequest:
    return request


def hold_the_loop(condition: Callable[[], bool]) -> None:
    """Let threads work until the condition holds, without an iteration of the event loop."""
    latest = perf_counter() + 30
    while not condition():
        assert perf_counter() < latest


async def test_forwards_that_end_in_one_iteration_of_the_event_loop_are_each_told_their_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is late: it hears of both when the second one has ended."""
    now = 0.0
    gates = {"quick": Gate(), "slow": Gate()}
    ended: list[str] = []

    def clock() -> float:
        if ended and threading.current_thread().name.startswith("test device"):
            told.add(ended[-1])
        return now

    def hold(texts: Sequence[str]) -> None:
        gates[texts[0]](texts)
        ended.append(texts[0])

    told: set[str] = set()
    timelines = {text: Timeline() for text in gates}
    model = LetterModel(on_forward=hold)
    async with engine_on(model, options=StageOptions(clock=clock)) as engine, anyio.create_task_group() as tasks:
        observed: list[tuple[int, float]] = []
        service_time = batch_stages(engine)["text"]._service_time
        monkeypatch.setattr(service_time, "observe", lambda *what: observed.append(what))
        for text, timeline in timelines.items():
            request = EmbedRequest(inputs=(TextInput(text),))
            submit = partial(engine.submit, partial(_same, request), str, timeline=timeline)
            tasks.start_soon(submit)
            await gates[text].arrived()
        for text, now in (("quick", 1.0), ("slow", 10.0)):  # noqa: B007  # the clock reads it
            gates[text].open()
            hold_the_loop(lambda: text in told)  # noqa: B023  # it is called here
    assert {text: timeline.device_s for text, timeline in timelines.items()} == {"quick": 1.0, "slow": 10.0}
    if [tokens for tokens, _ in observed] == [5, 4]:  # trio tells of them in any order
        # For a second the two shared the device; then the slow one had it alone: 10 s, of 11 s of forwards in all.
        assert observed == [(5, 1.0 / 2), (4, 10.0 * 10.0 / 11.0)]
    assert all(seconds > 0 for _, seconds in observed)


async def test_a_forward_that_was_ahead_is_told_its_own_time_where_the_end_before_it_is_heard_of_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted from when the loop learns of the free slot, it takes no time."""
    now = 0.0
    gates = {"run": Gate(), "next": Gate(), "last": Gate()}
    seen: list[float] = []

    def clock() -> float:
        if threading.current_thread().name.startswith("test device"):
            seen.append(now)
        return now

    timelines = {text: Timeline() for text in gates}
    model = LetterModel(on_forward=lambda texts: gates[texts[0]](texts))
    options = StageOptions(clock=clock)
    async with engine_on(model, 1, options, max_batch_tokens=4) as engine, anyio.create_task_group() as tasks:
        stage = batch_stages(engine)["text"]
        observed: list[tuple[int, float]] = []
        monkeypatch.setattr(stage._service_time, "observe", lambda *what: observed.append(what))
        for text, timeline in timelines.items():
            request = EmbedRequest(inputs=(TextInput(text),))
            tasks.start_soon(partial(engine.submit, partial(_same, request), str, timeline=timeline))
            await gates["run"].arrived()
            if text != "run":
                await until(lambda: stage.waiting == 1)
        await until(lambda: stage._slots.ahead == 1)
        await anyio.wait_all_tasks_blocked()  # the device has it
        now = 1.0
        gates["run"].open()
        hold_the_loop(lambda: seen == [0.0, 1.0, 1.0])  # it goes on by itself
        now = 10.0
        gates["next"].open()
        hold_the_loop(lambda: seen == [0.0, 1.0, 1.0, 10.0])
        gates["last"].open()
    assert (timelines["run"].device_s, timelines["next"].device_s) == (1.0, 9.0)
    if [tokens for tokens, _ in observed] == [3, 4, 4]:  # trio tells of them in any order
        assert observed[:2] == [(3, 1.0), (4, 9.0)]
    assert all(seconds > 0 for _, seconds in observed[:2])
