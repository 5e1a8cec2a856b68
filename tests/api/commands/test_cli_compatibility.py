"""Flags, variables and defaults of version 0.1 keep their meaning. `flags_of_0_1.txt` lists them."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from staged_pool.api.commands import cli
from staged_pool.api.commands.options import SettingOption

ROWS = [
    [part.strip() for part in line.split("|")]
    for line in (Path(__file__).parent / "flags_of_0_1.txt").read_text().splitlines()[1:]
]


def _found(command: str, flag: str) -> click.Parameter:
    params = cli.main.commands[command].params
    for param in params:
        names = "/".join([*param.opts, *param.secondary_opts])
        if flag in (names, (param.name or "").upper() if isinstance(param, click.Argument) else names):
            return param
    raise AssertionError(f"{command} has no {flag}")


def _kind(param: click.Parameter) -> str:
    several = "s" if getattr(param, "multiple", False) or param.nargs == -1 else ""
    if isinstance(param, click.Option) and param.is_flag:
        return "on/off" if param.secondary_opts else "switch"
    if isinstance(param.type, click.Choice):
        return "choice"
    names = {"integer": "int", "float": "float", "text": "text", "path": "path", "file": "path"}
    return names[param.type.name] + several + (" (optional)" if param.nargs == -1 else "")


def _default(param: click.Parameter) -> str:
    if isinstance(param, SettingOption):
        default = param.row.plain(param.command_default)
        return "" if default in (None, [], "") else str(default)
    assert isinstance(param, click.Option | click.Argument)
    return str(param.default) if isinstance(param, click.Option) and isinstance(param.default, bool) else ""


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:2]) for row in ROWS])
def test_a_flag_is_as_it_was(row: list[str]) -> None:
    command, flag, variable, kind, choices, default = row
    param = _found(command, flag)
    assert (param.envvar or "") == variable
    assert _kind(param) == kind
    if isinstance(param.type, click.Choice):
        assert {*choices.split(",")} <= {*param.type.choices}  # new ones may have come
    assert _default(param) == default
