"""One visit to one server: it is started, asked whether it is right, loaded in every way, weighed, and ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import psutil

from perf import report
from perf.load import HealthProbe, Load, LoadGenerator, LoadOutcome, ProbeOutcome
from perf.openloop import Arrivals, ArrivalsOutcome, OpenLoop
from perf.peers.catalogue import Launch, Peer
from perf.peers.inputs import UNITS, Answers, Inputs, Scenario, agreement
from perf.servers import Server, family, serving
from perf.workers import worker

START_TIMEOUT_S: Final = 300.0
PATIENCE_S: Final = 60.0
WARM_UP_S: Final = 30.0
"""At most; it is one request of each client."""

OPEN_SHAPE: Final[Scenario] = "s1"
TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 800
RECOVERED_MS: Final = 250.0
"""What counts as quick again after a load, for every server alike."""

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done in one visit."""

    seconds: float
    """Of one cell, and of one level of the open loop."""
    clients: Mapping[Scenario, tuple[int, ...]]
    levels: tuple[float, ...]
    """Of the open loop: multiples of the most that the server did in the closed one, in this visit."""

    def steps(self, peer: Peer, scenarios: tuple[Scenario, ...], inputs: Inputs) -> int:
        """Cells and levels of a visit, for a bar of progress."""
        cells = sum(len(self.clients[scenario]) for scenario in scenarios if inputs.requests(peer.dialect, scenario))
        return cells + (len(self.levels) if OPEN_SHAPE in scenarios else 0)


@dataclass(frozen=True, slots=True)
class Cell:
    """A closed loop of so many clients."""

    load: LoadOutcome
    health: ProbeOutcome
    others_cores: float

    def rate(self, scenario: Scenario) -> float:
        """Texts, documents or pictures per second."""
        return len(self.load.latencies_ms) * UNITS[scenario] / self.load.elapsed_s


@dataclass(frozen=True, slots=True)
class Level:
    """An open loop at one rate."""

    offered_per_s: float
    capacity_per_s: float
    outcome: ArrivalsOutcome
    health: ProbeOutcome
    others_cores: float


@dataclass(slots=True)
class Visit:
    """What was seen of one server in one round."""

    start_s: float = 0.0
    """From the start of its process to its first answer."""
    least_cosine: float = 0.0
    cells: dict[tuple[Scenario, int], Cell] = field(default_factory=dict)
    levels: dict[float, Level] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Cells and levels that came to nothing, and why."""
    processes: int = 0
    rss_mb: float = 0.0
    """After the loads, of all its processes; what they share is counted in each."""
    pss_mb: float = 0.0
    """Likewise, what they share counted once."""


def visit(
    peer: Peer,
    launch: Launch,
    inputs: Inputs,
    scenarios: tuple[Scenario, ...],
    *,
    plan: Plan,
    ours: Answers,
    seed: int,
    done: Callable[[], None],
) -> Visit:
    """Make one.

    Args:
        ours: What its answers have to agree with.
        seed: Of the times of arrivals: the same for every server.
        done: Called after each cell and level.

    Raises:
        ServerFailed: It did not start.
        Disagreement: It computes something else; nothing was timed.
    """
    seen = Visit()
    with started(peer, launch) as server:
        server.wait_answer(inputs.first(peer.dialect))
        seen.start_s = server.age_s()
        seen.least_cosine = agreement(ours, inputs.answers(server, peer.dialect))
        for scenario in scenarios:
            requests = inputs.requests(peer.dialect, scenario)
            for clients in plan.clients[scenario] if requests else ():
                try:
                    seen.cells[scenario, clients] = _cell(server, peer, requests, clients, plan.seconds)
                except RuntimeError as error:
                    seen.failures[f"{scenario}, {clients} clients"] = str(error)
                done()
        if OPEN_SHAPE in scenarios:
            rates = [cell.rate(OPEN_SHAPE) for (scenario, _), cell in seen.cells.items() if scenario == OPEN_SHAPE]
            capacity, requests = max(rates, default=0.0), inputs.requests(peer.dialect, OPEN_SHAPE)
            for factor in plan.levels if capacity else ():
                arrivals = Arrivals(
                    rate=factor * capacity,
                    seconds=plan.seconds,
                    seed=seed,
                    timeout_s=TIMEOUT_S,
                    max_connections=MAX_CONNECTIONS,
                    recovered_ms=RECOVERED_MS,
                )
                try:
                    seen.levels[factor] = _level(server, peer, requests, arrivals, capacity)
                except RuntimeError as error:
                    seen.failures[f"open loop, {factor:g}x"] = str(error)
                done()
        _weigh(server, seen)
    return seen


def started(peer: Peer, launch: Launch) -> AbstractContextManager[Server]:
    """The server's process, on a free port; it may still be loading."""
    variables = {
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", **launch.variables(), **peer.variables,
    }  # fmt: skip
    launch.scratch.mkdir(parents=True, exist_ok=True)
    return serving(peer.command(launch), folder=launch.scratch, variables=variables, start_timeout_s=START_TIMEOUT_S)


def _cell(server: Server, peer: Peer, requests: tuple[bytes, ...], clients: int, seconds: float) -> Cell:
    with (
        worker(partial(_pinned, partial(LoadGenerator, server.port, requests))) as generate,
        worker(partial(_pinned, partial(HealthProbe, server.port, peer.health))) as probe,
    ):
        generate(Load(clients=clients, seconds=WARM_UP_S, max_requests=clients, patience_s=PATIENCE_S, strict=False))
        with _beside() as others:
            generate.begin(Load(clients=clients, seconds=seconds, patience_s=PATIENCE_S, strict=False))
            health = probe(seconds)
            outcome = generate.end()
        return Cell(outcome, health, others[0])


def _level(server: Server, peer: Peer, requests: tuple[bytes, ...], arrivals: Arrivals, capacity_per_s: float) -> Level:
    with (
        worker(partial(_pinned, partial(OpenLoop, server.port, requests))) as offer,
        worker(partial(_pinned, partial(HealthProbe, server.port, peer.health))) as probe,
    ):
        with _beside() as others:
            offer.begin(arrivals)
            health = probe(arrivals.seconds)
            outcome = offer.end()
        return Level(arrivals.rate, capacity_per_s, outcome, health, others[0])


def _pinned(make: Callable[[], Callable[[A], R]]) -> Callable[[A], R]:
    """Keep this process, a client, to one core: what it takes of the machine is the same for every server."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return make()


@contextmanager
def _beside() -> Iterator[list[float]]:
    """Gives a list that holds, after the block, how many cores other processes took meanwhile."""
    found: list[float] = []
    started, before_s = time.perf_counter(), report.others_s()
    yield found
    found.append(max(0.0, (report.others_s() - before_s) / (time.perf_counter() - started)))


def _weigh(server: Server, seen: Visit) -> None:
    for process in family(server.process.pid):
        with suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            seen.processes += 1
            seen.rss_mb += memory.rss / 1e6
            seen.pss_mb += memory.pss / 1e6
