"""Model lookup: find the folder and read its settings, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.load_progress import LoadProgress
from staged_pool.runtime.models.folders.adapters import compose, find_adapter
from staged_pool.runtime.models.folders.folder import read_folder
from staged_pool.runtime.models.folders.local import local_folder, offline_variable
from staged_pool.runtime.models.specs.model import ModelFolder
from staged_pool.stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model whose files are on this machine."""

    name: str
    """Served name."""
    folder: ModelFolder
    """Settings read from its files."""
    base: Path | None = None
    """Folder of the base model, for an adapter. None: the model is no adapter."""


def find_model(config: EngineConfig, progress: LoadProgress | None = None) -> FoundModel:
    """Find the model that `config` names, and read its settings. Downloads it if needed.

    Args:
        config: Settings of the engine.
        progress: See `resolve`.

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
        progress=progress,
    )
    folder = resolved.folder
    if (adapter := find_adapter(folder)) is None:
        return FoundModel(name=resolved.name, folder=read_model(folder, config))
    try:
        base = resolve(
            adapter.base,
            revision=None if local_folder(adapter.base) else adapter.revision,
            offline=config.offline,
            own_code=config.trust_remote_code,
            progress=progress,
        )
    except ConfigError as error:
        raise ConfigError(f"adapter_config.json: the base model cannot be found: {error}") from error
    read = read_model(compose(adapter, base.folder), config)
    note = f"the adapter is merged into the weights of {base.name}"
    return FoundModel(name=resolved.name, folder=replace(read, notes=(*read.notes, note)), base=base.folder)


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
        if config.offline or offline_variable():
            find_model(config)
    elif config.revision is not None:
        raise ConfigError(f"revision={config.revision!r}: only a hub id has revisions, and {config.model} is a folder")
    elif (adapter := find_adapter(folder)) is None:
        read_model(folder, config)
    elif config.offline or local_folder(adapter.base) is not None:
        find_model(config)


def read_model(folder: Path, config: EngineConfig) -> ModelFolder:
    """Read the settings of a model folder; see `read_folder`.

    Raises:
        ConfigError: See `read_folder`.
    """
    return read_folder(
        folder,
        task=config.task,
        score_template=config.score_template,
        score_tokens=config.score_tokens,
    )
