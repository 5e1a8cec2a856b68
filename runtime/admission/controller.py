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
from typing import Final

from staged_pool.runtime.admission.accounting import (
    DEFAULT_CLASS,
    LIMITS,
    InFlight,
    LaneUsage,
    RequestClass,
    Reservation,
    UsageTotals,
)
from staged_pool.runtime.admission.estimates import Estimate, Estimates
from staged_pool.runtime.admission.prediction import LanePrediction
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Lane
from staged_pool.runtime.statistics import AdmissionStatistics, LaneStatistics
from staged_pool.stages.errors import ADMISSION, DeadlineExceeded, Overloaded, TooLarge, detached
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.scheduling.tuning import DELAY_MARGIN, INTERACTIVE_WEIGHT, TIMES_FREE

EXPECTED_S: Final = 0.1
"""Seconds after a rejection in which more are expected. At twice the capacity, one comes each millisecond."""


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
        self._lanes = {lane: LanePrediction(service_time) for lane, service_time in service_times.items()}
        self._estimates = Estimates(tuple(service_times))
        self.in_flight = InFlight(fed_limits, self._estimates)
        self._admitted = 0
        self._rejected: Counter[str] = Counter()
        """Rejected requests since the start, by limit."""
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
        if body_bytes > self._config.max_bytes:
            raise TooLarge(f"The request has {body_bytes} bytes; at most {self._config.max_bytes} are accepted.")
        self._has_classes = self._has_classes or request_class != DEFAULT_CLASS
        guesses = self._estimates.guess(body_bytes, images)
        lane, expected_s = expected = self._quickest(guesses, request_class)
        takes_s = expected_s + self._lanes[lane].lag_s(request_class)
        if self.in_flight.total.requests and takes_s > timeout_s:
            self._count_rejection("deadline")
            message = f"The request would take about {takes_s:.3g} s: longer than its deadline allows."
            raise DeadlineExceeded(message, stage=ADMISSION, retry_after_s=self._drain_s(lane))
        if (rejection := self._overload(body_bytes, guesses, expected, request_class)) is not None:
            raise detached(rejection)
        self._admitted += 1
        return self.in_flight.enter(
            {name: LaneUsage(guess.tokens, int(name == lane)) for name, guess in guesses.items()},
            body_bytes=body_bytes,
            entered_at=self._clock(),
            lane=lane,
            expected_s=expected_s,
            request_class=request_class,
        )

    def overload(
        self, body_bytes: int, request_class: RequestClass = DEFAULT_CLASS, images: int | None = None
    ) -> Overloaded | None:
        """Return the error of a request that is rejected now, and count it; None if it may enter."""
        guesses = self._estimates.guess(body_bytes, images)
        return self._overload(body_bytes, guesses, self._quickest(guesses, request_class), request_class)

    def _overload(
        self,
        body_bytes: int,
        guesses: Mapping[Lane, Estimate],
        expected: tuple[Lane, float],
        request_class: RequestClass,
    ) -> Overloaded | None:
        if not self.in_flight.total.requests:  # otherwise a wrong prediction would never be corrected
            return None
        lane, expected_s = expected
        wanted = (1, 1, sum([guess.tokens for guess in guesses.values()]), body_bytes)
        in_flight = self.in_flight.total.limited
        for place, allowed in enumerate(self._allowed):
            if in_flight[place] + wanted[place] > allowed:
                limit = LIMITS[place]
                return self._reject(limit, f"The server is at its limit of {allowed} {limit} in flight.", lane)
        if self._has_classes and (whose := self._beyond_part(in_flight, wanted, request_class)) is not None:
            return self._reject("part", f"{whose} has reached its share of the server's limit.", lane)
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
        """Set the number of inputs of a decoded request, by lane.

        Raises:
            TooLarge: The request has too many inputs.
            Overloaded: All requests together would have too many; or the request uses a lane that was not expected at
                admission, and would wait there for too long.
        """
        items, limit = sum(inputs.values()), self._config.max_request_items
        if items > limit:
            raise TooLarge(f"The request has {items} inputs; at most {limit} are accepted.", param="input")
        account, lane = self.in_flight, reservation.lane
        total, others, allowed = account.total, account.total.requests - 1, self._config.max_items
        if others and total.items + items - reservation.items > allowed:
            raise self._reject("items", f"The server is at its limit of {allowed} items in flight.", lane)
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
            name: self._delay_s(name, tokens, inputs[name], reservation.request_class, is_in_flight=True)
            for name, tokens in known.items()
        }
        for name, tokens in known.items():
            account.put(reservation, name, LaneUsage(tokens, inputs[name]))
        if others and reservation.tokens > guessed and sum(total.tokens.values()) > self._config.max_tokens:
            allowed = self._config.max_tokens
            raise self._reject("tokens", f"The server is at its limit of {allowed} tokens in flight.", lane)
        if tuple(inputs) == (lane,):
            return
        for name, expected_s in expected.items() if others else ():
            if name != lane and (rejection := self._too_late(name, expected_s, reservation.request_class)) is not None:
                raise detached(rejection)
        reservation.lane, reservation.expected_s = max(expected.items(), key=lambda pair: pair[1])

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
            self._learn(reservation, usages, self._clock() - reservation.entered_at - elsewhere_s)
        request_class, total = reservation.request_class, self.in_flight.total
        if request_class.tenant not in self.in_flight.tenants[request_class.priority]:
            for prediction in self._lanes.values():
                prediction.catch_up(request_class if total.requests else None)

    def _learn(self, reservation: Reservation, usages: Mapping[Lane, LaneUsage], took_s: float) -> None:
        computed = sum(usage.computed for usage in usages.values())
        tokens = computed + sum(usage.skipped for usage in usages.values())
        if not tokens:
            return
        # Coalesced and cached tokens waited for no device: their time says nothing about the lag of others.
        expected_s = reservation.expected_s * computed / tokens
        if share := self._estimates.device_share.value:  # the part of its tokens that it was expected to compute
            expected_s /= share
        late_s, was_alone = took_s - expected_s, reservation.was_alone
        self._lanes[reservation.lane].learn_lag(reservation.request_class, late_s, was_alone=was_alone)
        read = {name: read for name, usage in usages.items() if (read := usage.computed + usage.skipped)}
        self._estimates.learn(reservation.body_bytes, read, computed / tokens)

    def _quickest(self, guesses: Mapping[Lane, Estimate], request_class: RequestClass) -> tuple[Lane, float]:
        """Return the likely lane that would be done first with a request, and its seconds."""
        if len(guesses) == 1:
            ((lane, guess),) = guesses.items()
            return lane, self._delay_s(lane, guess.given_present, 1, request_class)
        delays = [
            (lane, self._delay_s(lane, guess.given_present, 1, request_class))
            for lane, guess in guesses.items()
            if guess.likely or not any(each.likely for each in guesses.values())  # none is likely
        ]
        return min(delays, key=lambda pair: pair[1] + self._lanes[pair[0]].lag_s(request_class))

    def _delay_s(
        self, lane: Lane, tokens: float, inputs: int, request_class: RequestClass, *, is_in_flight: bool = False
    ) -> float:
        """Return the seconds of a lane for a request and the work ahead of it."""
        priority, tenants = (
            self.in_flight.priorities[request_class.priority],
            self.in_flight.tenants[request_class.priority],
        )
        before, others_have = tokens, priority.tokens[lane]
        if (own := tenants.get(request_class.tenant)) is not None:
            before += min(own.tokens[lane], (own.requests - is_in_flight) * tokens)
            others_have -= own.tokens[lane]
        before += min(others_have, (len(tenants) - (own is not None)) * before)
        if request_class.priority is Priority.INTERACTIVE:
            before += min(self.in_flight.priorities[Priority.BULK].tokens[lane], before / INTERACTIVE_WEIGHT)
        else:
            before += min(self.in_flight.priorities[Priority.INTERACTIVE].tokens[lane], before * INTERACTIVE_WEIGHT)
        others = self.in_flight.total.requests - is_in_flight
        return self._lanes[lane].service_time.drain_s(
            before, min(self.in_flight.unprepared[lane], others * inputs) + inputs
        )

    def _too_late(self, lane: Lane, expected_s: float, request_class: RequestClass) -> Overloaded | None:
        delay_s = expected_s + self._lanes[lane].lag_s(request_class)
        if delay_s <= DELAY_MARGIN * self._config.target_delay_s:
            return None
        return self._reject("delay", f"The server is overloaded: this request would take about {delay_s:.3g} s.", lane)

    def _reject(self, limit: str, message: str, lane: Lane) -> Overloaded:
        self._count_rejection(limit)
        return Overloaded(message, retry_after_s=self._drain_s(lane))

    def _count_rejection(self, limit: str) -> None:
        self._rejected[limit] += 1
        self._rejected_at = self._clock()

    def _drain_s(self, lane: Lane) -> float:
        """Return the seconds that a lane needs for everything in flight."""
        return self._lanes[lane].service_time.drain_s(
            self.in_flight.total.tokens[lane], self.in_flight.unprepared[lane]
        )

    def expects_rejections(self) -> bool:
        """Return True if the last rejection is so recent that more are expected."""
        return bool(self._rejected) and self._clock() - self._rejected_at < EXPECTED_S

    def requests_of(self, priority: Priority) -> int:
        """Return the number of requests of a priority in flight."""
        return self.in_flight.priorities[priority].requests

    def statistics(self) -> AdmissionStatistics:
        """Return a snapshot of the amounts in flight, and of the limits."""
        total, config = self.in_flight.total, self._config
        lanes: dict[str, LaneStatistics] = {
            lane: LaneStatistics(
                tokens=round(total.tokens[lane]), drain_s=self._drain_s(lane), lag_s=prediction.most_lag_s
            )
            for lane, prediction in self._lanes.items()
        }
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
            drain_s=max(lane.drain_s for lane in lanes.values()),
            lag_s=max(lane.lag_s for lane in lanes.values()),
            bytes_per_token=self._estimates.bytes_per_token,
            tenants=sum(map(len, self.in_flight.tenants.values())),
            lanes=lanes,
        )
