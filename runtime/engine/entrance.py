"""The entrance of an engine: requests are admitted or rejected at once, or wait for room in fair order."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Literal

import anyio

from staged_pool.runtime.admission.accounting import LIMITS, Arriving, Reservation
from staged_pool.runtime.admission.controller import Admission, LimitReached
from staged_pool.stages.errors import ADMISSION, DeadlineExceeded, Overloaded, StagedPoolError, detached
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.fair_queue import FairQueue
from staged_pool.stages.wakeup import Wakeup, wakeup

LOOK_AGAIN_S: Final = 0.5
"""Longest wait for a departure, in seconds: memory of answers, too, is given back, without a request that leaves."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for room: an entry of the fair queue, and the claim on it."""

    arriving: Arriving
    late_at: float
    """Time at which its deadline passes, on the clock of the stages."""
    tokens: int
    woken: Wakeup = field(default_factory=wakeup)
    start_tags: dict[Hashable, float] = field(default_factory=dict)
    is_queued: bool = True
    outcome: Reservation | StagedPoolError | None = None

    @property
    def ticket(self) -> _Waiting:
        return self

    @property
    def priority(self) -> Priority:
        return self.arriving.request_class.priority

    @property
    def tenant(self) -> Hashable:
        return self.arriving.request_class.tenant

    @property
    def batch_key(self) -> Hashable:
        """Some limits hold for a class of requests: the queue finds the first of each."""
        return self.arriving.request_class


class Entrance:
    """Lets requests into an engine.

    A request is admitted or rejected at once; or it waits, for callers that have admitted the work already, such as a
    pipeline. A departure lets waiting requests in before any newcomer.

    Args:
        admission: Admits requests.
        clock: Clock of the stages, in seconds.
    """

    is_immediate: Final = True
    """A request that does not wait for room has its answer at once."""

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self._admission = admission
        self.check_open: Callable[[], object] = lambda: None
        """Raises an error while the engine takes no requests."""
        self._clock = clock
        self._queue = FairQueue[_Waiting]("entrance")
        self._departure: anyio.Event | None = None
        """Set when the next request leaves. None: nobody waits for that."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait for room."""
        return len(self._queue)

    async def admit(self, arriving: Arriving, *, waits: bool = False) -> Reservation:
        """Admit a request: at once, without a checkpoint, or with `waits` as soon as there is room.

        Raises:
            StagedPoolError: As for `enter_nowait` and `enter`.
        """
        return await self.enter(arriving) if waits else self.enter_nowait(arriving)

    def enter_nowait(self, arriving: Arriving) -> Reservation:
        """Admit a request or reject it; see `Admission.enter`.

        Raises:
            EngineStopped: The engine takes no requests.
        """
        self.check_open()
        body_bytes, timeout_s, request_class, images = arriving
        return self._admission.enter(
            body_bytes=body_bytes, timeout_s=timeout_s, request_class=request_class, images=images
        )

    async def enter(self, arriving: Arriving) -> Reservation:
        """Admit a request as soon as there is room. It is never rejected for overload.

        Raises:
            EngineStopped: The engine takes no requests, or stops to take them.
            DeadlineExceeded: `timeout_s` passed, or cannot be met.
            TooLarge: See `Admission.enter`.
        """
        timeout_s = arriving.timeout_s
        tokens = self._admission.expected_tokens(arriving.body_bytes, arriving.images)
        waiting = _Waiting(arriving, self._clock() + timeout_s, max(1, math.ceil(tokens)))
        self._queue.add(waiting)
        self.grant()
        try:
            if waiting.outcome is None:
                with anyio.move_on_after(timeout_s):
                    await waiting.woken.wait()
        except BaseException:
            self._withdraw(waiting)
            raise
        if waiting.is_queued:
            self._withdraw(waiting)
        match waiting.outcome:
            case Reservation():
                return waiting.outcome
            case None:
                late = "The time limit of the request passed before there was room for it in the engine."
                raise DeadlineExceeded(late, stage=ADMISSION)
            case error:
                raise detached(error)

    def _withdraw(self, waiting: _Waiting) -> None:
        """Take a request out whose caller waits no more; it may have been admitted at the same moment."""
        if isinstance(waiting.outcome, Reservation):
            self.leave(waiting.outcome)
        elif waiting.is_queued:
            self._queue.drop((waiting,))
            self.grant()  # it may have been the one that kept others out

    def leave(
        self, reservation: Reservation, *, answered: bool = False, elsewhere_s: float = 0.0, rejected: bool = False
    ) -> None:
        """Give a reservation back, and let those in who wait.

        Args:
            reservation: See `Admission.leave`.
            answered: See `Admission.leave`.
            elsewhere_s: See `Admission.leave`.
            rejected: The request was too much for what else is in flight. Its departure is no reason to try again.
        """
        self._admission.leave(reservation, answered=answered, elsewhere_s=elsewhere_s)
        if self._departure is not None and not rejected:
            self._departure.set()
            self._departure = None
        self.grant()

    async def wait_for_departure(self) -> None:
        """Wait until another request has left that was not rejected, for `LOOK_AGAIN_S` at most."""
        if self._departure is None:
            self._departure = anyio.Event()
        with anyio.move_on_after(LOOK_AGAIN_S):
            await self._departure.wait()

    def grant(self) -> None:
        """Let waiting requests in while there is room; fail them if the engine takes none.

        Called when a request comes or leaves, when tokens are computed, and when the engine takes requests no more.
        """
        while (settled := self._settle_next()) is not None:
            self._queue.take(settled)
            self._queue.end_round()
            settled.is_queued = False
            settled.woken.set()

    def _settle_next(self) -> _Waiting | None:
        """Settle the first request, in fair order, that can be settled now; None if there is none."""
        first = self._queue.first(_always)
        if first is None or (kept_out := self._settle(first)) == "all":
            return None
        if kept_out is None:
            return first
        for one in {waiting.batch_key: waiting for waiting in self._queue}.values():
            first = self._queue.first(_always, like=one)
            if first is not None and self._settle(first) is None:
                return first
        return None

    def _settle(self, waiting: _Waiting) -> Literal["all", "its class"] | None:
        """Admit a request, or fail it. Returns for whom a limit is reached, if it has to wait on."""
        body_bytes, _, request_class, images = waiting.arriving
        try:
            self.check_open()
            entered = self._admission.try_enter(
                body_bytes=body_bytes,
                timeout_s=waiting.late_at - self._clock(),
                request_class=request_class,
                images=images,
                waits=True,
            )
        except Overloaded:  # the process is short of memory
            return "all"
        except StagedPoolError as error:
            waiting.outcome = detached(error)
            return None
        if isinstance(entered, LimitReached):
            return "all" if entered.limit in LIMITS else "its class"
        waiting.outcome = entered
        return None


def _always(_: object) -> bool:
    return True
