"""Requests of plugins, their one input, and the completion of it by the first hooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import cast

from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.plugins.call import PluginCall
from staged_pool.runtime.plugins.host import PluginHost, PluginSession
from staged_pool.runtime.requests import PluginSource
from staged_pool.runtime.statistics import LimiterStatistics
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.meter import HistogramSnapshot
from staged_pool.stages.ticket import Item
from staged_pool.stages.work import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRequest(Request):
    """A request of a plugin."""

    data: object
    """The data, for the hook `parse`."""
    session: PluginSession


@dataclass(frozen=True, slots=True)
class PluginInput(PluginSource):
    """The one input of a request, between two hooks."""

    call: PluginCall
    value: object
    """Result of the last hook; at first, the data of the request."""
    is_preprocessed: bool = False
    """True if `preprocess` has run: it is awaited, or has a process of its own."""


class PluginCompleter:
    """Runs the hooks before the preprocess stage: the `Completer` of the parse stage.

    Args:
        host: Host of the plugin.
    """

    def __init__(self, host: PluginHost) -> None:
        self._host = host
        self.limit = 1  # a request has one input; `PluginHost.loading` limits the inputs of all

    def limiters(self) -> Mapping[str, LimiterStatistics]:
        """See `CountingCompleter.limiters`."""
        return {"load": LimiterStatistics.of(self._host.loading)}

    def fetches(self) -> Mapping[str, HistogramSnapshot]:
        """Return nothing: hooks fetch."""
        return {}

    def is_complete(self, given: ModelInput, /) -> bool:
        """False: each input passes the first hooks."""
        return False

    @asynccontextmanager
    async def completing(self, item: Item[ModelInput], /) -> AsyncIterator[ModelInput | None]:
        """Provide an input that is loaded for a block. None: a hook failed, and the ticket has the error."""
        async with self._host.loading:
            yield await self._loaded(item)

    async def _loaded(self, item: Item[ModelInput]) -> ModelInput | None:
        source = cast(PluginInput, item.payload.source)
        call, preprocess = source.call, self._host.places.hooks["preprocess"]
        try:
            value = await call.run("load", await call.run("parse", source.value))
            if preprocess.kind == "thread":  # the preprocess stage runs it
                return replace(item.payload, source=PluginInput(call, value))
            return replace(item.payload, source=PluginInput(call, await call.run("preprocess", value), True))
        except StagedPoolError as error:
            item.ticket.fail(error)
            return None
