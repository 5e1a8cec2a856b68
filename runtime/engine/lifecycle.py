"""The life of an engine: ready, draining, stopped or broken."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.stage_group import StageGroup
from staged_pool.runtime.memory.governor import MemoryGovernor, Pressure
from staged_pool.runtime.statistics import Phase
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.exception_groups import first_error
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Abandonable, Offload
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.user_code import user_code

log = get_logger("staged_pool.engine")


class Requests(Protocol):
    """The requests in flight of an engine."""

    @property
    def tickets(self) -> Collection[Ticket]: ...

    def any(self) -> bool:
        """Return True if a request is in flight."""
        ...

    def settle_waiting(self) -> None:
        """Admit or fail the requests that wait for room, as the engine now allows."""

    async def wait_until_empty(self) -> None:
        """Wait until no request is in flight."""

    def fail_all(self, message: str) -> None:
        """Settle every request with `EngineStopped`, also those that wait for room."""


class StagesEnded(Exception):
    """The stages ended while the engine was to serve: a fault, whatever has ended them."""


class Lifecycle:
    """Runs the stages of an engine from its start to its end.

    There are three ends: a drain finishes the requests in flight, a stop cancels them, and any other end of the stages
    breaks the engine. After each of them every ticket is settled.

    Args:
        config: Drain timeout and preprocess alarm.
        stages: The stages of the engine.
        requests: The requests in flight.
        offloads: Thread pools whose calls may hang.
        memory: Tells of memory pressure.
    """

    def __init__(
        self,
        config: EngineConfig,
        stages: StageGroup,
        requests: Requests,
        offloads: Collection[Offload],
        memory: MemoryGovernor,
    ) -> None:
        self._config = config
        self._stages = stages
        self._requests = requests
        self._offloads = offloads
        self._memory = memory
        self._hanging = anyio.CancelScope(shield=True)
        """Scope of the wait for calls that do not end once the engine stops."""
        self._is_ending = False
        """True once the host leaves the block of the engine, in whatever way."""
        self._broken = anyio.Event()
        self._breakage: str | None = None
        self.phase = Phase.READY
        stages.on_give_up(self._break)

    @property
    def fault(self) -> str | None:
        """Reason for taking no requests, for now or for ever; None if there is none."""
        return self._breakage or self._stages.obstruction()

    def check_open(self) -> None:
        """Reject a request that the engine cannot take at present.

        Raises:
            EngineStopped: It drains, is stopped, or has a fault.
            Overloaded: The process is short of memory.
        """
        if self.phase is not Phase.READY or self.fault:
            raise EngineStopped(f"The engine takes no requests: {self.fault or f'it is {self.phase}'}.")
        if self._memory.pressure >= Pressure.REJECT:
            raise self._memory.rejection()

    async def wait_broken(self) -> str:
        """Wait until the engine can serve no more. Returns the reason; empty if it was stopped in order."""
        await self._broken.wait()
        return self._breakage or ""

    async def drain(self, timeout_s: float) -> None:
        """Stop admitting, and wait until the outcome of each request is known. After `timeout_s`, fail the rest."""
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING
            self._requests.settle_waiting()
            log.info("engine.draining", requests=len(self._requests.tickets))
        with anyio.move_on_after(timeout_s):
            await self._requests.wait_until_empty()
        self._requests.fail_all("The engine was stopped before this request was done.")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the stages for a block: drain at its end, or stop if it raises or is cancelled."""
        stop_listening = self._memory.listen(self._save_memory, self._requests.any)
        async with anyio.create_task_group() as owner:
            try:
                await owner.start(self._run_stages)
                yield
                await self.drain(self._config.drain_timeout_s)
            except BaseException:
                owner.cancel_scope.cancel()
                raise
            finally:
                self._is_ending = True
                self.phase = Phase.STOPPED
                self._stages.close()
                self._requests.fail_all("The engine is stopped.")
                self._broken.set()
                stop_listening()
                owner.start_soon(self._leave_hanging_calls)

    async def _run_stages(self, *, task_status: TaskStatus[None]) -> None:
        try:
            async with user_code():
                await self._stages.run(task_status=task_status)
        except* anyio.BrokenResourceError:
            pass  # from a stage whose neighbour has ended: that one has reported why, or all are being cancelled
        except* Exception as group:  # noqa: BLE001  # a stage that gave up ends the engine, but not its host
            self._break(group)
        finally:
            if not (self._is_ending or anyio.current_effective_deadline() == -math.inf):
                self._break(StagesEnded("its stages have ended, and nobody has asked for that"))
            self.phase = Phase.STOPPED
            self._requests.fail_all("The engine is stopped.")  # a cancelled host may be slow to leave the block
            self._hanging.cancel()

    async def _leave_hanging_calls(self) -> None:
        """Abandon calls that hang, so that the host can leave: only the end of the process ends their threads."""
        with self._hanging:
            await anyio.sleep(self._config.preprocess_alarm_s)
            log.error("engine.left_hanging_calls", calls=self._stages.overdue_calls())
            for offload in self._offloads:
                if isinstance(offload, Abandonable):
                    offload.abandon()

    def _break(self, error: Exception) -> None:
        """Serve no more. Called as soon as a stage gives up, even while other calls still run."""
        if self.phase is Phase.STOPPED:  # broken already; or stopped, which breaks channels under their senders
            return
        first = first_error(error)
        self._breakage = fault = str(first) or type(first).__name__  # a text in any case: it tells that there is one
        self.phase = Phase.STOPPED
        log.error("engine.broken", fault=fault, requests=len(self._requests.tickets))
        self._requests.fail_all(f"The engine is broken: {fault}.")
        self._broken.set()

    def _save_memory(self, pressure: Pressure) -> None:
        self._stages.save_memory(pressure >= Pressure.SMALLER_BATCHES)
        self._requests.settle_waiting()
