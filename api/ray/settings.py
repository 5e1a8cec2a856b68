"""Settings of an application of Ray Serve, from configurations, a mapping or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from staged_pool.api.commands.config_file import ConfigFile, checked_settings, read_config_file
from staged_pool.api.commands.given import build_server, given_in, given_models
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.mounted import MountedServer
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError

Config: TypeAlias = EngineConfig | Sequence[EngineConfig] | Mapping[str, Any] | str | os.PathLike[str]
"""One or several models; or the settings of `staged-pool serve --config`, as a mapping or a file."""

_MAPPING: Final = Path("config")
"""Name of a mapping in errors, in place of that of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked settings of each replica. They travel to the replicas, so they have no open resources."""

    models: Sequence[EngineConfig]
    server: ServerConfig
    process: ProcessConfig = field(default_factory=ProcessConfig)


def read_settings(config: Config, server: ServerConfig | None = None) -> Settings:
    """Read the settings of replicas, and check what can be checked without a model.

    A model that is a folder here has the absolute path of that folder, which the machines of all replicas need.

    Raises:
        ConfigError: A setting is wrong, or has no meaning in a replica.
        TypeError: The configuration is of another type.
    """
    if isinstance(config, Mapping):
        settings = _of_file(checked_settings(config, _MAPPING), server)
    elif isinstance(config, str | os.PathLike):
        settings = _of_file(read_config_file(Path(config)), server)
    else:
        models = [config] if isinstance(config, EngineConfig) else list(config)
        for model in models:
            if not isinstance(model, EngineConfig):
                raise TypeError(f"config: expected models, each an EngineConfig, not a {type(model).__name__}")
        settings = Settings(models=models, server=server or ServerConfig())
    settings = replace(settings, models=[_with_absolute_path(model) for model in settings.models])
    _check(settings)
    return settings


def _of_file(file: ConfigFile, server: ServerConfig | None) -> Settings:
    if server is not None:
        raise ConfigError("server: write its settings into the configuration; only models as objects go beside it")
    given = given_in(file)
    return Settings(
        models=[model.build(EngineConfig) for model in given_models(given, file)],
        server=build_server(given),
        process=given.build(ProcessConfig),
    )


def _with_absolute_path(model: EngineConfig) -> EngineConfig:
    """Return a model whose folder is found from any working directory; a hub id stays."""
    if model.model is None or not (folder := Path(model.model)).is_dir():
        return model
    return replace(model, model=str(folder.resolve()))


def _check(settings: Settings) -> None:
    """Reject what a replica cannot have.

    Raises:
        ConfigError: Names the setting, and says why.
    """
    if not settings.models:
        raise ConfigError("config: no model; give at least one EngineConfig")
    if settings.server.batch_dir is not None:
        raise ConfigError(f"batch_dir={str(settings.server.batch_dir)!r}: replicas cannot share a folder of batches")
    if settings.process.pipeline:
        raise ConfigError(f"pipeline={settings.process.pipeline[0]!r}: replicas serve models, not pipelines")
    if settings.process.backend != "asyncio":
        raise ConfigError(f"backend={settings.process.backend!r}: replicas of Ray Serve run on asyncio")
    MountedServer(*settings.models, server=settings.server)  # it rejects settings of connections
