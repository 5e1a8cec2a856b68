"""Choice of the models that share the weights of one base model: adapters, and the base model itself.

Adapters of one base that are served together are not merged into copies of it. Their layers compute both, so that the
weights of the base exist once. What else an adapter's folder has must be that of the base model. Nothing here imports
torch.
"""

from __future__ import annotations

import filecmp
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.find import FoundModel, read_model
from staged_pool.runtime.models.folders.adapters import ADAPTER, SETTINGS, TOKENIZER_FILES
from staged_pool.runtime.models.folders.foreign_formats import WEIGHT_FILES
from staged_pool.runtime.models.specs.adapters import AdapterSpec
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import Dense, DenseSpec, LayerNorm, ModelFolder
from staged_pool.stages.log import get_logger

_OWN_SETTINGS: Final = frozenset({"model", "served_name", "revision", "plugin"})
"""Settings that may differ between models that share weights."""

_MODULE_FILES: Final = (*WEIGHT_FILES, "config.json")

log = get_logger("staged_pool.models")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Models that are loaded together."""

    places: tuple[int, ...]
    """Their places among all models, at least one."""
    base: ModelFolder | None = None
    """The base model, with the adapters of all of them under their served names. None: one model, by itself."""


def share_bases(models: Sequence[tuple[EngineConfig, FoundModel]]) -> list[Sharing]:
    """Group models by the weights that they share; most stand alone.

    Args:
        models: Settings and files of each. The order of the groups is that of their first models.

    Raises:
        ConfigError: A base model cannot be read.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, (config, found) in enumerate(models):
        base = found.base or found.folder.path
        settings = tuple(getattr(config, each.name) for each in fields(config) if each.name not in _OWN_SETTINGS)
        groups[base.resolve(), settings].append(place)
    sharings: list[Sharing] = []
    for (path, _), places in groups.items():
        sharings += _sharings(path, places, models)
    return sorted(sharings, key=lambda sharing: sharing.places[0])


def _sharings(path: Path, places: list[int], models: Sequence[tuple[EngineConfig, FoundModel]]) -> list[Sharing]:
    """Divide models of one base into those that share it, and others."""
    alone = models[places[0]][0].dtype == "int8"  # its check knows one set of weights
    if alone or len(places) < 2 or all(models[place][1].base is None for place in places):
        return [Sharing((place,)) for place in places]
    base = next((models[place][1].folder for place in places if models[place][1].base is None), None)
    base = base or read_model(path, models[places[0]][0])
    shared: list[int] = []
    apart: list[int] = []
    for place in places:
        found = models[place][1]
        reason = _why_apart(found.folder, base) if found.base is not None else None
        if reason is not None:
            log.info("model.not_shared", model=found.name, reason=reason)
        (shared if reason is None else apart).append(place)
    if len(shared) < 2:
        return [Sharing((place,)) for place in places]
    adapters = tuple(
        AdapterSpec(models[place][1].name, models[place][1].folder.body / ADAPTER)
        for place in shared
        if models[place][1].base is not None
    )
    base = replace(base, adapters=(*base.adapters, *adapters))
    return [Sharing(tuple(shared), base), *(Sharing((place,)) for place in apart)]


def _why_apart(folder: ModelFolder, base: ModelFolder) -> str | None:
    """Return the reason why an adapter cannot share the weights of its base; None if it can.

    Args:
        folder: The folder that is composed of the adapter and its base.
        base: The base model.
    """
    if not all(isinstance(spec, DenseSpec) for spec in base.heads) or base.architecture != "encoder":
        return "only models of vectors share weights"
    if base.images is not None or base.image_heads or base.adapter_of:
        return "the base model reads images, or has adapters of its own"
    settings = JsonFile.read(folder.body / ADAPTER / SETTINGS, root=folder.body)
    if settings is not None and settings.content.get("modules_to_save"):
        return "the adapter has whole layers of its own"
    for name in ("architecture", "max_seq_length", "lower_case", "conversation", "roles", "scoring"):
        if getattr(folder, name) != getattr(base, name):
            return f"{name} is not that of the base model"
    if [_with_files(spec) for spec in folder.heads] != [_with_files(spec) for spec in base.heads]:
        return "the modules after the transformer are not those of the base model"
    for name in TOKENIZER_FILES:
        ours, theirs = folder.body / name, base.body / name
        if ours.is_file() != theirs.is_file() or (ours.is_file() and not filecmp.cmp(ours, theirs, shallow=False)):
            return f"{name} is not that of the base model"
    return None


def _with_files(spec: Any) -> Any:
    """Return a head whose modules have the names of their files, behind all links."""
    modules = [
        replace(module, folder=_files(module.folder)) if isinstance(module, Dense | LayerNorm) else module
        for module in spec.modules
    ]
    return replace(spec, modules=tuple(modules))


def _files(folder: Path) -> Any:
    return tuple((folder / name).resolve() for name in _MODULE_FILES if (folder / name).exists())
