"""An engine whose callers wait for room, instead of being rejected."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_api import EngineApi
from staged_pool.runtime.engine.plugin_api import PluginApi
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.rows import RowStream
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline
from staged_pool.stages.work import Request

R = TypeVar("R")


class WaitingEngine(EngineApi, PluginApi):
    """The methods of an engine, for callers that wait for room.

    A pipeline has admitted the work already, and nothing inside may be rejected.

    Args:
        engine: Takes the requests, with `waits`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._model = engine._model
        self.card = engine.card

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
        stream: RowStream | None = None,
        answer: AnswerMemory | None = None,
    ) -> R:
        """Take one request of a few inputs through the four stages; see `Engine.submit`."""
        return await self._engine.submit(
            decode,
            encode,
            body_bytes=body_bytes,
            timeout_s=timeout_s,
            timeline=timeline,
            priority=priority,
            tenant=tenant,
            stream=stream,
            answer=answer,
            waits=True,
        )
