"""Trial of one gateway: a steady load while replicas are killed, drained and restarted, then overload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perf.gateways.gateway import Gateway, Running
from perf.gateways.replicas import Replica
from perf.tools.checked_load import CheckedLoad, Counts, requests_of
from perf.tools.load import Load, closed_loop_rate
from perf.tools.openloop import Arrivals, ArrivalsOutcome, OpenLoop
from perf.tools.workers import worker

CLIENTS: Final = 32
"""Connections, and most requests at once."""
LOAD: Final = 0.8
"""Rate of the steady load, as a part of the measured capacity."""
OVERLOAD: Final = 2.0
"""Rate of the overload, as a part of the measured capacity."""
QUIET_S: Final = 1.0
"""Pause between two events, in seconds: the gateway's view of the replicas settles."""
TIMEOUT_S: Final = 30.0
FULL_CLIENTS: Final = 192
"""Clients of the closed loop that measures the capacity with full queues."""
MAX_CONNECTIONS: Final = 3000
POLL_S: Final = 0.01

Vectors = Mapping[str, NDArray[np.float32]]
"""Texts with their right vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Size of a trial."""

    requests: int
    """Requests of the steady load, at least."""
    warm_up_requests: int
    """Requests by which the capacity is measured."""
    overload_s: float
    """Seconds of overload. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a replica during the steady load."""

    what: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a trial."""

    gateway: str
    capacity: float
    """Answers a second of a closed loop through the gateway."""
    steady: Counts
    steady_s: float
    """Seconds of the steady load."""
    failures: Sequence[str]
    """The first requests of the steady load without an answer with 200."""
    retried: int | None
    """Requests that the gateway sent again, during the steady load; None if it does not tell."""
    events: Sequence[Event]
    overload: ArrivalsOutcome | None


def run_trial(gateway: Gateway, replicas: Sequence[Replica], vectors: Vectors, plan: Plan, folder: Path) -> Outcome:
    """Run one trial on replicas that are ready; they are ready again at its end."""
    with gateway.running([replica.port for replica in replicas], folder) as running:
        capacity = _capacity(running.port, vectors, plan)
        retried_before = gateway.retried(running)
        rate = LOAD * capacity
        with CheckedLoad(running.port, vectors, clients=CLIENTS, rate=rate, least=plan.requests) as load:
            _wait(lambda: load.sent >= plan.requests // 10)
            events = list(_events(replicas))
        retried = gateway.retried(running)
        return Outcome(
            gateway=gateway.name,
            capacity=capacity,
            steady=load.counts,
            steady_s=load.seconds,
            failures=load.notes(),
            retried=None if retried is None else retried - (retried_before or 0),
            events=events,
            overload=_overload(running, vectors, plan) if plan.overload_s else None,
        )


def _capacity(port: int, vectors: Vectors, plan: Plan) -> float:
    with CheckedLoad(port, vectors, clients=CLIENTS, least=plan.warm_up_requests) as load:
        pass
    counts = load.counts
    if counts.answers != counts.asked:
        raise RuntimeError(f"{counts.wrong} wrong and others failed before any event: {load.notes()}")
    return counts.answers / load.seconds


def _events(replicas: Sequence[Replica]) -> Iterator[Event]:
    """Kill one replica, drain another, then drain all, one after the other; restart each."""
    first, second, *_ = replicas
    started = time.perf_counter()
    steps = [("kill -9", first.kill, first), ("drain", second.drain, second)]
    steps += [("roll", replica.drain, replica) for replica in replicas]
    for what, end, replica in steps:
        began = time.perf_counter()
        end()
        replica.start()
        replica.wait_ready()
        yield Event(what=what, began_s=began - started, ended_s=time.perf_counter() - started)
        time.sleep(QUIET_S)


def _overload(running: Running, vectors: Vectors, plan: Plan) -> ArrivalsOutcome:
    """Send twice what the replicas can answer with full queues, when batches are largest."""
    requests = tuple(request.content for request in requests_of(vectors))
    full = Load(clients=FULL_CLIENTS, seconds=plan.overload_s, patience_s=TIMEOUT_S)
    arrivals = Arrivals(
        rate=OVERLOAD * closed_loop_rate(running.port, requests, full),
        seconds=plan.overload_s,
        seed=1,
        timeout_s=TIMEOUT_S,
        max_connections=MAX_CONNECTIONS,
    )
    with worker(partial(OpenLoop, running.port, requests)) as generate:
        return generate(arrivals)


def _wait(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(POLL_S)
