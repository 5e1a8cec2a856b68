"""The supervisor: it keeps the fronts and the engine process running, and ends them in order."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from staged_pool.api.fleet import names
from staged_pool.api.fleet.control import Ask, Beat, Drain, Listening, Loading, Lost, Others, Ready, Tell
from staged_pool.api.fleet.duties import go_on
from staged_pool.api.fleet.lines import send_line
from staged_pool.api.fleet.processes import FIRST_PAUSE_S, LONGEST_PAUSE_S, Child, Start
from staged_pool.api.fleet.reports import Reports
from staged_pool.api.http.listener import SocketFile
from staged_pool.api.http.server import EXIT_OVERDUE, OVERDUE_S
from staged_pool.api.limits.server_state import GRACE_S
from staged_pool.api.rare_lines import RareLines
from staged_pool.runtime.machine.signals import end_signals
from staged_pool.stages.awake import Sleep, move_on_awake_after
from staged_pool.stages.changes import Changes
from staged_pool.stages.log import get_logger

EXIT_CONFIG: Final = 2
"""Exit code of a child that cannot start with its settings: it would fail again."""

EXIT_LOST: Final = 1
"""Exit code after the failure of a serving child in the drain: its requests are lost."""

ROUND_S: Final = 1.0
"""Most seconds between two looks at the children."""

ROUNDS: Final = 4
"""Fewest looks at a child that is silent, before it is killed."""

log = get_logger("staged_pool.fleet")


@dataclass(frozen=True, slots=True)
class Outside:
    """All that the supervisor asks of the operating system."""

    start: Start
    send_line: Callable[[int, Any, Any], Awaitable[None]] = send_line
    """Joins two children, by their `handover`, with a line of a number. Raises `OSError` if there is no room for it."""
    end_signals: Callable[[], AbstractContextManager[AsyncIterator[signal.Signals]]] = end_signals
    end_process: Callable[[int], object] = os._exit
    """Ends this process at once, with an exit code."""
    sleep: Sleep = anyio.sleep


class Supervisor:
    """Runs the processes of one server.

    A child that ends is started again, after a pause that grows while it never comes to serve. The listening socket
    stays open in the supervisor, so connections wait in it while no front runs. The supervisor computes nothing, and
    imports neither torch nor a model.

    Args:
        outside: Starts children, joins them, and brings signals.
        fronts: Number of fronts.
        drain_s: Longest time from an order to drain to the end of a front, in seconds, its lead included.
        silent_s: Seconds without a sign of life after which a child is killed.
    """

    def __init__(self, outside: Outside, *, fronts: int, drain_s: float, silent_s: float) -> None:
        self._outside = outside
        self._fronts = [names.front(number + 1) for number in range(fronts)]
        self._drain_s = drain_s
        self._silent_s = silent_s
        self._reports = Reports()
        self._kept: set[str] = set()
        """Names whose child is kept running, or has not ended yet."""
        self._ending: set[str] = set()
        """Names whose child, also one that is being started, has to drain."""
        self._children: dict[str, Child] = {}
        self._lines = count(1)
        self._changes = Changes()
        self._stopping = anyio.Event()
        self._exit_code = 0
        self._not_made = RareLines(log.error, "line.not_made")
        self._handlers: Mapping[type[Any], Callable[[Child, Any], object]] = {
            Listening: self._take_listening,
            Ready: self._take_ready,
            Lost: self._take_lost,
            Loading: lambda _, loading: self._pass_on(loading),
            Beat: lambda child, beat: self._reports.take(child.name, beat.snapshot),
            Ask: self._answer,
        }

    async def run(self, listener: socket.socket) -> int:
        """Serve until a signal ends the server. Returns the exit code of the process.

        Args:
            listener: The listening socket, which is closed at the end.
        """
        file = SocketFile(listener)
        try:
            async with anyio.create_task_group() as background:
                background.start_soon(go_on, self._handle_signals, listener)
                background.start_soon(go_on, self._watch)
                background.start_soon(go_on, self._join)
                async with anyio.create_task_group() as children:
                    for name in (names.ENGINE, *self._fronts):
                        self._kept.add(name)
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
        try:
            while not self._stopping.is_set():
                code, has_served = await self._run_once(name)
                if self._stopping.is_set():
                    self._note_end(name, code, has_served)
                    return
                if code == EXIT_CONFIG:
                    self._stop(code)
                    children.cancel_scope.cancel()
                    return
                pause_s = FIRST_PAUSE_S if has_served else pause_s
                log.error("process.ended", child=name, exit_code=code, restarts_in_s=pause_s)
                with anyio.move_on_after(pause_s):
                    await self._stopping.wait()
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            self._kept.discard(name)
            self._note()

    def _note_end(self, name: str, code: int | None, has_served: bool) -> None:
        """Note how a child has ended while the server drains; `code` is None if the supervisor has ended it itself."""
        if code:
            log.error("process.ended", child=name, exit_code=code)
            if has_served:
                self._exit_code = self._exit_code or EXIT_LOST

    async def _run_once(self, name: str) -> tuple[int | None, bool]:
        """Run a child until it ends.

        Returns:
            Its exit code, None if the system could not start it, or if it was dismissed; and True if it has come to
            serve.
        """
        try:
            started = await self._outside.start(name)
        except OSError as error:
            log.error("process.not_started", child=name, reason=str(error))
            return None, False
        child = Child(name, started, self._handlers)
        log.info("process.started", child=name, pid=started.process.pid)
        self._reports.started(name)
        self._children[name] = child
        if name in self._ending:
            self._order_the_end(child)
        self._note()
        try:
            code = await child.run()
            return None if child.is_dismissed else code, child.is_ready
        finally:
            self._reports.ended(name)
            del self._children[name]
            self._note()

    def _note(self) -> None:
        """Tell unready fronts, and all tasks of the supervisor, that the children have changed."""
        for front in self._running_fronts():
            if not front.is_ready and front.others_serve not in (None, self._others_serve(front.name)):
                self._tell_of_others(front)
        self._changes.note()

    def _tell_of_others(self, front: Child) -> None:
        front.others_serve = self._others_serve(front.name)
        front.control.post(Others(front.others_serve))

    def _running_fronts(self) -> list[Child]:
        return [child for name, child in self._children.items() if name != names.ENGINE]

    def _others_serve(self, name: str) -> bool:
        return any(front.is_ready for front in self._running_fronts() if front.name != name)

    async def _join(self) -> None:
        """Make a line between each front and the engine process, as they come and go."""
        while True:
            await self._changes.until(lambda: self._unjoined() is not None)
            engine, front = self._children[names.ENGINE], self._unjoined()
            assert front is not None
            front.line, front.joined = next(self._lines), engine
            try:
                await self._outside.send_line(front.line, front.handover, engine.handover)
            except OSError as error:
                self._not_made.add(child=front.name, reason=str(error))
                front.joined = None
                await self._outside.sleep(FIRST_PAUSE_S)

    def _unjoined(self) -> Child | None:
        """Return a front that needs a line to the engine process; None if there is none, or no engine process."""
        engine = self._children.get(names.ENGINE)
        if engine is None:
            return None
        return next((front for front in self._running_fronts() if front.joined is not engine), None)

    async def _watch(self) -> None:
        """Kill children that give no sign of life: their event loop hangs.

        Silence is counted in looks, not by the clock: while this process stands still, it hears nothing from anybody.
        """
        round_s = min(ROUND_S, self._silent_s / ROUNDS)
        while True:
            await self._outside.sleep(round_s)
            for child in list(self._children.values()):
                child.silent_s += round_s
                if child.silent_s > self._silent_s:
                    log.error("process.silent", child=child.name, silent_s=round(child.silent_s, 1))
                    child.kill()

    # ---- orders and reports of children ----

    def _take_listening(self, child: Child, _: Listening) -> None:
        self._tell_of_others(child)

    def _take_ready(self, child: Child, _: Ready) -> None:
        child.is_ready = True
        log.info("process.ready", child=child.name, after_s=round(child.lived_s, 3))
        self._note()

    def _take_lost(self, child: Child, lost: Lost) -> None:
        if lost.number == child.line:  # otherwise it has another line by now
            child.joined = None
            self._note()

    def _pass_on(self, loading: Loading) -> None:
        for front in self._running_fronts():
            front.control.post_report(loading)

    def _answer(self, child: Child, ask: Ask) -> None:
        openmetrics = ask.report == "openmetrics"
        body = self._reports.stages() if ask.report == "stages" else self._reports.metrics(openmetrics=openmetrics)
        child.control.post(Tell(ask.number, body))

    # ---- the end ----

    async def _handle_signals(self, listener: socket.socket) -> None:
        async with anyio.create_task_group() as closing:
            with self._outside.end_signals() as signals:
                async for number in signals:
                    log.info("server.stopping", signal=number.name)
                    if self._stopping.is_set():
                        self._kill_all()
                        self._outside.end_process(128 + number)
                    self._stop(0)
                    listener.close()  # once the fronts have closed it, too, nobody waits in its queue for an answer
                    closing.start_soon(self._drain)

    def _stop(self, exit_code: int) -> None:
        self._stopping.set()
        self._exit_code = exit_code

    async def _drain(self) -> None:
        """End the fronts once their requests are answered, and then the engine process."""
        in_time = await self._end(self._fronts, self._drain_s + GRACE_S + OVERDUE_S)
        in_time &= await self._end([names.ENGINE], GRACE_S + OVERDUE_S)
        if not in_time:
            log.warning("server.ended", exit_code=EXIT_OVERDUE)
            self._exit_code = EXIT_OVERDUE
            self._kill_all()

    async def _end(self, ending: Sequence[str], limit_s: float) -> bool:
        """Order children to drain, also those that are being started. Returns False if one has not ended in time."""
        self._ending.update(ending)
        for name in ending:
            if (child := self._children.get(name)) is not None:
                self._order_the_end(child)
        async with move_on_awake_after(limit_s, self._outside.sleep) as limit:
            await self._changes.until(lambda: self._kept.isdisjoint(ending))
        return not limit.cancelled_caught

    def _order_the_end(self, child: Child) -> None:
        if child.name == names.ENGINE and not child.is_ready:
            child.dismiss()  # it imports or loads, which nothing interrupts, and no front is left
        else:
            child.control.post(Drain())

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.dismiss()
