"""Names of the files that hold the weights of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from staged_pool.runtime.models.specs.inner_path import leads_out
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")


def weight_files(body: Path) -> list[str]:
    """Names of the weight files that transformers would load, by its own order of preference.

    Raises:
        ConfigError: The index names a file that is missing or outside the folder.
    """
    for whole in _WEIGHTS:
        if (body / whole).is_file():
            return [whole]
        if (index := JsonFile.read(body / f"{whole}.index.json", root=body)) is not None:
            return _shards_of(body, index)
    return []


def _shards_of(body: Path, index: JsonFile) -> list[str]:
    named = index.get("weight_map", dict, {})
    if not named:
        raise ConfigError(f"{index.name}: weight_map is missing or empty")
    shards = sorted(set(map(str, named.values())))
    for name in shards:
        if leads_out(name):
            raise ConfigError(f"{index.name}: {name!r} leads out of the model folder")
        if not (body / name).is_file():
            raise ConfigError(f"{index.name}: names {name!r}, which does not exist")
    return shards
