"""Table of all settings: those of the process, the server and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.settings import SettingField, settings_of

CONFIGS: Final = (ServerConfig, ProcessConfig, EngineConfig)
"""Configurations whose fields make up the table, in the order of the help pages."""


def every_setting() -> Iterator[SettingField]:
    """Yield the settings of all configurations, those without a flag included."""
    return chain.from_iterable(settings_of(config) for config in CONFIGS)


def setting_named(name: str) -> SettingField | None:
    """Find a setting by its field or its flag with underscores, as errors name it."""
    return next((row for row in every_setting() if name in (row.name, row.key.replace("-", "_"))), None)
