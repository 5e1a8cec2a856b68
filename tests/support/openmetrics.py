"""OpenMetrics, read by the strict parser of Prometheus' client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

_parse: Final[Callable[[str], Iterable[Metric]]] = text_string_to_metric_families


def openmetrics_families(text: str) -> dict[str, Metric]:
    """Return the families of a scrape by their names. A text that breaks a rule raises `ValueError`."""
    return {family.name: family for family in _parse(text)}
