"""Names of a model folder and of the repositories that it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from staged_pool.runtime.models.folders.adapters import ADAPTER, SETTINGS
from staged_pool.runtime.models.folders.readme import front_matter, model_card
from staged_pool.runtime.models.specs.json_file import JsonFile


def repository_names(path: Path, config: Mapping[str, Any]) -> str:
    """Return the names of a folder and of its source repositories.

    They are in lower case, one per line.

    Args:
        path: The model folder; one that is composed of an adapter and its base model has the names of both.
        config: `config.json`.
    """
    return "\n".join(name.lower() for name in _spelled_names(path, config))


def adapter_settings(path: Path) -> JsonFile | None:
    """Return the settings of the adapter in a composed folder. None: the folder has no adapter."""
    return JsonFile.read(path / ADAPTER / SETTINGS, root=path)


def _spelled_names(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    yield from _folder_names(path)
    if (adapter := adapter_settings(path)) is not None:
        link = path / ADAPTER / SETTINGS
        yield from _folder_names((link.readlink() if link.is_symlink() else link).parent)
        yield str(adapter.content.get("base_model_name_or_path", ""))
    yield str(config.get("_name_or_path", ""))
    headings = (line for line in model_card(path).splitlines() if line.startswith("# "))
    yield next(headings, "")
    lines = [line.strip() for line in front_matter(path)]
    for place, line in enumerate(lines):
        if line.startswith("base_model:"):
            yield line.partition(":")[2].strip()
            yield lines[place + 1].removeprefix("-").strip() if place + 1 < len(lines) else ""


def _folder_names(path: Path) -> Iterator[str]:
    yield path.name
    whole = path.resolve()
    yield whole.name
    for part in whole.parts:  # the hub's cache: models--owner--name/snapshots/commit
        if part.startswith("models--"):
            yield part.removeprefix("models--").replace("--", "/")
