"""The supervisor: it keeps the fronts and the engine process running, and ends them in order."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from staged_pool.api.fleet import names
from staged_pool.api.fleet.control import Ask, Beat, Drain, Loading, Ready, Tell, send_line
from staged_pool.api.fleet.processes import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    STEADY_S,
    Child,
    Launch,
    start,
)
from staged_pool.api.fleet.reports import Reports
from staged_pool.api.http.listener import SocketFile
from staged_pool.api.http.server import EXIT_OVERDUE, OVERDUE_S, ending_signals
from staged_pool.api.limits.server_state import GRACE_S
from staged_pool.stages.log import get_logger

EXIT_CONFIG: Final = 2
"""Exit code of a child that cannot start with its settings: it would fail again."""

log = get_logger("staged_pool.fleet")


class Supervisor:
    """Runs the processes of one server.

    A child that ends is started again, after a pause that grows. The listening socket stays open in the supervisor, so
    connections wait in it while no front runs. The supervisor computes nothing, and imports neither torch nor a model.

    Args:
        launch: Starts children.
        fronts: Number of fronts.
        drain_s: Longest time from an order to drain to the end of a front, in seconds, its lead included.
        silent_s: Seconds without a sign of life after which a child is killed.
    """

    def __init__(self, launch: Launch, *, fronts: int, drain_s: float, silent_s: float) -> None:
        self._launch = launch
        self._fronts = [names.front(number + 1) for number in range(fronts)]
        self._drain_s = drain_s
        self._silent_s = silent_s
        self._reports = Reports()
        self._children: dict[str, Child] = {}
        self._joined: set[tuple[Child, Child]] = set()
        self._changed = anyio.Event()
        self._stopping = anyio.Event()
        self._exit_code = 0

    async def run(self, listener: socket.socket) -> int:
        """Serve until a signal ends the server. Returns the exit code of the process.

        Args:
            listener: The listening socket, which is closed at the end.
        """
        file = SocketFile(listener)
        try:
            async with anyio.create_task_group() as background:
                background.start_soon(self._handle_signals, listener)
                background.start_soon(self._watch)
                background.start_soon(self._join)
                async with anyio.create_task_group() as children:
                    for name in (names.ENGINE, *self._fronts):
                        children.start_soon(self._keep, name, children)
                background.cancel_scope.cancel()
        finally:
            file.remove()
            listener.close()
        log.info("server.stopped")
        return self._exit_code

    # ---- children ----

    async def _keep(self, name: str, children: TaskGroup) -> None:
        """Run the child with a name, again and again, until the server stops."""
        pause_s = FIRST_PAUSE_S
        handlers: Mapping[type[Any], Callable[[Child, Any], object]] = {
            Ready: self._take_ready,
            Loading: lambda _, loading: self._pass_on(loading),
            Beat: lambda child, beat: self._reports.take(child.name, beat.snapshot),
            Ask: self._answer,
        }
        while not self._stopping.is_set():
            others_serve = any(other.is_ready for place, other in self._children.items() if place != names.ENGINE)
            child = await start(name, self._launch, handlers, others_serve=others_serve)
            self._reports.started(name)
            self._set(name, child)
            code = await child.wait()
            self._reports.ended(name)
            self._set(name, None)
            if self._stopping.is_set():
                return
            if code == EXIT_CONFIG:
                self._stop(code)
                children.cancel_scope.cancel()
                return
            pause_s = FIRST_PAUSE_S if child.lived_s > STEADY_S else pause_s
            log.error("process.ended", child=name, exit_code=code, restarts_in_s=pause_s)
            with anyio.move_on_after(pause_s):
                await self._stopping.wait()
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _join(self) -> None:
        """Make a line between each front and the engine process, as they come and go."""
        while True:
            changed = self._changed
            engine = self._children.get(names.ENGINE)
            for front in [child for name, child in self._children.items() if name != names.ENGINE]:
                if engine is not None and (front, engine) not in self._joined:
                    self._joined.add((front, engine))
                    await send_line(front.handover, engine.handover)
            await changed.wait()

    def _set(self, name: str, child: Child | None) -> None:
        """Note the child that has a name now; None: it has ended."""
        if child is not None:
            self._children[name] = child
        else:
            gone = self._children.pop(name)
            self._joined = {pair for pair in self._joined if gone not in pair}
        self._changed.set()
        self._changed = anyio.Event()

    async def _watch(self) -> None:
        """Kill children that give no sign of life: their event loop hangs."""
        while True:
            await anyio.sleep(1.0)
            for child in list(self._children.values()):
                if (silent_s := time.monotonic() - child.heard_at) > self._silent_s:
                    log.error("process.silent", child=child.name, silent_s=round(silent_s, 1))
                    child.kill()

    # ---- reports ----

    def _take_ready(self, child: Child, _: Ready) -> None:
        child.is_ready = True
        log.info("process.ready", child=child.name, after_s=round(child.lived_s, 3))

    def _pass_on(self, loading: Loading) -> None:
        for name, child in self._children.items():
            if name != names.ENGINE:
                child.control.post(loading)

    def _answer(self, child: Child, ask: Ask) -> None:
        openmetrics = ask.report == "openmetrics"
        body = self._reports.stages() if ask.report == "stages" else self._reports.metrics(openmetrics=openmetrics)
        child.control.post(Tell(ask.number, body))

    # ---- the end ----

    async def _handle_signals(self, listener: socket.socket) -> None:
        async with anyio.create_task_group() as closing:
            with anyio.open_signal_receiver(*ending_signals()) as signals:
                async for number in signals:
                    log.info("server.stopping", signal=number.name)
                    if self._stopping.is_set():
                        self._kill_all()
                        os._exit(128 + number)
                    self._stop(0)
                    listener.close()  # once the fronts have closed it, too, nobody waits in its queue for an answer
                    closing.start_soon(self._drain)

    def _stop(self, exit_code: int) -> None:
        self._stopping.set()
        self._exit_code = exit_code

    async def _drain(self) -> None:
        """End the fronts once their requests are answered, and then the engine process."""
        with anyio.move_on_after(self._drain_s + GRACE_S + OVERDUE_S) as fronts:
            await self._end([name for name in self._fronts if name in self._children])
        with anyio.move_on_after(GRACE_S + OVERDUE_S) as engine:
            await self._end([name for name in (names.ENGINE,) if name in self._children])
        if fronts.cancelled_caught or engine.cancelled_caught:
            log.warning("server.ended", exit_code=EXIT_OVERDUE)
            self._exit_code = EXIT_OVERDUE
            self._kill_all()

    async def _end(self, ending: Sequence[str]) -> None:
        """Order children to drain, and wait for their end."""
        for name in ending:
            self._children[name].control.post(Drain())
        while any(name in self._children for name in ending):
            await self._changed.wait()

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.kill()
