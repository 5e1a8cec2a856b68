"""Supervision of workers: custody of their items, and restarts with back-off."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio

from staged_pool.stages.errors import DeviceLost, EngineStopped, StagedPoolError, StageFailed
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.user_code import user_code, was_asked_for

log = get_logger("staged_pool.stages")


class Custody:
    """Tickets of the items that a worker holds between receive and send; made by `custody()`."""

    __slots__ = ("_stage", "_tickets")

    def __init__(self, stage: str, tickets: Iterable[Ticket]) -> None:
        self._stage = stage
        self._tickets = set(tickets)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._tickets:
            return
        stage = self._stage
        if error is None:
            if self.settle(StageFailed(f"the {stage} stage lost this request", stage=stage)):
                log.error("stage.lost_request", stage=stage)
        elif isinstance(error, DeviceLost):
            self.settle(error)
        elif isinstance(error, anyio.BrokenResourceError) or was_asked_for(error):
            self.settle(EngineStopped("the engine was stopped while it worked on this request"))
        elif isinstance(error, Exception) and is_out_of_memory(error):
            self.settle(exhausted(error, stage))
        else:  # whatever it is: an open ticket would hold its caller for ever
            self.settle(StageFailed(f"the {stage} stage failed on this request", stage=stage))

    def take(self, tickets: Iterable[Ticket]) -> None:
        """Hold these tickets, too."""
        self._tickets.update(tickets)

    def handed_on(self) -> None:
        """Let go of all tickets: their items have reached the next stage."""
        self._tickets.clear()

    def settle(self, error: StagedPoolError) -> int:
        """Fail the open tickets, each with its own copy of the error. Returns their number."""
        return sum([ticket.fail(error) for ticket in self._tickets])


def custody(stage: str, tickets: Iterable[Ticket]) -> Custody:
    """Hold tickets for a block, and settle those that are still open at its end.

    They fail with `StageFailed` after a crash or a missing `handed_on`, and with `OutOfMemory` after a failed
    allocation. If the worker is cancelled or the next stage has ended, they fail with `EngineStopped`. The exception
    goes on to the supervisor.
    """
    return Custody(stage, tickets)


@asynccontextmanager
async def suppress_crash(meter: StageMeter) -> AsyncIterator[None]:
    """Log and count a crash of the block, for a task that is not restarted. A cancellation by a scope passes."""
    try:
        async with user_code():
            yield
    except anyio.BrokenResourceError:
        pass  # the next stage has ended, and reports why
    except Exception:
        meter.crashes += 1
        log.exception("stage.worker_crashed", stage=meter.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Limits and pauses for restarts of crashed workers."""

    max_crashes: int = 8
    """Most crashes of one stage within the window that lead to a restart."""
    window_s: float = 60.0
    """Time for which a crash counts."""
    first_delay_s: float = 0.05
    """Pause before the first restart; doubles with each further crash in the window."""
    max_delay_s: float = 2.0
    """Longest pause before a restart."""


class StageBroken(Exception):
    """A stage crashed too often: the engine takes no further requests."""

    def __init__(self, stage: str, crashes: int, window_s: float) -> None:
        super().__init__(f"the {stage} stage crashed {crashes} times within {window_s:g} s")
        self.stage = stage


class Supervisor:
    """Runs the workers of one stage, and restarts those that crash."""

    def __init__(self, meter: StageMeter, policy: RestartPolicy) -> None:
        self._meter = meter
        self._policy = policy
        self._crashed_at: list[float] = []

    async def run(self, worker: Callable[[], Awaitable[None]]) -> None:
        """Run a worker until it returns, at the end of its stream.

        Cancellation passes through at once, even in a pause before a restart.

        Raises:
            StageBroken: The stage's workers crashed too often within the policy's window.
            DeviceLost: From the worker: no restart brings a device back.
            BrokenResourceError: From the worker: the next stage has ended, by a fault of its own or cancelled.
        """
        while True:
            try:
                async with user_code():  # code of models and plugins runs in workers, too
                    await worker()
            except (DeviceLost, anyio.BrokenResourceError):
                raise
            except Exception as error:  # the boundary to worker code: a crash must end neither the stage nor its host
                if is_out_of_memory(error):  # no bug, so it does not count against the limit
                    log.error("memory.exhausted", stage=self._meter.name, exc_info=error)
                    await anyio.sleep(self._policy.first_delay_s)
                    continue
                log.exception("stage.worker_crashed", stage=self._meter.name)
                await anyio.sleep(self._next_delay_s())
            else:
                return

    def _next_delay_s(self) -> float:
        self._meter.crashes += 1
        now = anyio.current_time()
        policy = self._policy
        self._crashed_at = [t for t in self._crashed_at if now - t < policy.window_s] + [now]
        crashes = len(self._crashed_at)
        if crashes > policy.max_crashes:
            raise StageBroken(self._meter.name, crashes, policy.window_s)
        return min(policy.max_delay_s, policy.first_delay_s * math.pow(2, crashes - 1))
