"""The call of a plugin for one request: it runs the hooks, one at a time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from staged_pool.runtime.plugins.hooks import Hook, HookName
from staged_pool.runtime.plugins.places import HookPlaces
from staged_pool.runtime.plugins.processor import PluginContext
from staged_pool.stages.errors import Abandoned, PluginFailed, StagedPoolError
from staged_pool.stages.exhausted import is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.user_code import kind_of, user_code

R = TypeVar("R")

log = get_logger("staged_pool.plugins")


class PluginCall:
    """One request on its way through the hooks. At most one hook runs at any moment.

    Args:
        places: Hooks of the plugin, and their places.
        ticket: Ticket of the request.
        context: Context of the request, for the hooks.
    """

    __slots__ = ("_places", "_ticket", "context", "has_ended", "runs", "was_left")

    def __init__(self, places: HookPlaces, ticket: Ticket, context: PluginContext) -> None:
        self._places = places
        self._ticket = ticket
        self.context = context
        self.runs = False
        """True while a hook runs."""
        self.has_ended = False
        """True once the request has ended; no further hook begins."""
        self.was_left = False
        """True if the request ended because nobody waits for it any more."""

    @property
    def plugin(self) -> str:
        """Name of the plugin."""
        return self._places.plugin

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in each hook."""
        return self._ticket.timeline.hooks

    async def run(self, name: HookName, value: object) -> Any:
        """Run a hook in its place, and return its result; without the hook, return the value.

        Raises:
            StagedPoolError: The hook has raised it, or failed with `PluginFailed`.
        """
        if (hook := self._places.hooks.get(name)) is None:
            return value
        try:
            match hook.kind:
                case "awaited":
                    return await self._await(hook, value)
                case "thread":
                    return await self._places.threads(partial(self.run_here, hook), value)
                case "process":
                    return await self._run_in_process(hook, value)
        finally:
            self._places.called()

    def run_here(self, hook: Hook, value: object) -> Any:
        """Run a plain hook in the calling thread; see `run`."""
        return self.run_part(hook, lambda: _no_coroutine(hook(value, self.context)))

    def run_part(self, hook: Hook, code: Callable[[], R]) -> R:
        """Run more code of a hook, such as its generator, in the calling thread; see `run`."""
        with _Running(self, hook), user_code():
            return code()

    async def _await(self, hook: Hook, value: object) -> Any:
        with _Running(self, hook):
            async with user_code():
                return await self._places.watch.watched(hook.name, hook(value, self.context))

    async def _run_in_process(self, hook: Hook, value: object) -> Any:
        async with self._places.processes:
            with _Running(self, hook):
                async with user_code():
                    result, self.context.state = await self._places.processes.run(hook, value, self.context)
                return result


def _no_coroutine(result: Any) -> Any:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("it returned a coroutine: declare it with `async def`")
    return result


class _Running:
    """The block in which a hook runs: it is timed, and its errors become errors of the engine."""

    __slots__ = ("_began_at", "_call", "_hook")

    def __init__(self, call: PluginCall, hook: Hook) -> None:
        self._call = call
        self._hook = hook

    def __enter__(self) -> None:
        call = self._call
        call.runs = True  # before the look at `has_ended`: another thread sets that, and then looks at `runs`
        if call.has_ended:
            call.runs = False
            raise Abandoned("the request has ended")
        call.context.hook = self._hook.name
        self._began_at = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call, name = self._call, self._hook.name
        call.seconds[name] = call.seconds.get(name, 0.0) + time.perf_counter() - self._began_at
        call.runs = False
        if not isinstance(error, Exception) or isinstance(error, StagedPoolError) or is_out_of_memory(error):
            return
        plugin = call.plugin
        log.error("plugin.failed", plugin=plugin, hook=name, exc_info=error)
        raise PluginFailed(
            f"the plugin `{plugin}` failed in its hook `{name}` ({kind_of(error)})", plugin=plugin, hook=name
        ) from None
