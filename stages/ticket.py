"""The caller's claim on its results: the one mutable object that the caller and all stages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import anyio

from staged_pool.stages.errors import (
    DeadlineExceeded,
    InvalidInput,
    InvalidSetting,
    MediaUnavailable,
    ModelFailed,
    ScopeEnds,
    StagedPoolError,
    said_again,
)
from staged_pool.stages.rows import RowStream
from staged_pool.stages.wakeup import Wakeup, wakeup
from staged_pool.stages.work import Item, Parts, Plan, Priority, Request

Decode: TypeAlias = Callable[[], Request]
"""Makes the request out of what the caller sent. Runs once, in parse; may run in a thread."""

Encode: TypeAlias = Callable[[object], object]
"""Makes the answer out of the result. Runs once, in postprocess; may run in a thread."""

_NAMES_OF_INPUTS: Final = (None, "input", "messages", "image_url")
"""What those who read an input, or a part of it, call it, whatever the request calls it."""


@dataclass(slots=True)
class Timeline:
    """Where the time of one request went, filled in as it moves.

    The items of a request pass a stage side by side, so each field is the longest that any one of them took.
    """

    parse_s: float = 0.0
    """Decoding, checking and cutting the request into items, the wait for parse included."""
    fetch_s: float = 0.0
    """Fetching what an input only points to, the wait for a fetch of others included."""
    preprocess_s: float = 0.0
    """The preprocess call, the wait for it included."""
    queue_s: float = 0.0
    """Waiting for the device."""
    device_s: float = 0.0
    """Collating and the forward."""
    postprocess_s: float = 0.0
    """Turning rows into the answer, the wait for it included."""
    items: int = 0
    tokens: int = 0
    """Of all items, special tokens included, after truncation."""


class Load(Protocol):
    """What a request weighs at the door; told as its items move. Belongs to admission, which must know the backlog."""

    def prepared(self, lane: Hashable, tokens: int) -> None:
        """One of its inputs of a lane is prepared and has so many tokens."""

    def computed(self, lane: Hashable, tokens: int) -> None:
        """One of its items has left the device."""

    def spared(self, lane: Hashable, tokens: int) -> None:
        """So many of its tokens need not go through the device: their rows come with those of another. Negative: they
        must, after all."""

    def recalled(self, lane: Hashable, tokens: int) -> None:
        """So many of its tokens need not go through the device: their rows are there."""


class Standing:
    """Where a request stands in one lane: each has a waiting room, and a virtual time, of its own."""

    __slots__ = ("room", "turn", "waiting_tokens")

    def __init__(self) -> None:
        self.turn = 0.0
        """When the next of its items has its turn on the device, in the batcher's virtual time."""
        self.waiting_tokens = 0
        """Of its items that wait for the device."""
        self.room: anyio.Event | None = None
        """Set when fewer wait; None where nobody wants to know."""


class Ticket:
    """Settles once: the first writer wins, and every later one is told so.

    The caller waits in `wait()`; stages write rows and errors from the event loop's thread. A stage asks `settled`
    before it starts work on an item; nothing that has begun is interrupted. If `wait()` is cancelled the ticket stays
    unsettled: whoever owns the caller's scope settles it (`Engine.submit` does, with `Abandoned`).

    Args:
        decode: See `Decode`.
        encode: See `Encode`.
        load: See `Load`.
        deadline: On the clock of the stages, in seconds; `math.inf` for none. That of `timeout_s`: passing it is an
            error that the caller sees.
        scope_ends_at: On the same clock: when the caller's own scope will cancel it, as far as is known. Work that
            cannot be done by then is dropped; the scope does the rest.
        timeline: Where the stages note their times; the caller may hold it too.
        priority: How it stands to other requests that want the device.
        tenant: Whose it is: tenants share the device fairly. None is a tenant, too.
        stream: Gets each row, too. `encode` then makes the answer out of the number of tokens alone.
    """

    __slots__ = (
        "_decode",
        "_encode",
        "_errands",
        "_error",
        "_left",
        "_plan",
        "_rows",
        "_standings",
        "_stream",
        "_value",
        "_wakeup",
        "deadline",
        "load",
        "numbers",
        "priority",
        "scope_ends_at",
        "settled",
        "sharing_scope",
        "stage",
        "tenant",
        "timeline",
    )

    def __init__(
        self,
        decode: Decode,
        encode: Encode,
        load: Load,
        *,
        deadline: float = math.inf,
        scope_ends_at: float = math.inf,
        timeline: Timeline | None = None,
        priority: Priority = Priority.INTERACTIVE,
        tenant: Hashable = None,
        stream: RowStream | None = None,
    ) -> None:
        self.load = load
        self.deadline = deadline
        self.scope_ends_at = scope_ends_at
        self.timeline = timeline if timeline is not None else Timeline()
        self.priority = priority
        self.tenant = tenant
        self.stage = "door"
        """Where the request was last seen: names the stage in a deadline's message and in metrics."""
        self.sharing_scope: Hashable = None
        """Its items share rows only with those of an equal scope. Set in parse."""
        self.settled = False
        self.numbers = 0
        """That its rows hold."""
        self._decode: Decode | None = decode
        self._encode: Encode | None = encode
        self._stream = stream
        self._plan: Plan[object] | None = None
        self._rows: list[object] = []
        self._left = 0
        self._wakeup: Wakeup | None = None
        """Of the caller, while it waits: the ticket is settled, or there is something for the caller to do."""
        self._errands: Sequence[Item[object]] | None = None
        self._standings: dict[Hashable, Standing] = {}
        self._value: object = None
        self._error: StagedPoolError | None = None

    @property
    def error(self) -> StagedPoolError | None:
        """What it was settled with, where that was an error."""
        return self._error

    def take_decode(self) -> Decode:
        """The decode function, once: it holds the body, which is not needed after parse."""
        decode, self._decode = self._decode, None
        if decode is None:
            raise RuntimeError("a ticket is decoded once")
        return decode

    def expect(self, plan: Plan[object]) -> None:
        """Say how the request is done; a row must be delivered for each of its inputs."""
        if self.settled:
            return
        self._plan = plan
        self._left = len(plan.inputs)
        self._rows = [None] * self._left
        self.timeline.items = self._left
        if self._stream is not None:
            self._stream.expect(plan)

    def split(self, index: int, parts: int) -> None:
        """One of its inputs goes on as so many items; a row must be delivered for each."""
        if not self.settled:
            self._rows[index] = Parts([None] * parts)
            self._left += parts - 1

    def deliver(self, item: Item[object], numbers: int = 0) -> bool:
        """Keep the row that an item carries, of so many numbers. True for the last one: `answer()` can be made now."""
        if self.settled:
            return False
        self.numbers += numbers
        if isinstance(parts := self._rows[item.index], Parts):
            parts[item.part] = item.payload
        else:
            self._rows[item.index] = item.payload
        row = self._rows[item.index]
        if self._stream is not None and not (isinstance(row, Parts) and any(part is None for part in row)):
            self._stream.add(item.index, row)
        self._left -= 1
        self.timeline.tokens += item.cost
        return self._left == 0

    def leave_to_caller(self, errands: Sequence[Item[object]]) -> None:
        """Have the caller see to these items of its request: it waits in `errands`."""
        if not self.settled:
            self._errands = errands
            self._wake()

    async def errands(self) -> Sequence[Item[object]]:
        """What parse leaves to the caller, once; empty when the ticket is settled, with or without any."""
        if self._errands is None and not self.settled:
            await self._until_woken()
        errands, self._errands = self._errands, None
        return () if errands is None else errands

    def standing(self, lane: Hashable) -> Standing:
        """Where the request stands in a lane."""
        standing = self._standings.get(lane)
        if standing is None:
            standing = self._standings[lane] = Standing()
        return standing

    def waits(self, lane: Hashable, tokens: int) -> None:
        """So many tokens more of it wait for the device in a lane; fewer, where negative."""
        standing = self.standing(lane)
        standing.waiting_tokens += tokens
        if tokens < 0 and standing.room is not None:
            standing.room.set()

    async def wait_for_room(self, lane: Hashable, tokens: int) -> None:
        """Wait until fewer than so many tokens of it wait for the device in a lane, or until it is settled."""
        standing = self.standing(lane)
        while standing.waiting_tokens >= tokens and not self.settled:
            if standing.room is None or standing.room.is_set():  # never replaced while somebody waits: several may
                standing.room = anyio.Event()
            await standing.room.wait()

    def answer(self) -> Callable[[], object]:
        """A function that makes the answer of all rows. It may run in a thread, and holds what it needs."""
        encode, plan, rows, tokens = self._encode, self._plan, self._rows, self.timeline.tokens
        if encode is None or plan is None or self._left:
            raise RuntimeError("an answer is made once, of all rows")
        if self._stream is not None:
            return lambda: encode(tokens)
        return lambda: encode(plan.finish(rows, tokens))

    def resolve(self, value: object) -> bool:
        """Settle with the answer. False if it was settled already; the value is then dropped."""
        if self.settled:
            return False
        self._value = value
        self._settle()
        return True

    def fail(self, error: StagedPoolError) -> bool:
        """Settle with an error. False if it was settled already; the error is then dropped."""
        if self.settled:
            return False
        # A traceback leads to the frames of a stage, and they to this ticket: the error, and with it all that these
        # frames hold, would be kept until the garbage collector comes by.
        self._error = error.with_traceback(None)
        self._settle()
        return True

    @property
    def latest(self) -> float:
        """The time after which nobody waits for the answer, on the clock of the stages."""
        return min(self.deadline, self.scope_ends_at)

    def expire(self, stage: str) -> None:
        """Settle a request that cannot be done by `latest`, with the error of whichever limit is the earlier."""
        if self.scope_ends_at < self.deadline:
            self.fail(ScopeEnds(f"the caller's scope ends before the {stage} stage could be done", stage=stage))
        else:
            message = f"the deadline passed before the {stage} stage could work on this request"
            self.fail(DeadlineExceeded(message, stage=stage))

    def fail_input(self, index: int, error: StagedPoolError) -> bool:
        """As `fail`, with an error that one of its inputs has caused, and that says so: in the words of the request.

        An error about a setting of the whole request names no input.
        """
        if isinstance(error, InvalidSetting):
            return self.fail(error)
        field = None
        if self._plan is not None and self._plan.locate is not None:
            field, index = self._plan.locate(index)
        if isinstance(error, InvalidInput | ModelFailed | MediaUnavailable):
            error.index = index
        if isinstance(error, InvalidInput) and error.param in _NAMES_OF_INPUTS:
            error.param = field or "input"
        return self.fail(error)

    def _settle(self) -> None:
        # A settled request holds no memory, however long its items still wait in channels.
        self._decode = self._encode = self._plan = self._errands = None
        self._rows = []
        self.settled = True
        self._wake()
        for standing in self._standings.values():
            if standing.room is not None:
                standing.room.set()

    def release(self) -> None:
        """Let go of the outcome, which is its caller's now: stages may hold the ticket until their next message."""
        self._value = None
        if self._error is not None:
            self._error = said_again(self._error)

    async def wait_settled(self) -> None:
        """Wait until it is settled, without looking at the outcome."""
        if not self.settled:
            await self._until_woken()

    async def _until_woken(self) -> None:
        self._wakeup = wakeup()
        await self._wakeup.wait()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    async def wait(self) -> object:
        """The answer; the error that the request was settled with is raised.

        An outcome that is there already is returned without a checkpoint, so that a cancellation cannot take it away.
        """
        await self.wait_settled()
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # this frame is in the error's traceback now, and the ticket has the error
