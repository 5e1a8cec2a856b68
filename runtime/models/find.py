"""Model lookup: find the folder and read its settings, without importing torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.folders.local import local_folder
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model whose files are on this machine."""

    name: str
    """Served name."""
    folder: ModelFolder
    """Settings read from its files."""


def find_model(config: EngineConfig) -> FoundModel:
    """Find the model that `config` names, and read its settings. Downloads it if needed.

    Raises:
        ConfigError: It cannot be found or understood, or a setting does not fit it.
    """
    from staged_pool.runtime.models.folders.resolver import resolve  # the hub client is slow to import

    resolved = resolve(
        config.model,
        revision=config.revision,
        offline=config.offline,
        served_name=config.served_name,
        own_code=config.trust_remote_code,
    )
    return FoundModel(name=resolved.name, folder=_read(resolved.folder, config))


def check_model(config: EngineConfig) -> None:
    """Reject a model that is known to be wrong without a download.

    Reads a local folder. Looks a hub id up in the local cache, but only in offline mode.

    Raises:
        ConfigError: As for `find_model`.
    """
    if config.model is None:
        return
    folder = local_folder(config.model)
    if folder is None:
        if config.offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
            find_model(config)
    elif config.revision is not None:
        raise ConfigError(f"revision={config.revision!r}: only a hub id has revisions, and {config.model} is a folder")
    else:
        _read(folder, config)


def _read(folder: Path, config: EngineConfig) -> ModelFolder:
    return read_folder(
        folder,
        task=config.task,
        score_template=config.score_template,
        score_tokens=config.score_tokens,
    )
