"""Pooling of a sentence-transformers folder, and the modules after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, get_args

from staged_pool.runtime.models.folders.common_files import expect_level, read_dense, required
from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import HeadModule, LayerNorm, Normalize, PoolingMode
from staged_pool.stages.errors import ConfigError

_POOLING_MODES: Final[tuple[PoolingMode, ...]] = get_args(PoolingMode)

_POOLING_FLAGS: Final[Mapping[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling modes by their flag in older folders, in the order of concatenation."""


def read_head(chain: list[tuple[str, Path]], *, root: Path) -> tuple[tuple[HeadModule, ...], bool]:
    """Read the modules after the pooling.

    Args:
        chain: Name and folder of each module.
        root: The model folder.

    Returns:
        The modules without the normalisation at the end, and True if there is one: postprocess does it.

    Raises:
        ConfigError: A module is not supported, or one of its files is malformed.
    """
    head: list[HeadModule] = []
    for name, folder in chain:
        if name == "Normalize":
            settings = JsonFile.read(folder / "config.json", root=root) or JsonFile.empty()
            expect_level(settings, "sentence_embedding")
            head.append(Normalize())
        elif name == "Dense":
            head.append(read_dense(folder, root=root))
        elif name == "LayerNorm":
            file = required(folder / "config.json", root=root)
            head.append(LayerNorm(folder=folder, dimension=file.size("dimension")))
        else:
            raise ConfigError(f"modules.json: module {name} is not supported after the pooling")
    normalize = False
    while head and isinstance(head[-1], Normalize):
        head.pop()
        normalize = True
    return tuple(head), normalize


def read_pooling_modes(file: JsonFile) -> tuple[PoolingMode, ...]:
    """Read the pooling modes of a config: one name, a list of names, or one flag per mode.

    Raises:
        ConfigError: A mode is not known.
    """
    named = file.content.get("pooling_mode")
    if named is None:
        unknown = [n for n in file.content if n.startswith("pooling_mode_") and n not in _POOLING_FLAGS]
        if wrong := [n for n in unknown if file.content[n]]:
            raise ConfigError(f"{file.name}: {wrong[0]} is not known, only {', '.join(_POOLING_FLAGS)}")
        return tuple(m for flag, m in _POOLING_FLAGS.items() if file.get(flag, bool, False)) or ("mean",)
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{file.name}: pooling_mode={named!r} must be a name or a list of names")
    modes = []
    for name in names:
        if name not in _POOLING_MODES:
            raise ConfigError(f"{file.name}: pooling_mode={name!r} is not known, only {', '.join(_POOLING_MODES)}")
        modes.append(name)
    return tuple(modes)
