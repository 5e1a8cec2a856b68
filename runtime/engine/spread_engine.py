"""An engine whose requests may go to another engine of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import EngineStopped, Overloaded
from staged_pool.stages.rows import RowStream
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline
from staged_pool.stages.work import Request

R = TypeVar("R")

TRIES: Final = 3
"""Most engines that a request is given to. A request that ends engines must not end all of them."""


def _nowhere(_: Sequence[Engine]) -> Engine | None:
    return None


class SpreadEngine(Engine):
    """One of several engines of a model, in front of engine processes.

    These may end at any time. A request that its engine process rejects, or loses because it ends, goes to another one.
    Its deadline stays.
    """

    elsewhere: Callable[[Sequence[Engine]], Engine | None] = staticmethod(_nowhere)
    """Returns an engine of the same model beside those given, which may take a request; None if there is none."""

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
        images: int | None = None,
        stream: RowStream | None = None,
        answer: AnswerMemory | None = None,
        waits: bool = False,
    ) -> R:
        """See `Engine.submit`. A request whose rows are streamed is repeated only if it was rejected.

        `decode` runs once: the decoded request is kept until its answer, for another engine.
        """
        late_at, tried, kept = self._clock() + timeout_s, list[Engine](), list[Request]()
        engine: Engine = self

        def decode_once() -> Request:
            if not kept:
                kept.append(decode())
            return kept[0]

        try:
            while True:
                tried.append(engine)
                try:
                    return await Engine.submit(
                        engine,
                        decode_once if stream is None else decode,
                        encode,
                        body_bytes=body_bytes,
                        timeout_s=timeout_s,
                        timeline=timeline,
                        priority=priority,
                        tenant=tenant,
                        images=images,
                        stream=stream,
                        answer=answer,
                        waits=waits,
                    )
                except (EngineStopped, Overloaded) as error:
                    timeout_s = late_at - self._clock()
                    may_repeat = stream is None or isinstance(error, Overloaded)
                    other = self.elsewhere(tried) if may_repeat and len(tried) < TRIES and timeout_s > 0 else None
                    if other is None:
                        raise
                engine = other
        finally:
            kept.clear()  # the traceback of an error holds this frame
