"""The account of everything in flight, by priority, tenant and request.

There is one account of tokens. By it admission admits requests, and feeding lets inputs into preprocess.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import ceil, inf
from typing import Final, NamedTuple, cast

from staged_pool.runtime.admission.estimates import Estimates
from staged_pool.runtime.card import Lane
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.scheduling.entries import Priority


class RequestClass(NamedTuple):
    """The class of a request: its priority and its tenant."""

    priority: Priority = Priority.INTERACTIVE
    tenant: Hashable = None
    """None is a tenant like any other."""


DEFAULT_CLASS: Final = RequestClass()


class Arriving(NamedTuple):
    """A request in front of admission; see `Admission.enter`."""

    body_bytes: int
    timeout_s: float = inf
    request_class: RequestClass = DEFAULT_CLASS
    images: int | None = None


NEGLIGIBLE: Final = 1e-6
"""Fewer tokens than this are a rounding error of estimates, and count as none."""


class UsageTotals:
    """Amounts that several requests have in flight, in sum."""

    __slots__ = ("body_bytes", "computed", "items", "requests", "tokens")

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.requests = 0
        self.items = 0
        self.body_bytes = 0
        self.tokens = dict.fromkeys(lanes, 0.0)
        """Tokens by lane, without those that are computed."""
        self.computed = dict.fromkeys(lanes, 0)
        """Tokens that the device has computed of requests in flight, by lane."""

    def whole(self, lane: Lane) -> float:
        """Return the tokens of the requests in flight, with those that are computed."""
        return self.tokens[lane] + self.computed[lane]

    @property
    def limited(self) -> tuple[float, ...]:
        """Requests, items, tokens and bytes, in the order of `LIMITS`."""
        return self.requests, self.items, sum(self.tokens.values()), self.body_bytes


LIMITS: Final = ("requests", "items", "tokens", "bytes")


class LaneUsage:
    """Amounts of one request in one lane."""

    __slots__ = ("computed", "estimate", "fed", "skipped", "tokens", "unprepared")

    def __init__(self, tokens: float, inputs: int) -> None:
        self.tokens = tokens
        """Tokens in flight: the true number for tokenized inputs, and an estimate for the others."""
        self.unprepared = inputs
        self.estimate = tokens / inputs if inputs else 0.0
        """Estimated tokens of one input that is not tokenized yet."""
        self.fed = 0.0
        """Tokens in preprocess, in front of the device, or on it."""
        self.computed = 0
        """Tokens that the device has computed."""
        self.skipped = 0
        """Tokens that were coalesced or cached, and so were not computed."""


class Reservation:
    """The account of one request, and the `RequestLoad` of its ticket. `Admission.leave` gives it back."""

    __slots__ = (
        "_in_flight",
        "answer",
        "body_bytes",
        "counted_in",
        "entered_at",
        "expected_s",
        "headroom_s",
        "is_in_flight",
        "is_predicted",
        "items",
        "lane",
        "lanes",
        "request_class",
        "waits",
        "was_alone",
    )

    def __init__(
        self,
        in_flight: InFlight,
        *,
        body_bytes: int,
        entered_at: float,
        lane: Lane,
        expected_s: float,
        request_class: RequestClass,
        counted_in: tuple[UsageTotals, ...],
    ) -> None:
        self._in_flight = in_flight
        self.request_class = request_class
        self.counted_in = counted_in
        """The sums that it counts in: of all requests, of its priority, and of its tenant in that."""
        self.was_alone = counted_in[-1].requests == 0
        """Its tenant had nothing else in flight."""
        self.body_bytes = body_bytes
        self.answer: AnswerMemory | None = None
        """Memory of the answer. None: no answer is expected yet."""
        self.items = 1
        self.waits = False
        """Its caller waits for room: the amounts that parse finds are no reason to reject it."""
        self.lanes: dict[Lane, LaneUsage] = {}
        self.entered_at = entered_at
        self.lane = lane
        """The lane that determines its delay."""
        self.expected_s = expected_s
        """Predicted seconds to its answer, at its arrival."""
        self.headroom_s = 0.0
        """Seconds between the largest accepted prediction and the target delay, at its arrival."""
        self.is_predicted = False
        """The time of a batch was known at its arrival."""
        self.is_in_flight = True
        """False once it is given back. Items of a caller who left may move on for a while, uncounted."""

    @property
    def tokens(self) -> float:
        """Tokens in flight, in all lanes."""
        return sum([usage.tokens for usage in self.lanes.values()])

    def tokens_of(self, lane: Hashable, inputs: int) -> int:
        """See `Load.tokens_of`."""
        usage = self.lanes.get(cast(Lane, lane))
        return max(1, ceil(inputs * usage.estimate)) if usage is not None else inputs

    def may_feed(self, lane: Hashable, inputs: int) -> bool:
        """See `Load.may_feed`.

        A request may have as many tokens fed as remain free in the lane: a dynamic threshold (Choudhury and Hahne,
        1998). So one more request may always be fed. If nothing is fed, a list of any size may go.
        """
        if not self.is_in_flight or (usage := self.lanes.get(cast(Lane, lane))) is None:
            return True
        fed = self._in_flight.fed[cast(Lane, lane)]
        return not fed or usage.fed + inputs * usage.estimate <= self._in_flight.fed_limits[cast(Lane, lane)] - fed

    def fed(self, lane: Hashable, inputs: int) -> None:
        """See `Load.fed`."""
        if self.is_in_flight and (usage := self.lanes.get(cast(Lane, lane))) is not None:
            self._in_flight.feed(usage, cast(Lane, lane), inputs * usage.estimate)

    def tokenized(self, lane: Hashable, tokens: int) -> None:
        """See `Load.tokenized`."""
        if self.is_in_flight:
            self._in_flight.tokenized(self, cast(Lane, lane), tokens)

    def computed(self, lane: Hashable, tokens: int) -> None:
        """See `Load.computed`."""
        if self.is_in_flight and (usage := self.lanes.get(cast(Lane, lane))) is not None:
            usage.computed += tokens
            for totals in self.counted_in:
                totals.computed[cast(Lane, lane)] += tokens
            self._in_flight.correct(self, cast(Lane, lane), -tokens)
            self._in_flight.room_freed()

    def adjust_tokens(self, lane: Hashable, tokens: int) -> None:
        """See `Load.adjust_tokens`."""
        if self.is_in_flight and (usage := self.lanes.get(cast(Lane, lane))) is not None:
            usage.skipped += tokens
            self._in_flight.correct(self, cast(Lane, lane), -tokens)

    def cached(self, lane: Hashable, tokens: int) -> None:
        """See `Load.cached`."""
        self.adjust_tokens(lane, tokens)

    def delivered(self, numbers: int, left: int) -> StagedPoolError | None:
        """See `Load.delivered`."""
        return None if self.answer is None else self.answer.delivered(numbers, left)


class InFlight:
    """Sums of all requests in flight: admitted, and not answered, failed or abandoned yet.

    Args:
        fed_limits: Most tokens between feeding and the end of their forward, by lane.
        estimates: Learn the tokens of inputs.
    """

    def __init__(self, fed_limits: Mapping[Lane, int], estimates: Estimates) -> None:
        self._lanes = tuple(fed_limits)
        self._estimates = estimates
        self.fed_limits = fed_limits
        self.fed = dict.fromkeys(self._lanes, 0.0)
        """Tokens between feeding and the end of their forward, by lane."""
        self.fed_tokens_freed: Callable[[Lane], object] = lambda lane: None
        """Called when the fed tokens of a lane have decreased."""
        self.room_freed: Callable[[], object] = lambda: None
        """Called when tokens in flight have been computed."""
        self.total = UsageTotals(self._lanes)
        self.unprepared: dict[Lane, int] = dict.fromkeys(self._lanes, 0)
        """Inputs that are not tokenized yet, by lane."""
        self.priorities = {priority: UsageTotals(self._lanes) for priority in Priority}
        self.tenants: dict[Priority, dict[Hashable, UsageTotals]] = {priority: {} for priority in Priority}
        """Tenants that have something in flight, by priority."""

    def enter(
        self,
        lanes: Mapping[Lane, LaneUsage],
        *,
        body_bytes: int,
        entered_at: float,
        lane: Lane,
        expected_s: float,
        request_class: RequestClass,
    ) -> Reservation:
        """Add a request, as one item."""
        tenants = self.tenants[request_class.priority]
        if (of_tenant := tenants.get(request_class.tenant)) is None:
            of_tenant = tenants[request_class.tenant] = UsageTotals(self._lanes)
        reservation = Reservation(
            self,
            body_bytes=body_bytes,
            entered_at=entered_at,
            lane=lane,
            expected_s=expected_s,
            request_class=request_class,
            counted_in=(self.total, self.priorities[request_class.priority], of_tenant),
        )
        for usage in reservation.counted_in:
            usage.requests += 1
            usage.items += 1
            usage.body_bytes += body_bytes
        for name, lane_usage in lanes.items():
            self.put(reservation, name, lane_usage)
        return reservation

    def count_items(self, reservation: Reservation, items: int) -> None:
        """Set the number of items of a request."""
        for usage in reservation.counted_in:
            usage.items += items - reservation.items
        reservation.items = items

    def put(self, reservation: Reservation, lane: Lane, usage: LaneUsage) -> None:
        """Add the usage of a lane to a request, which had none there."""
        reservation.lanes[lane] = usage
        self._count(reservation, lane, usage.tokens)
        self.unprepared[lane] += usage.unprepared

    def take(self, reservation: Reservation, lane: Lane) -> None:
        """Remove the usage of a lane from a request."""
        usage = reservation.lanes.pop(lane)
        self._count(reservation, lane, -usage.tokens)
        for totals in reservation.counted_in:
            totals.computed[lane] -= usage.computed
        self.unprepared[lane] -= usage.unprepared
        self.feed(usage, lane, -usage.fed)

    def divide(self, reservation: Reservation, lane: Lane, inputs: int, most: float) -> None:
        """Divide the estimated tokens of a request among its inputs.

        Args:
            reservation: The request.
            lane: Lane of the inputs.
            inputs: Number of inputs.
            most: Most tokens of one input.
        """
        usage = reservation.lanes[lane]
        self.unprepared[lane] += inputs - usage.unprepared
        tokens = min(usage.tokens, inputs * most)
        self._count(reservation, lane, tokens - usage.tokens)
        usage.tokens, usage.unprepared, usage.estimate = tokens, inputs, tokens / inputs

    def feed(self, usage: LaneUsage, lane: Lane, tokens: float) -> None:
        """Add fed tokens; a negative number subtracts them."""
        usage.fed += tokens
        fed = self.fed[lane] + tokens
        self.fed[lane] = fed if fed > NEGLIGIBLE else 0.0
        if tokens < 0:
            self.fed_tokens_freed(lane)

    def tokenized(self, reservation: Reservation, lane: Lane, tokens: int) -> None:
        """Replace the estimate of one input by its true number of tokens."""
        usage = reservation.lanes.get(lane)
        if usage is not None and usage.unprepared:
            usage.unprepared -= 1
            self.unprepared[lane] -= 1
            self._estimates.tokenized(lane, tokens)
            self.correct(reservation, lane, tokens - usage.estimate)

    def correct(self, reservation: Reservation, lane: Lane, tokens: float) -> None:
        """Add tokens to a request, in flight and fed; a negative number subtracts them."""
        if (usage := reservation.lanes.get(lane)) is not None:
            usage.tokens += tokens
            self._count(reservation, lane, tokens)
            self.feed(usage, lane, tokens)

    def leave(self, reservation: Reservation) -> None:
        """Remove a request and all its amounts."""
        reservation.is_in_flight = False
        for usage in reservation.counted_in:
            usage.requests -= 1
            usage.items -= reservation.items
            usage.body_bytes -= reservation.body_bytes
        for lane in tuple(reservation.lanes):
            self.take(reservation, lane)
        for usage in reservation.counted_in:
            if not usage.requests:
                usage.tokens = dict.fromkeys(self._lanes, 0.0)  # drop rounding errors
        if not self.total.requests:
            self.fed = dict.fromkeys(self._lanes, 0.0)
        if not reservation.counted_in[-1].requests:
            del self.tenants[reservation.request_class.priority][reservation.request_class.tenant]

    def _count(self, reservation: Reservation, lane: Lane, tokens: float) -> None:
        for usage in reservation.counted_in:
            usage.tokens[lane] += tokens
