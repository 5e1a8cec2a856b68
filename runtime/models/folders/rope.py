"""Checks of rotary position settings that transformers would silently ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

_FIELDS: Final = ("rope_scaling", "rope_parameters")
"""Older and newer name of the settings."""
_NUMBERS: Final = ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_SCALING_SETTINGS: Final = (*_NUMBERS, "short_factor", "long_factor")
"""Settings that scale frequencies; each belongs to some rope types only."""


def check_rope(config: Mapping[str, Any]) -> None:
    """Reject scaled positions without a type, with two types, or with malformed numbers.

    Args:
        config: `config.json`.

    Raises:
        ConfigError: Names the field.
    """
    for part, where in ((config, "config.json"), (config.get("text_config"), "config.json: text_config")):
        if isinstance(part, Mapping):
            _check(part, where)


def _check(config: Mapping[str, Any], where: str) -> None:
    file = JsonFile(where, config)
    fields = {name: file.get(name, dict, {}) for name in _FIELDS if config.get(name)}
    kinds = {name: [_kind(settings) for settings in _each(given)] for name, given in fields.items()}
    for name, given in fields.items():
        for settings in _each(given):
            for number in _NUMBERS:
                if isinstance(value := settings.get(number), str | bool | list):
                    raise ConfigError(f"{where}: {name}: {number}={value!r} must be a number")
            scaled = [setting for setting in _SCALING_SETTINGS if settings.get(setting) not in (None, 1)]
            if scaled and _kind(settings) is None:
                raise ConfigError(
                    f"{where}: {name}: {scaled[0]}={settings[scaled[0]]!r} has no effect without a rope_type: set "
                    "one, such as linear, dynamic, yarn, longrope or llama3"
                )
    if len(fields) > 1 and kinds["rope_scaling"] != kinds["rope_parameters"]:
        raise ConfigError(
            f"{where}: rope_scaling={fields['rope_scaling']!r} and rope_parameters={fields['rope_parameters']!r} "
            "have different types: remove one of them"
        )


def _each(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of all layers, or those of each layer type if they differ."""
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or [given]


def _kind(given: Mapping[str, Any]) -> str | None:
    kind = given.get("rope_type", given.get("type"))
    return kind if isinstance(kind, str) else None
