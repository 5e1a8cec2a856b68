"""Hooks of a plugin: their kinds and arguments, and the errors of plugins that have wrong ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.plugins.hooks import hooks_of, overrides
from staged_pool.runtime.plugins.processor import PluginClass, PluginContext, PluginSetup, Processor, name_of
from staged_pool.stages.errors import ConfigError

SETUP = PluginSetup(config=EngineConfig(), card=None, fetch=None)  # type: ignore[arg-type]


class Plain(Processor):
    def preprocess(self, loaded: Any, context: PluginContext) -> Any:
        return [loaded]


def kinds(plugin: Any) -> dict[str, str]:
    return {name: hook.kind for name, hook in hooks_of(plugin, "p").items()}


def test_only_hooks_of_its_own_are_run() -> None:
    assert kinds(Plain()) == {"preprocess": "thread"}
    assert not overrides(Plain(), "forward")


def test_a_coroutine_function_is_awaited_however_it_is_wrapped() -> None:
    async def load(prompt: Any, context: Any) -> Any:
        return prompt

    class Callable:
        async def __call__(self, rows: Any) -> Any:
            return rows

    plugin = Plain()
    plugin.load = functools.partial(functools.partial(load))  # type: ignore[method-assign]
    plugin.postprocess = Callable()  # type: ignore[method-assign,assignment]
    assert kinds(plugin) == {"load": "awaited", "preprocess": "thread", "postprocess": "awaited"}


def test_isolation_moves_plain_hooks_alone() -> None:
    class Apart(Plain):
        isolation = "process"

        async def load(self, prompt: Any, context: PluginContext) -> Any:
            return prompt

        def cancelled(self, context: PluginContext) -> None: ...

    assert kinds(Apart()) == {"load": "awaited", "preprocess": "process", "cancelled": "thread"}


def test_the_setting_places_the_hooks_of_plugins_that_name_no_place() -> None:
    class Stays(Plain):
        isolation = "thread"

    assert hooks_of(Plain(), "p", "process")["preprocess"].kind == "process"
    assert hooks_of(Stays(), "p", "process")["preprocess"].kind == "thread"


def test_a_hook_may_leave_the_context_out() -> None:
    class Short:
        def parse(self, data: Any) -> Any:
            return data + 1

        def preprocess(self, loaded: Any, context: Any) -> Any:
            return [loaded, context.id]

    hooks, context = hooks_of(Short(), "short"), PluginContext("id")
    assert hooks["parse"](1, context) == 2
    assert hooks["preprocess"](2, context) == [2, "id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preprocess": None}, "no hook `preprocess`"),
        ({"load": lambda: None}, r"the hook `load` takes other arguments than \(value, context\)"),
        ({"cancelled": lambda: None}, r"the hook `cancelled` takes other arguments than \(context\)"),
        ({"isolation": "vm"}, "isolation='vm'; expected 'thread' or 'process'"),
    ],
)
def test_wrong_plugins_are_named(change: dict[str, Any], message: str) -> None:
    plugin = Plain()
    for name, value in change.items():
        setattr(plugin, name, value)
    with pytest.raises(ConfigError, match=f"plugin 'p': .*{message}"):
        hooks_of(plugin, "p")


def test_a_forward_that_would_wait_is_rejected() -> None:
    class Waits(Plain):
        async def forward(self, batch: Any) -> Any:
            return batch

    with pytest.raises(ConfigError, match="`forward` runs in a device thread"):
        hooks_of(Waits(), "p")


def test_a_plugin_is_made_with_or_without_the_setup() -> None:
    class Asks(Plain):
        def __init__(self, setup: PluginSetup) -> None:
            self.setup = setup

    assert isinstance(PluginClass("p", Plain)(SETUP), Plain)
    made = PluginClass("p", Asks)(SETUP)
    assert isinstance(made, Asks)
    assert made.setup is SETUP


def test_a_plugin_that_cannot_be_made_is_named() -> None:
    def broken() -> Any:
        raise KeyError("weights")

    with pytest.raises(ConfigError, match="plugin 'p': it could not be made: KeyError: 'weights'"):
        PluginClass("p", broken)(SETUP)


def test_names_can_stand_in_a_path() -> None:
    assert (name_of(Plain()), name_of(Plain)) == ("plain", "plain")
    plugin = Plain()
    plugin.name = "a/b"
    with pytest.raises(ConfigError, match="plugin name 'a/b': expected letters"):
        name_of(plugin)
