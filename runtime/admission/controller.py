"""Admission: how much may be inside the engine, decided for a whole request before any work is done on it.

Limits on requests, items, tokens and bytes bound the memory. Delay bounds the wait: a request is rejected if the engine
would not get to it within the target. The delay is predicted from what goes before the request in its lane and from the
measured service time, and corrected by how far recent predictions were from what happened. So a bottleneck elsewhere,
such as an event loop with too much to do, counts too.

The lane of a request is known at the door only where its bytes show it; else it is what bodies of its size have turned
out to be. Where that leaves a choice, the door believes in the quicker lane. The request is judged again when it has
been decoded.

The delay is predicted by the rules of `stages/scheduling/fair_queue.py`. Of its own tenant's requests each gets no more
than a new one does until that is done. Each other tenant gets no more than its own does meanwhile. Interactive and bulk
work get no more of each other's time than their weights say.
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
    Usage,
)
from staged_pool.runtime.admission.estimates import Estimate, Estimates
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Lane
from staged_pool.runtime.statistics import AdmissionStatistics, LaneStatistics
from staged_pool.stages.errors import DeadlineExceeded, Overloaded, TooLarge, detached
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.scheduling.tuning import DELAY_MARGIN, INTERACTIVE_WEIGHT, LEARNING_WEIGHT, TIMES_FREE

EXPECTED_S: Final = 0.1
"""Seconds after a rejection for which more are expected: at twice what can be served, one comes every millisecond."""


class _LanePrediction:
    """The service time of a lane, and how far predictions by it were off."""

    __slots__ = ("_lag_s", "_own_lag_s", "service_time")

    def __init__(self, service_time: LaneServiceTime) -> None:
        self.service_time = service_time
        self._lag_s = dict.fromkeys(Priority, 0.0)
        """Seconds that recent requests of a priority have taken beyond the prediction, of those that came alone."""
        self._own_lag_s: dict[RequestClass, float] = {}
        """The same of those whose tenant had others inside. They waited for each other: nobody else is so late."""

    def lag_s(self, of: RequestClass) -> float:
        """Return the seconds that a request will take beyond the prediction, as far as recent ones tell."""
        return self._own_lag_s.get(of, self._lag_s[of.priority])

    @property
    def most_lag_s(self) -> float:
        return max(*self._lag_s.values(), *self._own_lag_s.values())

    def learn_lag(self, of: RequestClass, late_s: float, *, came_alone: bool) -> None:
        """Learn from a request that has taken so many seconds beyond the prediction."""
        own_s = self.lag_s(of)
        self._own_lag_s[of] = max(0.0, own_s + LEARNING_WEIGHT * (late_s - own_s))
        if came_alone:
            lag_s = self._lag_s[of.priority]
            self._lag_s[of.priority] = max(0.0, lag_s + LEARNING_WEIGHT * (late_s - lag_s))

    def catch_up(self, of: RequestClass | None = None) -> None:
        """Note that nothing of a class is inside any more, or nothing at all."""
        if of is not None:
            self._own_lag_s.pop(of, None)
            return
        self._own_lag_s.clear()
        self._lag_s = dict.fromkeys(Priority, 0.0)


class Admission:
    """Counts what is inside, and rejects what would exceed a limit. Never waits.

    Args:
        config: The limits.
        service_times: Of each lane that the model has, measured elsewhere.
        fed_limits: Tokens of each lane that preprocess and the device hold at most.
        clock: Of the stages, in seconds.
        input_tokens: Most tokens of one text: longer ones are cut or rejected.
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
        self._lanes = {lane: _LanePrediction(service_time) for lane, service_time in service_times.items()}
        self._estimates = Estimates(tuple(service_times))
        self.in_flight = InFlight(fed_limits, self._estimates)
        self._admitted = 0
        self._rejected: Counter[str] = Counter()
        """Since the start, by limit."""
        self._rejected_at = 0.0
        """Time of the last rejection."""
        self._allowed = (config.max_requests, config.max_items, config.max_tokens, config.max_bytes)
        self._has_classes = False
        """A tenant with a name, or bulk work, has asked: requests of none must leave room to others then, too."""

    def enter(
        self, *, body_bytes: int, timeout_s: float, of: RequestClass = DEFAULT_CLASS, images: int | None = None
    ) -> Reservation:
        """Let a request in.

        Args:
            body_bytes: Size of what it sent; its tokens are estimated from it.
            timeout_s: Seconds that its caller gives it.
            of: Who asks.
            images: Images that the bytes of the request show. None: not known.

        Raises:
            Overloaded: A limit is reached; nothing was counted.
            DeadlineExceeded: It could not be answered in time; nothing was counted.
            TooLarge: It exceeds a limit by itself.
        """
        if body_bytes > self._config.max_bytes:
            raise TooLarge(f"The request has {body_bytes} bytes; at most {self._config.max_bytes} are accepted.")
        self._has_classes = self._has_classes or of != DEFAULT_CLASS
        guesses = self._estimates.guess(body_bytes, images)
        lane, expected_s = expected = self._quickest(guesses, of)
        takes_s = expected_s + self._lanes[lane].lag_s(of)
        if self.in_flight.total.requests and takes_s > timeout_s:
            self._count_rejection("deadline")
            message = f"The request would take about {takes_s:.3g} s: longer than its deadline allows."
            raise DeadlineExceeded(message, stage="door", retry_after_s=self._drain_s(lane))
        if (rejection := self._overload(body_bytes, guesses, expected, of)) is not None:
            raise detached(rejection)
        self._admitted += 1
        return self.in_flight.enter(
            {name: LaneUsage(guess.tokens, int(name == lane)) for name, guess in guesses.items()},
            body_bytes=body_bytes,
            entered_at=self._clock(),
            lane=lane,
            expected_s=expected_s,
            of=of,
        )

    def overload(
        self, body_bytes: int, of: RequestClass = DEFAULT_CLASS, images: int | None = None
    ) -> Overloaded | None:
        """The error of a request that is rejected now, and counted as rejected; None if it may enter."""
        guesses = self._estimates.guess(body_bytes, images)
        return self._overload(body_bytes, guesses, self._quickest(guesses, of), of)

    def _overload(
        self, body_bytes: int, guesses: Mapping[Lane, Estimate], expected: tuple[Lane, float], of: RequestClass
    ) -> Overloaded | None:
        if not self.in_flight.total.requests:  # its predictions would never be put right otherwise
            return None
        lane, expected_s = expected
        wanted = (1, 1, sum([guess.tokens for guess in guesses.values()]), body_bytes)
        inside = self.in_flight.total.limited
        for place, allowed in enumerate(self._allowed):
            if inside[place] + wanted[place] > allowed:
                limit = LIMITS[place]
                return self._reject(limit, f"The server is at its limit of {allowed} {limit} in flight.", lane)
        if self._has_classes and (whose := self._beyond_part(inside, wanted, of)) is not None:
            return self._reject("part", f"{whose} takes up its part of what the server has in flight at most.", lane)
        return self._too_late(lane, expected_s, of)

    def _beyond_part(self, inside: Sequence[float], wanted: Sequence[float], of: RequestClass) -> str | None:
        """Name bulk work, or the tenant, if it would have more of a limit than its part. None: neither would.

        The part is `TIMES_FREE` times what it leaves free, so that whoever comes next always finds some room.
        """
        tenant = [usage[of.tenant] for usage in self.in_flight.tenants.values() if of.tenant in usage]
        parts: dict[str, list[Usage]] = {"This caller": tenant}
        if of.priority is Priority.BULK:
            parts = {"Bulk work": [self.in_flight.priorities[Priority.BULK]], **parts}
        for whose, usages in parts.items():
            for place, (allowed, has, more) in enumerate(zip(self._allowed, inside, wanted, strict=True)):
                own = sum([usage.limited[place] for usage in usages])
                if own and own + more > TIMES_FREE * (allowed - has - more):
                    return whose
        return None

    def count_items(self, reservation: Reservation, inputs: Mapping[Lane, int]) -> None:
        """A request that is inside turned out to have so many items of each lane.

        Raises:
            TooLarge: More than one request may have.
            Overloaded: All requests together would have too many; or it uses a lane that the door did not judge it by,
                and would wait there for too long.
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
            # As it was guessed: there is nothing better to estimate by.
            account.divide(reservation, "text", items, self._input_tokens)
            return
        guessed = reservation.tokens
        for name in list(reservation.lanes):
            account.take(reservation, name)
        known = self._estimates.known(reservation.body_bytes, inputs)
        expected = {
            name: self._delay_s(name, tokens, inputs[name], reservation.of, is_inside=True)
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
            if name != lane and (rejection := self._too_late(name, expected_s, reservation.of)) is not None:
                raise detached(rejection)
        reservation.lane, reservation.expected_s = max(expected.items(), key=lambda pair: pair[1])

    def leave(self, reservation: Reservation, *, answered: bool = False, elsewhere_s: float = 0.0) -> None:
        """Give back what `enter` took.

        Args:
            answered: Estimates are learned from what it turned out to have.
            elsewhere_s: Seconds that it waited for what is not the engine's.
        """
        usages = dict(reservation.lanes)
        self.in_flight.leave(reservation)
        if answered:
            self._learn(reservation, usages, self._clock() - reservation.entered_at - elsewhere_s)
        of, total = reservation.of, self.in_flight.total
        if of.tenant not in self.in_flight.tenants[of.priority]:
            for prediction in self._lanes.values():
                prediction.catch_up(of if total.requests else None)

    def _learn(self, reservation: Reservation, usages: Mapping[Lane, LaneUsage], took_s: float) -> None:
        computed = sum(usage.computed for usage in usages.values())
        tokens = computed + sum(usage.spared for usage in usages.values())
        if not tokens:
            return
        # What was spared waited for no device: quick as it is, it says nothing of how late the others are.
        expected_s = reservation.expected_s * computed / tokens
        if share := self._estimates.device_share.value:  # what it was expected to compute of what it has
            expected_s /= share
        late_s, came_alone = took_s - expected_s, reservation.came_alone
        self._lanes[reservation.lane].learn_lag(reservation.of, late_s, came_alone=came_alone)
        read = {name: read for name, usage in usages.items() if (read := usage.computed + usage.spared)}
        self._estimates.learn(reservation.body_bytes, read, computed / tokens)

    def _quickest(self, guesses: Mapping[Lane, Estimate], of: RequestClass) -> tuple[Lane, float]:
        """The lane that would be done first with a request, of those that it may well use; and in how many seconds."""
        if len(guesses) == 1:
            ((lane, guess),) = guesses.items()
            return lane, self._delay_s(lane, guess.given_present, 1, of)
        delays = [
            (lane, self._delay_s(lane, guess.given_present, 1, of))
            for lane, guess in guesses.items()
            if guess.likely or not any(each.likely for each in guesses.values())  # such bodies have held nothing so far
        ]
        return min(delays, key=lambda pair: pair[1] + self._lanes[pair[0]].lag_s(of))

    def _delay_s(self, lane: Lane, tokens: float, inputs: int, of: RequestClass, *, is_inside: bool = False) -> float:
        """Seconds that a request of so many tokens would take in a lane, with what goes before it."""
        priority, tenants = self.in_flight.priorities[of.priority], self.in_flight.tenants[of.priority]
        before, others_have = tokens, priority.tokens[lane]
        if (own := tenants.get(of.tenant)) is not None:
            before += min(own.tokens[lane], (own.requests - is_inside) * tokens)
            others_have -= own.tokens[lane]
        before += min(others_have, (len(tenants) - (own is not None)) * before)
        if of.priority is Priority.INTERACTIVE:
            before += min(self.in_flight.priorities[Priority.BULK].tokens[lane], before / INTERACTIVE_WEIGHT)
        else:
            before += min(self.in_flight.priorities[Priority.INTERACTIVE].tokens[lane], before * INTERACTIVE_WEIGHT)
        others = self.in_flight.total.requests - is_inside
        return self._lanes[lane].service_time.drain_s(
            before, min(self.in_flight.unprepared[lane], others * inputs) + inputs
        )

    def _too_late(self, lane: Lane, expected_s: float, of: RequestClass) -> Overloaded | None:
        delay_s = expected_s + self._lanes[lane].lag_s(of)
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
        """Seconds that a lane needs for all that is inside."""
        return self._lanes[lane].service_time.drain_s(
            self.in_flight.total.tokens[lane], self.in_flight.unprepared[lane]
        )

    def expects_rejections(self) -> bool:
        """The last rejection is so recent that more are expected."""
        return bool(self._rejected) and self._clock() - self._rejected_at < EXPECTED_S

    def requests_of(self, priority: Priority) -> int:
        """Inside."""
        return self.in_flight.priorities[priority].requests

    def statistics(self) -> AdmissionStatistics:
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
