"""A measurement from its first request to its report: probing, levels, and an end at any time."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

import anyio
import numpy as np

from staged_pool.api.bench.address import Address
from staged_pool.api.bench.connection import Connection, HttpConnection
from staged_pool.api.bench.level import Level, Plan, statuses
from staged_pool.api.bench.load import Limits
from staged_pool.api.bench.probe import Findings, Probe
from staged_pool.api.bench.replay import TraceMaker
from staged_pool.api.bench.server_work import read_work, work_between
from staged_pool.api.bench.sweep import FoundRates, GivenRates, Sweep, Tried, held, knee
from staged_pool.api.bench.trace import Trace
from staged_pool.api.bench.workload import Inputs, Maker, MixedMaker, Target
from staged_pool.runtime.version import VERSION
from staged_pool.stages.errors import ConfigError

FORMAT: Final = "staged-pool-bench"
FORMAT_VERSION: Final = 1
"""Version of the JSON: it grows when a field goes or changes its meaning, not when one is added."""

FIRST_SHARE: Final = 0.5
"""First rate of a sweep for the knee, as a share of one client's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A measurement as the user asks for it."""

    address: Address
    target: Target
    inputs: Inputs
    plan: Plan
    seed: int
    sweep: Sequence[float] | None = None
    """Rates to measure, one after another."""
    finds_knee: bool = False
    """Find the rates to measure, from that of the plan on, if it has one."""
    limits: Limits = field(default_factory=Limits)
    trace: Trace | None = None
    """Requests to replay, in place of those of the plan and the inputs."""


class Bench:
    """A measurement.

    Args:
        settings: What to measure.
        connect: Makes connections; None: to the address of the settings.
    """

    def __init__(self, settings: Settings, connect: Callable[[], Connection] | None = None) -> None:
        self._settings = settings
        self._connect = connect or (lambda: HttpConnection(settings.address.connect))
        # Each has a source of its own: the times do not depend on the inputs.
        self._input_rng, self._time_rng = np.random.default_rng(settings.seed).spawn(2)
        self._scope = anyio.CancelScope()
        self._started_at = datetime.now(UTC)
        self._findings = Findings(settings.target)
        self.levels: list[Level] = []
        """Levels that have begun, in the order of time."""
        self._reports: list[dict[str, Any]] = []
        self.interrupted = False

    def stop(self) -> None:
        """End the load now; the report then has what was measured so far."""
        self.interrupted = True
        self._scope.cancel()

    async def run(self) -> None:
        """Run all of it.

        Raises:
            ConfigError: The server cannot be measured; says why, and the next step.
        """
        with self._scope:
            probe = Probe(self._settings.address, self._settings.target, self._settings.limits.timeout_s)
            self._findings = probe.findings
            try:
                make = await self._prepare(probe)
                await self._run_levels(probe, make)
            finally:
                with anyio.CancelScope(shield=True):
                    await probe.close()

    async def _prepare(self, probe: Probe) -> Maker:
        """Send the probing requests, and return the maker of the requests of the load."""
        settings, found = self._settings, self._findings
        await probe.find_model()
        kinds = list(settings.inputs.mix)
        if settings.inputs.lines is None:
            for kind in kinds:
                if kind != "images":
                    await probe.calibrate(kind)
        for kind in kinds:
            await probe.try_request(MixedMaker(found.target, settings.inputs, found.rates, self._input_rng), kind)
        if settings.trace is not None:
            maker = TraceMaker(settings.trace, found.target, found.rates, self._input_rng)
            await anyio.to_thread.run_sync(maker.draw_images)
            return maker
        return MixedMaker(found.target, settings.inputs, found.rates, self._input_rng)

    async def _run_levels(self, probe: Probe, make: Maker) -> None:
        sweep, tried = self._sweep(), list[Tried]()
        if sweep is None:
            await self._run_level(self._settings.plan, probe, make)
            return
        while (rate := sweep.next_rate(tried)) is not None:
            await self._run_level(replace(self._settings.plan, rate=rate, clients=None), probe, make)
            report = self._reports[-1]
            tried.append(Tried(rate, held(report, slo=self._settings.plan.slo_s is not None)))
            if report["generator"]["is_bottleneck"] and self._settings.finds_knee:
                break

    def _sweep(self) -> Sweep | None:
        settings = self._settings
        if settings.sweep is not None:
            return GivenRates(settings.sweep)
        if not settings.finds_knee:
            return None
        return FoundRates(settings.plan.rate or FIRST_SHARE / max(self._findings.answer_s, 1e-4))

    async def _run_level(self, plan: Plan, probe: Probe, make: Maker) -> None:
        level = Level(plan, make, self._connect, self._settings.limits, self._time_rng)
        before = await _work_so_far(probe)
        self.levels.append(level)
        await level.run()
        level.server = work_between(before, await _work_so_far(probe))
        self._reports.append(level.report())

    def report(self) -> dict[str, Any]:
        """Return all numbers, as JSON has them; see docs/bench.md."""
        settings, found = self._settings, self._findings
        reports = [*self._reports, *(level.report() for level in self.levels[len(self._reports) :])]
        outcomes: Counter[str] = Counter()
        for level in self.levels:
            outcomes.update(statuses(level.records))
        slo = settings.plan.slo_s is not None
        plans = [level.plan for level in self.levels]
        tried = [
            Tried(plan.rate, held(report, slo=slo))
            for plan, report in zip(plans, reports, strict=True)
            if plan.rate is not None and report["is_whole"]
        ]
        for plan, report in zip(plans, reports, strict=True):
            report["plan"] = str(plan)
            report["planned_rate"] = plan.rate
        swept = settings.finds_knee or settings.sweep is not None
        reports.sort(key=lambda report: report["planned_rate"] or math.inf)
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "staged_pool": VERSION,
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "url": str(settings.address),
            "model": found.target.model,
            "inputs": "the sizes of the trace" if settings.trace is not None else str(settings.inputs),
            "slo_s": settings.plan.slo_s,
            "seed": settings.seed,
            "warmup_s": settings.plan.warmup_s,
            "round_s": settings.plan.round_s,
            "burstiness": settings.plan.burstiness,
            "generator": {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "tokens_per_word": {
                kind: {"per_word": round(rate.per_word, 4), "per_text": round(rate.per_text, 2), "source": rate.source}
                for kind, rate in found.rates.items()
            },
            "interrupted": self.interrupted,
            "knee": knee(tried) if swept else None,
            "levels": reports,
            "probing": found.statuses,
            "outcomes": dict(outcomes),
        }


async def _work_so_far(probe: Probe) -> dict[str, int] | None:
    """Return the server's counts of its work; None if it has none, or is gone."""
    try:
        return read_work(await probe.get("/stages"))
    except ConfigError:
        return None
