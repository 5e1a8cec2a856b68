"""One visit: all measurements of one server in one round.

The server is started, its answers are checked, closed loops are run, and its memory is measured. Then it is started
again for the open loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import psutil

from perf.contenders.bare import BareLoop
from perf.peers.catalogue import Launch, Peer
from perf.peers.inputs import UNITS, Answers, Inputs, Scenario, agreement
from perf.peers.neighbours import busy_loops, cpu_s
from perf.tools import report
from perf.tools.load import HealthProbe, Load, LoadGenerator, LoadOutcome, ProbeOutcome
from perf.tools.openloop import Arrivals, ArrivalsOutcome, OpenLoop
from perf.tools.servers import MAX_CONNECTIONS, PREPARED, Options, Server, family, serving
from perf.tools.workers import pinned, worker

START_TIMEOUT_S: Final = 300.0
PATIENCE_S: Final = 60.0
WARM_UP_S: Final = 30.0
"""Maximum length of the warm-up in seconds; it is one request of each client."""

OPEN_SHAPE: Final[Scenario] = "s1"
MIX: Final[Mapping[Scenario, float]] = {"captions": 0.4, "images": 0.6}
"""Share of each kind of requests in a mixed load."""
MIXED_LOAD: Final = 0.8
"""Offered mixed load as a share of the capacity, as the closed loops measured it."""

TIMEOUT_S: Final = 10.0
RECOVERED_MS: Final = 250.0
"""Latency that counts as recovered after a load, the same for every server."""

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Measurements of one visit."""

    seconds: float
    """Length of one cell."""
    level_seconds: float
    """Length of one level of the open loop, and of the mixed load."""
    clients: Mapping[Scenario, tuple[int, ...]]
    levels: tuple[float, ...]
    """Rates of the open loop, as multiples of the best closed-loop rate of this visit."""
    neighbour: bool = False
    """A busy loop on each core runs during each measurement; see `busy_loops`."""

    def steps(self, peer: Peer, scenarios: tuple[Scenario, ...], inputs: Inputs) -> int:
        """Return the number of cells and levels of a visit, for a progress bar."""
        cells = sum(len(self.clients[scenario]) for scenario in scenarios if inputs.requests(peer.dialect, scenario))
        if OPEN_SHAPE in scenarios:
            return cells + len(self.levels)
        return cells + (1 if cells and set(MIX).issubset(scenarios) else 0)


@dataclass(slots=True)
class CoresUsed:
    """Mean number of cores used during a measurement; set at its end."""

    server: float = 0.0
    loops: float = 0.0
    """Cores of all `busy_loops` together."""
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """Closed loop of a number of clients."""

    load: LoadOutcome
    health: ProbeOutcome
    cores: CoresUsed

    def rate(self, scenario: Scenario) -> float:
        """Return the texts, documents or images per second."""
        return self.load.rate * UNITS[scenario]


@dataclass(frozen=True, slots=True)
class Level:
    """Open loop at one rate."""

    offered_per_s: float
    capacity_per_s: float
    outcome: ArrivalsOutcome
    health: ProbeOutcome
    cores: CoresUsed


@dataclass(slots=True)
class Visit:
    """Figures of one server in one round."""

    start_s: float = 0.0
    """Time from the start of its process to its first answer."""
    least_cosine: float = 0.0
    cells: dict[tuple[Scenario, int], Cell] = field(default_factory=dict)
    levels: dict[float, Level] = field(default_factory=dict)
    mixed: dict[Scenario, Level] = field(default_factory=dict)
    """Open loops of texts and images at the same time."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons of the cells and levels that failed."""
    processes: int = 0
    rss_mb: float = 0.0
    """Memory of all its processes after the closed loops; shared pages count in each process."""
    pss_mb: float = 0.0
    """The same, with shared pages counted once."""


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
    """Run all measurements of one server.

    Args:
        peer: The server.
        launch: Parameters of its start.
        inputs: Inputs of the model.
        scenarios: Scenarios of the model.
        plan: Measurements.
        ours: Our answers, with which its answers must agree.
        seed: Seed of the arrival times, the same for every server.
        done: Called after each cell and level.

    Raises:
        ServerFailed: The server did not start.
        Disagreement: Its answers are wrong; nothing was timed.
    """
    seen = Visit()
    with started(peer, launch) as server:
        server.wait_answer(inputs.first(peer.dialect))
        seen.start_s = server.age_s()
        seen.least_cosine = agreement(ours, inputs.answers(server, peer.dialect))
        for scenario in scenarios:
            requests = inputs.requests(peer.dialect, scenario)
            for clients in plan.clients[scenario] if requests else ():
                with _noting(seen, f"{scenario}, {clients} clients"):
                    seen.cells[scenario, clients] = _cell(server, peer, requests, clients, plan)
                done()
        if set(MIX).issubset(scenarios) and all(_most(seen, kind) for kind in MIX):
            with _noting(seen, "texts and images"):
                each = MIXED_LOAD / sum(share / _most(seen, kind) for kind, share in MIX.items())
                rates = {kind: share * each for kind, share in MIX.items()}
                seen.mixed = _levels(server, peer, inputs, rates, plan=plan, seed=seed, seen=seen)
            done()
        _weigh(server, seen)
    if plan.levels and OPEN_SHAPE in scenarios and (capacity := _most(seen, OPEN_SHAPE)):
        with _noting(seen, "open loop"), started(peer, launch, *peer.under_overload) as server:
            server.wait_answer(inputs.first(peer.dialect))
            _warm_up(server, inputs.requests(peer.dialect, OPEN_SHAPE), max(plan.clients[OPEN_SHAPE]))
            for factor in plan.levels:
                with _noting(seen, f"open loop, {factor:g}x"):
                    rates = {OPEN_SHAPE: factor * capacity}
                    found = _levels(server, peer, inputs, rates, plan=plan, seed=seed, seen=seen)
                    seen.levels[factor] = found[OPEN_SHAPE]
                done()
    return seen


def visit_bare(launch: Launch, inputs: Inputs, scenarios: tuple[Scenario, ...], *, plan: Plan) -> Visit:
    """Measure the loop without a server; its rate counts for all numbers of clients."""
    options = Options(model=str(launch.folder), dtype=launch.dtype, torch_threads=launch.torch_threads)
    seen = Visit(least_cosine=1.0)
    with worker(partial(BareLoop, options)) as loop:
        for scenario in scenarios:
            with _counting(None, neighbour=plan.neighbour) as cores:
                rate = loop(inputs.bare_load(scenario, plan.seconds))
            load = LoadOutcome([1e3 * rate.elapsed_s / rate.groups] * rate.groups, elapsed_s=rate.elapsed_s)
            cell = Cell(load, ProbeOutcome(), cores)
            seen.cells |= {(scenario, clients): cell for clients in plan.clients[scenario]}
    return seen


def started(peer: Peer, launch: Launch, *more: str) -> AbstractContextManager[Server]:
    """Start the server's process on a free port; it may still be loading. `more` is added to its command."""
    variables = {
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", **launch.variables(), **peer.variables,
    }  # fmt: skip
    launch.scratch.mkdir(parents=True, exist_ok=True)
    return serving(
        [*peer.command(launch), *more],
        folder=launch.scratch,
        variables=variables,
        without=PREPARED,  # each server as it starts for its users
        start_timeout_s=START_TIMEOUT_S,
    )


def _cell(server: Server, peer: Peer, requests: tuple[bytes, ...], clients: int, plan: Plan) -> Cell:
    with (
        worker(partial(pinned, partial(LoadGenerator, server.port, requests))) as generate,
        worker(partial(pinned, partial(HealthProbe, server.port, peer.health))) as probe,
    ):
        generate(_first_requests(clients))
        with _counting(server, neighbour=plan.neighbour) as cores:
            generate.begin(Load(clients=clients, seconds=plan.seconds, patience_s=PATIENCE_S, strict=False))
            health = probe(plan.seconds)
            outcome = generate.end()
        return Cell(outcome, health, cores)


def _warm_up(server: Server, requests: tuple[bytes, ...], clients: int) -> None:
    with worker(partial(pinned, partial(LoadGenerator, server.port, requests))) as generate:
        generate(_first_requests(clients))


def _first_requests(clients: int) -> Load:
    return Load(clients=clients, seconds=WARM_UP_S, max_requests=clients, patience_s=PATIENCE_S, strict=False)


def _levels(
    server: Server,
    peer: Peer,
    inputs: Inputs,
    rates: Mapping[Scenario, float],
    *,
    plan: Plan,
    seed: int,
    seen: Visit,
) -> dict[Scenario, Level]:
    """Run open loops of one or several kinds of requests at the same time; `rates` are requests a second."""
    with ExitStack() as running:
        offers = {
            kind: running.enter_context(
                worker(partial(pinned, partial(OpenLoop, server.port, inputs.requests(peer.dialect, kind))))
            )
            for kind in rates
        }
        probe = running.enter_context(worker(partial(pinned, partial(HealthProbe, server.port, peer.health))))
        with _counting(server, neighbour=plan.neighbour) as cores:
            for place, (kind, rate) in enumerate(rates.items()):
                offers[kind].begin(
                    Arrivals(
                        rate=rate,
                        seconds=plan.level_seconds,
                        seed=len(rates) * seed + place,
                        timeout_s=TIMEOUT_S,
                        max_connections=MAX_CONNECTIONS,
                        recovered_ms=RECOVERED_MS,
                    )
                )
            health = probe(plan.level_seconds)
            outcomes = {kind: offer.end() for kind, offer in offers.items()}
        return {
            kind: Level(rates[kind], _most(seen, kind), outcome, health, cores) for kind, outcome in outcomes.items()
        }


def _most(seen: Visit, scenario: Scenario) -> float:
    """Return the best rate of a scenario in texts or images per second."""
    return max((cell.rate(kind) for (kind, _), cell in seen.cells.items() if kind == scenario), default=0.0)


@contextmanager
def _noting(seen: Visit, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        seen.failures[what] = str(error)


@contextmanager
def _counting(server: Server | None, *, neighbour: bool) -> Iterator[CoresUsed]:
    """Measure the cores used during the block.

    Args:
        server: The server, counted with its child processes.
        neighbour: Run busy loops during the block.
    """
    found = CoresUsed()
    ours = [] if server is None else list(family(server.process.pid))
    with busy_loops(wanted=neighbour) as loops:
        began = time.perf_counter()
        before_s = cpu_s(ours), cpu_s(loops), report.others_s()
        yield found
        after_s = cpu_s(ours), cpu_s(loops), report.others_s()
        elapsed_s = time.perf_counter() - began
        found.server, found.loops, found.others = (
            max(0.0, (after - before) / elapsed_s) for before, after in zip(before_s, after_s, strict=True)
        )


def _weigh(server: Server, seen: Visit) -> None:
    for process in family(server.process.pid):
        with suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            seen.processes += 1
            seen.rss_mb += memory.rss / 1e6
            seen.pss_mb += memory.pss / 1e6
