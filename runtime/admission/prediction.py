"""Predictions of delays: the service time of a lane, and the lag of its requests."""

from __future__ import annotations

from staged_pool.runtime.admission.accounting import RequestClass
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime
from staged_pool.stages.scheduling.tuning import LEARNING_WEIGHT


class LanePrediction:
    """The service time of a lane, and the lag of its predictions."""

    __slots__ = ("_lag_s", "_own_lag_s", "service_time")

    def __init__(self, service_time: LaneServiceTime) -> None:
        self.service_time = service_time
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

    def learn_lag(self, request_class: RequestClass, late_s: float, *, was_alone: bool) -> None:
        """Learn the lag of an answered request."""
        own_s = self.lag_s(request_class)
        self._own_lag_s[request_class] = max(0.0, own_s + LEARNING_WEIGHT * (late_s - own_s))
        if was_alone:
            lag_s = self._lag_s[request_class.priority]
            self._lag_s[request_class.priority] = max(0.0, lag_s + LEARNING_WEIGHT * (late_s - lag_s))

    def catch_up(self, request_class: RequestClass | None = None) -> None:
        """Reset the lag of a class that has nothing in flight, or of all classes."""
        if request_class is not None:
            self._own_lag_s.pop(request_class, None)
            return
        self._own_lag_s.clear()
        self._lag_s = dict.fromkeys(Priority, 0.0)
