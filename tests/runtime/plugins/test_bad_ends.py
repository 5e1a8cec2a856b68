"""Hooks that end by a panic, `SystemExit` or a stray cancellation: their request fails, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest
import structlog

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.plugins.processor import PluginClass, PluginContext, PluginSetup
from staged_pool.stages.errors import ConfigError, PluginFailed, StageFailed, TooLarge
from tests.conftest import BACKENDS
from tests.runtime.plugins.hosting import AwaitedLetters, Letters, is_idle
from tests.servers.engines import engine_of_plugin
from tests.support.user_code import BAD_ENDS, BadEnd
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

CRASHES = 9
"""Crashes of a stage within a minute that break its engine."""

HOOKS = ["parse", "load", "preprocess", "postprocess"]


async def fails_alone(engine: Engine, hook: str) -> None:
    """Check that a bad request fails by name, and no other one."""
    told: list[PluginFailed] = []
    outputs: list[Any] = []

    async def ask_bad() -> None:
        with pytest.raises(PluginFailed, match=f"`{hook}`") as caught:
            await engine.process({"text": "bad"})
        told.append(caught.value)

    async def ask_good() -> None:
        outputs.append((await engine.process({"text": "ab"}))["codes"])

    async with anyio.create_task_group() as tasks:
        for ask in (ask_good, ask_bad, ask_good):
            tasks.start_soon(ask)
    await ask_good()
    assert outputs == [[97, 98]] * 3
    assert (told[0].plugin, told[0].hook) == ("codes", hook)
    assert engine.fault is None
    await until(lambda: is_idle(engine))


def bad_in(plugin: Letters, hook: str, end: Callable[[], Any]) -> None:
    """Let a hook of a plugin end so for the text `bad`; for others it does as before."""
    texts: dict[str, str] = {}
    original, parse = getattr(plugin, hook), plugin.parse

    def is_bad(value: Any, context: PluginContext) -> bool:
        if isinstance(value, dict) and "text" in value:
            texts[context.id] = value["text"]
        return texts.get(context.id) == "bad"

    if isinstance(plugin, AwaitedLetters):

        async def awaited(value: Any, context: PluginContext) -> Any:
            if is_bad(value, context):
                await end()
            return await original(value, context)

        async def awaited_parse(value: Any, context: PluginContext) -> Any:
            is_bad(value, context)
            return await parse(value, context)

        plugin.parse = awaited_parse  # type: ignore[method-assign,assignment]
        setattr(plugin, hook, awaited)
        return

    def called(value: Any, context: PluginContext) -> Any:
        if is_bad(value, context):
            end()
        return original(value, context)

    def called_parse(value: Any, context: PluginContext) -> Any:
        is_bad(value, context)
        return parse(value, context)

    plugin.parse = called_parse  # type: ignore[method-assign,assignment]
    setattr(plugin, hook, called)


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize("hook", HOOKS)
async def test_an_awaited_hook_fails_its_request_alone(hook: str, end: BadEnd) -> None:
    plugin = AwaitedLetters()
    bad_in(plugin, hook, end.awaited)
    async with engine_of_plugin(plugin) as engine:
        await fails_alone(engine, hook)


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize("hook", ["parse", "preprocess", "postprocess"])
async def test_a_plain_hook_fails_its_request_alone(hook: str, end: BadEnd) -> None:
    plugin = Letters()
    bad_in(plugin, hook, end.called)
    async with engine_of_plugin(plugin) as engine:
        await fails_alone(engine, hook)


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize(
    ("method", "hook"), [("forward", "forward"), ("tokens", "preprocess"), ("batch_key", "preprocess")]
)
async def test_what_the_plugin_does_with_a_model_input_fails_by_name(method: str, hook: str, end: BadEnd) -> None:
    plugin = Letters()
    original = getattr(plugin, method)

    def called(given: Any) -> Any:
        if "d" in given:  # of `bad` alone
            end.called()
        return original(given)

    setattr(plugin, method, called)
    async with engine_of_plugin(plugin) as engine:
        await fails_alone(engine, hook)


@pytest.mark.parametrize("end", BAD_ENDS)
async def test_hooks_after_the_end_of_a_request_harm_nobody(
    end: BadEnd, logged: list[structlog.typing.EventDict]
) -> None:
    plugin = AwaitedLetters("load")
    plugin.release = end.called  # type: ignore[method-assign,assignment]
    plugin.cancelled = end.awaited  # type: ignore[method-assign,assignment]
    plugin.aclose = end.awaited  # type: ignore[method-assign]
    async with engine_of_plugin(plugin) as engine:
        with anyio.move_on_after(0.01):
            await engine.process({"text": "left"})
        await until(lambda: is_idle(engine))
        plugin.waits_in = ""
        assert (await engine.process({"text": "a"}))["codes"] == [97]
        assert engine.fault is None
    failed = {
        event.get("hook", "aclose") for event in logged if event["event"] in ("plugin.failed", "plugin.close_failed")
    }
    assert failed == {"release", "cancelled", "aclose"}


def test_a_plugin_that_ends_so_while_it_is_made_is_an_error_of_the_settings() -> None:
    def make() -> None:
        raise SystemExit(3)

    with pytest.raises(ConfigError, match="SystemExit: 3"):
        PluginClass("codes", make)(PluginSetup(config=EngineConfig(), card=None, fetch=None))  # type: ignore[arg-type]


async def test_a_generator_of_model_inputs_is_taken_to_the_limit_and_no_further() -> None:
    taken = itertools.count()

    class Endless(Letters):
        def preprocess(self, loaded: Any, context: PluginContext) -> Iterator[str]:
            return ("x" for _ in (taken if loaded == "bad" else loaded))

    async with engine_of_plugin(Endless(), config=EngineConfig(max_request_items=8)) as engine:
        with pytest.raises(TooLarge, match="more than 8 model inputs"):
            await engine.process({"text": "bad"})
        assert next(taken) == 9
        assert len((await engine.process({"text": "ab"}))["codes"]) == 2


async def test_a_generator_of_rows_is_taken_to_one_more_than_the_batch() -> None:
    taken = itertools.count()

    class Endless(Letters):
        def forward(self, batch: Any) -> Any:
            return (next(taken) for _ in itertools.repeat(0))

    async with engine_of_plugin(Endless()) as engine:
        with pytest.raises(PluginFailed, match="returned 2 or more rows for 1 model inputs"):
            await engine.process({"text": "ab"})


async def test_a_generator_that_raises_fails_by_the_name_of_its_hook() -> None:
    class Raises(Letters):
        def preprocess(self, loaded: Any, context: PluginContext) -> Iterator[str]:
            yield from loaded
            raise ValueError("boom")

    async with engine_of_plugin(Raises()) as engine:
        with pytest.raises(PluginFailed, match=r"`preprocess` \(ValueError\)"):
            await engine.process({"text": "ab"})


class OddKey:
    """A key that is equal to nothing, and fails when it is compared."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise SystemExit(3)


class OddRow:
    """A row whose size cannot be told."""

    @property
    def nbytes(self) -> int:
        raise SystemExit(3)


class Odd(AwaitedLetters):
    """Gives the stages an odd value for the letter x."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def batch_key(self, item: Any) -> Any:
        keys = {"a list as key": ["x"], "a key that fails": OddKey()}
        return keys.get(self._kind) if item == "x" else None

    def tokens(self, item: Any) -> Any:
        costs = {"an endless cost": 10**400, "a cost that is no number": math.nan}
        return costs.get(self._kind, 1) if item == "x" else 1

    def forward(self, batch: Any) -> Any:
        rows = super().forward(batch)
        return [OddRow() if self._kind == "a row without size" and row == ord("x") else row for row in rows]


@pytest.mark.parametrize(
    "kind", ["a list as key", "a key that fails", "an endless cost", "a cost that is no number", "a row without size"]
)
async def test_odd_values_fail_their_request_and_never_the_stages(kind: str) -> None:
    told: list[str] = []
    outputs: list[Any] = []

    async def ask(engine: Engine, text: str) -> None:
        try:
            outputs.append((await engine.process({"text": text}))["codes"])
        except PluginFailed as error:
            told.append(error.hook)

    async with engine_of_plugin(Odd(kind)) as engine:
        for _ in range(CRASHES + 1):  # more crashes than a stage survives
            async with anyio.create_task_group() as tasks:
                for text in ("ab", "xx", "ab"):
                    tasks.start_soon(ask, engine, text)
            await until(lambda: is_idle(engine))
        assert engine.fault is None
    assert outputs == [[97, 98]] * (2 * CRASHES + 2)
    assert set(told) == {"forward" if "row" in kind else "preprocess"}
    assert len(told) == CRASHES + 1


async def test_only_equal_keys_share_a_batch() -> None:
    class Keyed(AwaitedLetters):
        def batch_key(self, item: Any) -> Any:
            return (item.isupper(), frozenset({1, 2}))

    plugin = Keyed()
    async with engine_of_plugin(plugin) as engine:
        assert (await engine.process({"text": "aBcD"}))["codes"] == [97, 66, 99, 68]
    assert sorted(map(sorted, plugin.batches)) == [["B", "D"], ["a", "c"]]


@pytest.mark.parametrize("anyio_backend", BACKENDS[:2])
async def test_a_task_that_cancels_itself_does_not_end_the_engine_in_silence() -> None:
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def serve() -> None:
        async with engine_of_plugin(AwaitedLetters()) as engine:
            model: Any = engine._model
            model.host._tasks.start_soon(cancels_itself)
            await anyio.sleep_forever()

    with pytest.raises(StageFailed, match="have ended, and nobody has asked for that"):
        await serve()


@pytest.mark.parametrize("end", BAD_ENDS)
async def test_a_row_that_does_not_tell_its_bytes_fails_its_request_alone(end: BadEnd) -> None:
    class Row:
        @property
        def nbytes(self) -> int:
            end.called()
            return 4

    class Rows(Letters):
        def forward(self, batch: Sequence[str]) -> Sequence[Any]:
            return [Row() if letter == "d" else ord(letter) for letter in batch]

    async with engine_of_plugin(Rows()) as engine:
        await fails_alone(engine, "forward")


async def test_a_row_that_lies_about_its_bytes_counts_as_none() -> None:
    class Row:
        def __init__(self, nbytes: object) -> None:
            self.nbytes = nbytes

    class Rows(Letters):
        def forward(self, batch: Sequence[str]) -> Sequence[Any]:
            return [Row({"a": -(10**12), "b": 10**400, "c": "many"}[letter]) for letter in batch]

    async with engine_of_plugin(Rows()) as engine:
        assert len((await engine.process({"text": "abc"}))["codes"]) == 3
        assert engine.memory.budget.answers.held_bytes == 0
