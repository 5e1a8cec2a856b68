"""The caller's claim on its results: the one mutable object that the caller and all stages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

from staged_pool.stages.errors import (
    DeadlineExceeded,
    InvalidInput,
    InvalidSetting,
    MediaUnavailable,
    ModelFailed,
    ScopeEnds,
    StagedPoolError,
    detached,
)
from staged_pool.stages.rows import RowStream
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.wakeup import Wakeup, wakeup
from staged_pool.stages.work import Parts, Plan, Request

P_co = TypeVar("P_co", covariant=True)
Q = TypeVar("Q")

Decode: TypeAlias = Callable[[], Request]
"""Makes the request out of what the caller sent. Runs once, in parse; may run in a thread."""

Encode: TypeAlias = Callable[[object], object]
"""Makes the answer out of the result. Runs once, in postprocess; may run in a thread."""

_NAMES_OF_INPUTS: Final = (None, "input", "messages", "image_url")
"""Names for an input, or a part of it, among those who read it; the request may call it otherwise."""


@dataclass(slots=True)
class Timeline:
    """Times of one request, filled in as it moves.

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
    """Tokens of all items, special tokens included, after truncation."""


class Load(Protocol):
    """The weight of a request by lane, told as its inputs move. Admission keeps the account."""

    def may_feed(self, lane: Hashable, inputs: int) -> bool:
        """True where that many more of its inputs may go to preprocess: enough of the lane is left for others."""
        ...

    def tokens_of(self, lane: Hashable, inputs: int) -> int:
        """Estimated tokens of so many inputs that are not prepared yet, at least 1."""
        ...

    def fed(self, lane: Hashable, inputs: int) -> None:
        """Count inputs that go to preprocess."""

    def tokenized(self, lane: Hashable, tokens: int) -> None:
        """Count an input that is prepared and has so many tokens."""

    def computed(self, lane: Hashable, tokens: int) -> None:
        """Count an item that has left the device."""

    def adjust_tokens(self, lane: Hashable, tokens: int) -> None:
        """Count tokens whose rows come with those of another item. Negative: they go through the device, after all."""

    def cached(self, lane: Hashable, tokens: int) -> None:
        """Count tokens whose rows are kept from earlier."""

    def delivered(self, numbers: int) -> StagedPoolError | None:
        """Count numbers of a row that is kept for the answer; returns the error of one that has grown too large."""


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
        "_at",
        "_decode",
        "_encode",
        "_error",
        "_left",
        "_on_settled",
        "_plan",
        "_rows",
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
        "start_tags",
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
        self.start_tags: dict[Hashable, float] = {}
        """Start tag of the next entry of the request in each fair queue; see `scheduling/fair_queue.py`."""
        self.sharing_scope: Hashable = None
        """Its items share rows only with those of an equal scope. Set in parse."""
        self.settled = False
        self.numbers = 0
        """Count of the numbers that its rows hold."""
        self._decode: Decode | None = decode
        self._encode: Encode | None = encode
        self._stream = stream
        self._plan: Plan[object] | None = None
        self._rows: list[object] = []
        self._left = 0
        self._wakeup: Wakeup | None = None
        """Wakeup of the caller, while it waits."""
        self._at: dict[str, int] = {"door": 1}
        """Inputs and items of the request in each stage, in the order in which these were reached."""
        self._on_settled: Callable[[], object] | None = None
        self._value: object = None
        self._error: StagedPoolError | None = None

    @property
    def error(self) -> StagedPoolError | None:
        """The error that it was settled with; None for an answer, and before."""
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
        if (too_large := self.load.delivered(numbers)) is not None:
            self.fail(too_large)
            return False
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

    @property
    def stage(self) -> str:
        """The earliest stage that has something of the request; for messages and metrics."""
        return next((stage for stage, count in self._at.items() if count > 0), "postprocess")

    def move(self, count: int, stage: str | None, to: str) -> None:
        """Count inputs or items that have gone from one stage to another. `stage` None: they are new."""
        at = self._at
        if stage is not None:
            at[stage] = at.get(stage, 0) - count
        at[to] = at.get(to, 0) + count

    def moved_to(self, stage: str, count: int = 1) -> None:
        """The whole request is in one stage."""
        self._at = {stage: count}

    @contextmanager
    def on_settled(self, call: Callable[[], object]) -> Iterator[None]:
        """Have a function called when it is settled, at once where it is; one at a time."""
        self._on_settled = call
        if self.settled:
            call()
        try:
            yield
        finally:
            self._on_settled = None

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
        self._error = detached(error)
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
        error = detached(error)
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
        self._decode = self._encode = self._plan = None
        self._rows = []
        self.settled = True
        if self._wakeup is not None:
            self._wakeup.set()
        if self._on_settled is not None:
            self._on_settled()

    def release(self) -> None:
        """Let go of the answer, which is its caller's now: stages may hold the ticket until their next message."""
        self._value = None

    async def wait_settled(self) -> None:
        """Wait until it is settled, without looking at the outcome."""
        if not self.settled:
            self._wakeup = wakeup()
            await self._wakeup.wait()

    async def wait(self) -> object:
        """The answer; the error that the request was settled with is raised.

        An outcome that is there already is returned without a checkpoint, so that a cancellation cannot take it away.
        """
        await self.wait_settled()
        if self._error is not None:
            raise detached(self._error)
        return self._value


@dataclass(frozen=True, slots=True, eq=False)
class Item(Generic[P_co]):
    """One unit of work of a request, with what it carries now. Each stage makes a new one."""

    ticket: Ticket
    index: int
    """Place of its input in the request."""
    payload: P_co
    sent_at: float
    """Time of its hand-over to the channel that it waits in, in seconds on the clock of the stages."""
    cost: int = 0
    batch_key: Hashable = None
    part: int = 0
    """Place among the pieces that preprocess cut its input into."""
    identity: Hashable = None
    """Items of equal identity share a row: see `Prepared.identity_in`. None: this one shares none."""

    def carrying(self, payload: Q, *, sent_at: float) -> Item[Q]:
        """The same unit of work with what the next stage is to work on."""
        return Item(self.ticket, self.index, payload, sent_at, self.cost, self.batch_key, self.part, self.identity)
