"""Options of deployments, and settings of models within what Ray has assigned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from staged_pool.ray.settings import Settings
from staged_pool.runtime.config import EngineConfig

HEALTH_PERIOD_S: Final = 2.0
"""Seconds between two health checks. Serve replaces a replica after three failed ones in a row."""

CLOSING_S: Final = 5.0
"""Seconds that the end of a replica may take after its last request."""

LEAD_S: Final = 4.0
"""Seconds that an engine replica takes requests after Serve has stopped it.

Serve stops it as soon as its successor runs, and preparers have to find that one first.
"""


def common_options(settings: Settings) -> dict[str, Any]:
    """Return the options of all deployments, which a caller may change."""
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": settings.models[0].drain_timeout_s + CLOSING_S,
        "logging_config": {"enable_access_log": False},  # the server logs a line for each request
    }


def within(assigned: Mapping[str, float], model: EngineConfig) -> EngineConfig:
    """Return the settings of a model, within the resources that Ray has assigned.

    Args:
        assigned: Amounts by resource: `CPU` in cores, and `memory` in bytes.
        model: Settings. Threads and memory that they give stay.
    """
    threads, memory_bytes = int(assigned.get("CPU", 0)), int(assigned.get("memory", 0))
    return replace(
        model,
        torch_threads=model.torch_threads or threads or None,
        memory_limit_bytes=model.memory_limit_bytes or memory_bytes or None,
    )
