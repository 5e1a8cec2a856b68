"""Counters of each model, over the engines that have served it: no counter falls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.statistics import EngineStatistics

Families: TypeAlias = Callable[[EngineStatistics], Iterable[Metric]]
"""Converts the statistics of an engine to metrics, without the label of the model."""


class EngineTotals:
    """Sums of the counters of one model, over the engines that have served it.

    Args:
        families: See `Families`.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
        self._kept: dict[str, _Sums] = {}
        """Counters of engines that have ended, by model."""
        self._leaving: dict[str, list[Engine]] = {}
        """Engines that still work, by the model that others serve now."""

    def replaced(self, engine: Engine) -> None:
        """Count an engine on, whose place another one has taken."""
        self._leaving.setdefault(engine.card.name, []).append(engine)

    def ended(self, engine: Engine) -> None:
        """Keep the counters of an engine that was replaced."""
        name = engine.card.name
        if engine in self._leaving.get(name, ()):
            self._leaving[name].remove(engine)
            self._kept.setdefault(name, _Sums()).add(self._families(engine.statistics()))

    def forget(self, name: str) -> None:
        """Drop the counters of a model that is not served any more: its series end."""
        self._kept.pop(name, None)
        self._leaving.pop(name, None)

    def families(self, engines: Mapping[str, EngineStatistics]) -> Iterable[Metric]:
        """Return the metrics of all models, each sample with the label `model`.

        Args:
            engines: Statistics of the engines that serve now, by model.
        """
        merged: dict[str, Metric] = {}
        for name, statistics in engines.items():
            families = list(self._families(statistics))
            if name in self._kept or self._leaving.get(name):
                sums = _Sums()
                if name in self._kept:
                    sums.add(self._kept[name].families())
                for engine in self._leaving.get(name, ()):
                    sums.add(self._families(engine.statistics()))
                sums.add(families)
                families = [*(family for family in families if not _counts(family)), *sums.families()]
            for family in families:
                found = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                found.samples += [s._replace(labels={"model": name, **s.labels}) for s in family.samples]
        return merged.values()


class _Sums:
    """Sums of counters and histograms, sample by sample."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        self._samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]] = {}

    def add(self, families: Iterable[Metric]) -> None:
        """Add the samples of all families that count."""
        for family in filter(_counts, families):
            self._families.setdefault(family.name, family)
            samples = self._samples.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                before = samples[key].value if key in samples else 0.0
                samples[key] = sample._replace(value=before + sample.value)

    def families(self) -> Iterable[Metric]:
        """Yield each family with its sums."""
        for name, family in self._families.items():
            summed = Metric(name, family.documentation, family.type)
            summed.samples = list(self._samples[name].values())
            yield summed


def _counts(family: Metric) -> bool:
    return family.type in ("counter", "histogram")
