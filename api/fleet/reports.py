"""Reports on all processes of a server: the sums for `/metrics` and `/stages`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from staged_pool.api.app.load_report import ServerLoad
from staged_pool.api.app.metrics import metrics_registry, metrics_text
from staged_pool.api.fleet.names import ENGINE
from staged_pool.api.fleet.snapshot import Snapshot, counters, total
from staged_pool.api.limits.http_statistics import HttpStatistics
from staged_pool.runtime.pipelines.statistics import PipelineStatistics
from staged_pool.runtime.statistics import EngineStatistics, Phase
from staged_pool.stages.scheduling.entries import Priority


@dataclass(slots=True)
class _Process:
    """Snapshots of the processes that have had one place, such as `front-1`."""

    last: Snapshot | None = None
    """The newest one of the present process. None: it has sent none yet."""
    before: Snapshot | None = None
    """Counters of earlier processes. None: there were none."""
    starts: int = 0


@dataclass(slots=True)
class Reports:
    """Adds up the snapshots of all processes. Counters of processes that have ended stay in the sums."""

    _processes: dict[str, _Process] = field(default_factory=dict)

    def started(self, name: str) -> None:
        """Note that a process has started in a place."""
        self._processes.setdefault(name, _Process()).starts += 1

    def take(self, name: str, snapshot: Snapshot) -> None:
        """Take the newest snapshot of a process."""
        self._processes[name].last = snapshot

    def ended(self, name: str) -> None:
        """Keep the counters of a process that has ended."""
        process = self._processes[name]
        if process.last is not None:
            kept = counters(process.last)
            process.before = kept if process.before is None else total((kept, process.before))
            process.last = None

    def statistics(self) -> Mapping[str, EngineStatistics]:
        """Return the statistics of each model: fronts have some stages, the engine process the others."""
        engine, fronts = self._of(ENGINE), [self._of(name) for name in self._processes if name != ENGINE]
        found = {}
        for name, computed in {} if engine is None else engine.engines.items():
            prepared = [front.engines[name] for front in fronts if front is not None and name in front.engines]
            found[name] = _joined(computed, prepared, is_up=self._processes[ENGINE].last is not None)
        return found

    def pipeline_statistics(self) -> Mapping[str, PipelineStatistics]:
        """Return the statistics of each pipeline, over all fronts."""
        fronts = [front for name in self._processes if (front := self._of(name)) is not None and front.pipelines]
        return total([front.pipelines for front in fronts]) if fronts else {}

    def load(self) -> ServerLoad:
        """Return the load of all models."""
        engine = self._processes.get(ENGINE)
        return ServerLoad.of({} if engine is None or engine.last is None else engine.last.loads)

    def http(self) -> HttpStatistics:
        """Return the statistics of the HTTP side, over all fronts."""
        return total([front.http for name in self._processes if (front := self._of(name)) and front.http is not None])

    def stages(self) -> bytes:
        """Return the JSON of `/stages`."""
        has_http = any(process.last is not None and process.last.http for process in self._processes.values())
        http = self.http() if has_http else None
        return msgspec.json.encode({"models": self.statistics(), "pipelines": self.pipeline_statistics(), "http": http})

    def metrics(self, *, openmetrics: bool = False) -> bytes:
        """Return the text of `/metrics`.

        Args:
            openmetrics: Write it as OpenMetrics, with exemplars.
        """
        registry = metrics_registry(self, self.http)
        registry.register(_ProcessCollector(self._processes))
        return metrics_text(registry, openmetrics=openmetrics)

    def _of(self, name: str) -> Snapshot | None:
        """Return the sum of the process that has a place, and of those before it."""
        process = self._processes.get(name)
        if process is None or (process.last is None and process.before is None):
            return None
        return total([each for each in (process.last, process.before) if each is not None])


def _joined(computed: EngineStatistics, prepared: list[EngineStatistics], *, is_up: bool) -> EngineStatistics:
    """Join the statistics of a model in the engine process with those in all fronts."""
    if not is_up:
        computed = replace(computed, phase=Phase.STARTING, fault="the engine process is being started")
    if not prepared:
        return computed
    fronts = total(prepared)
    batch = {stage.name: stage for stage in computed.stages if stage.name.startswith("batch")}
    return replace(
        computed,
        cancelled=fronts.cancelled,
        expired=fronts.expired,
        overdue_preprocess_calls=fronts.overdue_preprocess_calls,
        stages=tuple(
            replace(batch[stage.name], oldest_s=stage.oldest_s) if stage.name in batch else stage
            for stage in fronts.stages
        ),
        answered=fronts.answered,
        limiters=fronts.limiters,
        fetches=fronts.fetches,
        priorities={
            priority: replace(
                computed.priorities[priority], waiting_requests=fronts.priorities[priority].waiting_requests
            )
            for priority in Priority
        },
        image_cache=fronts.image_cache,
    )


class _ProcessCollector(Collector):
    """Metrics of each process."""

    def __init__(self, processes: Mapping[str, _Process]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        labels = ("process",)
        up = GaugeMetricFamily("staged_pool_process_up", "1 while the process runs and reports", labels=labels)
        starts = CounterMetricFamily("staged_pool_process_starts", "Starts of the process", labels=labels)
        cpu = CounterMetricFamily("staged_pool_process_cpu_seconds", "CPU time of the process", labels=labels)
        peak = GaugeMetricFamily("staged_pool_process_peak_bytes", "Largest resident memory so far", labels=labels)
        for name, process in self._processes.items():
            up.add_metric((name,), process.last is not None)
            starts.add_metric((name,), process.starts)
            before_s = 0.0 if process.before is None else process.before.cpu_s
            cpu.add_metric((name,), before_s + (0.0 if process.last is None else process.last.cpu_s))
            peak.add_metric((name,), 0 if process.last is None else process.last.peak_bytes)
        yield from (up, starts, cpu, peak)

    def describe(self) -> Iterable[Metric]:
        return ()
