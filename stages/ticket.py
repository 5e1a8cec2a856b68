"""Tickets and items: a caller's claim on an answer, and the units of work behind it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from staged_pool.stages.errors import (
    ADMISSION,
    DeadlineExceeded,
    InvalidInput,
    InvalidSetting,
    MediaUnavailable,
    ModelFailed,
    ScopeEnds,
    StagedPoolError,
    detached,
)
from staged_pool.stages.load import RequestLoad
from staged_pool.stages.rows import RowStream
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.timeline import Timeline
from staged_pool.stages.wakeup import Wakeup, wakeup
from staged_pool.stages.work import Parts, Plan, Request

P_co = TypeVar("P_co", covariant=True)
Q = TypeVar("Q")

Decode: TypeAlias = Callable[[], Request]
"""Makes the request from the bytes of the caller. Runs once, in parse; may run in a thread."""

Encode: TypeAlias = Callable[[object], object]
"""Makes the answer from the result. Runs once, in postprocess; may run in a thread."""

_INPUT_PARAMS: Final = (None, "input", "messages", "image_url")
"""Values of `InvalidInput.param` that mean an input, or a part of one. The request may have another name for it."""


class Ticket:
    """A caller's claim on the answer of one request.

    The caller and all stages share it. A ticket settles once, with an answer or an error: the first writer wins, and
    later ones are told so. Stages write rows and errors on the event loop's thread. They ask `settled` before they
    start work on an item; work that has begun is not interrupted.

    The caller waits in `wait()`. If that is cancelled, the ticket stays open: the owner of the caller's scope must
    settle it, as `Engine.submit` does with `Abandoned`.

    Args:
        decode: See `Decode`.
        encode: See `Encode`.
        load: See `RequestLoad`.
        deadline: Time at which the caller gets `DeadlineExceeded`, in seconds on the clock of the stages. `math.inf`:
            none.
        scope_ends_at: Time at which the caller's own cancel scope will end, as far as is known, on the same clock.
            Stages drop work that cannot be done by then; the scope does the cancelling.
        timeline: Filled in by the stages; the caller may hold it too.
        priority: Urgency of the request.
        tenant: Owner of the request. Tenants share the device fairly; None is a tenant, too.
        stream: Gets each row as it comes. `encode` is then called with the number of tokens alone.
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
        "progressed_at",
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
        load: RequestLoad,
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
        """Scope of `share_between_tenants` and the salt: rows are shared only within it. Set in parse."""
        self.settled = False
        self.progressed_at = -math.inf
        """Time at which a part of the request last reached a stage, in seconds. Infinite: none has."""
        self.numbers = 0
        """Numbers that the delivered rows hold."""
        self._decode: Decode | None = decode
        self._encode: Encode | None = encode
        self._stream = stream
        self._plan: Plan[object] | None = None
        self._rows: list[object] = []
        self._left = 0
        self._wakeup: Wakeup | None = None
        """Wakes the caller while it waits."""
        self._at: dict[str, int] = {ADMISSION: 1}
        """Inputs and items in each stage, in the order in which the stages were reached."""
        self._on_settled: list[Callable[[], object]] | None = None
        self._value: object = None
        self._error: StagedPoolError | None = None

    @property
    def error(self) -> StagedPoolError | None:
        """The error that the ticket was settled with; None for an answer, and before."""
        return self._error

    def take_decode(self) -> Decode:
        """Return the decode function and let go of it: it holds the body, which only parse needs."""
        decode, self._decode = self._decode, None
        if decode is None:
            raise RuntimeError("a ticket is decoded once")
        return decode

    def expect(self, plan: Plan[object]) -> None:
        """Set the plan of the request: a row must be delivered for each of its inputs."""
        if self.settled:
            return
        self._plan = plan
        self._left = len(plan.inputs)
        self._rows = [None] * self._left
        self.timeline.items = self._left
        if self._stream is not None:
            self._stream.expect(plan)

    def split(self, index: int, parts: int) -> None:
        """Expect several rows for one input, which preprocess has cut into as many items."""
        if not self.settled:
            self._rows[index] = Parts([None] * parts)
            self._left += parts - 1

    def deliver(self, item: Item[object], numbers: int = 0) -> bool:
        """Keep the row that an item carries.

        Args:
            item: Carries the row as its payload.
            numbers: Count of numbers in the row.

        Returns:
            True for the last row: `answer()` can be called now.
        """
        if self.settled:
            return False
        self.numbers += numbers
        if (too_large := self.load.delivered(numbers, self._left - 1)) is not None:
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
        self.timeline.tokens += item.tokens
        return self._left == 0

    @property
    def stage(self) -> str:
        """The earliest stage that holds a part of the request, for messages and metrics."""
        return next((stage for stage, count in self._at.items() if count > 0), "postprocess")

    def move(self, count: int, stage: str | None, to: str, *, now: float) -> None:
        """Count inputs or items that have moved to a stage.

        Args:
            count: Number of inputs or items.
            stage: Stage that they have left. None: they are new.
            to: Stage that they have reached.
            now: Time on the clock of the stages, in seconds.
        """
        self.progressed_at, at = now, self._at
        if stage is not None:
            at[stage] = at.get(stage, 0) - count
        at[to] = at.get(to, 0) + count

    def moved_to(self, stage: str, count: int = 1, *, now: float) -> None:
        """Count the whole request in one stage. `now` is the time on the clock of the stages, in seconds."""
        self.progressed_at = now
        self._at = {stage: count}

    @contextmanager
    def on_settled(self, call: Callable[[], object]) -> Iterator[None]:
        """Within the block, call a function once the ticket is settled."""
        if self._on_settled is None:
            self._on_settled = []
        self._on_settled.append(call)
        if self.settled:
            call()
        try:
            yield
        finally:
            self._on_settled.remove(call)

    def answer(self) -> Callable[[], object]:
        """Return a function that makes the answer from all rows. It may run in a thread."""
        encode, plan, rows, tokens = self._encode, self._plan, self._rows, self.timeline.tokens
        if encode is None or plan is None or self._left:
            raise RuntimeError("an answer is made once, of all rows")
        if self._stream is not None:
            return lambda: encode(tokens)
        return lambda: encode(plan.finish(rows, tokens))

    def answer_async(self) -> Callable[[], Awaitable[Callable[[], object]]] | None:
        """Return a function that awaits the result, and then gives the one of `answer`.

        None: the result waits for nothing; see `Plan.finish_async`.
        """
        encode, plan, rows, tokens = self._encode, self._plan, self._rows, self.timeline.tokens
        if encode is None or plan is None or plan.finish_async is None:
            return None
        finish = plan.finish_async

        async def finished() -> Callable[[], object]:
            result = await finish(rows, tokens)
            return lambda: encode(result)

        return finished

    def resolve(self, value: object) -> bool:
        """Settle with the answer. Returns False if the ticket was settled already; the value is then dropped."""
        if self.settled:
            return False
        self._value = value
        self._settle()
        return True

    def fail(self, error: StagedPoolError) -> bool:
        """Settle with an error. Returns False if the ticket was settled already; the error is then dropped."""
        if self.settled:
            return False
        self._error = detached(error)
        self._settle()
        return True

    @property
    def latest(self) -> float:
        """Time after which nobody waits for the answer, in seconds."""
        return min(self.deadline, self.scope_ends_at)

    def expire(self, stage: str) -> None:
        """Settle a request that cannot be done by `latest`, with the limit's error."""
        if self.scope_ends_at < self.deadline:
            self.fail(ScopeEnds(f"the caller's scope ends before the {stage} stage could be done", stage=stage))
        else:
            message = f"the deadline passed before the {stage} stage could work on this request"
            self.fail(DeadlineExceeded(message, stage=stage))

    def fail_input(self, index: int, error: StagedPoolError) -> bool:
        """Settle with an error that one input has caused; the error then names the input.

        It names the field and the place that the caller used, see `Plan.locate`. An `InvalidSetting` names no input.
        """
        if isinstance(error, InvalidSetting):
            return self.fail(error)
        error = detached(error)
        field: str | None = None
        place: int | None = index
        if self._plan is not None and self._plan.locate is not None:
            field, place = self._plan.locate(index)
        if isinstance(error, InvalidInput | ModelFailed | MediaUnavailable):
            error.index = place
        if isinstance(error, InvalidInput) and error.param in _INPUT_PARAMS:
            error.param = field or "input"
        return self.fail(error)

    def _settle(self) -> None:
        # Items may wait in channels for long after this: they must not keep the memory of the request.
        self._decode = self._encode = self._plan = None
        self._rows = []
        self.settled = True
        if self._wakeup is not None:
            self._wakeup.set()
        for call in self._on_settled or ():
            call()

    def release(self) -> None:
        """Let go of the answer, which belongs to the caller now. Stages may hold the ticket for longer."""
        self._value = None

    async def wait_settled(self) -> None:
        """Wait until the ticket is settled, without looking at the outcome."""
        if not self.settled:
            self._wakeup = wakeup()
            await self._wakeup.wait()

    async def wait(self) -> object:
        """Wait for the outcome: return the answer, or raise the error.

        There is no checkpoint if the ticket is settled already, so no cancellation can take the outcome away.
        """
        await self.wait_settled()
        if self._error is not None:
            raise detached(self._error)
        return self._value


@dataclass(frozen=True, slots=True, eq=False)
class Item(Generic[P_co]):
    """One unit of work of a request, with its payload of the moment. Each stage makes a new one."""

    ticket: Ticket
    index: int
    """Index of its input in the request."""
    payload: P_co
    sent_at: float
    """Time at which it entered its present channel, in seconds."""
    tokens: int = 0
    """Tokens without padding; 0 before preprocess."""
    batch_key: Hashable = None
    """Only items with equal keys may share a batch."""
    part: int = 0
    """Index among the parts that preprocess cut its input into."""
    identity: Hashable = None
    """Items of equal identity share a row, see `Prepared.identity_in`. None: it shares none."""

    def carrying(self, payload: Q, *, sent_at: float) -> Item[Q]:
        """Return the same unit of work with the payload for the next stage."""
        return Item(self.ticket, self.index, payload, sent_at, self.tokens, self.batch_key, self.part, self.identity)
