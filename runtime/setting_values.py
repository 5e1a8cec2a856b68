"""Values of settings in files and bodies: checked against the type and the range of their field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from staged_pool.runtime.settings import Kind, SettingField
from staged_pool.stages.errors import ConfigError

_EXPECTED: Final[Mapping[Kind, str]] = {
    "text": "a text in quotes",
    "texts": 'a list of texts, such as ["a", "b"]',
    "path": "a path in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


def checked_value(row: SettingField, value: Any, *, several: bool = False) -> Any:
    """Return a value of a setting in the form that its flag has.

    Args:
        row: The setting.
        value: Value of a TOML file or of JSON.
        several: The setting takes a list here, too.

    Raises:
        ConfigError: It is of another type, or out of range; names the key, and never a secret.
    """
    many = row.kind == "texts" or several
    values = value if many and isinstance(value, list) else [value]
    if not all(_fits(row, each) for each in values):
        expected = f"one of {', '.join(row.choices)}" if row.kind == "choice" else _EXPECTED[row.given_kind]
        found = "" if row.about.secret else f" = {_shown(value)}:"
        raise ConfigError(f"{row.key}{found} must be {expected}")
    try:
        row.check(row.read(values if many else value))
    except ConfigError as error:
        raise ConfigError(f"{row.key} = {_shown(value)}: {str(error).partition(': ')[2]}") from None
    return values if many else value


def _fits(row: SettingField, value: Any) -> bool:
    if row.kind == "choice":
        return value in row.choices
    if row.kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if row.given_kind == "int":
        return isinstance(value, int)
    if row.given_kind == "float":
        return isinstance(value, int | float)
    return isinstance(value, str) or (row.about.unit is not None and isinstance(value, int))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
