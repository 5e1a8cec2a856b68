"""Requests of plugins: the order and place of hooks, their limits, and the release of each request."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count as count_from
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog
from numpy.testing import assert_array_equal

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.plugins.processor import PluginContext, Processor
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidInput,
    ModelFailed,
    PluginFailed,
    Unsupported,
)
from tests.runtime.plugins.hosting import AwaitedLetters, Elsewhere, Letters, is_idle, statistics
from tests.servers.engines import engine_of_plugin, engine_on
from tests.support.cards import BOTH_LANES, CARD
from tests.support.deadlines import LATER_S, let_deadlines_pass
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

HOOKS = ["parse", "load", "preprocess", "postprocess"]


@pytest.mark.parametrize("plugin", [Letters, AwaitedLetters])
async def test_a_request_passes_the_hooks_in_order(plugin: type[Letters]) -> None:
    letters = plugin()
    async with engine_of_plugin(letters) as engine:
        output = await engine.process({"text": "abc"})
        assert output == {"codes": [97, 98, 99], "hooks": HOOKS}
        await until(lambda: is_idle(engine))
        (context,) = letters.contexts
        assert context.state is None
        assert {name: seconds.count for name, seconds in statistics(engine).seconds.items()} == dict.fromkeys(HOOKS, 1)
        assert not letters.is_closed
    assert letters.is_closed


async def test_each_request_has_a_state_and_an_id_of_its_own() -> None:
    letters = Letters()
    async with engine_of_plugin(letters, config=EngineConfig(preprocess_limit=4)) as engine:
        outputs: dict[str, Any] = {}

        async def ask(text: str) -> None:
            outputs[text] = await engine.process({"text": text})

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(ask, f"{number:05}")
        assert all(output["codes"] == [ord(letter) for letter in text] for text, output in outputs.items())
        assert len({context.id for context in letters.contexts}) == 20
        for context in letters.contexts:
            assert [hook for hook, of in letters.ran if of == context.id] == HOOKS


async def test_plain_hooks_run_in_threads_and_the_forward_on_the_device() -> None:
    threads: dict[str, str] = {}
    loop = threading.current_thread().name

    def note(hook: str) -> None:
        threads[hook] = threading.current_thread().name

    async with engine_of_plugin(Letters(at=note)) as engine:
        await engine.process({"text": "a"})
    assert threads["load"] == loop
    assert loop not in (threads["parse"], threads["preprocess"], threads["postprocess"], threads["forward"])
    assert threads["forward"].startswith("test device")


async def test_a_batch_has_inputs_of_several_requests() -> None:
    gate, letters = Gate(), Letters()
    letters.at = lambda hook: gate() if hook == "forward" and len(letters.batches) == 1 else None
    async with (
        engine_of_plugin(letters, config=EngineConfig(preprocess_limit=8)) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(engine.process, {"text": "x"})
        await gate.arrived()
        for text in ("ab", "cd", "ef"):
            tasks.start_soon(engine.process, {"text": text})
        stage = next(stage for stage in engine.statistics().stages if stage.name == "batch")
        await until(lambda: sum(hook == "preprocess" for hook, _ in letters.ran) == 4)
        await until(lambda: next(s for s in engine.statistics().stages if s.name == "batch").waiting == 6)
        assert stage.workers == 1
        gate.open()
    assert sorted(letters.batches[1]) == list("abcdef")


async def test_plain_hooks_keep_to_the_preprocess_limit() -> None:
    running: list[int] = []
    lock, most, calls = threading.Lock(), [0], count_from(0)
    two = threading.Barrier(2)

    def count(hook: str) -> None:
        if hook not in ("parse", "preprocess", "postprocess"):
            return
        with lock:
            running.append(1)
            most[0] = max(most[0], len(running))
            is_early = next(calls) < 2
        if is_early:
            two.wait(30)
        with lock:
            running.pop()

    async with (
        engine_of_plugin(Letters(at=count), config=EngineConfig(preprocess_limit=2)) as engine,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(12):
            tasks.start_soon(engine.process, {"text": "a"})
    assert most == [2]


async def test_awaited_loads_keep_to_the_media_limit_and_hold_no_thread() -> None:
    letters = AwaitedLetters(waits_in="load")
    async with engine_of_plugin(letters, config=EngineConfig(preprocess_limit=1, media_limit=3)) as engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(engine.process, {"text": "a"})
            await until(lambda: letters.waiting == 3)
            assert statistics(engine).loading == 3
            assert statistics(engine).running["load"] == 3
            tasks.cancel_scope.cancel()
        await until(lambda: is_idle(engine))
    assert letters.left == ["load"] * 3  # the others had not begun


async def test_a_request_without_model_inputs_has_an_output() -> None:
    letters = Letters()
    async with engine_of_plugin(letters) as engine:
        assert (await engine.process({"text": ""}))["codes"] == []
    assert letters.batches == []


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("ends", ["cancel", "deadline"])
async def test_a_caller_who_leaves_in_an_awaited_hook_is_told_once(hook: str, ends: str) -> None:
    letters = AwaitedLetters(waits_in=hook)
    async with engine_of_plugin(letters) as engine:

        async def ask() -> None:
            with pytest.raises(DeadlineExceeded):
                await engine.process({"text": "abc"}, timeout_s=LATER_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: letters.waiting == 1)
            if ends == "deadline":
                let_deadlines_pass(engine)
            else:
                tasks.cancel_scope.cancel()
        await until(lambda: is_idle(engine) and letters.contexts[0].state is None)
        assert letters.left == [hook]
        assert letters.waiting == 0
        assert dict(statistics(engine).cancelled) == {hook: 1}
        letters.waits_in = ""
        assert (await engine.process({"text": "abc"}))["codes"] == [97, 98, 99]
    assert letters.left == [hook]


@pytest.mark.parametrize("hook", ["parse", "preprocess", "forward", "postprocess"])
async def test_a_caller_who_leaves_in_a_thread_is_gone_at_once_and_told_when_the_hook_ends(hook: str) -> None:
    gate = Gate()
    letters = Letters(at=lambda name: gate() if name == hook else None)
    async with engine_of_plugin(letters, config=EngineConfig(preprocess_limit=1)) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.process, {"text": "abc"})
            await gate.arrived()
            tasks.cancel_scope.cancel()
        assert engine.statistics().admission.requests == 0  # the caller does not wait for the thread
        if hook != "forward":
            assert letters.left == []
            assert letters.contexts[0].state is not None
        gate.open()
        await until(lambda: is_idle(engine) and len(letters.left) == 1 and letters.contexts[0].state is None)
        assert letters.left == ["preprocess" if hook == "forward" else hook]
        reached = HOOKS[: HOOKS.index("preprocess" if hook == "forward" else hook) + 1]
        assert [name for name, _ in letters.ran] == reached  # no further hook began
        assert (await engine.process({"text": "z"}))["codes"] == [122]


async def test_a_hook_in_a_thread_can_ask_if_anybody_waits() -> None:
    gate = Gate()

    class Asks(Letters):
        def __init__(self) -> None:
            super().__init__()
            self.checked: list[str] = []

        def preprocess(self, loaded: Any, context: PluginContext) -> Any:
            context.check()
            gate()
            try:
                context.check()
            except Exception as error:
                self.checked.append(type(error).__name__)
                raise
            return super().preprocess(loaded, context)

    asks = Asks()
    async with engine_of_plugin(asks) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.process, {"text": "abc"})
            await gate.arrived()
            tasks.cancel_scope.cancel()
        gate.open()
        await until(lambda: is_idle(engine))
    assert asks.checked == ["Abandoned"]


@pytest.mark.parametrize("hook", [*HOOKS, "forward"])
async def test_a_hook_that_fails_fails_its_own_request(hook: str, logged: list[structlog.typing.EventDict]) -> None:
    broken = {"yes": True}

    def fail(name: str) -> None:
        if name == hook and broken["yes"]:
            raise KeyError("secret")

    letters = Letters(at=fail)
    async with engine_of_plugin(letters) as engine:
        with pytest.raises(PluginFailed, match=f"`{hook}`") as caught:
            await engine.process({"text": "abc"})
        assert "secret" not in str(caught.value)
        assert (caught.value.plugin, caught.value.hook) == ("codes", hook)
        await until(lambda: is_idle(engine))
        assert letters.left == []  # an error is no departure
        broken["yes"] = False
        assert (await engine.process({"text": "a"}))["codes"] == [97]
    events = [event for event in logged if event["event"] == "plugin.failed"]
    assert {(event["plugin"], event["hook"]) for event in events} == {("codes", hook)}


async def test_one_bad_input_of_a_batch_fails_alone() -> None:
    gate = Gate()

    class Picky(Letters):
        def forward(self, batch: Sequence[str]) -> Sequence[int]:
            if not self.batches:
                self.batches.append(list(batch))
                gate()
            if "?" in batch:
                raise ValueError("no letter")
            return [ord(letter) for letter in batch]

    outcomes: dict[str, Any] = {}
    async with engine_of_plugin(Picky(), config=EngineConfig(preprocess_limit=8)) as engine:

        async def ask(text: str) -> None:
            try:
                outcomes[text] = (await engine.process({"text": text}))["codes"]
            except PluginFailed as error:
                outcomes[text] = error.hook

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "x")
            await gate.arrived()
            for text in ("ab", "c?", "de"):
                tasks.start_soon(ask, text)
            await until(lambda: next(s for s in engine.statistics().stages if s.name == "batch").waiting == 6)
            gate.open()
    assert outcomes == {"x": [120], "ab": [97, 98], "c?": "forward", "de": [100, 101]}


async def test_an_error_of_ours_reaches_the_caller() -> None:
    class Strict(Letters):
        def parse(self, data: Any, context: PluginContext) -> Any:
            super().parse({"text": ""}, context)
            raise InvalidInput("bands: 3 are needed, got 2", param="data.bands")

    async with engine_of_plugin(Strict()) as engine:
        with pytest.raises(InvalidInput, match="3 are needed") as caught:
            await engine.process({})
        assert caught.value.param == "data.bands"
        await until(lambda: is_idle(engine))


@pytest.mark.parametrize(
    ("returned", "fault"),
    [("abc", "str"), ({"a": 1}, "dict"), (7, "int"), (None, "NoneType")],
)
async def test_preprocess_must_return_a_sequence(returned: object, fault: str) -> None:
    class Wrong(Processor):
        def preprocess(self, loaded: Any, context: PluginContext) -> Any:
            return returned

        def forward(self, batch: Any) -> Any:
            return batch

    async with engine_of_plugin(Wrong()) as engine:
        with pytest.raises(PluginFailed, match=f"returned {fault}, not a sequence"):
            await engine.process({})


async def test_a_forward_must_return_a_row_for_each_input() -> None:
    class Short(Letters):
        def forward(self, batch: Sequence[str]) -> Sequence[int]:
            return [0] * (len(batch) + 1)

    async with engine_of_plugin(Short()) as engine:
        with pytest.raises(PluginFailed, match="returned 2 or more rows for 1 model inputs"):
            await engine.process({"text": "a"})


async def test_a_plain_hook_that_returns_a_coroutine_is_an_error(logged: list[structlog.typing.EventDict]) -> None:
    class Hidden(Letters):
        def parse(self, data: Any, context: PluginContext) -> Any:
            return AwaitedLetters().parse(data, context)

    async with engine_of_plugin(Hidden()) as engine:
        with pytest.raises(PluginFailed, match="`parse`"):
            await engine.process({"text": "a"})
    (event,) = [event for event in logged if event["event"] == "plugin.failed"]
    assert "async def" in str(event["exc_info"])


async def test_the_served_model_runs_the_forward_of_a_plugin_without_one() -> None:
    class Words(Processor):
        def preprocess(self, loaded: Any, context: PluginContext) -> Any:
            return loaded.split()

        def postprocess(self, rows: Any, context: PluginContext) -> Any:
            return [row.values["dense"].tolist() for row in rows]

    model = LetterModel()
    async with engine_of_plugin(Words(), model) as engine:
        vectors = await engine.process("two words")
        assert vectors == [expected("two").tolist(), expected("words").tolist()]
        assert await engine.process("") == []
        with pytest.raises(InvalidInput, match=r"model input 1 of the plugin: .*too many tokens"):
            await engine.process("short " + "x" * (model.card.max_tokens + 1))
        with pytest.raises(ModelFailed):
            await engine.process("NaN")
        assert (await engine.process("again")) == [expected("again").tolist()]


async def test_vectors_of_the_served_model_are_those_of_embed() -> None:
    class Words(Processor):
        def preprocess(self, loaded: Any, context: PluginContext) -> Any:
            return loaded.split()

        def postprocess(self, rows: Any, context: PluginContext) -> Any:
            return [row.values["dense"] for row in rows]

    model = LetterModel(replace(CARD, normalize=True))
    async with engine_of_plugin(Words(), model) as engine, engine_on(model) as served:
        vectors = await engine.process("two words")
        assert_array_equal(vectors, (await served.embed(["two", "words"])).embeddings)


async def test_an_error_of_preprocess_names_the_data_and_no_index() -> None:
    class Strict(Letters):
        def preprocess(self, loaded: Any, context: PluginContext) -> Any:
            raise InvalidInput("too dark", param="input")

    async with engine_of_plugin(Strict()) as engine:
        with pytest.raises(InvalidInput, match="too dark") as caught:
            await engine.process({"text": "a"})
        assert (caught.value.param, caught.value.index) == ("data", None)


async def test_a_plugin_may_mix_texts_and_images_of_the_served_model() -> None:
    class Mixed(Processor):
        def preprocess(self, loaded: Any, context: PluginContext) -> Any:
            return ["text", Image(b"image"), "more"]

        def postprocess(self, rows: Any, context: PluginContext) -> Any:
            return [row.values["dense"].tolist() for row in rows]

    async with engine_of_plugin(Mixed(), LetterModel(BOTH_LANES)) as engine:
        assert await engine.process({}) == [expected(text).tolist() for text in ("text", "image", "more")]


async def test_an_engine_of_a_plugin_does_no_task_of_models() -> None:
    async with engine_of_plugin(Letters(), LetterModel()) as engine:
        with pytest.raises(Unsupported, match="plugin"):
            await engine.embed("a")
        with pytest.raises(Unsupported, match="tokenizer"):
            await engine.tokenize("a")


async def test_data_of_unknown_plugins_is_rejected_by_name() -> None:
    async with engine_of_plugin(Letters()) as engine:
        with pytest.raises(InvalidInput, match="no plugin 'words'; name one of codes"):
            await engine.process({}, plugin="words")
        engine.plugins = {"codes": engine, "words": engine}
        with pytest.raises(InvalidInput, match="several plugins"):
            await engine.process({})
        engine.plugins = {}
        with pytest.raises(Unsupported, match="--plugin"):
            await engine.process({})


async def test_hooks_of_a_process_have_the_state_of_their_request() -> None:
    async with engine_of_plugin(Elsewhere(), config=EngineConfig(preprocess_limit=2)) as engine:
        output = await engine.process("a")
        assert (output["rows"], output["seen"]) == (["a"], "a")
        assert output["process"] != os.getpid()


async def test_a_hook_in_a_process_ends_with_its_caller() -> None:
    async with engine_of_plugin(Elsewhere(), config=EngineConfig(preprocess_limit=1)) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.process, "wait")
            await until(lambda: statistics(engine).running["preprocess"] == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: is_idle(engine))
        assert (await engine.process("b"))["rows"] == ["b"]  # the only place is free again


async def test_a_stopped_engine_tells_the_plugin() -> None:
    letters = AwaitedLetters(waits_in="load")
    failures: list[BaseException] = []

    async def ask(engine: Engine) -> None:
        try:
            await engine.process({"text": "a"})
        except EngineStopped as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        async with engine_of_plugin(letters, config=EngineConfig(drain_timeout_s=0.0)) as engine:
            tasks.start_soon(ask, engine)
            await until(lambda: letters.waiting == 1)
    assert len(failures) == 1
    assert letters.left == ["load"]
    assert letters.is_closed


async def test_a_plain_cancelled_hook_that_hangs_is_left_with_its_thread(
    logged: list[structlog.typing.EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.runtime.plugins.host.CANCELLED_S", 0.05)
    gate, ended = Gate(), threading.Event()

    class Hangs(AwaitedLetters):
        def cancelled(self, context: PluginContext) -> None:  # type: ignore[override]
            gate()
            ended.set()

    letters = Hangs(waits_in="load")
    try:
        async with engine_of_plugin(letters) as engine:
            for requests in (1, 2):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(engine.process, {"text": "a"})
                    await until(lambda: letters.waiting == 1)
                    tasks.cancel_scope.cancel()
                await until(lambda: all(context.state is None for context in letters.contexts))
                assert len(letters.contexts) == requests
            assert is_idle(engine)
            assert not ended.is_set()
    finally:
        gate.open()
    events = [event["event"] for event in logged if "cancelled" in event["event"]]
    assert events == ["plugin.cancelled_left", "plugin.cancelled_timed_out"] * 2
    await until(ended.is_set)


async def test_a_cancelled_hook_that_hangs_keeps_nobody(logged: list[structlog.typing.EventDict]) -> None:
    class Hangs(AwaitedLetters):
        async def cancelled(self, context: PluginContext) -> None:
            await anyio.sleep_forever()

    letters = Hangs(waits_in="load")
    async with engine_of_plugin(letters) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.process, {"text": "a"})
            await until(lambda: letters.waiting == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: letters.contexts[0].state is None)
        assert is_idle(engine)
    assert [event["event"] for event in logged if "cancelled" in event["event"]] == ["plugin.cancelled_timed_out"]
