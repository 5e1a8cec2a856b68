"""One engine process with its fronts and devices, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from perf.scale.costs import UnitCosts
from perf.scale.device_stage import DeviceStage, Request, Text, work_of
from perf.scale.devices import Device
from perf.scale.events import Credits, Events, Gathering, Station
from perf.scale.linear import Work
from perf.scale.need import Traffic
from staged_pool.runtime.config import EngineConfig

_DEFAULTS = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """An engine process with fronts, or a server of one process, with default settings."""

    costs: UnitCosts
    device: Device
    traffic: Traffic
    fronts: int
    """Fronts. 0: a server of one process."""
    preprocess_limit: int = _DEFAULTS.preprocess_limit
    chunk_items: int = _DEFAULTS.chunk_items
    credits: int = _DEFAULTS.channel_capacity
    """Lists of one front that may be on their way to the fair queue."""
    max_requests: int = _DEFAULTS.max_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """The load: Poisson arrivals, or clients that send their next request after each answer."""

    requests: int
    """Requests that arrive; then the shard ends its work."""
    per_s: float = 0.0
    """Poisson arrivals a second."""
    clients: int = 0
    """Clients of a closed loop, in place of Poisson arrivals."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Outcome of a simulation, in virtual seconds."""

    offered: int = 0
    answered: int = 0
    rejected: int = 0
    latencies_s: list[float] = field(default_factory=list)
    """Latencies of the requests that arrived after the warm-up, in order of their answers."""
    elapsed_s: float = 0.0
    """Time of the last answer."""
    batches: int = 0
    texts: int = 0
    most_in_flight: int = 0
    most_credits: int = 0
    """Largest number of credits of one front that were taken at once."""
    front_busy: float = 0.0
    """Part of the time in which the event loop of a front worked; the mean of all fronts."""
    engine_busy: float = 0.0
    device_busy: float = 0.0

    @property
    def per_s(self) -> float:
        """Requests answered a second."""
        return self.answered / self.elapsed_s

    def percentile_s(self, part: float) -> float:
        """Return the latency that this part of the requests does not exceed."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


WARM_UP = 0.1
"""Part of the requests whose latencies do not count, because the shard begins empty."""


def simulate(shard: Shard, arriving: Arriving) -> Outcome:
    """Run a shard until all requests are answered or rejected. The same arguments give the same outcome."""
    return _Run(shard, arriving).run()


class _Run:
    """One simulation.

    There: the loop of the front, admission in the engine process, preprocess, the line, the fair queue, the device.
    Back: the loop of the engine process, and the loop of the front. How a loop's cost divides between the two ways is
    not measured: half of it is taken each way.
    """

    def __init__(self, shard: Shard, arriving: Arriving) -> None:
        self._shard = shard
        self._arriving = arriving
        self._rng = random.Random(arriving.seed)
        self._events = events = Events()
        costs = shard.costs
        if shard.fronts:
            self._front_cost, self._engine_cost, preprocess = (
                costs.front_loop,
                costs.engine_loop,
                costs.front_preprocess,
            )
            self._engine = Station(events)
            self._loops = [Station(events) for _ in range(shard.fronts)]
        else:  # one loop does both, and its costs contain both
            self._front_cost, self._engine_cost, preprocess = (
                costs.one_loop,
                costs.one_loop.times(0.0),
                costs.one_preprocess,
            )
            self._engine = Station(events)
            self._loops = [self._engine]
        self._half = self._front_cost.times(0.5)
        self._credits = [Credits(shard.credits) for _ in self._loops]
        self._preprocess = [
            Gathering[Text](
                events,
                shard.preprocess_limit,
                shard.chunk_items,
                lambda texts: preprocess.of(work_of(texts)),
                partial(self._prepared, front),
            )
            for front in range(len(self._loops))
        ]
        self._device = DeviceStage(
            events,
            shard.device,
            loop=self._engine,
            batch_s=self._engine_cost.batches if shard.fronts else self._front_cost.batches,
            preparing=lambda: sum(each.preparing for each in self._preprocess),
            ready_s=lambda: max(each.call_s for each in self._preprocess),
            done=self._computed,
        )
        self._in_flight = 0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        if self._arriving.clients:
            for _ in range(min(self._arriving.clients, self._arriving.requests)):
                self._arrive()
        else:
            self._plan_arrival()
        self._events.run()
        outcome, elapsed_s = self._outcome, self._outcome.elapsed_s
        outcome.batches, outcome.texts = self._device.batches, self._device.texts
        outcome.most_credits = max(each.most_out for each in self._credits)
        outcome.front_busy = sum(loop.busy_s for loop in self._loops) / len(self._loops) / elapsed_s
        outcome.engine_busy = self._engine.busy_s / elapsed_s
        outcome.device_busy = self._device.busy_s / self._shard.device.slots / elapsed_s
        return outcome

    # ---- arrivals ----

    def _plan_arrival(self) -> None:
        if self._outcome.offered < self._arriving.requests:
            self._events.after(self._rng.expovariate(self._arriving.per_s), self._arrive_and_plan)

    def _arrive_and_plan(self) -> None:
        self._arrive()
        self._plan_arrival()

    def _arrive(self) -> None:
        number, sizes = self._outcome.offered, self._rng.choice(self._shard.traffic.sizes)
        request = Request(number, self._rng.randrange(len(self._loops)), self._events.now, len(sizes))
        self._outcome.offered += 1
        texts = [Text(request, tokens) for tokens in sizes]
        self._loops[request.front].submit(self._half.of(Work(requests=1)), lambda: self._ask(request, texts))

    def _ask(self, request: Request, texts: list[Text]) -> None:
        """Ask the engine process to admit a request; its part of the loop's cost is counted here."""
        self._engine.submit(self._engine_cost.of(Work(requests=1)), lambda: self._enter(request, texts))

    def _enter(self, request: Request, texts: list[Text]) -> None:
        if self._in_flight >= self._shard.max_requests:
            self._outcome.rejected += 1
            self._next_of_client()
            return
        self._in_flight += 1
        self._outcome.most_in_flight = max(self._outcome.most_in_flight, self._in_flight)
        chunk = self._shard.chunk_items
        for start in range(0, len(texts), chunk):
            self._preprocess[request.front].add(texts[start : start + chunk])

    # ---- the way to the device ----

    def _prepared(self, front: int, texts: list[Text]) -> None:
        """A preprocess call has ended: the front sends its texts as soon as it has a credit."""
        seconds = self._half.of(_texts_of(texts))
        self._loops[front].submit(seconds, lambda: self._credits[front].take(lambda: self._send(front, texts)))
        self._device.look()

    def _send(self, front: int, texts: list[Text]) -> None:
        seconds = self._engine_cost.times(0.5).of(_texts_of(texts))
        self._engine.submit(seconds, lambda: self._queue(front, texts))

    def _queue(self, front: int, texts: list[Text]) -> None:
        self._credits[front].give_back()
        self._device.add(texts)

    # ---- the way back ----

    def _computed(self, texts: Sequence[Text]) -> None:
        """A forward has ended: the engine process sends its rows to each front that has some."""
        seconds = self._engine_cost.times(0.5).of(_texts_of(texts))
        self._engine.submit(seconds, lambda: self._give(texts))

    def _give(self, texts: Sequence[Text]) -> None:
        by_front = sorted(texts, key=lambda text: text.ticket.front)
        for front, own in groupby(by_front, key=lambda text: text.ticket.front):
            rows = list(own)
            batch_s = self._front_cost.batches if self._shard.fronts else 0.0  # one loop: it is counted above
            seconds = batch_s + self._half.of(_texts_of(rows))
            self._loops[front].submit(seconds, partial(self._take_rows, front, rows))

    def _take_rows(self, front: int, rows: Iterable[Text]) -> None:
        for row in rows:
            row.ticket.left -= 1
            if not row.ticket.left:
                seconds = self._half.of(Work(requests=1))
                self._loops[front].submit(seconds, partial(self._answer, row.ticket))

    def _answer(self, request: Request) -> None:
        self._in_flight -= 1
        self._outcome.answered += 1
        self._outcome.elapsed_s = self._events.now
        if request.number >= WARM_UP * self._arriving.requests:
            self._outcome.latencies_s.append(self._events.now - request.arrived_at)
        self._next_of_client()

    def _next_of_client(self) -> None:
        if self._arriving.clients and self._outcome.offered < self._arriving.requests:
            self._arrive()


def _texts_of(texts: Sequence[Text]) -> Work:
    """Return the texts and tokens of a list, without the batch that it may be."""
    return Work(texts=len(texts), tokens=sum(text.tokens for text in texts))
