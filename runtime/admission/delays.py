"""Delays of requests, predicted by lane, and learned from those that were answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from staged_pool.runtime.admission.accounting import InFlight, LaneUsage, RequestClass, Reservation
from staged_pool.runtime.admission.estimates import Estimate, Estimates
from staged_pool.runtime.admission.prediction import LanePrediction
from staged_pool.runtime.card import Lane
from staged_pool.runtime.statistics import LaneStatistics
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.scheduling.tuning import INTERACTIVE_WEIGHT


class Delays:
    """Delays of the requests of one engine.

    Args:
        service_times: Service time of each lane of the model.
        in_flight: The requests in flight.
        estimates: Estimates of what a request holds.
        target_s: Target delay, in seconds.
    """

    def __init__(
        self,
        service_times: Mapping[Lane, LaneServiceTime],
        in_flight: InFlight,
        estimates: Estimates,
        target_s: float,
    ) -> None:
        self.lanes: Final = {lane: LanePrediction(time, target_s) for lane, time in service_times.items()}
        self._in_flight = in_flight
        self._estimates = estimates

    def lag_s(self, lane: Lane, request_class: RequestClass) -> float:
        """Return the expected lag of a request in a lane, in seconds; see `LanePrediction`."""
        return self.lanes[lane].lag_s(request_class)

    def are_known(self, lane: Lane) -> bool:
        """Return True if the delays of a lane can be predicted: it has run a batch."""
        return self.lanes[lane].service_time.is_known

    def quickest(self, guesses: Mapping[Lane, Estimate], request_class: RequestClass) -> tuple[Lane, float]:
        """Return the likely lane that would be done first with a request, and its seconds."""
        if len(guesses) == 1:
            ((lane, guess),) = guesses.items()
            return lane, self.delay_s(lane, guess.given_present, 1, request_class)
        delays = [
            (lane, self.delay_s(lane, guess.given_present, 1, request_class))
            for lane, guess in guesses.items()
            if guess.likely or not any(each.likely for each in guesses.values())  # none is likely
        ]
        return min(delays, key=lambda pair: pair[1] + self.lag_s(pair[0], request_class))

    def delay_s(
        self, lane: Lane, tokens: float, inputs: int, request_class: RequestClass, *, is_in_flight: bool = False
    ) -> float:
        """Return the seconds of a lane for a request and the work ahead of it."""
        priority, tenants = (
            self._in_flight.priorities[request_class.priority],
            self._in_flight.tenants[request_class.priority],
        )
        before, others_have = tokens, priority.whole(lane)
        if (own := tenants.get(request_class.tenant)) is not None:
            before += min(own.whole(lane), (own.requests - is_in_flight) * tokens)
            others_have -= own.whole(lane)
        before += min(others_have, (len(tenants) - (own is not None)) * before)
        if request_class.priority is Priority.INTERACTIVE:
            before += min(self._in_flight.priorities[Priority.BULK].whole(lane), before / INTERACTIVE_WEIGHT)
        else:
            before += min(self._in_flight.priorities[Priority.INTERACTIVE].whole(lane), before * INTERACTIVE_WEIGHT)
        others = self._in_flight.total.requests - is_in_flight
        return self.lanes[lane].service_time.drain_s(
            before, min(self._in_flight.unprepared[lane], others * inputs) + inputs, others + 1
        )

    def drain_s(self, lane: Lane) -> float:
        """Return the seconds that a lane needs for everything in flight."""
        return self.lanes[lane].service_time.drain_s(
            self._in_flight.total.tokens[lane], self._in_flight.unprepared[lane], self._in_flight.total.requests
        )

    def statistics(self) -> dict[str, LaneStatistics]:
        """Return a snapshot of all lanes."""
        return {
            name: LaneStatistics(
                tokens=round(self._in_flight.total.tokens[name]),
                drain_s=self.drain_s(name),
                lag_s=lane.most_lag_s,
                headroom_s=lane.most_headroom_s,
                rejected=dict(lane.rejected),
            )
            for name, lane in self.lanes.items()
        }

    def learn(self, reservation: Reservation, usages: Mapping[Lane, LaneUsage], took_s: float) -> None:
        """Learn from an answered request: its lag, and the tokens of a body of its size.

        Args:
            reservation: The account of the request.
            usages: Its amounts by lane.
            took_s: Seconds from its arrival to its answer.
        """
        computed = sum(usage.computed for usage in usages.values())
        tokens = computed + sum(usage.skipped for usage in usages.values())
        if not tokens:
            return
        # Coalesced and cached tokens waited for no device: their time says nothing about the lag of others.
        expected_s = reservation.expected_s * computed / tokens
        if share := self._estimates.device_share.value:  # the part of its tokens that it was expected to compute
            expected_s /= share
        if reservation.is_predicted:
            late_s, was_alone = took_s - expected_s, reservation.was_alone
            lane = self.lanes[reservation.lane]
            lane.learn_lag(reservation.request_class, late_s, was_alone=was_alone)
            lane.learn_headroom(reservation.request_class, took_s, reservation.headroom_s)
        read = {name: read for name, usage in usages.items() if (read := usage.computed + usage.skipped)}
        self._estimates.learn(reservation.body_bytes, read, computed / tokens)

    def catch_up(self, request_class: RequestClass) -> None:
        """Reset the lags of a class that has nothing in flight; all lags if nothing at all is."""
        if request_class.tenant not in self._in_flight.tenants[request_class.priority]:
            for prediction in self.lanes.values():
                prediction.catch_up(request_class if self._in_flight.total.requests else None)
