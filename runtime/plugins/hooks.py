"""Hooks of a plugin: each is found, and its kind decided, once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from staged_pool.runtime.plugins.processor import Isolation, PluginContext, PluginLike, Processor, takes
from staged_pool.stages.errors import ConfigError

HookName: TypeAlias = Literal["parse", "load", "preprocess", "postprocess", "cancelled"]

HOOKS: Final[tuple[HookName, ...]] = ("parse", "load", "preprocess", "postprocess")
"""The hooks that a request passes, in order. `forward` is none of them: it takes inputs of several requests."""

Kind: TypeAlias = Literal["awaited", "thread", "process"]


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook of one plugin."""

    name: HookName
    kind: Kind
    """Place of its calls: on the event loop, in a thread, or in a process of its own."""
    function: Callable[..., Any]
    takes_context: bool
    """True if it takes the `PluginContext` behind its value."""

    def __call__(self, value: object, context: PluginContext) -> Any:
        """Call the function. An awaited hook returns an awaitable."""
        if self.name == "cancelled":
            return self.function(context)
        return self.function(value, context) if self.takes_context else self.function(value)


def hooks_of(plugin: PluginLike, name: str, place: Isolation = "thread") -> Mapping[HookName, Hook]:
    """Find the hooks of a plugin. Those that it leaves to `Processor`, or lacks, are missing: they pass values on.

    Args:
        plugin: The plugin.
        name: Name of the plugin, for errors.
        place: Place of plain hooks, unless the plugin has an `isolation` of its own.

    Raises:
        ConfigError: `preprocess` is missing, or a hook takes other arguments; or `forward` is a coroutine function.
    """
    isolation: Kind = getattr(plugin, "isolation", None) or place
    if isolation not in ("thread", "process"):
        raise ConfigError(f"plugin {name!r}: isolation={isolation!r}; expected 'thread' or 'process'")
    if "preprocess" not in (found := {each for each in (*HOOKS, "cancelled") if overrides(plugin, each)}):
        raise ConfigError(f"plugin {name!r}: {type(plugin).__name__} has no hook `preprocess`, which it needs")
    if overrides(plugin, "forward") and is_async(plugin.forward):  # type: ignore[attr-defined]
        raise ConfigError(f"plugin {name!r}: `forward` runs in a device thread: make it a plain function")
    return {each: _hook(plugin, name, each, isolation) for each in (*HOOKS, "cancelled") if each in found}


def overrides(plugin: PluginLike, name: str) -> bool:
    """Return True if a plugin has a function of its own by this name."""
    function = getattr(plugin, name, None)
    return callable(function) and getattr(function, "__func__", None) is not getattr(Processor, name)


def _hook(plugin: PluginLike, plugin_name: str, name: Any, isolation: Kind) -> Hook:
    function = getattr(plugin, name)
    values = 0 if name == "cancelled" else 1
    takes_context = takes(function, values + 1)
    if not takes_context and not (values and takes(function, values)):
        expected = "context" if name == "cancelled" else "value, context"
        raise ConfigError(f"plugin {plugin_name!r}: the hook `{name}` takes other arguments than ({expected})")
    kind: Kind = "awaited" if is_async(function) else "thread" if name == "cancelled" else isolation
    return Hook(name, kind, function, takes_context)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function, also behind `functools.partial` or in an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
