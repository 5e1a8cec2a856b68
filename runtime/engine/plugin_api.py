"""The plugin API of an engine: it takes data through the hooks of a plugin."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from staged_pool.runtime import arguments
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.runtime.model import Preparer
from staged_pool.runtime.plugins.model import PluginModel
from staged_pool.runtime.plugins.processor import AsgiApp, Process
from staged_pool.runtime.plugins.request import PluginRequest
from staged_pool.stages.errors import InvalidInput, Unsupported, shortened
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline
from staged_pool.stages.user_code import user_code
from staged_pool.stages.work import Request

R = TypeVar("R")


class PluginApi(ABC):
    """Methods of an engine for plugins. Each plugin has an engine of its own; that of the model knows them."""

    _model: Preparer
    plugins: Mapping[str, PluginApi]
    """Engines of the plugins that were opened with this one, by name; if it is a plugin's, itself among them."""

    @abstractmethod
    async def submit(
        self,
        decode: Callable[[], Request],
        encode: Callable[[Any], R],
        *,
        body_bytes: int = 0,
        timeout_s: float = math.inf,
        timeline: Timeline | None = None,
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        answer: AnswerMemory | None = None,
    ) -> R:
        """Take one request through the four stages and return its answer; see `Engine.submit`."""

    async def process(
        self,
        data: object,
        *,
        plugin: str | None = None,
        timeout_s: float = math.inf,
        priority: Priority | str = Priority.INTERACTIVE,
        tenant: Hashable = None,
    ) -> Any:
        """Take data through the hooks of a plugin, and return its output.

        Args:
            data: The data, for the hook `parse`.
            plugin: Name of the plugin. None: the only one.
            timeout_s: Time limit for the output, in seconds.
            priority: `interactive` or `bulk`, as for `embed`.
            tenant: Owner of the request, as for `embed`.

        Raises:
            InvalidInput: The data is wrong, or no plugin has this name.
            Unsupported: The engine has no plugin.
            PluginFailed: A hook failed.
            DeadlineExceeded: `timeout_s` passed, or cannot be met.
            StagedPoolError: The other errors of `submit`.
        """
        return await self.engine_of(plugin).submit_data(
            lambda: data,
            lambda output: output,
            timeout_s=timeout_s,
            priority=arguments.priority(priority),
            tenant=tenant,
        )

    async def submit_data(
        self,
        read: Callable[[], object],
        encode: Callable[[Any], R],
        *,
        body_bytes: int = 0,
        timeout_s: float = math.inf,
        timeline: Timeline | None = None,
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        answer: AnswerMemory | None = None,
    ) -> R:
        """Take data through the hooks of this engine's own plugin; see `process`.

        Args:
            read: Returns the data, in parse; in a thread if it is large.
            encode: Makes the answer from the output, in postprocess; may run in a thread.
            body_bytes: See `submit`.
            timeout_s: See `submit`.
            timeline: See `submit`.
            priority: See `submit`.
            tenant: See `submit`.
            answer: See `submit`.
        """
        if not isinstance(self._model, PluginModel):
            raise Unsupported(f"The model `{self._model.card.name}` is no plugin.")
        with self._model.host.session() as session:
            return await self.submit(
                lambda: PluginRequest(data=read(), session=session),
                encode,
                body_bytes=body_bytes,
                timeout_s=timeout_s,
                timeline=timeline,
                priority=priority,
                tenant=tenant,
                answer=answer,
            )

    def plugin_app(self, process: Process) -> AsgiApp | None:
        """Return the application for the routes of this engine's own plugin; None if it has none.

        Args:
            process: See `Processor.routes`.
        """
        make = getattr(self._model.host.plugin, "routes", None) if isinstance(self._model, PluginModel) else None
        if make is None:
            return None
        with user_code():
            app: AsgiApp | None = make(process)
        return app

    def engine_of(self, plugin: str | None) -> PluginApi:
        """Return the engine of a plugin.

        Args:
            plugin: Name of the plugin. None: the only one.

        Raises:
            InvalidInput: No plugin has this name; or there are several, and no name is given.
            Unsupported: There is no plugin.
        """
        plugins = self.plugins
        if not plugins:
            raise Unsupported("No plugin is served: give one with --plugin NAME, or as `open_engine(plugins=[...])`.")
        if plugin is None and len(plugins) == 1:
            return next(iter(plugins.values()))
        if plugin is not None and plugin in plugins:
            return plugins[plugin]
        named = f"there is no plugin {shortened(plugin)!r}" if plugin is not None else "several plugins are served"
        raise InvalidInput(f"plugin: {named}; name one of {', '.join(plugins)}", param="plugin")
