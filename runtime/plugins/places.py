"""Places of hooks: the event loop, threads under a limit, and processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from staged_pool.runtime.plugins.block_watch import BlockWatch
from staged_pool.runtime.plugins.hooks import Hook, HookName
from staged_pool.runtime.plugins.processes import HookProcesses
from staged_pool.stages.offload import Abandonable, Offload, ThreadOffload

A = TypeVar("A")
R = TypeVar("R")


class HookThreads:
    """Threads of plain hooks. After each call it looks for ended requests that waited for it.

    Args:
        threads: Run the hooks.
        called: Called on the event loop after each call.
    """

    def __init__(self, threads: Offload, called: Callable[[], None]) -> None:
        self._threads = threads
        self._called = called

    async def __call__(self, function: Callable[[A], R], argument: A, /) -> R:
        try:
            return await self._threads(function, argument)
        finally:
            self._called()

    def abandon(self) -> None:
        """See `Abandonable`."""
        if isinstance(self._threads, Abandonable):
            self._threads.abandon()


class HookPlaces:
    """The hooks of one plugin, and the places where they run.

    Args:
        plugin: Name of the plugin.
        hooks: Its hooks.
        limit: Most plain hooks at once.
        called: Called on the event loop after each hook.
        threads: Makes the threads of plain hooks, of which at most `limit` run at once.
        watch: Makes the watch for hooks that block the event loop.
    """

    def __init__(
        self,
        plugin: str,
        hooks: Mapping[HookName, Hook],
        limit: int,
        called: Callable[[], None],
        *,
        threads: Callable[[int], Offload] = ThreadOffload,
        watch: Callable[[str], BlockWatch] = BlockWatch,
    ) -> None:
        self.plugin = plugin
        self.hooks = hooks
        self.called = called
        self.threads = HookThreads(threads(limit), called)
        """Threads of plain hooks. They are not those of texts, so no text waits for a slow hook."""
        apart = {name: hook for name, hook in hooks.items() if hook.kind == "process"}
        self.processes = HookProcesses(plugin, apart, limit)
        self.watch = watch(plugin)
