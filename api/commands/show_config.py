"""The command `config`: print the settings that hold, and the source of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import click

from staged_pool.api.commands.config_file import MODELS_KEY
from staged_pool.api.commands.given import Given, Source, build_server, config_file, given_models, given_settings
from staged_pool.api.commands.options import SettingsCommand
from staged_pool.api.commands.process import errors_in_flag_words
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.commands.serve import serve_options
from staged_pool.api.commands.table import every_setting
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.settings import GROUPS, SettingField

_HIDDEN: Final = "(hidden)"


def _config(*, as_json: bool, **_: Any) -> None:
    ctx = click.get_current_context()
    with errors_in_flag_words():
        given = given_settings(ctx)
        given.build(ProcessConfig)
        build_server(given)
        models = given_models(given, config_file(ctx))
        for model in models:
            model.build(EngineConfig)
    base, others = (models[0], []) if len(models) == 1 else (given, models)
    shown = _shown(base)
    of_models = [_of_model(shown, _shown(model)) for model in others]
    click.echo(_json(shown, of_models) if as_json else "\n".join(_toml(shown, of_models)))


class _Shown(NamedTuple):
    """Setting as it is printed."""

    row: SettingField
    value: Any
    """Value in the units of flags; None or empty: not set."""
    source: Source


def _shown(given: Given) -> dict[str, _Shown]:
    shown = {}
    for row in every_setting():
        if row.about.has_flag:
            value = row.plain(row.read(given.values[row.name]) if row.name in given.values else row.default)
            if row.about.secret and value:
                value = [_HIDDEN] * len(value)
            shown[row.key] = _Shown(row, value, given.source(row.name))
    return shown


def _of_model(base: Mapping[str, _Shown], model: Mapping[str, _Shown]) -> dict[str, _Shown]:
    """Return the settings that the table of one of several models needs."""
    own = ("model", "served-name")
    return {key: each for key, each in model.items() if (key in own or each != base[key]) and each.value is not None}


def _json(shown: Mapping[str, _Shown], models: list[dict[str, _Shown]]) -> str:
    def fields(settings: Mapping[str, _Shown]) -> dict[str, object]:
        return {
            key: {"value": each.value, "source": each.source.kind, "name": each.source.name or None}
            for key, each in settings.items()
        }

    return json.dumps({"settings": fields(shown), MODELS_KEY: [fields(model) for model in models]}, indent=2)


def _toml(shown: Mapping[str, _Shown], models: list[dict[str, _Shown]]) -> Iterator[str]:
    """Yield the lines of a configuration file with the same meaning; secrets are commented out."""
    for group in GROUPS:
        yield f"# {group}"
        yield from (_toml_line(key, each) for key, each in shown.items() if each.row.about.group == group)
        yield ""
    for model in models:
        yield f"[[{MODELS_KEY}]]"
        yield from (_toml_line(key, each) for key, each in model.items())
        yield ""


def _toml_line(key: str, each: _Shown) -> str:
    source = each.source.name or each.source.kind
    if each.value is None or each.value == []:
        return f"# {key}: not set"
    line = f"{key} = {json.dumps(each.value, ensure_ascii=False)}"  # JSON of texts, numbers and lists is TOML
    return f"{'# ' if each.row.about.secret else ''}{line:<40}  # {source}"


config: Final = SettingsCommand(
    "config",
    callback=_config,
    params=[
        *serve_options(),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object, for programs."),
    ],
    help="""Print the settings that hold, with their sources.

    They are those that `serve` would have; the flags are the same. The output is a configuration file with the same
    meaning. API keys are hidden.
    """,
)
