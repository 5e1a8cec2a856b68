"""Supervision of workers: custody of what they hold, restarts with back-off, and an end to restarts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio

from staged_pool.stages.errors import DeviceLost, EngineStopped, StagedPoolError, StageFailed
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.ticket import Ticket

log = get_logger("staged_pool.stages")


class Custody:
    """The tickets of what a worker holds between a receive and the hand-over; made by `custody()`."""

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
        elif isinstance(error, anyio.BrokenResourceError | anyio.get_cancelled_exc_class()):
            self.settle(EngineStopped("the engine was stopped while it worked on this request"))
        elif isinstance(error, Exception) and is_out_of_memory(error):
            self.settle(exhausted(error, stage))
        elif isinstance(error, Exception):
            self.settle(StageFailed(f"the {stage} stage failed on this request", stage=stage))

    def take(self, tickets: Iterable[Ticket]) -> None:
        """Hold these as well."""
        self._tickets.update(tickets)

    def handed_on(self) -> None:
        """Everything held has reached the next stage, which answers for it from here on."""
        self._tickets.clear()

    def settle(self, error: StagedPoolError) -> int:
        """Fail what is still held and unsettled, each with an error of its own; returns how many that were."""
        return sum([ticket.fail(error) for ticket in self._tickets])


def custody(stage: str, tickets: Iterable[Ticket]) -> Custody:
    """Answer for these tickets until they are settled or handed on.

    Whatever leaves the block unsettled and not handed on is settled there: as `StageFailed` after a crash or a
    forgotten hand-over, as `EngineStopped` when the worker is cancelled or the stage behind has ended. The exception
    goes on to the supervisor.
    """
    return Custody(stage, tickets)


@contextmanager
def suppress_crash(meter: StageMeter) -> Iterator[None]:
    """A block that may crash without ending its stage: for a task that is not started again. Cancellation passes."""
    try:
        yield
    except anyio.BrokenResourceError:
        pass  # the stage behind has ended, and knows why
    except Exception:
        meter.crashes += 1
        log.exception("stage.worker_crashed", stage=meter.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Crashes that a stage may have before it counts as broken."""

    max_crashes: int = 8
    """Crashes of one stage within the window that are still answered by a restart."""
    window_s: float = 60.0
    first_delay_s: float = 0.05
    """Pause before the first restart; doubled for each further crash in the window."""
    max_delay_s: float = 2.0


class StageBroken(Exception):
    """A stage crashed too often; the engine must not be trusted with further requests."""

    def __init__(self, stage: str, crashes: int, window_s: float) -> None:
        super().__init__(f"the {stage} stage crashed {crashes} times within {window_s:g} s")
        self.stage = stage


class Supervisor:
    """Runs the workers of one stage and restarts the ones that crash."""

    def __init__(self, meter: StageMeter, policy: RestartPolicy) -> None:
        self._meter = meter
        self._policy = policy
        self._crashed_at: list[float] = []

    async def run(self, worker: Callable[[], Awaitable[None]]) -> None:
        """Run `worker` until it returns, which it does at the end of its stream.

        Cancellation passes through at once, also during a pause before a restart.

        Raises:
            StageBroken: The stage's workers crashed too often within the policy's window.
            DeviceLost: From the worker: no restart brings a device back.
            BrokenResourceError: From the worker: the stage behind has ended, by a fault of its own or cancelled.
        """
        while True:
            try:
                await worker()
            except (DeviceLost, anyio.BrokenResourceError):
                raise
            except Exception as error:  # the boundary: a crash must end neither the stage nor its host
                if is_out_of_memory(error):  # no bug, and no reason to give the engine up
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
