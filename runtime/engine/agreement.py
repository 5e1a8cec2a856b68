"""Agreement of models that share a process: on shared settings, and on different names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError

SHARED_SETTINGS: Final = (
    "device", "forward_workers", "preprocess_limit", "image_preprocess_limit", "torch_threads", "watchdog_s",
    "drain_timeout_s", "memory_limit_bytes", "load_timeout_s",
)  # fmt: skip
"""Settings that must be equal in all engines which share threads and memory."""


def agreed(configs: Sequence[EngineConfig]) -> EngineConfig:
    """Return the first settings, after a check that all agree on shared resources.

    Raises:
        ConfigError: They do not, or there are none.
    """
    if not configs:
        raise ConfigError("no model: at least one is needed")
    first = configs[0]
    for name in SHARED_SETTINGS:
        if len(values := {getattr(config, name) for config in configs}) > 1:
            found = " and ".join(sorted(map(repr, values)))
            raise ConfigError(f"{name}={found}: models that share a device must agree on it")
    return first


def check_names(names: Sequence[str]) -> None:
    """Reject a name that comes twice.

    Raises:
        ConfigError: It does.
    """
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise ConfigError(f"served_name={twice!r}: two models or plugins have this name; name them apart")
