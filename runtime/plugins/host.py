"""The host of a plugin: its limits, its open requests, and its statistics."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from types import TracebackType
from typing import Final

import anyio
from anyio.abc import TaskGroup

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.plugins.block_watch import BlockWatch
from staged_pool.runtime.plugins.call import PluginCall
from staged_pool.runtime.plugins.hooks import HOOKS, hooks_of, overrides
from staged_pool.runtime.plugins.places import HookPlaces
from staged_pool.runtime.plugins.processor import PluginContext, PluginLike
from staged_pool.runtime.statistics import PluginStatistics
from staged_pool.runtime.threads.function_threads import FunctionThreads
from staged_pool.stages.errors import Abandoned, DeadlineExceeded, EngineStopped, StagedPoolError, StageFailed
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import Histogram
from staged_pool.stages.offload import Offload, ThreadOffload
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.user_code import user_code

CANCELLED_S: Final = 1.0
"""Seconds that the hook `cancelled` may take."""

CLOSE_S: Final = 10.0
"""Seconds that `aclose` may take."""

log = get_logger("staged_pool.plugins")


class PluginHost:
    """Runs the hooks of one plugin for all requests of its engine.

    Args:
        name: Name of the plugin in requests.
        plugin: The plugin.
        config: Limits of hooks.
        clock: Clock of the engine, in seconds.
        threads: See `HookPlaces`.
        leaving: Runs plain hooks `cancelled`, which may be left behind. None: threads.
        watch: See `HookPlaces`.

    Raises:
        ConfigError: A hook is missing, or takes other arguments.
    """

    def __init__(
        self,
        name: str,
        plugin: PluginLike,
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        threads: Callable[[int], Offload] = ThreadOffload,
        leaving: Offload | None = None,
        watch: Callable[[str], BlockWatch] = BlockWatch,
    ) -> None:
        self.name = name
        self.plugin = plugin
        hooks = hooks_of(plugin, name, config.preprocess_place())
        self.places = HookPlaces(name, hooks, config.preprocess_limit, self.release_ended, threads=threads, watch=watch)
        self.loading = anyio.CapacityLimiter(config.media_limit)
        """Requests that are in `parse` or `load`, or wait for preprocess after that. It bounds the loaded data."""
        self.finishing = anyio.CapacityLimiter(config.media_limit)
        """Requests in an awaited `postprocess`."""
        self._clock = clock
        self._open: set[PluginCall] = set()
        self._ended: list[PluginCall] = []
        """Ended requests whose hook still runs."""
        self._leaving = leaving or FunctionThreads(config.media_limit, self._log_left)
        self._tasks: TaskGroup
        self._seconds: dict[str, Histogram] = {name: Histogram() for name in HOOKS if name in self.places.hooks}
        self._cancelled: Counter[str] = Counter()

    @property
    def runs_forward(self) -> bool:
        """True if the plugin has a forward of its own."""
        return overrides(self.plugin, "forward")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Host the plugin for a block, inside of which its engine runs. At its end the plugin is closed.

        Raises:
            StageFailed: The block was cancelled from inside, and nobody has asked for that.
        """
        awaits = any(hook.kind == "awaited" for hook in self.places.hooks.values())
        was_left = False
        try:
            with single_errors():
                async with (
                    self.places.watch.running() if awaits else nullcontext(),
                    anyio.create_task_group() as self._tasks,
                ):
                    yield
                    was_left = True
            if not was_left:  # a task that ends by a stray cancellation cancels the block, and raises nothing
                message = f"The tasks of the plugin `{self.name}` have ended, and nobody has asked for that."
                raise StageFailed(message, stage="plugin")
        finally:
            await self.places.processes.close()
            await self._close()

    async def _close(self) -> None:
        if not overrides(self.plugin, "aclose"):
            return
        with anyio.move_on_after(CLOSE_S, shield=True) as scope:
            try:
                async with user_code():
                    if (closing := self.plugin.aclose()) is not None:  # type: ignore[attr-defined]
                        await closing
            except Exception:
                log.exception("plugin.close_failed", plugin=self.name)
        if scope.cancelled_caught:
            log.error("plugin.close_timed_out", plugin=self.name, seconds=CLOSE_S)

    def session(self) -> PluginSession:
        """Return the block in which one caller waits for one request."""
        return PluginSession(self)

    def open(self, ticket: Ticket) -> PluginCall:
        """Begin a request."""
        call = PluginCall(self.places, ticket, PluginContext(secrets.token_hex(16), ticket, self._clock))
        self._open.add(call)
        return call

    def end(self, call: PluginCall, *, left: bool) -> None:
        """End a request. It is released now, or when the hook that runs has ended.

        Args:
            call: The request.
            left: Nobody waits for it any more.
        """
        call.has_ended, call.was_left = True, left
        if call.runs:
            self._ended.append(call)
        else:
            self._release(call)

    def release_ended(self) -> None:
        """Release the ended requests whose hook has ended, too. Called on the event loop after each hook."""
        if self._ended:
            ended, self._ended = self._ended, []
            for call in ended:
                self.end(call, left=call.was_left)

    def _release(self, call: PluginCall) -> None:
        self._open.discard(call)
        if overrides(self.plugin, "release"):
            try:
                with user_code():
                    self.plugin.release(call.context)  # type: ignore[attr-defined]
            except Exception:  # the boundary to the plugin: the request has ended already
                log.exception("plugin.failed", plugin=self.name, hook="release")
        for name, seconds in call.seconds.items():
            self._seconds[name].observe(seconds)
        if not call.was_left:
            call.context.state = None
            return
        self._cancelled[call.context.hook] += 1
        self._tasks.start_soon(self._tell_left, call.context)

    def _log_left(self, calls: int) -> None:
        log.warning("plugin.cancelled_left", plugin=self.name, calls=calls)

    async def _tell_left(self, context: PluginContext) -> None:
        """Call the hook `cancelled`, and release the state of the request. A hook that hangs is left behind."""
        try:
            if (hook := self.places.hooks.get("cancelled")) is None:
                return
            with anyio.move_on_after(CANCELLED_S, shield=True) as scope:
                if hook.kind == "awaited":
                    async with user_code():
                        await self.places.watch.watched(hook.name, hook(None, context))
                else:
                    await self._leaving(lambda _: hook(None, context), None)
            if scope.cancelled_caught:
                log.error("plugin.cancelled_timed_out", plugin=self.name, seconds=CANCELLED_S)
        except Exception:  # the boundary to the plugin: the request has ended already
            log.exception("plugin.failed", plugin=self.name, hook="cancelled")
        finally:
            context.state = None

    def statistics(self) -> PluginStatistics:
        """Return a snapshot."""
        return PluginStatistics(
            open=len(self._open),
            running={name: sum(call.runs and call.context.hook == name for call in self._open) for name in HOOKS},
            loading=int(self.loading.borrowed_tokens),
            cancelled=dict(self._cancelled),
            blocked=dict(self.places.watch.blocked),
            seconds={name: histogram.snapshot() for name, histogram in self._seconds.items()},
        )


class PluginSession:
    """The wait of one caller for one request. At its end the request is released, however it ends.

    Args:
        host: Host of the plugin.
    """

    def __init__(self, host: PluginHost) -> None:
        self._host = host
        self._call: PluginCall | None = None
        self._has_ended = False

    def __enter__(self) -> PluginSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended = True
        if self._call is not None:
            own_errors = isinstance(error, StagedPoolError) and not isinstance(error, DeadlineExceeded | EngineStopped)
            self._host.end(self._call, left=error is not None and not own_errors)

    def begin(self, ticket: Ticket) -> PluginCall:
        """Begin the request, or begin it again if its work was dropped too early.

        Raises:
            Abandoned: The caller has left.
        """
        if self._has_ended:
            raise Abandoned("the caller left")
        if self._call is not None:
            self._host.end(self._call, left=True)
        self._call = self._host.open(ticket)
        return self._call
