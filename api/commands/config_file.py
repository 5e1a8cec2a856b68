"""Configuration file: TOML whose keys are the names of flags, with a table for each of several models."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from staged_pool.api.commands.table import every_setting
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.setting_values import checked_value
from staged_pool.runtime.settings import SettingField, settings_of
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError

CONFIG_FILE: Final = "config_file"
"""Name of the parameter of `--config`."""

MODELS_KEY: Final = "models"
"""Key of the array of tables, one for each model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Settings of one table of the file: of its top, or of one model."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by field, in the units of flags."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Places by field, such as `pool.toml, line 3`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A configuration file that has been read and checked."""

    path: Path
    top: Table
    models: Sequence[Table]


def read_config_file(path: Path) -> ConfigFile:
    """Read a file, and check each key, type and range.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong; names file, line, key and the right form.
    """
    try:
        text = foreign_text.text_of(path.read_bytes())
        found = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"config={str(path)!r}: cannot be read ({error.strerror}); name a TOML file") from None
    except foreign_text.BadText as error:
        raise ConfigError(f"config={str(path)!r}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    return checked_settings(found, path, text)


def checked_settings(found: Mapping[str, Any], path: Path, text: str = "") -> ConfigFile:
    """Check each key, type and range of settings that have the form of the file.

    Args:
        found: Values by key, and the tables of models.
        path: File of the settings, or another name for them in errors.
        text: Text of the file, for the lines in errors.

    Raises:
        ConfigError: Something is wrong; names file, line, key and the right form.
    """
    reader = _Reader(path, text)
    tables = found.get(MODELS_KEY, [])
    top = reader.table({key: value for key, value in found.items() if key != MODELS_KEY}, None)
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(
            f"{reader.place(MODELS_KEY, None)}: {MODELS_KEY} must be tables, each begun by [[{MODELS_KEY}]]"
        )
    models = [reader.table(table, number) for number, table in enumerate(tables, start=1)]
    if models and "model" in top.values:
        raise ConfigError(f"{top.places['model']}: model stands beside [[{MODELS_KEY}]]; keep one of them")
    for number, model in enumerate(models, start=1):
        if "model" not in model.values:
            raise ConfigError(f'{path}: [[{MODELS_KEY}]] number {number} needs model, such as model = "./my-model"')
    return ConfigFile(path=path, top=top, models=models)


class _Reader:
    """Reader of one file: converts tables, and names the line of each key."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()
        self._rows = {row.key: row for row in every_setting() if row.about.has_flag}
        self._of_engine = {row.key for row in settings_of(EngineConfig)}

    def table(self, found: Mapping[str, Any], number: int | None) -> Table:
        """Convert one table; `number` counts those of models from 1."""
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        for key, value in found.items():
            place = self.place(key, number)
            row = self._row(key, place, number)
            values[row.name] = _checked(row, value, place, of_model=number is not None)
            places[row.name] = place
        return Table(values=values, places=places)

    def place(self, key: str, number: int | None) -> str:
        """Return file and line of a key, as errors name it."""
        line = next(self._lines_of(key, number), None)
        return str(self._path) if line is None else f"{self._path}, line {line}"

    def _row(self, key: str, place: str, number: int | None) -> SettingField:
        row = self._rows.get(key)
        if row is None:
            near = get_close_matches(key.replace("_", "-").lower(), [*self._rows, MODELS_KEY], 1)
            known = f"did you mean {near[0]}?" if near else "`staged-pool serve --help-all` lists all"
            raise ConfigError(f"{place}: {key} is no setting; {known}")
        if number is not None and (key not in self._of_engine or row.about.shared):
            raise ConfigError(f"{place}: {key} is for all models; write it above the first [[{MODELS_KEY}]]")
        return row

    def _lines_of(self, key: str, number: int | None) -> Iterator[int]:
        """Yield the line of a key: the text above it is whole TOML, and has as many tables of models."""
        begins = re.compile(rf"""\s*(\[\[?\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
        for count, line in enumerate(self._lines):
            if begins.match(line):
                try:
                    above = tomllib.loads("\n".join(self._lines[:count]))
                except tomllib.TOMLDecodeError:  # inside a text of several lines
                    continue
                if key == MODELS_KEY or len(above.get(MODELS_KEY, [])) == (number or 0):
                    yield count + 1


def _checked(row: SettingField, value: Any, place: str, *, of_model: bool) -> Any:
    """Return the value in the form that the flag has.

    Raises:
        ConfigError: It is of another type, or out of range.
    """
    try:
        return checked_value(row, value, several=row.name == "model" and not of_model)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
