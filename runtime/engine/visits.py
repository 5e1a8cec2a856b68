"""Use of an engine by its callers: its phase, its last use, and until when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from staged_pool.runtime.admission.controller import Admission
from staged_pool.runtime.engine.followed_requests import FollowedRequests
from staged_pool.runtime.engine.lifecycle import Lifecycle
from staged_pool.runtime.statistics import Phase


class Visits:
    """Methods of an engine that may be unloaded while its process goes on."""

    _admission: Admission
    _requests: FollowedRequests
    _clock: Callable[[], float]
    _life: Lifecycle

    @property
    def phase(self) -> Phase:
        """Phase of the engine's life."""
        return self._life.phase

    @property
    def idle_s(self) -> float:
        """Seconds since the last request was admitted; since the start, if there was none."""
        return self._clock() - self._admission.admitted_at

    @property
    def is_used(self) -> bool:
        """True while a request is in flight, or a caller visits."""
        return self._requests.any()

    def visit(self) -> AbstractContextManager[None]:
        """Keep the engine for several requests of one caller, and between them, too."""
        return self._requests.visit()

    async def wait_unused(self) -> None:
        """Wait until no request is in flight. More may come."""
        await self._requests.wait_until_empty()
