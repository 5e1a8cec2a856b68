"""Predictions of delays: the service time of a lane, and the lag of its requests."""

from __future__ import annotations

from collections import Counter

from staged_pool.runtime.admission.accounting import RequestClass
from staged_pool.runtime.card import Lane
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.scheduling.tuning import LATE_SHARE, LEARNING_WEIGHT


class Headroom:
    """Seconds between the largest accepted prediction and the target delay.

    Predictions are right on average only. An answer beyond the target raises the headroom to its excess, and each one
    in time lowers it a little. So it is 0 while all answers are in time, however near the target they are.
    """

    __slots__ = ("_target_s", "seconds")

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self.seconds = 0.0

    def learn(self, took_s: float, admitted_with_s: float) -> None:
        """Learn from an answer. Its request was admitted with a headroom, so its excess is not counted twice."""
        if took_s > self._target_s:
            most_s = self._target_s / 2  # a stall of the machine says nothing of predictions: it must not shut the door
            self.seconds = max(self.seconds, min(most_s, admitted_with_s + took_s - self._target_s))
        else:
            self.seconds *= 1.0 - LATE_SHARE


class LanePrediction:
    """Service time of a lane, lag of its predictions, and the headroom for them.

    Args:
        service_time: Service time of the lane.
        target_s: Target delay, in seconds.
    """

    __slots__ = ("_headroom", "_lag_s", "_own_lag_s", "_target_s", "rejected", "service_time")

    def __init__(self, service_time: LaneServiceTime, target_s: float) -> None:
        self.service_time = service_time
        self._target_s = target_s
        self._headroom: dict[RequestClass, Headroom] = {}
        """Headroom by class, so that late answers of one keep no other out."""
        self.rejected: Counter[str] = Counter()
        """Requests rejected for their predicted delay, by what made it too long: `work` or `lag`."""
        self._lag_s = dict.fromkeys(Priority, 0.0)
        """Mean lag by priority, in seconds, of requests whose tenant had nothing else in flight.

        The lag is the time beyond the prediction.
        """
        self._own_lag_s: dict[RequestClass, float] = {}
        """Mean lag by class, in seconds, of all requests of a tenant. They wait for each other, so others lag less."""

    def lag_s(self, request_class: RequestClass) -> float:
        """Return the expected lag of a request, in seconds."""
        return self._own_lag_s.get(request_class, self._lag_s[request_class.priority])

    @property
    def most_lag_s(self) -> float:
        """Largest lag of all classes, in seconds."""
        return max(*self._lag_s.values(), *self._own_lag_s.values())

    def headroom_s(self, request_class: RequestClass) -> float:
        """Return the seconds between the largest accepted prediction of a class and the target delay."""
        headroom = self._headroom.get(request_class)
        return 0.0 if headroom is None else headroom.seconds

    @property
    def most_headroom_s(self) -> float:
        """Largest headroom of all classes, in seconds."""
        return max([headroom.seconds for headroom in self._headroom.values()], default=0.0)

    def learn_headroom(self, request_class: RequestClass, took_s: float, admitted_with_s: float) -> None:
        """Learn from an answered request; see `Headroom.learn`."""
        if (headroom := self._headroom.get(request_class)) is None:
            if took_s <= self._target_s:
                return
            headroom = self._headroom[request_class] = Headroom(self._target_s)
        headroom.learn(took_s, admitted_with_s)

    def learn_lag(self, request_class: RequestClass, late_s: float, *, was_alone: bool) -> None:
        """Learn the lag of an answered request."""
        own_s = self.lag_s(request_class)
        self._own_lag_s[request_class] = max(0.0, own_s + LEARNING_WEIGHT * (late_s - own_s))
        if was_alone:
            lag_s = self._lag_s[request_class.priority]
            self._lag_s[request_class.priority] = max(0.0, lag_s + LEARNING_WEIGHT * (late_s - lag_s))

    def catch_up(self, request_class: RequestClass | None = None) -> None:
        """Reset lag and headroom of a class with nothing in flight, or of all."""
        if request_class is not None:
            self._own_lag_s.pop(request_class, None)
            self._headroom.pop(request_class, None)
            return
        self._own_lag_s.clear()
        self._headroom.clear()
        self._lag_s = dict.fromkeys(Priority, 0.0)


def cause_of(expected_s: float, most_s: float) -> str:
    """Return what makes a delay longer than `most_s`; see `LaneStatistics.rejected`."""
    return "work" if expected_s > most_s else "lag"


def in_words(lane: Lane, expected_s: float, lag_s: float) -> str:
    """Return a predicted delay and its parts, for the message to a caller."""
    return (
        f"about {expected_s + lag_s:.3g} s ({expected_s:.3g} s for the work of the lane `{lane}` ahead of it and its "
        f"own, and {lag_s:.3g} s by which recent ones were later than predicted)"
    )
