"""Click options of the settings, and commands with a short and a full help page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from staged_pool.api.commands.config_file import CONFIG_FILE
from staged_pool.runtime.settings import ENV_PREFIX, GROUPS, Kind, SettingField, settings_of

HELP_WIDTH: Final = 100
"""Most columns of a help page."""

_FIRST_COLUMN: Final = 25
_LONGEST_METAVAR: Final = 16
_CHOICE: Final = "CHOICE"
_UNBREAKABLE: Final = "\N{NON-BREAKING HYPHEN}"
_ALL: Final = "staged_pool.help_all"
_TYPES: Final[Mapping[Kind, click.ParamType[Any]]] = {
    "text": click.STRING,
    "texts": click.STRING,
    "path": click.Path(path_type=Path, readable=False),
    "int": click.INT,
    "float": click.FLOAT,
}
"""Click types by kind. Click 8.2 gives a switch its type only where none is named."""
_METAVARS: Final[Mapping[Kind, str]] = {"text": "TEXT", "texts": "TEXT", "path": "FILE", "int": "N", "float": "X"}


class SettingOption(click.Option):
    """Flag of one setting.

    Args:
        row: The setting.
        default: Default of the command, where it differs from the setting's.
        multiple: The flag may be repeated, although the field holds one value.
    """

    def __init__(self, row: SettingField, *, default: Any = None, multiple: bool = False) -> None:
        self.row = row
        self.command_default = row.default if default is None else default
        super().__init__(
            [row.name, f"{row.flag}/{row.off_flag}" if row.off_flag else row.flag],
            type=click.Choice(row.choices) if row.kind == "choice" else _TYPES.get(row.given_kind),
            is_flag=row.kind == "bool" or None,
            multiple=multiple or row.kind == "texts",
            default=None,  # the configuration classes have the defaults
            envvar=row.variable,
            show_envvar=True,  # in errors
            metavar=metavar_of(row),
            help=row.about.help,
            shell_complete=_complete_folder if row.about.completes == "dir" else None,
        )

    def help_record(self, *, in_full: bool) -> tuple[str, str]:
        """Return the line of the help page: the flag, and its text."""
        flag = self.row.flag
        if self.row.off_flag and in_full:
            flag += f" / {self.row.off_flag}"
        elif self.row.kind != "bool":
            flag += f" {self.metavar}"
        return flag, " ".join(help_sentences(self.row, self.command_default, in_full=in_full))


def metavar_of(row: SettingField) -> str | None:
    """Return the placeholder of a value in help; None for a switch."""
    if row.kind == "bool":
        return None
    if row.about.metavar:
        return row.about.metavar
    if row.kind == "choice":
        choices = "|".join(row.choices)
        return choices if len(choices) <= _LONGEST_METAVAR else _CHOICE
    return "SECONDS" if row.name.endswith("_s") else _METAVARS[row.given_kind]


def help_sentences(row: SettingField, default: Any, *, in_full: bool) -> Iterator[str]:
    """Yield the help of a setting, the choices where help names none, and the default."""
    yield row.about.help
    if in_full:
        if row.about.more:
            yield row.about.more
        if metavar_of(row) == _CHOICE:
            yield f"One of {', '.join(row.choices)}."
    if row.about.default:
        if in_full:
            yield f"Default: {row.about.default}."
    elif default not in (None, (), "", False):
        yield f"Default: {row.show(default)}."


class SettingsCommand(click.Command):
    """Command whose `--help` lists the basic settings, and `--help-all` all of them."""

    def __init__(self, name: str, *, callback: Callable[..., None], params: list[click.Parameter], help: str) -> None:
        super().__init__(name, callback=callback, params=[*params, _HELP_ALL], help=help)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the page without a line break inside a flag or a name."""
        super().format_help(ctx, formatter)
        formatter.buffer = [text.replace(_UNBREAKABLE, "-") for text in formatter.buffer]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by group."""
        in_full = bool(ctx.meta.get(_ALL))
        own: list[tuple[str, str]] = []
        settings: list[SettingOption] = []
        for param in self.get_params(ctx):
            if isinstance(param, SettingOption):
                settings.append(param)
            elif isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                own.append(record)
        _write(formatter, "Options", own)
        settings.sort(key=lambda option: GROUPS.index(option.row.about.group))
        basic = [option.help_record(in_full=False) for option in settings if option.row.about.basic]
        if in_full:
            for group, some in groupby(settings, key=lambda option: option.row.about.group):
                _write(formatter, group, [option.help_record(in_full=True) for option in some])
        else:
            _write(formatter, "Common settings", basic)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(_unbroken(_rules(ctx, 0 if in_full else len(settings) - len(basic))))


def _write(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if not rows:
        return
    with formatter.section(title):
        formatter.write_dl([(f"{flag:<{_FIRST_COLUMN}}", _unbroken(text)) for flag, text in rows], _FIRST_COLUMN)


def _unbroken(text: str) -> str:
    return re.sub(r"(?<=\S)-(?=\S)", _UNBREAKABLE, text)


def _rules(ctx: click.Context, hidden: int) -> str:
    are = "is" if hidden == 1 else "are"
    rest = f"`{ctx.command_path} --help-all` explains all flags; {hidden} {are} not listed here.\n\n" if hidden else ""
    variable = f"{ENV_PREFIX} and the flag's name in capitals ({ENV_PREFIX}DTYPE=float32)"
    if all(param.name != CONFIG_FILE for param in ctx.command.params):
        return f"{rest}Settings can also be variables: {variable}."
    return (
        f'{rest}Settings can also be variables: {variable}; or keys of the --config file (dtype = "float32"). '
        "A flag wins over a variable, and a variable over the file."
    )


def _show_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL: Final = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Explain all flags, by group, and exit.",
)


def _complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def setting_options(config: type[Any], names: Iterable[str] | None = None, **defaults: Any) -> list[click.Parameter]:
    """Make the flags of a configuration class.

    Args:
        config: Class whose fields are settings.
        names: Fields that the command has, in this order. None: all that have a flag.
        defaults: Defaults of the command, where they differ.
    """
    rows = {row.name: row for row in settings_of(config) if row.about.has_flag}
    return [SettingOption(rows[name], default=defaults.get(name)) for name in (rows if names is None else names)]
