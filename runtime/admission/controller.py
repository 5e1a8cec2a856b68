"""Admission: whole requests are admitted or rejected before any work is done.

Limits on requests, items, tokens and bytes bound the memory. The target delay bounds the wait: a request is rejected if
its predicted delay is longer. The delay is predicted from the tokens ahead of the request in its lane and the measured
service time. It is corrected by the errors of recent predictions, so that a bottleneck elsewhere counts, too, such as a
busy event loop.

The lane of a request is known here only if its bytes show it. Otherwise it is guessed from earlier bodies of its size;
if several lanes are likely, the quicker one counts. The request is checked again when it is decoded.

The prediction follows the rules of `stages/scheduling/fair_queue.py`. Until a new request is done, each other request
of its tenant gets no more than it does, and each other tenant no more than its own. Interactive and bulk work share by
their weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple, cast

from staged_pool.runtime.admission.accounting import (
    DEFAULT_CLASS,
    LIMITS,
    InFlight,
    LaneUsage,
    RequestClass,
    Reservation,
    UsageTotals,
)
from staged_pool.runtime.admission.delays import Delays
from staged_pool.runtime.admission.estimates import Estimate, Estimates
from staged_pool.runtime.admission.prediction import cause_of, in_words
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.statistics import AdmissionStatistics
from staged_pool.stages.errors import ADMISSION, DeadlineExceeded, Overloaded, TooLarge
from staged_pool.stages.meter import Histogram
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.scheduling.tuning import TIMES_FREE
from staged_pool.stages.ticket import Ticket

EXPECTED_S: Final = 0.1
"""Seconds after a rejection in which more are expected. At twice the capacity, one comes each millisecond."""


class LimitReached(NamedTuple):
    """A limit that keeps a request out for now."""

    limit: str
    """One of `LIMITS`, `part` or `delay`."""
    message: str
    lane: Lane
    """The lane that determines the delay of the request."""
    cause: str | None = None
    """Cause of a predicted delay that is too long: `work` or `lag`. None: the limit is another one."""


class Admission:
    """Counts the requests in flight, and rejects those that would exceed a limit. Never waits.

    Args:
        config: The limits.
        service_times: Service time of each lane of the model.
        fed_limits: Most tokens that preprocess and the device hold, by lane.
        clock: Clock of the stages, in seconds.
        input_tokens: Most tokens of one text. Longer texts are cut or rejected.
    """

    def __init__(
        self,
        config: EngineConfig,
        service_times: Mapping[Lane, LaneServiceTime],
        fed_limits: Mapping[Lane, int],
        clock: Callable[[], float],
        input_tokens: float = inf,
    ) -> None:
        self._config = config
        self._clock = clock
        self._input_tokens = input_tokens
        self._estimates = Estimates(tuple(service_times))
        self.in_flight = InFlight(fed_limits, self._estimates)
        self._delays = Delays(service_times, self.in_flight, self._estimates, config.target_delay_s)
        self._admitted = 0
        self.admitted_at = clock()
        """Time of the last admission; of the start, if there was none."""
        self._rejected: Counter[str] = Counter()
        """Rejected requests since the start, by limit."""
        self._retry_after = Histogram()
        self._rejected_at = 0.0
        """Time of the last rejection."""
        self._allowed = (config.max_requests, config.max_items, config.max_tokens, config.max_bytes)
        self._has_classes = False
        """True once a named tenant or bulk work has come: others must leave a part of each limit to it."""

    def enter(
        self,
        *,
        body_bytes: int,
        timeout_s: float,
        request_class: RequestClass = DEFAULT_CLASS,
        images: int | None = None,
    ) -> Reservation:
        """Let a request in.

        Args:
            body_bytes: Size of the body. Tokens are estimated from it.
            timeout_s: Time limit of the request, in seconds.
            request_class: Its priority and tenant.
            images: Number of images in the body. None: unknown.

        Raises:
            Overloaded: A limit is reached; nothing was counted.
            DeadlineExceeded: It cannot be answered in time; nothing was counted.
            TooLarge: It exceeds a limit by itself.
        """
        entered = self.try_enter(body_bytes=body_bytes, timeout_s=timeout_s, request_class=request_class, images=images)
        if isinstance(entered, LimitReached):
            raise self._reject(entered)
        return entered

    def try_enter(
        self,
        *,
        body_bytes: int,
        timeout_s: float,
        request_class: RequestClass = DEFAULT_CLASS,
        images: int | None = None,
        waits: bool = False,
    ) -> Reservation | LimitReached:
        """Let a request in, or return the limit that keeps it out. A limit is not counted as a rejection.

        Args:
            body_bytes: See `enter`.
            timeout_s: See `enter`.
            request_class: See `enter`.
            images: See `enter`.
            waits: The request waits until it may enter. The target delay then lets the first one of a class in.

        Raises:
            DeadlineExceeded: As for `enter`.
            TooLarge: As for `enter`.
        """
        if body_bytes > self._config.max_bytes:
            raise TooLarge(f"The request has {body_bytes} bytes; at most {self._config.max_bytes} are accepted.")
        self._has_classes = self._has_classes or request_class != DEFAULT_CLASS
        guesses = self._estimates.guess(body_bytes, images)
        lane, expected_s = expected = self._delays.quickest(guesses, request_class)
        lag_s = self._delays.lag_s(lane, request_class)
        if self.in_flight.total.requests and expected_s + lag_s > timeout_s:
            retry_after_s = self._count_rejection("deadline", lane, cause_of(expected_s, timeout_s))
            takes = in_words(lane, expected_s, lag_s)
            message = f"The request would take {takes}: longer than its deadline allows."
            raise DeadlineExceeded(message, stage=ADMISSION, retry_after_s=retry_after_s)
        if (reached := self._limit_reached(body_bytes, guesses, expected, request_class, waits=waits)) is not None:
            return reached
        self._admitted += 1
        self.admitted_at = self._clock()
        reservation = self.in_flight.enter(
            {name: LaneUsage(guess.tokens, int(name == lane)) for name, guess in guesses.items()},
            body_bytes=body_bytes,
            entered_at=self.admitted_at,
            lane=lane,
            expected_s=expected_s,
            request_class=request_class,
        )
        reservation.waits = waits
        reservation.headroom_s = self._delays.lanes[lane].headroom_s(request_class)
        reservation.is_predicted = self._delays.are_known(lane)
        return reservation

    def overload(
        self, body_bytes: int, request_class: RequestClass = DEFAULT_CLASS, images: int | None = None
    ) -> Overloaded | None:
        """Return the error of a request that is rejected now, and count it; None if it may enter."""
        guesses = self._estimates.guess(body_bytes, images)
        reached = self._limit_reached(body_bytes, guesses, self._delays.quickest(guesses, request_class), request_class)
        return None if reached is None else self._reject(reached)

    def expected_tokens(self, body_bytes: int, images: int | None = None) -> float:
        """Return the expected tokens of a request, in all lanes."""
        return sum([guess.tokens for guess in self._estimates.guess(body_bytes, images).values()])

    def _limit_reached(
        self,
        body_bytes: int,
        guesses: Mapping[Lane, Estimate],
        expected: tuple[Lane, float],
        request_class: RequestClass,
        *,
        waits: bool = False,
    ) -> LimitReached | None:
        if not self.in_flight.total.requests:  # otherwise a wrong prediction would never be corrected
            return None
        lane, expected_s = expected
        wanted = (1, 1, sum([guess.tokens for guess in guesses.values()]), body_bytes)
        in_flight = self.in_flight.total.limited
        for place, allowed in enumerate(self._allowed):
            if in_flight[place] + wanted[place] > allowed:
                limit = LIMITS[place]
                return LimitReached(limit, f"The server is at its limit of {allowed} {limit} in flight.", lane)
        if self._has_classes and (whose := self._beyond_part(in_flight, wanted, request_class)) is not None:
            return LimitReached("part", f"{whose} has reached its share of the server's limit.", lane)
        if waits and request_class.tenant not in self.in_flight.tenants[request_class.priority]:
            return None  # otherwise those of other classes could keep it waiting for ever
        return self._too_late(lane, expected_s, request_class)

    def _beyond_part(
        self, in_flight: Sequence[float], wanted: Sequence[float], request_class: RequestClass
    ) -> str | None:
        """Return the name of a share of a limit that the request would exceed: bulk work or its tenant.

        The share is `TIMES_FREE` times the free rest, so that something is always left for the next caller.

        Returns:
            The subject of the error message; None if no share is exceeded.
        """
        tenant = [
            usage[request_class.tenant] for usage in self.in_flight.tenants.values() if request_class.tenant in usage
        ]
        parts: dict[str, list[UsageTotals]] = {"This caller": tenant}
        if request_class.priority is Priority.BULK:
            parts = {"Bulk work": [self.in_flight.priorities[Priority.BULK]], **parts}
        for whose, usages in parts.items():
            for place, (allowed, has, more) in enumerate(zip(self._allowed, in_flight, wanted, strict=True)):
                own = sum([usage.limited[place] for usage in usages])
                if own and own + more > TIMES_FREE * (allowed - has - more):
                    return whose
        return None

    def count_items(self, reservation: Reservation, inputs: Mapping[Lane, int]) -> None:
        """Set the number of inputs of a decoded request, by lane. One whose caller waits is not rejected for overload.

        Raises:
            TooLarge: The request has too many inputs.
            Overloaded: All requests together would have too many; or the request uses a lane that was not expected at
                admission, and would wait there for too long.
        """
        items, limit = sum(inputs.values()), self._config.max_request_items
        if items > limit:
            raise TooLarge(f"The request has {items} inputs; at most {limit} are accepted.", param="input")
        account, lane = self.in_flight, reservation.lane
        total, allowed = account.total, self._config.max_items
        others = 0 if reservation.waits else total.requests - 1
        if others and total.items + items - reservation.items > allowed:
            raise self._reject(LimitReached("items", f"The server is at its limit of {allowed} items in flight.", lane))
        account.count_items(reservation, items)
        if len(inputs) == len(reservation.lanes) == 1 and "text" in inputs and "text" in reservation.lanes:
            # As it was guessed: there is no better estimate.
            account.divide(reservation, "text", items, self._input_tokens)
            return
        guessed = reservation.tokens
        for name in list(reservation.lanes):
            account.take(reservation, name)
        known = self._estimates.known(reservation.body_bytes, inputs)
        expected = {
            name: self._delays.delay_s(name, tokens, inputs[name], reservation.request_class, is_in_flight=True)
            for name, tokens in known.items()
        }
        for name, tokens in known.items():
            account.put(reservation, name, LaneUsage(tokens, inputs[name]))
        if others and reservation.tokens > guessed and sum(total.tokens.values()) > self._config.max_tokens:
            allowed = self._config.max_tokens
            raise self._reject(
                LimitReached("tokens", f"The server is at its limit of {allowed} tokens in flight.", lane)
            )
        if tuple(inputs) == (lane,):
            return
        for name, expected_s in expected.items() if others else ():
            if name != lane and (reached := self._too_late(name, expected_s, reservation.request_class)) is not None:
                raise self._reject(reached)
        reservation.lane, reservation.expected_s = max(expected.items(), key=lambda pair: pair[1])
        reservation.is_predicted = self._delays.are_known(reservation.lane)

    def count_ticket(self, ticket: Ticket, inputs: Mapping[Lane, int]) -> None:
        """Set the number of inputs of a ticket's request; see `count_items`."""
        self.count_items(cast(Reservation, ticket.load), inputs)

    def leave(self, reservation: Reservation, *, answered: bool = False, elsewhere_s: float = 0.0) -> None:
        """Give back what `enter` took.

        Args:
            reservation: The account of the request.
            answered: True if the request was answered: estimates learn from it.
            elsewhere_s: Seconds that it waited outside the engine, for images to be fetched.
        """
        usages = dict(reservation.lanes)
        self.in_flight.leave(reservation)
        if answered:
            self._delays.learn(reservation, usages, self._clock() - reservation.entered_at - elsewhere_s)
        self._delays.catch_up(reservation.request_class)

    def _too_late(self, lane: Lane, expected_s: float, request_class: RequestClass) -> LimitReached | None:
        lag_s = self._delays.lag_s(lane, request_class)
        most_s = self._config.target_delay_s - self._delays.lanes[lane].headroom_s(request_class)
        if expected_s + lag_s <= most_s:
            return None
        takes = in_words(lane, expected_s, lag_s)
        message = f"The server is overloaded: this request would take {takes}, and at most {most_s:.3g} s are accepted."
        return LimitReached("delay", message, lane, cause_of(expected_s, most_s))

    def _reject(self, reached: LimitReached) -> Overloaded:
        """Count a rejected request, and return its error."""
        retry_after_s = self._count_rejection(reached.limit, reached.lane, reached.cause)
        return Overloaded(reached.message, retry_after_s=retry_after_s)

    def _count_rejection(self, limit: str, lane: Lane, cause: str | None) -> float:
        """Count a rejected request. Returns the seconds after which it may come again."""
        self._rejected[limit] += 1
        if cause is not None:
            self._delays.lanes[lane].rejected[cause] += 1
        self._rejected_at = self._clock()
        retry_after_s = self._delays.drain_s(lane)
        self._retry_after.observe(retry_after_s)
        return retry_after_s

    def expects_rejections(self) -> bool:
        """Return True if the last rejection is so recent that more are expected."""
        return bool(self._rejected) and self._clock() - self._rejected_at < EXPECTED_S

    def requests_of(self, priority: Priority) -> int:
        """Return the number of requests of a priority in flight."""
        return self.in_flight.priorities[priority].requests

    def statistics(self) -> AdmissionStatistics:
        """Return a snapshot of the amounts in flight, and of the limits."""
        total, config = self.in_flight.total, self._config
        lanes = self._delays.statistics()
        return AdmissionStatistics(
            requests=total.requests,
            max_requests=config.max_requests,
            items=total.items,
            max_items=config.max_items,
            tokens=round(sum(total.tokens.values())),
            max_tokens=config.max_tokens,
            body_bytes=total.body_bytes,
            max_bytes=config.max_bytes,
            admitted=self._admitted,
            refused=dict(self._rejected),
            target_delay_s=config.target_delay_s,
            retry_after=self._retry_after.snapshot(),
            drain_s=max(lane.drain_s for lane in lanes.values()),
            lag_s=max(lane.lag_s for lane in lanes.values()),
            bytes_per_token=self._estimates.bytes_per_token,
            tenants=sum(map(len, self.in_flight.tenants.values())),
            lanes=lanes,
        )
