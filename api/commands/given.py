"""Settings that the user has given: their values, their sources, and the configurations made of them.

Order: flag, environment variable, configuration file, default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from staged_pool.api.commands.config_file import CONFIG_FILE, ConfigFile, Table, read_config_file
from staged_pool.api.commands.options import SettingOption
from staged_pool.api.commands.process import errors_in_flag_words
from staged_pool.api.commands.table import setting_named
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import read_keys
from staged_pool.runtime.settings import settings_of
from staged_pool.stages.errors import ConfigError

T = TypeVar("T")

_FILE: Final = "staged_pool.config_file"


class Source(NamedTuple):
    """Source of a value."""

    kind: Literal["flag", "environment", "file", "default"]
    name: str
    """Flag, variable, or file and line; empty for a default."""


DEFAULT: Final = Source("default", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Values that the user has given, by field, in the units of flags."""

    values: Mapping[str, Any]
    sources: Mapping[str, Source] = field(default_factory=dict)

    def source(self, name: str) -> Source:
        """Return the source of a field."""
        return self.sources.get(name, DEFAULT)

    def build(self, config: type[T]) -> T:
        """Make a configuration of the values.

        Raises:
            ConfigError: A value is wrong; names its flag, or its line in the file.
        """
        rows = {row.name: row for row in settings_of(config)}
        with self.errors_by_source():
            return config(**{name: rows[name].read(value) for name, value in self.values.items() if name in rows})

    @contextmanager
    def errors_by_source(self) -> Iterator[None]:
        """Have errors name the line of a setting that comes from the file."""
        try:
            yield
        except ConfigError as error:
            message = str(error)
            if (found := re.match(r"(\w+)=", message)) is None or (row := setting_named(found[1])) is None:
                raise
            source = self.source(row.name)
            if source.kind != "file":
                raise
            raise ConfigError(f"{source.name}: {row.key} = {message[found.end() :]}") from None

    def beneath(self, table: Table) -> Given:
        """Return these values, with those of a table where no flag or variable gives one."""
        names = [name for name in table.values if self.source(name).kind not in ("flag", "environment")]
        return Given(
            values={**self.values, **{name: table.values[name] for name in names}},
            sources={**self.sources, **{name: Source("file", table.places[name]) for name in names}},
        )


def config_option() -> click.Option:
    """Make `--config`, which reads the file before the other flags are looked up."""
    return click.Option(
        [CONFIG_FILE, "--config"],
        type=click.Path(path_type=Path, readable=False),
        metavar="FILE",
        envvar="STAGED_POOL_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="TOML file of settings. Its keys are the names of flags without dashes.",
    )


def _read_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None and not ctx.resilient_parsing:
        with errors_in_flag_words():
            ctx.meta[_FILE] = file = read_config_file(path)
        ctx.default_map = dict(file.top.values)


def config_file(ctx: click.Context) -> ConfigFile | None:
    """Return the file that `--config` names."""
    file: ConfigFile | None = ctx.meta.get(_FILE)
    return file


def given_settings(ctx: click.Context) -> Given:
    """Return the settings that flags, variables and the top of the file give."""
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    file = config_file(ctx)
    for param in ctx.command.params:
        if not isinstance(param, SettingOption):
            continue
        name, row = param.row.name, param.row
        match ctx.get_parameter_source(name):
            case ParameterSource.COMMANDLINE:
                sources[name] = Source("flag", row.flag)
            case ParameterSource.ENVIRONMENT:
                sources[name] = Source("environment", row.variable)
            case ParameterSource.DEFAULT_MAP if file is not None:
                sources[name] = Source("file", file.top.places[name])
            case _:
                if param.command_default != row.default:
                    values[name] = param.command_default
                continue
        values[name] = ctx.params[name]
    return Given(values=values, sources=sources)


def given_in(file: ConfigFile) -> Given:
    """Return the settings that the top of a file gives, without flags and variables."""
    values = {
        name: Path(value) if (row := setting_named(name)) is not None and row.kind == "path" else value
        for name, value in file.top.values.items()
    }
    return Given(values=values, sources={name: Source("file", place) for name, place in file.top.places.items()})


def build_server(given: Given) -> ServerConfig:
    """Make the configuration of the server; API keys come from flags and from their file.

    Raises:
        ConfigError: A value or the file of keys is wrong.
    """
    values = dict(given.values)
    with given.errors_by_source():
        if (path := values.get("api_key_file")) is not None:
            values["api_keys"] = (*values.get("api_keys", ()), *read_keys(path))
    if "root_path" in values:
        values["root_path"] = values["root_path"].rstrip("/")
    return Given(values=values, sources=given.sources).build(ServerConfig)


def given_models(given: Given, file: ConfigFile | None) -> Sequence[Given]:
    """Return the settings of each model to serve.

    Raises:
        ConfigError: `--served-name` is given, and it is not clear for which model.
    """
    values, sources = dict(given.values), dict(given.sources)
    served_name = values.pop("served_name", None)
    if file is not None and file.models and "model" not in values:
        if served_name is not None:
            raise ConfigError(f"served_name={served_name!r}: write served-name into the table of its model")
        return [given.beneath(table) for table in file.models]
    models = []
    for name, source in _named(values.pop("model", ()), served_name):
        own = {key: value for key, value in (("model", source), ("served_name", name)) if value is not None}
        origins = {"served_name": given.source("model"), **sources}
        models.append(Given(values=values | own, sources={key: origins[key] for key in origins if key in values | own}))
    return models


def _named(models: Sequence[str], served_name: str | None) -> list[tuple[str | None, str | None]]:
    """Split each `name=source`; a source alone has no served name.

    Raises:
        ConfigError: `served_name` is given, and it is not clear for which model.
    """
    named: list[tuple[str | None, str | None]] = []
    for model in models:
        name, _, source = model.rpartition("=")
        named.append((None, model) if not name or Path(model).exists() else (name, source))
    if served_name is None:
        return named or [(None, None)]
    if len(named) > 1 or any(name for name, _ in named):
        raise ConfigError(f"served_name={served_name!r}: several models, or a named one: write --model name=folder")
    return [(served_name, named[0][1] if named else None)]
