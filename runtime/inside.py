"""What is inside the engine, counted: all of it, by priority, and by tenant.

Admission decides by these counts who may enter; what is counted of a request changes with what becomes known of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, NamedTuple, cast

from staged_pool.runtime.estimates import Estimates
from staged_pool.runtime.model import Lane
from staged_pool.stages.work import Priority


class Asker(NamedTuple):
    """How a request stands to others."""

    priority: Priority = Priority.INTERACTIVE
    tenant: Hashable = None
    """Whose it is. None: nobody's in particular; all of these are one tenant."""


ANYBODY: Final = Asker()
"""Interactive work of no tenant: there is nobody that it has to leave room to."""


class Amounts:
    """What some requests have inside together."""

    __slots__ = ("body_bytes", "items", "requests", "tokens")

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.requests = 0
        self.items = 0
        self.body_bytes = 0
        self.tokens = dict.fromkeys(lanes, 0.0)
        """By lane."""

    @property
    def limited(self) -> tuple[float, ...]:
        """Requests, items, tokens and bytes: what there are limits of, in the order of `LIMITS`."""
        return self.requests, self.items, sum(self.tokens.values()), self.body_bytes


LIMITS: Final = ("requests", "items", "tokens", "bytes")


class Part:
    """What one request has in one lane."""

    __slots__ = ("estimate", "read", "tokens", "unprepared")

    def __init__(self, tokens: float, inputs: int) -> None:
        self.tokens = tokens
        self.unprepared = inputs
        self.estimate = tokens / inputs if inputs else 0.0
        """Tokens of one input that is not prepared yet."""
        self.read = 0
        """Tokens of the inputs that are."""


class Room:
    """What one request takes inside; `Admission.leave` gives it back whole.

    Its tokens are an estimate at first. As its inputs are prepared the estimate becomes their true cost, and as they
    leave the device they are inside no more.
    """

    __slots__ = (
        "_inside",
        "asker",
        "body_bytes",
        "counted_in",
        "entered_at",
        "expected_s",
        "is_inside",
        "items",
        "lane",
        "parts",
        "recalled_tokens",
    )

    def __init__(
        self,
        inside: Inside,
        *,
        body_bytes: int,
        entered_at: float,
        lane: Lane,
        expected_s: float,
        asker: Asker,
        counted_in: tuple[Amounts, ...],
    ) -> None:
        self._inside = inside
        self.asker = asker
        self.counted_in = counted_in
        """Those of all requests, of its priority, and of its tenant in that."""
        self.body_bytes = body_bytes
        self.items = 1
        self.parts: dict[Lane, Part] = {}
        """By lane."""
        self.entered_at = entered_at
        self.lane = lane
        """The one that decides how long it takes."""
        self.expected_s = expected_s
        """How long it was predicted to take when it entered."""
        self.recalled_tokens = 0
        self.is_inside = True
        """Until it is given back: items of a caller who left move on for a while, and count no more."""

    @property
    def tokens(self) -> float:
        return sum([part.tokens for part in self.parts.values()])

    def prepared(self, lane: Hashable, tokens: int) -> None:
        """One of its inputs is prepared and has so many tokens."""
        if self.is_inside:
            self._inside.prepared(self, cast(Lane, lane), tokens)

    def computed(self, lane: Hashable, tokens: int) -> None:
        """One of its items has left the device."""
        if self.is_inside:
            self._inside.correct(self, cast(Lane, lane), -tokens)

    def spared(self, lane: Hashable, tokens: int) -> None:
        """So many of its tokens are not for the device; negative: they are, after all."""
        if self.is_inside:
            self._inside.correct(self, cast(Lane, lane), -tokens)

    def recalled(self, lane: Hashable, tokens: int) -> None:
        """So many of its tokens are not for the device: what it would give for them is known."""
        self.recalled_tokens += tokens
        self.spared(lane, tokens)


class Inside:
    """Everything that has entered and not left.

    Args:
        estimates: Told what inputs turn out to have.
    """

    def __init__(self, lanes: Iterable[Lane], estimates: Estimates) -> None:
        self._lanes = tuple(lanes)
        self._estimates = estimates
        self.total = Amounts(self._lanes)
        self.unprepared: dict[Lane, int] = dict.fromkeys(self._lanes, 0)
        """Inputs that are not prepared yet."""
        self.priorities = {priority: Amounts(self._lanes) for priority in Priority}
        self.tenants: dict[Priority, dict[Hashable, Amounts]] = {priority: {} for priority in Priority}
        """Only those that have something inside."""

    def enter(
        self,
        parts: Mapping[Lane, Part],
        *,
        body_bytes: int,
        entered_at: float,
        lane: Lane,
        expected_s: float,
        asker: Asker,
    ) -> Room:
        """Count one request more, as one item."""
        tenants = self.tenants[asker.priority]
        if (of_tenant := tenants.get(asker.tenant)) is None:
            of_tenant = tenants[asker.tenant] = Amounts(self._lanes)
        room = Room(
            self,
            body_bytes=body_bytes,
            entered_at=entered_at,
            lane=lane,
            expected_s=expected_s,
            asker=asker,
            counted_in=(self.total, self.priorities[asker.priority], of_tenant),
        )
        for amounts in room.counted_in:
            amounts.requests += 1
            amounts.items += 1
            amounts.body_bytes += body_bytes
        for of, part in parts.items():
            self.put(room, of, part)
        return room

    def count_items(self, room: Room, items: int) -> None:
        """A request turned out to have so many items."""
        for amounts in room.counted_in:
            amounts.items += items - room.items
        room.items = items

    def put(self, room: Room, lane: Lane, part: Part) -> None:
        """A request has this in a lane, in which it had nothing."""
        room.parts[lane] = part
        self._count(room, lane, part.tokens)
        self.unprepared[lane] += part.unprepared

    def take(self, room: Room, lane: Lane) -> None:
        """A request has nothing in a lane any more."""
        part = room.parts.pop(lane)
        self._count(room, lane, -part.tokens)
        self.unprepared[lane] -= part.unprepared

    def divide(self, room: Room, lane: Lane, inputs: int) -> None:
        """What a request has in a lane is of so many inputs, none of which is prepared yet."""
        part = room.parts[lane]
        self.unprepared[lane] += inputs - part.unprepared
        part.unprepared, part.estimate = inputs, part.tokens / inputs

    def prepared(self, room: Room, lane: Lane, tokens: int) -> None:
        """One of a request's inputs is prepared and has so many tokens."""
        part = room.parts.get(lane)
        if part is not None and part.unprepared:
            part.unprepared -= 1
            part.read += tokens
            self.unprepared[lane] -= 1
            self._estimates.prepared(lane, tokens)
            part.tokens += tokens - part.estimate
            self._count(room, lane, tokens - part.estimate)

    def correct(self, room: Room, lane: Lane, tokens: float) -> None:
        """A request has so many tokens more inside than was thought."""
        if (part := room.parts.get(lane)) is not None:
            part.tokens += tokens
            self._count(room, lane, tokens)

    def leave(self, room: Room) -> None:
        """Count one request less, and nothing that it had."""
        room.is_inside = False
        for lane in tuple(room.parts):
            self.take(room, lane)
        for amounts in room.counted_in:
            amounts.requests -= 1
            amounts.items -= room.items
            amounts.body_bytes -= room.body_bytes
            if not amounts.requests:
                amounts.tokens = dict.fromkeys(self._lanes, 0.0)  # no rounding error is carried on
        if not room.counted_in[-1].requests:
            del self.tenants[room.asker.priority][room.asker.tenant]

    def _count(self, room: Room, lane: Lane, tokens: float) -> None:
        for amounts in room.counted_in:
            amounts.tokens[lane] += tokens
