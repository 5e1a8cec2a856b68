"""Bodies and queries of the routes by which operators load models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

import msgspec

from staged_pool.api.config import MAX_TIMEOUT_S
from staged_pool.api.wire import json_decode
from staged_pool.api.wire.exchange import Body
from staged_pool.runtime.config import OF_ONE_MODEL, EngineConfig
from staged_pool.runtime.setting_values import checked_value
from staged_pool.runtime.settings import SettingField, settings_of
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.foreign_json import MOST_DEPTH

MOST_NAME_CHARACTERS: Final = 256

AT_START_ONLY: Final = frozenset(
    {"plugin", "offline", "trust_remote_code", "allow_pickle", "allow_media_path", "allow_media_domains"}
)
"""Settings of one model that only the start takes: most of them let a model or a client do more on this machine."""

_OWN: Final = ("name", "model", "pin")


class LoadBody(NamedTuple):
    """A wanted model."""

    config: EngineConfig
    pin: bool | None
    """Keep it when another load needs memory. None: as the model before it, or no."""


_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


def read_load(body: Body, base: EngineConfig) -> LoadBody:
    """Read the body of a load: `name`, `model`, `pin`, and settings by the names of their flags.

    Args:
        body: The body.
        base: Settings of what the body does not give.

    Raises:
        InvalidInput: A field is missing, unknown or wrong.
    """
    given = json_decode.decode(_OBJECT, body, most_depth=MOST_DEPTH)
    name = _text(given, "name", "the name to serve it under")
    model = _text(given, "model", "a folder, or a hub id")
    if len(name) > MOST_NAME_CHARACTERS or not name.isprintable() or name != name.strip(" /"):
        right = f"up to {MOST_NAME_CHARACTERS} printable characters, without a space or a slash at an end"
        raise InvalidInput(f"name: expected {right}", param="name")
    pin = given.get("pin")
    if pin is not None and not isinstance(pin, bool):
        raise InvalidInput("pin: expected true or false", param="pin")
    rows = {row.key: row for row in settings_of(EngineConfig)}
    values = {key: _setting(rows, key, value) for key, value in given.items() if key not in _OWN}
    changes = {rows[key].name: value for key, value in values.items()}
    try:
        return LoadBody(replace(base, **changes, model=model, served_name=name), pin)
    except ConfigError as error:
        raise in_keys(error) from None


def base_of(config: EngineConfig) -> EngineConfig:
    """Return the settings that a model takes over from another one."""
    return replace(config, **{row.name: row.default for row in settings_of(EngineConfig) if row.name in OF_ONE_MODEL})


def read_wait_s(query: bytes) -> float:
    """Return the seconds for which an answer may wait: `wait` of a query. Without it, as long as it takes.

    Raises:
        InvalidInput: It is no number in range.
    """
    found = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("wait")
    if found is None:
        return MAX_TIMEOUT_S
    try:
        wait_s = float(found[-1])
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_TIMEOUT_S:
        raise InvalidInput(f"wait: expected a number of seconds from 0 to {MAX_TIMEOUT_S:.0f}", param="wait")
    return wait_s


def _text(given: Mapping[str, Any], field: str, what: str) -> str:
    value = given.get(field)
    if not isinstance(value, str) or not value:
        found = "is missing" if field not in given else "must be a text that is not empty"
        raise InvalidInput(f"{field}: {found}; expected {what}", param=field)
    return value


def _setting(rows: Mapping[str, SettingField], key: str, value: Any) -> Any:
    row = rows.get(key)
    if row is None:
        near = get_close_matches(key.lower().replace("_", "-"), [*_OWN, *rows], 1)
        hint = f"did you mean {near[0]}?" if near else "settings have the names of their flags, without dashes in front"
        raise InvalidInput(f"{key[:64]}: is no setting of a model; {hint}", param=key[:64])
    if key == "served-name":
        raise InvalidInput("served-name: is `name` here", param=key)
    if row.about.shared or row.name in AT_START_ONLY or not row.about.has_flag:
        raise InvalidInput(f"{key}: is set at the start of the server, for all models", param=key)
    try:
        return row.read(checked_value(row, value))
    except ConfigError as error:
        raise InvalidInput(str(error), param=key) from None


def in_keys(error: ConfigError) -> InvalidInput:
    """Return the error with the key of a setting in place of its field."""
    field, _, rest = str(error).partition("=")
    key = next((row.key for row in settings_of(EngineConfig) if row.name == field), None)
    return InvalidInput(str(error)) if key is None else InvalidInput(f"{key} = {rest}", param=key)
