"""Lookup of plugins by name, among the entry points of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from staged_pool.runtime.plugins.processor import Plugin, PluginClass, name_of
from staged_pool.runtime.plugins.vllm_style import VllmPlugin
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.user_code import as_text, user_code

GROUP: Final = "staged_pool.plugins"
"""Entry points of plugins: name -> class or function that makes a `Processor`."""

VLLM_GROUP: Final = "vllm.io_processor_plugins"
"""Entry points of vLLM's plugins: name -> function that returns the class's dotted name."""


def find_plugin(name: str) -> PluginClass:
    """Find a plugin by the name of its entry point. Its module is imported when the plugin is made.

    Raises:
        ConfigError: No installed package has a plugin of this name, or several have.
    """
    for group, make in ((GROUP, _make), (VLLM_GROUP, _make_vllm)):
        found = {point.value: point for point in entry_points(group=group, name=name)}
        if len(found) > 1:
            raise ConfigError(f"plugin={name!r}: several packages have this plugin: {', '.join(sorted(found))}")
        if found:
            (point,) = found.values()
            return PluginClass(name, partial(make, point))
    known = sorted({point.name for group in (GROUP, VLLM_GROUP) for point in entry_points(group=group)})
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(known) or 'none'}"
    raise ConfigError(f"plugin={name!r}: no installed package has this entry point in the group {GROUP}; {hint}")


def all_plugins(names: Sequence[str], given: Sequence[Plugin]) -> Sequence[PluginClass]:
    """Return the plugins of an engine: those of the setting `plugin`, and those given as objects.

    Raises:
        ConfigError: A plugin cannot be found, or two have the same name.
    """
    found = [find_plugin(name) for name in names]
    for plugin in given:
        if isinstance(plugin, PluginClass):
            found.append(plugin)
        else:
            found.append(PluginClass(name_of(plugin), plugin if isinstance(plugin, type) else partial(_itself, plugin)))
    all_names = [plugin.name for plugin in found]
    if twice := next((name for place, name in enumerate(all_names) if name in all_names[:place]), None):
        raise ConfigError(f"plugin={twice!r}: two plugins have this name; name them apart")
    return found


def _itself(plugin: Any) -> Any:
    return plugin


def _make(point: EntryPoint, setup: Any) -> Any:
    return PluginClass(point.name, _loaded(point))(setup)


def _make_vllm(point: EntryPoint, setup: Any) -> Any:
    named = _loaded(point)()
    if not isinstance(named, str):
        raise ConfigError(f"plugin={point.name!r}: the entry point {point.value} must return the name of a class")
    module, _, attribute = named.rpartition(".")
    return VllmPlugin(_loaded(EntryPoint(point.name, f"{module}:{attribute}", VLLM_GROUP)), setup)


def _loaded(point: EntryPoint) -> Callable[..., Any]:
    try:
        with user_code():
            loaded: Callable[..., Any] = point.load()
    except Exception as error:
        raise ConfigError(f"plugin={point.name!r}: {point.value} could not be imported: {as_text(error)}") from error
    return loaded
