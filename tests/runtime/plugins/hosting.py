"""Plugins that record their hooks, and the state of their engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.plugins.processor import PluginContext, Processor
from staged_pool.runtime.statistics import PluginStatistics


def statistics(engine: Engine) -> PluginStatistics:
    """Return the statistics of the engine's plugin."""
    found = engine.statistics().plugin
    assert found is not None
    return found


def is_idle(engine: Engine) -> bool:
    """Return True if nothing of any request is left."""
    now, admission = statistics(engine), engine.statistics().admission
    counts = (now.open, now.loading, *now.running.values(), admission.requests, admission.items, admission.tokens)
    return not any(counts)


class Letters(Processor):
    """Splits a text into letters, whose codes are the output. It records its hooks.

    Args:
        at: Called by each hook with its name.
    """

    name = "codes"

    def __init__(self, at: Callable[[str], None] = lambda hook: None) -> None:
        self.at = at
        self.ran: list[tuple[str, str]] = []
        """Hook and request id, in the order of the calls."""
        self.batches: list[list[str]] = []
        self.contexts: list[PluginContext] = []
        self.left: list[str] = []
        """Last hook of each request that was left."""
        self.is_closed = False

    def note(self, hook: str, context: PluginContext) -> None:
        """Record a hook, and check that each request has a state of its own."""
        if hook == "parse":
            assert context.state is None
            context.state = []
            self.contexts.append(context)
        assert context.hook == hook
        context.state.append(hook)
        self.ran.append((hook, context.id))
        self.at(hook)

    def parse(self, data: Any, context: PluginContext) -> Any:
        self.note("parse", context)
        return data["text"]

    async def load(self, prompt: Any, context: PluginContext) -> Any:
        self.note("load", context)
        await anyio.lowlevel.checkpoint()
        return prompt

    def preprocess(self, loaded: Any, context: PluginContext) -> Any:
        self.note("preprocess", context)
        return list(loaded)

    def forward(self, batch: Sequence[str]) -> Sequence[int]:
        self.batches.append(list(batch))
        self.at("forward")
        return [ord(letter) for letter in batch]

    def postprocess(self, rows: Any, context: PluginContext) -> Any:
        self.note("postprocess", context)
        return {"codes": rows, "hooks": context.state}

    def cancelled(self, context: PluginContext) -> Any:
        assert context.state is not None
        self.left.append(context.hook)

    async def aclose(self) -> None:
        self.is_closed = True


class AwaitedLetters(Letters):
    """The same with coroutine functions, which wait where `waits` says."""

    def __init__(self, waits_in: str = "") -> None:
        super().__init__()
        self.waits_in = waits_in
        self.waiting = 0

    async def _wait(self, hook: str, context: PluginContext) -> None:
        self.note(hook, context)
        if hook == self.waits_in:
            self.waiting += 1
            try:
                await anyio.sleep_forever()
            finally:
                self.waiting -= 1

    async def parse(self, data: Any, context: PluginContext) -> Any:
        await self._wait("parse", context)
        return data["text"]

    async def load(self, prompt: Any, context: PluginContext) -> Any:
        await self._wait("load", context)
        return prompt

    async def preprocess(self, loaded: Any, context: PluginContext) -> Any:
        await self._wait("preprocess", context)
        return list(loaded)

    async def postprocess(self, rows: Any, context: PluginContext) -> Any:
        await self._wait("postprocess", context)
        return {"codes": rows, "hooks": context.state}

    async def cancelled(self, context: PluginContext) -> None:
        await anyio.lowlevel.checkpoint()
        super().cancelled(context)


class Elsewhere(Processor):
    """A plugin whose plain hooks run in a process of their own."""

    isolation = "process"

    def parse(self, data: Any, context: PluginContext) -> Any:
        context.state = {"seen": data}
        return data

    def preprocess(self, loaded: Any, context: PluginContext) -> Any:
        import os

        context.state["process"] = os.getpid()
        if loaded == "wait":
            time.sleep(600)
        return [loaded]

    def forward(self, batch: Sequence[Any]) -> Sequence[Any]:
        return batch

    def postprocess(self, rows: Any, context: PluginContext) -> Any:
        return {"rows": rows, **context.state}
