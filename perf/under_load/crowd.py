"""Latency of one short text beside few and beside many large requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

import anyio

from perf.tools import report
from perf.tools.servers import Options
from perf.tools.workers import worker
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine

FEW, MANY = 8, 100
"""Large requests, each in a closed loop of its own."""
TEXTS: Final = 250
"""Texts of a large request."""
TENANTS: Final[dict[str, Hashable]] = {"no tenant": None, "a tenant": "small"}
"""Tenant of the short text; the large requests have none."""
TARGET_DELAY_S: Final = 1000.0
"""Target delay in seconds, so high that nothing is rejected."""
SETTLE_S: Final = 2.5
"""Seconds that the large requests have before the first short text."""

AIM: Final = 2.0
"""Target ratio of the latency beside many large requests to that beside few."""

COLUMNS: Final = ("one short text of, beside", "p50 ms", "p99", "max", "n")


@dataclass(frozen=True, slots=True)
class Crowd:
    """Load beside which short texts are timed, one after the other."""

    large: int
    """Number of large requests in closed loops."""
    tenant: Hashable
    """Tenant of the short texts."""
    calls: int
    """Number of short texts that are timed."""
    settle_s: float = SETTLE_S


class CrowdedEngine:
    """Engine in this process; a call measures short texts beside one crowd.

    Args:
        options: The model and its event loop.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, crowd: Crowd) -> list[float]:
        """Return the latency of each short text, in milliseconds."""
        times_ms: list[float] = anyio.run(partial(self._measure, crowd), backend=self._options.backend)
        return times_ms

    async def _measure(self, crowd: Crowd) -> list[float]:
        config = EngineConfig(
            model=self._options.model,
            dtype=self._options.dtype,
            torch_threads=self._options.torch_threads,
            target_delay_s=TARGET_DELAY_S,
        )
        times_ms: list[float] = []
        async with open_engine(config) as engine:
            await engine.embed([f"a text to warm up with, number {place}" for place in range(64)])
            async with anyio.create_task_group() as others:
                for number in range(crowd.large):
                    others.start_soon(_large, engine, number)
                await anyio.sleep(crowd.settle_s)
                for place in range(crowd.calls):
                    began = time.perf_counter()
                    await engine.embed(f"one short text, number {place}", tenant=crowd.tenant)
                    times_ms.append((time.perf_counter() - began) * 1e3)
                others.cancel_scope.cancel()
        return times_ms


def run(options: Options, *, rounds: int, calls: int) -> None:
    """Measure, print and record: each round has few and many large requests, for each tenant."""
    settings = {"options": options, "rounds": rounds, "calls": calls, "few": FEW, "many": MANY, "texts": TEXTS}
    cases = list(product(TENANTS, (FEW, MANY)))
    times_ms: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    ratios: dict[str, list[float]] = {whose: [] for whose in TENANTS}
    with report.recording("crowd", settings) as record, report.progress("crowd", rounds * len(cases)) as bar:
        with worker(partial(CrowdedEngine, options)) as beside:
            for round_number in range(rounds):
                medians = {}
                for whose, large in cases[:: -1 if round_number % 2 else 1]:
                    found = beside(Crowd(large, TENANTS[whose], calls))
                    times_ms[whose, large] += found
                    medians[whose, large] = statistics.median(found)
                    bar.advance(bar.task_ids[0])
                for whose, each in ratios.items():
                    each.append(medians[whose, MANY] / medians[whose, FEW])
        summaries = {f"{whose}, {large} large": report.Summary.of(each) for (whose, large), each in times_ms.items()}
        rows = [[name, *report.Summary.cells(summary)] for name, summary in summaries.items()]
        report.show_table(f"Beside requests of {TEXTS} texts, in closed loops", COLUMNS, rows)
        record.results |= {**summaries, "ratios": ratios}
        for whose, each in ratios.items():
            name = f"p50 of one text of {whose} beside {MANY}, of that beside {FEW}, median of the rounds"
            record.show_target(name, statistics.median(each), AIM, "times")


async def _large(engine: Engine, number: int) -> None:
    while True:
        await engine.embed([f"{number} text number {place} of several words to embed" for place in range(TEXTS)])
