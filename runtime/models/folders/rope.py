"""Check what `config.json` says of rotary positions, where transformers would leave a part of it out without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.stages.errors import ConfigError

_FIELDS: Final = ("rope_scaling", "rope_parameters")
"""The older and the newer name."""
_NUMBERS: Final = ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_OF_A_SCALING: Final = (*_NUMBERS, "short_factor", "long_factor")
"""Settings that change frequencies, each of some types only."""


def check_rope(config: Mapping[str, Any]) -> None:
    """Reject scaled positions whose type is not said, is said twice, or whose numbers are none.

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
    said = {name: file.get(name, dict, {}) for name in _FIELDS if config.get(name)}
    kinds = {name: [_kind(one) for one in _each(given)] for name, given in said.items()}
    for name, given in said.items():
        for one in _each(given):
            for number in _NUMBERS:
                if isinstance(value := one.get(number), str | bool | list):
                    raise ConfigError(f"{where}: {name}: {number}={value!r} must be a number")
            scaled = [setting for setting in _OF_A_SCALING if one.get(setting) not in (None, 1)]
            if scaled and _kind(one) is None:
                raise ConfigError(
                    f"{where}: {name}: {scaled[0]}={one[scaled[0]]!r} without a rope_type would have no effect: name "
                    "one, such as linear, dynamic, yarn, longrope or llama3"
                )
    if len(said) > 1 and kinds["rope_scaling"] != kinds["rope_parameters"]:
        raise ConfigError(
            f"{where}: rope_scaling={said['rope_scaling']!r} and rope_parameters={said['rope_parameters']!r} say "
            "different types: keep one of them"
        )


def _each(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of one kind of position; several where each type of layer has its own."""
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or [given]


def _kind(given: Mapping[str, Any]) -> str | None:
    kind = given.get("rope_type", given.get("type"))
    return kind if isinstance(kind, str) else None
