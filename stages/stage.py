"""The base class of the four stages: a task group of supervised workers, and a meter."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from staged_pool.stages.channel import Channel, Sender
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.supervise import RestartPolicy, Supervisor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Options of all stages of one engine."""

    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    clock: Callable[[], float] = time.perf_counter
    """Returns the time in seconds, for measurements and deadlines. Device threads call it, too."""
    channel: type[Channel[Any]] = Channel
    """Class of the channels between stages. The simulator passes one that delays and fails."""


class Stage(ABC):
    """One stage: a task group around its workers.

    Args:
        name: Such as `preprocess`, or `preprocess_images` in the lane of images.
        workers: Number of workers.
        options: See `StageOptions`.
    """

    def __init__(self, name: str, *, workers: int, options: StageOptions) -> None:
        self.meter = StageMeter(name, workers, options.clock)
        self._supervisor = Supervisor(self.meter, options.restarts)
        self._clock = options.clock
        self.gave_up: Callable[[Exception], object] = lambda _: None
        """Called as soon as a worker cannot be restarted. `run` itself raises only when running calls have ended."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until the receiver ends, then close this stage's ends of its channels.

        If cancelled, wait for running calls, and settle the tickets in custody.

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
        """Run one worker: take messages until the receiver ends."""

    @abstractmethod
    def close(self) -> object:
        """Close this stage's ends of its channels. `run` does so itself; call it for a stage that never runs."""

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
            await anyio.lowlevel.checkpoint()  # let the workers begin: asyncio warns of tasks that never did
            task_status.started()

    async def _hand_on(self, sender: Sender[T], message: T) -> None:
        """Send a message to the next stage. The worker counts as blocked while there is no room for it.

        Raises:
            anyio.BrokenResourceError: The next stage is gone.
        """
        if sender.has_room(message):
            await sender.send(message)
        else:
            with self.meter.blocked():
                await sender.send(message)

    async def _supervise(self, worker: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._supervisor.run(worker)
        except anyio.BrokenResourceError:
            raise  # the next stage has ended, and reports why
        except Exception as error:
            self.gave_up(error)
            raise
