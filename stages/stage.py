"""The base of the four stages: a task group around workers, a supervisor and a meter."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from staged_pool.stages.channel import Channel
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.supervise import RestartPolicy, Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Options that all stages of one engine share."""

    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    clock: Callable[[], float] = time.perf_counter
    """Seconds, for everything that is measured and for deadlines. Also called in the device's threads."""
    channel: type[Channel[Any]] = Channel
    """Class of the channels between stages. A simulator hands in one whose ends misbehave."""


class Stage(ABC):
    """One stage: a task group of its own around its workers.

    Args:
        name: Such as `preprocess`; that of another lane has a suffix.
        workers: How many workers, for the meter.
        options: See `StageOptions`.
    """

    def __init__(self, name: str, *, workers: int, options: StageOptions) -> None:
        self.meter = StageMeter(name, workers)
        self._supervisor = Supervisor(self.meter, options.restarts)
        self._clock = options.clock
        self.gave_up: Callable[[Exception], object] = lambda _: None
        """Called when a worker cannot be restarted: at once, where `run` first waits for the other workers' calls."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until the inlet ends, then close the ends of its channels.

        Cancelled, it waits for the calls that run, and settles what is in hand.

        Args:
            task_status: Told when all workers have begun.

        Raises:
            StageBroken, DeviceLost: See `Supervisor.run`; the other workers are cancelled.
        """
        try:
            await self._serve(task_status)
        finally:
            self.close()

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        await self._work_until_done([self._work] * self.meter.workers, task_status)

    @abstractmethod
    async def _work(self) -> None:
        """Take messages until the inlet ends; one worker."""

    @abstractmethod
    def close(self) -> object:
        """Close the stage's ends of its channels: for a stage that never runs; `run` does so at its end."""

    async def _work_until_done(
        self, workers: Sequence[Callable[[], Awaitable[None]]], task_status: TaskStatus[None]
    ) -> None:
        """Run the workers until all have returned.

        Raises:
            StageBroken, DeviceLost: See `Supervisor.run`; the other workers are cancelled.
        """
        async with anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(self._supervise, worker)
            await anyio.lowlevel.checkpoint()  # a loop that ends now would warn of those that never began
            task_status.started()

    async def _supervise(self, worker: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._supervisor.run(worker)
        except anyio.BrokenResourceError:
            raise  # the stage behind has ended, and knows why
        except Exception as error:
            self.gave_up(error)
            raise
