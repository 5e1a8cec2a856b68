"""The door of a pipeline: requests are let in or rejected, counted, and ended by a drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from staged_pool.runtime.admission.estimates import Mean
from staged_pool.runtime.pipelines.run import PipelineRun
from staged_pool.runtime.pipelines.statistics import PipelineStageStatistics, PipelineStatistics
from staged_pool.runtime.pipelines.window import Window
from staged_pool.stages.errors import DeadlineExceeded, EngineStopped, Overloaded
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.tuning import TIMES_FREE

FIRST_INTERVAL_S: Final = 1.0
"""Seconds between two departures, before the first one is measured."""

OUTCOMES: Final = ("answered", "rejected", "expired", "cancelled", "failed")


class Door:
    """Lets requests into a pipeline, or rejects them.

    Bulk work, and each tenant, gets at most `TIMES_FREE` times the places that it leaves free.

    Args:
        name: Name of the pipeline.
        max_requests: Most requests at once.
        window: Window of the pipeline.
        clock: Returns the time in seconds.
    """

    def __init__(self, name: str, max_requests: int, window: Window, clock: Callable[[], float]) -> None:
        self._name = name
        self._max_requests = max_requests
        self._window = window
        self._clock = clock
        self._runs: set[PipelineRun] = set()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._interval_s = Mean(FIRST_INTERVAL_S)
        """Mean seconds between two departures while there are requests."""
        self._left_at = 0.0
        """Time of the last departure, or of an arrival at an empty pipeline."""
        self._is_open = True
        self._empty = anyio.Event()

    @contextmanager
    def entered(self, run: PipelineRun) -> Iterator[None]:
        """Let a request in for a block.

        Raises:
            EngineStopped: The pipeline drains.
            Overloaded: It has too many requests.
        """
        self._check(run)
        if not self._runs:
            self._left_at = self._clock()
        self._runs.add(run)
        outcome = "cancelled"
        try:
            yield
            outcome = "answered"
        except DeadlineExceeded:
            outcome = "expired"
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._outcomes[outcome] += 1
            self._leave(run)

    def _check(self, run: PipelineRun) -> None:
        if not self._is_open:
            raise EngineStopped(f"The pipeline `{self._name}` takes no requests: it drains.")
        requests, limit = len(self._runs), self._max_requests
        message = None
        if requests >= limit:
            message = f"The pipeline `{self._name}` is at its limit of {limit} requests in flight."
        elif requests and (whose := self._beyond_part(run, limit - requests - 1)) is not None:
            message = f"{whose} has reached its share of the {limit} requests of the pipeline `{self._name}`."
        if message is not None:
            self._outcomes["rejected"] += 1
            raise Overloaded(message, retry_after_s=self._interval_s.value)

    def _beyond_part(self, run: PipelineRun, free: int) -> str | None:
        """Return whose share a request would exceed; None if no share is exceeded."""
        parts = {"This caller": sum(other.tenant == run.tenant for other in self._runs)}
        if run.priority is Priority.BULK:
            parts["Bulk work"] = sum(other.priority is Priority.BULK for other in self._runs)
        if parts["This caller"] == len(self._runs) and run.priority is Priority.INTERACTIVE:
            return None  # there is nobody else
        return next((whose for whose, own in parts.items() if own and own + 1 > TIMES_FREE * free), None)

    def _leave(self, run: PipelineRun) -> None:
        self._runs.discard(run)
        now = self._clock()
        self._interval_s.observe(now - self._left_at)
        self._left_at = now
        if not self._runs:
            self._empty.set()

    async def drain(self, timeout_s: float) -> None:
        """See `Pipeline.drain`."""
        self._is_open = False
        with anyio.move_on_after(timeout_s):
            while self._runs:
                if self._empty.is_set():
                    self._empty = anyio.Event()
                await self._empty.wait()
        for run in tuple(self._runs):
            run.fail(EngineStopped("The pipeline was stopped before this request was done."))

    def snapshot(self, stages: tuple[PipelineStageStatistics, ...], *, left: int) -> PipelineStatistics:
        """Return a snapshot of the pipeline with these stages.

        Args:
            stages: Its stages.
            left: Calls of functions that nobody waits for any more.
        """
        requests = len(self._runs)
        return PipelineStatistics(
            name=self._name,
            requests=requests,
            max_requests=self._max_requests,
            window=self._window.limit,
            in_flight=self._window.taken,
            waiting=self._window.waiting,
            outcomes=dict(self._outcomes),
            left=left,
            drain_s=requests * self._interval_s.value,
            stages=stages,
        )
