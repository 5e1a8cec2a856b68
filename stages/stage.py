"""What the four stages have in common: workers under a supervisor, a meter, and seams where a test may interfere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from staged_pool.stages.meter import StageMeter
from staged_pool.stages.supervise import RestartPolicy, Supervisor

Seam: TypeAlias = Callable[[str], Awaitable[None]]
"""Called at the seams of the pipeline with the seam's name, such as `preprocess.received`. It may raise, sleep or
cancel: whatever can go wrong there for real. For simulators and chaos tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """What all stages of one engine share."""

    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    clock: Callable[[], float] = anyio.current_time
    """Seconds, for everything that is measured and for deadlines. The event loop's own follows virtual time; uvloop's
    stands still within a turn of the loop and counts whole milliseconds, so a real engine uses a finer one."""
    seam: Seam | None = None
    """None in production; a stage then does no more than look at it."""


class Stage(ABC):
    """A stage is a task group of its own around its workers.

    Args:
        name: Such as `preprocess`; that of another lane has a suffix.
        workers: How many workers, for the meter.
        options: See `StageOptions`.
    """

    def __init__(self, name: str, *, workers: int, options: StageOptions) -> None:
        self.meter = StageMeter(name, workers)
        self._supervisor = Supervisor(self.meter, options.restarts)
        self._clock = options.clock
        self._seam = options.seam
        self.gave_up: Callable[[Exception], object] = lambda _: None
        """Called when a worker cannot be restarted: at once, where `run` first waits for the other workers' calls."""

    @abstractmethod
    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until the inlet ends. Cancelled, it waits for the calls that run, and settles what is in hand.

        Args:
            task_status: Told when all workers have begun.
        """

    @abstractmethod
    def close(self) -> object:
        """Close the stage's ends of its channels, once: for a stage that never runs; `run` does so at its end."""

    async def _run(
        self,
        workers: Sequence[Callable[[], Awaitable[None]]],
        close: Callable[[], object],
        task_status: TaskStatus[None],
    ) -> None:
        """Run the workers until all have returned, then close the stage's ends of its channels.

        Raises:
            StageBroken, DeviceLost: See `Supervisor.run`; the other workers are cancelled.
        """
        try:
            async with anyio.create_task_group() as group:
                for worker in workers:
                    group.start_soon(self._supervise, worker)
                await anyio.lowlevel.checkpoint()  # a loop that ends now would warn of those that never began
                task_status.started()
        finally:
            close()

    async def _supervise(self, worker: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._supervisor.run(worker)
        except anyio.BrokenResourceError:
            raise  # the stage behind has ended, and knows why
        except Exception as error:
            self.gave_up(error)
            raise

    async def _at(self, point: str) -> None:
        """Reach a seam. Call it behind `if self._seam is not None`, so that production pays one comparison."""
        if self._seam is not None:
            await self._seam(f"{self.meter.name}.{point}")
