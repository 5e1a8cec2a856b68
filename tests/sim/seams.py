"""Channel ends that a world interferes with: what can go wrong where one stage hands something to the next.

Each channel is known by the stage behind it, and has four points:

- `X.receiving`: a worker of X is about to look for a message that is not the first of all. It may be late, or crash
  with empty hands.
- `X.received`: it has one. The client of it may leave at this very moment; a crash comes in the worker's own code, when
  it looks at the message for the second time, and so in its custody.
- `X.sending`: the stage before X is about to hand a message over. It may be held up, wait until the message's deadline,
  or crash. Nothing waits where requests are fed to preprocess, so that nothing happens there.
- `X.sent`: it has done so. A crash here leaves behind a message that will be worked on for nobody.

There is one point more: `clock`. A worker that looks at the clock crashes there, with whatever it has in hand.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

from staged_pool.stages.channel import Channel, Receiver, Sender
from staged_pool.stages.isolate import run_isolated
from staged_pool.stages.parse import Arrival, ParseStage
from staged_pool.stages.stage import Stage
from staged_pool.stages.supervise import Supervisor
from staged_pool.stages.ticket import Ticket
from tests.sim.watch import Watch, client_of
from tests.sim.world import World

T = TypeVar("T")

CHANNELS = ("parse", "preprocess", "batch", "postprocess")
IMAGE_CHANNELS = ("preprocess_images", "batch_images")

FEEDER = "a feeder of parse"

NEAR_S = 1.0
"""A message is held until its deadline if that is no further away."""


class WorkerCrash(Exception):
    """A bug that the simulator plants in a worker."""


class WorkerPanic(BaseException):
    """Such a bug in a library of a worker that raises no `Exception`."""


class Brittle(list[T]):
    """A message whose reader crashes when it iterates a second time."""

    def __init__(self, items: Sequence[T], crash: Callable[[], BaseException]) -> None:
        super().__init__(items)
        self._crash = crash
        self._readings = 0

    def __iter__(self) -> Iterator[T]:
        self._readings += 1
        if self._readings == 2:
            raise self._crash()
        return super().__iter__()


class BrittleArrival:
    """A request whose reader crashes when it reads the arrival time."""

    def __init__(self, arrival: Arrival, crash: Callable[[], BaseException]) -> None:
        self.ticket = arrival.ticket
        self.body_bytes = arrival.body_bytes
        self._crash = crash

    @property
    def sent_at(self) -> float:
        raise self._crash()


class Seams:
    """The actions of a world at the points of one engine's channels."""

    def __init__(self, world: World, watch: Watch, leave: Callable[[int], object]) -> None:
        self._watch = watch
        self._leave = leave
        self._reached: Counter[str] = Counter()
        self._has_received = False
        self._yields = world.yields
        self._crashes = {(each.point, each.count) for each in world.crashes}
        self._delays = {(each.point, each.count): each.seconds for each in world.delays}
        self._leaves = {(each.point, each.count) for each in world.leaves}
        self._lates = {(each.point, each.count) for each in world.lates}
        self._panics = world.seed % 3 == 2
        self._may_interfere = bool(world.yields or world.crashes or world.delays or world.leaves or world.lates)

    def clock(self) -> Callable[[], float]:
        """The clock of this engine."""
        crashes = {count for point, count in self._crashes if point == "clock"}
        return self._brittle_clock(crashes) if crashes else self._watch.now

    def _brittle_clock(self, crashes: set[int]) -> Callable[[], float]:
        now, readings = self._watch.now, 0

        def brittle() -> float:
            nonlocal readings
            if self._has_received and (stage := worker_of()) is not None:
                readings += 1
                if readings - 1 in crashes:
                    if stage == FEEDER:
                        stage = "parse"
                        self._watch.unsupervised.add(now())
                    raise self.crash("clock", stage)
            return now()

        return brittle

    def channel(self, *args: Any, **kwargs: Any) -> Channel[Any]:
        """A channel of this engine; arguments as for `Channel`."""
        made = Channel[Any](*args, **kwargs)
        if self._may_interfere:
            made.sender = SimOutlet(made.sender, made.name, self)  # type: ignore[assignment]
            made.receiver = SimInlet(made.receiver, made.name, self)  # type: ignore[assignment]
        return made

    async def at(self, point: str, stage: str, message: object = None) -> None:
        """Act at a point where the world may hold up a task or crash it.

        Args:
            point: See the module.
            stage: Whose worker it is.
            message: The message that it is about to hand over, if any.
        """
        now = point, self._reached[point]
        self._reached[point] += 1
        watch = self._watch
        if (delay_s := self._delays.get(now)) is not None:
            watch.note("{} is held up", point)
            with watch.at_work():
                await anyio.sleep(delay_s)
        elif self._yields:
            await anyio.lowlevel.checkpoint()
        if now in self._lates and (ticket := _ticket(message)) is not None:
            left_s = ticket.latest - watch.now()
            if 0 <= left_s <= NEAR_S:
                watch.note("{} waits for its deadline", point)
                with watch.at_work():
                    await anyio.sleep(left_s)
        if now in self._crashes:
            raise self.crash(point, stage)

    def received(self, name: str, message: Any) -> Any:
        """A worker has a message now: nothing may be awaited before it has it in custody."""
        self._has_received = True
        point = f"{name}.received"
        now = point, self._reached[point]
        self._reached[point] += 1
        if now in self._leaves and (ticket := _ticket(message)) is not None:
            self._leave(client_of(ticket))
        if now in self._crashes:
            crash = functools.partial(self.crash, point, name)
            return Brittle(message, crash) if isinstance(message, Sequence) else BrittleArrival(message, crash)
        return message

    def crash(self, point: str, stage: str) -> BaseException:
        watch = self._watch
        watch.note("{} crashes", point)
        watch.crashed_at.setdefault(stage, []).append(watch.now())
        return WorkerPanic(point) if self._panics else WorkerCrash(point)

    def sender(self, name: str, message: object) -> str:
        """Return the stage that sends through a channel."""
        if name == "postprocess":
            return f"batch{self._watch.suffix_of(message)}"
        return name.replace("batch", "preprocess")


def worker_of() -> str | None:
    """The stage whose worker reads the clock, in code of its own; None where a crash would not be the worker's."""
    frame: FrameType | None = sys._getframe(2)
    reader = None if frame is None else frame.f_locals.get("self")
    if not isinstance(reader, Stage) or sys.exc_info()[0] is not None:  # one that cleans up would hide why
        return None
    if frame is not None and frame.f_code is ParseStage._complete.__code__:
        return FEEDER
    while frame is not None:
        if frame.f_code is run_isolated.__code__:  # a failure there fails one input
            return None
        if frame.f_code is Supervisor.run.__code__:
            name: str = frame.f_locals["self"]._meter.name
            return name if name == reader.meter.name else None
        frame = frame.f_back
    return None


def _ticket(message: object) -> Ticket | None:
    """Return the ticket of the first item of a message, or of a request."""
    if isinstance(message, Sequence):
        message = message[0] if message else None
    return getattr(message, "ticket", None)


class SimOutlet(Generic[T]):
    """A sending end of a channel, with its points."""

    def __init__(self, inner: Sender[T], name: str, seams: Seams) -> None:
        self._inner = inner
        self._name = name
        self._seams = seams

    async def send(self, message: T) -> None:
        stage = self._seams.sender(self._name, message)
        await self._seams.at(f"{self._name}.sending", stage, message)
        await self._inner.send(message)
        await self._seams.at(f"{self._name}.sent", stage)

    def clone(self) -> SimOutlet[T]:
        return SimOutlet(self._inner.clone(), self._name, self._seams)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SimInlet(Generic[T]):
    """A receiving end of a channel, with its points."""

    def __init__(self, inner: Receiver[T], name: str, seams: Seams) -> None:
        self._inner = inner
        self._name = name
        self._seams = seams
        self._has_received = False

    def __aiter__(self) -> SimInlet[T]:
        return self

    async def __anext__(self) -> T:
        if self._has_received:
            await self._seams.at(f"{self._name}.receiving", self._name)
        message: T = self._seams.received(self._name, await self._inner.__anext__())
        self._has_received = True
        return message

    def receive_waiting(self) -> T | None:
        message = self._inner.receive_waiting()
        return None if message is None else self._seams.received(self._name, message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
